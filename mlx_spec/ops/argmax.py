"""The greedy walk over a block: from logits to the tokens to hand out, on the device, in one small array."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Any

import mlx.core as mx

from mlx_spec.ops.kernel import SIMD_LANES, Kernel, kernels_run_here, padded

FAULT, ACCEPTED, COUNT, BONUS, TOKENS = range(5)
"""Columns of the result; tokens are the last and go on to the end."""

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
    "greedy_walk",
    "greedy_walk",
    ("values", "tokens", "lse", "proposals", "stops", "budgets", "width", "shares", "stop_count"),
    ("result",),
    "threadgroup int choices[32]; threadgroup int faults[32];"
    " greedy_walk<T, LOGPROBS>(values, tokens, lse, proposals, stops, budgets, result, width, shares, stop_count,"
    " threadgroup_position_in_grid.x, simdgroup_index_in_threadgroup, thread_index_in_simdgroup,"
    " simdgroups_per_threadgroup, choices, faults);",
)

MOST_POSITIONS = 32
_THREADS = 256
_TOKENS_TO_A_SHARE = 8192
_SHARES = 8, 32
"""Fewest and most shares of a row. With fewest, what one dispatch leaves for the next is never padded."""


def kernel_holds(dtype: mx.Dtype) -> bool:
    """Whether the kernel runs here and gives the reference's numbers, tried once for each dtype of logits.

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
            for block in (_trial(kind, width, dtype),)
        )
    except (ValueError, RuntimeError):
        # A text that this compiler or GPU refuses is not equal.
        return False


def _trial(kind: str, width: int, dtype: mx.Dtype) -> GreedyBlock:
    """Two rows whose proposals are right halfway; with ties, a NaN in the middle, or half of the tokens allowed."""
    keys = mx.random.split(mx.random.key(width), 2)
    logits = mx.round(mx.random.normal((2, width, 1003), key=keys[0]) * 2)
    if kind == "nan":
        logits = mx.where((mx.arange(width) == width // 2)[:, None] & (mx.arange(1003) == 700), mx.nan, logits)
    words = mx.random.randint(0, 2**31 - 1, (2, width, 32), key=keys[1]).astype(mx.uint32) if kind == "masked" else None
    given = logits.astype(dtype)
    lse = mx.logsumexp(given, axis=-1) if kind == "ties" else None
    choices = GreedyBlock(given, mx.zeros((2, width - 1), mx.int32), lse, words).choices()
    proposals = mx.where(mx.arange(width - 1) < width // 2 + 1, choices[:, :-1], -1)
    return GreedyBlock(given, proposals, lse, words, stops=mx.array([3, 5], mx.int32))


@dataclass(frozen=True)
class GreedyBlock:
    """One block of B rows and W positions.

    Attributes:
        logits: [B, W, V] raw logits.
        proposals: [B, W-1] int32. An id outside the vocabulary never matches.
        lse: [B, W] their log-sum-exp in the logits' dtype; None to compare the logits themselves.
        allowed: [B, W, ceil(V / 32)] uint32, bit i % 32 of word i / 32 set where token i may be chosen; None for all.
        stops: [S] int32 tokens that end a row, or None.
        budgets: [B] int32, tokens a row may still hand out; None for no bound.
    """

    logits: mx.array
    proposals: mx.array
    lse: mx.array | None = None
    allowed: mx.array | None = None
    stops: mx.array | None = None
    budgets: mx.array | None = None

    def walk(self) -> mx.array:
        """[B, 4 + W] int32: fault, accepted, count, bonus, tokens. By the kernel where that was found equal. Lazy.

        `fault` is 0; or position + 1 of the first of the tokens to hand out whose logit, or log-sum-exp where that is
        given, is NaN; or -(position + 1) where no token is allowed. `accepted` leading proposals equal the choice
        before them; `bonus` is the choice after them. `count` tokens are handed out: up to the bonus, the first stop
        token or the budget. After them tokens are -1.

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
        places = mx.arange(choices.shape[1])
        agrees = (self.proposals == choices[:, :-1]).astype(mx.int32)
        accepted = mx.cumprod(agrees, axis=1).sum(axis=1)
        count = accepted + 1
        if self.stops is not None:
            stopping = (choices[..., None] == self.stops).any(axis=-1)
            count = mx.minimum(count, mx.where(stopping, places, MOST_POSITIONS).min(axis=1) + 1)
        if self.budgets is not None:
            count = mx.minimum(count, self.budgets)
        handed_out = places < count[:, None]
        faulty = handed_out & (faults != 0)
        first = mx.argmax(faulty.astype(mx.int32), axis=1, keepdims=True)
        fault = mx.where(faulty.any(axis=1), mx.take_along_axis(faults, first, axis=1)[:, 0], 0)
        bonus = mx.take_along_axis(choices, accepted[:, None], axis=1)[:, 0]
        head = mx.stack([fault, accepted, count, bonus], axis=1)
        return mx.concatenate([head, mx.where(handed_out, choices, -1)], axis=1).astype(mx.int32)

    def choices(self) -> mx.array:
        """[B, W] int32, the choice at every position; -1 where no token is allowed."""
        return self._choices()[0]

    def _choices(self) -> tuple[mx.array, mx.array]:
        """The choices, and what is wrong with each."""
        compared = self.logits if self.lse is None else self.logits - self.lse[..., None]
        _, width, vocabulary = compared.shape
        allowed = None
        if self.allowed is not None:
            bits = self.allowed[..., None] >> mx.arange(32, dtype=mx.uint32)
            allowed = (bits & 1).reshape(*bits.shape[:2], -1)[..., :vocabulary].astype(mx.bool_)
            compared = mx.where(allowed, compared, -mx.inf)
        choices = mx.argmax(compared, axis=-1)
        best = mx.take_along_axis(compared, choices[..., None], axis=-1)[..., 0]
        faults = mx.where(mx.isnan(best if self.lse is None else self.lse), mx.arange(1, width + 1), 0)
        if allowed is not None:
            # Where nothing but -inf is allowed, the first allowed token stands for the maximum.
            choices = mx.where(best == -mx.inf, mx.argmax(allowed, axis=-1), choices)
            none = ~allowed.any(axis=-1)
            choices = mx.where(none, -1, choices.astype(mx.int32))
            faults = mx.where(none, -mx.arange(1, width + 1), faults)
        return choices.astype(mx.int32), faults

    def by_kernel(self) -> mx.array:
        """The kernel: the same numbers as the reference."""
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
        stops = mx.zeros((0,), mx.int32) if self.stops is None else self.stops
        budgets = mx.full((batch,), width, mx.int32) if self.budgets is None else self.budgets
        simd_groups = min(width, 8)
        (result,) = _WALK(
            [
                *(values, tokens, padded(lse), padded(self.proposals.reshape(-1)), padded(stops), padded(budgets)),
                *(mx.array(number, mx.int32) for number in (width, shares, stops.size)),
            ],
            [((batch, width + 4), mx.int32)],
            template=[("T", dtype), ("LOGPROBS", self.lse is not None)],
            grid=(batch * simd_groups * SIMD_LANES, 1, 1),
            threadgroup=(simd_groups * SIMD_LANES, 1, 1),
        )
        return result
