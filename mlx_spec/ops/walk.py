"""The walk over a block: from logits, or from tokens chosen otherwise, to what a round hands out, in one small array.

A row of the result has 1 + 2 W numbers, int32:

    [accepted, fault of position 0 .. W-1, token of position 0 .. W-1]

`accepted` leading proposals equal the token before them. A position's fault is NAN where its logits, or their
log-sum-exp where that is given, hold NaN; NOTHING_ALLOWED where a mask leaves no token, whose token is -1 then; else 0.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Any

import mlx.core as mx

from mlx_spec.ops.kernel import SIMD_LANES, Kernel, kernels_run_here, padded

NAN, NOTHING_ALLOWED = 1, 2

_SPLIT = Kernel(
    "argmax_split",
    "greedy_walk",
    ("logits", "lse", "allowed"),
    ("values", "tokens"),
    "threadgroup float shared_values[32]; threadgroup uint shared_tokens[32];"
    " argmax_split<T, LOGPROBS, MASKED>(logits, lse, allowed, values, tokens, logits_shape[1],"
    " threadgroup_position_in_grid, threadgroups_per_grid, thread_position_in_threadgroup.x, threads_per_threadgroup.x,"
    " simdgroup_index_in_threadgroup, thread_index_in_simdgroup, simdgroups_per_threadgroup, shared_values,"
    " shared_tokens);",
)
_WALK = Kernel(
    "block_walk",
    "greedy_walk",
    ("values", "tokens", "lse", "proposals", "width", "shares"),
    ("result",),
    "threadgroup int choices[32]; threadgroup int faults[32];"
    " block_walk<T, LOGPROBS>(values, tokens, lse, proposals, result, width, shares,"
    " threadgroup_position_in_grid.x, simdgroup_index_in_threadgroup, thread_index_in_simdgroup,"
    " simdgroups_per_threadgroup, choices, faults);",
)

MOST_POSITIONS = 32
_THREADS = 256
_TOKENS_TO_A_SHARE = 8192
_SHARES = 8, 32
"""Fewest and most shares of a row. With fewest, what one dispatch leaves for the next is never padded."""


def kernel_holds(dtype: mx.Dtype) -> bool:
    """Whether the kernels run here and give the references' numbers, tried once for each dtype of logits.

    Cost:
        The first time a few small blocks, evaluated.
    """
    return kernels_run_here() and _holds(mx.fast.metal_kernel, dtype)


@functools.cache
def _holds(maker: Callable[..., Any], dtype: mx.Dtype) -> bool:
    del maker  # what was found with one kernel maker says nothing about another
    try:
        return all(
            bool(mx.array_equal(block.by_kernel(), block.by_ops()).item())
            for kind, width in product(("ties", "nan", "masked"), (1, 5, 32))
            for block in _trials(kind, width, dtype)
        )
    except (ValueError, RuntimeError):
        # A text that this compiler or GPU refuses is not equal.
        return False


def _trials(kind: str, width: int, dtype: mx.Dtype) -> tuple[GreedyBlock, ChosenBlock]:
    """Two rows whose proposals are right halfway; with ties, a NaN in the middle, or half of the tokens allowed."""
    keys = mx.random.split(mx.random.key(width), 2)
    logits = mx.round(mx.random.normal((2, width, 1003), key=keys[0]) * 2)
    if kind == "nan":
        logits = mx.where((mx.arange(width) == width // 2)[:, None] & (mx.arange(1003) == 700), mx.nan, logits)
    words = mx.random.randint(0, 2**31 - 1, (2, width, 32), key=keys[1]).astype(mx.uint32) if kind == "masked" else None
    given = logits.astype(dtype)
    lse = mx.logsumexp(given, axis=-1)
    greedy = GreedyBlock(given, mx.zeros((2, width - 1), mx.int32), lse if kind == "ties" else None, words)
    choices = greedy.choices()
    proposals = mx.where(mx.arange(width - 1) < width // 2 + 1, choices[:, :-1], -1)
    return GreedyBlock(given, proposals, greedy.lse, words), ChosenBlock(choices.astype(mx.uint32), proposals, lse)


@dataclass(frozen=True)
class ChosenBlock:
    """One block of B rows and W positions whose tokens are chosen.

    Attributes:
        choices: [B, W] token ids.
        proposals: [B, W-1] int32. An id outside the vocabulary never matches.
        lse: [B, W] the log-sum-exp of the logits they were chosen from; any array that is NaN where one of these is.
    """

    choices: mx.array
    proposals: mx.array
    lse: mx.array

    def walk(self) -> mx.array:
        """[B, 1 + 2 W] int32, as the module says. By the kernel where that was found equal. Lazy.

        Cost:
            The kernel takes one dispatch, the reference about ten.
        """
        fits = self.choices.shape[1] <= MOST_POSITIONS
        return self.by_kernel() if fits and kernel_holds(self.lse.dtype) else self.by_ops()

    def by_ops(self) -> mx.array:
        """The reference."""
        return _walked(self.choices.astype(mx.int32), mx.isnan(self.lse).astype(mx.int32), self.proposals)

    def by_kernel(self) -> mx.array:
        """The kernel: the same numbers as the reference."""
        values = padded(self.lse.astype(mx.float32).reshape(-1))
        return _by_kernel(
            self.proposals, self.lse, values, padded(self.choices.astype(mx.uint32).reshape(-1)), shares=1
        )


@dataclass(frozen=True)
class GreedyBlock:
    """One block of B rows and W positions whose tokens are the likeliest.

    Attributes:
        logits: [B, W, V] raw logits.
        proposals: [B, W-1] int32. An id outside the vocabulary never matches.
        lse: [B, W] their log-sum-exp in the logits' dtype; None to compare the logits themselves.
        allowed: [B, W, ceil(V / 32)] uint32, bit i % 32 of word i / 32 set where token i may be chosen; None for all.
    """

    logits: mx.array
    proposals: mx.array
    lse: mx.array | None = None
    allowed: mx.array | None = None

    def walk(self) -> mx.array:
        """[B, 1 + 2 W] int32, as the module says. By the kernel where that was found equal. Lazy.

        Cost:
            Logits are read once. The kernel takes two dispatches, the reference about twenty.
        """
        return self.by_kernel() if self.kernel_takes() and kernel_holds(self.logits.dtype) else self.by_ops()

    def kernel_takes(self) -> bool:
        """Whether the block has no more positions than a SIMD-group has lanes."""
        return self.logits.shape[1] <= MOST_POSITIONS

    def by_ops(self) -> mx.array:
        """The reference."""
        choices, faults = self._choices()
        return _walked(choices, faults, self.proposals)

    def choices(self) -> mx.array:
        """[B, W] int32, the choice at every position; -1 where no token is allowed."""
        return self._choices()[0]

    def _choices(self) -> tuple[mx.array, mx.array]:
        """The choices, and what is wrong with each."""
        compared = self.logits if self.lse is None else self.logits - self.lse[..., None]
        allowed = None
        if self.allowed is not None:
            bits = self.allowed[..., None] >> mx.arange(32, dtype=mx.uint32)
            allowed = (bits & 1).reshape(*bits.shape[:2], -1)[..., : compared.shape[2]].astype(mx.bool_)
            compared = mx.where(allowed, compared, -mx.inf)
        choices = mx.argmax(compared, axis=-1)
        best = mx.take_along_axis(compared, choices[..., None], axis=-1)[..., 0]
        faults = mx.where(mx.isnan(best if self.lse is None else self.lse), NAN, 0)
        if allowed is not None:
            # Where nothing but -inf is allowed, the first allowed token stands for the maximum.
            choices = mx.where(best == -mx.inf, mx.argmax(allowed, axis=-1), choices)
            none = ~allowed.any(axis=-1)
            choices = mx.where(none, -1, choices.astype(mx.int32))
            faults = mx.where(none, NOTHING_ALLOWED, faults)
        return choices.astype(mx.int32), faults.astype(mx.int32)

    def by_kernel(self) -> mx.array:
        """The kernels: the same numbers as the reference."""
        batch, width, vocabulary = self.logits.shape
        rows, dtype = batch * width, self.logits.dtype
        fewest, most = _SHARES
        shares = min(most, max(fewest, -(-vocabulary // _TOKENS_TO_A_SHARE)))
        lse = mx.zeros((1,), dtype) if self.lse is None else self.lse.astype(dtype).reshape(-1)
        allowed = mx.zeros((1,), mx.uint32) if self.allowed is None else self.allowed.reshape(-1)
        values, tokens = _SPLIT(
            [self.logits.reshape(rows, vocabulary), padded(lse), padded(allowed)],
            [((rows, shares), mx.float32), ((rows, shares), mx.uint32)],
            template=[("T", dtype), ("LOGPROBS", self.lse is not None), ("MASKED", self.allowed is not None)],
            grid=(shares * _THREADS, rows, 1),
            threadgroup=(_THREADS, 1, 1),
        )
        judged = None if self.lse is None else lse
        return _by_kernel(self.proposals, judged, values, tokens, shares)


def _walked(choices: mx.array, faults: mx.array, proposals: mx.array) -> mx.array:
    """[B, W] int32 choices and faults, [B, W-1] proposals -> [B, 1 + 2 W] int32."""
    agrees = (proposals == choices[:, :-1]).astype(mx.int32)
    accepted = mx.cumprod(agrees, axis=1).sum(axis=1, keepdims=True)
    return mx.concatenate([accepted, faults, choices], axis=1)


def _by_kernel(proposals: mx.array, lse: mx.array | None, values: mx.array, tokens: mx.array, shares: int) -> mx.array:
    batch, width = proposals.shape[0], proposals.shape[1] + 1
    dtype = mx.float32 if lse is None else lse.dtype
    given = mx.zeros((1,), dtype) if lse is None else lse.reshape(-1)
    simd_groups = min(width, 8)
    (result,) = _WALK(
        [
            *(values, tokens, padded(given), padded(proposals.reshape(-1))),
            *(mx.array(number, mx.int32) for number in (width, shares)),
        ],
        [((batch, 1 + 2 * width), mx.int32)],
        template=[("T", dtype), ("LOGPROBS", lse is not None)],
        grid=(batch * simd_groups * SIMD_LANES, 1, 1),
        threadgroup=(simd_groups * SIMD_LANES, 1, 1),
    )
    walked: mx.array = result
    return walked
