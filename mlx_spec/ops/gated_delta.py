"""The gated delta rule over a block of tokens with a tape, and the state after some of its tokens from the tape.

mlx-lm's own kernel is the same for one token and for many. What it does not leave is the means to keep a part of a
block without computing it again: the tape holds what each token added to the state.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from mlx_spec.ops.kernel import SIMD_LANES, Kernel, kernels_run_here, padded

_PLACE = "thread_position_in_grid, thread_index_in_simdgroup);"
_SHAPE = "Dk, Dv, Hk, Hv, VECTOR, MASKED"

_BLOCK = Kernel(
    "gated_delta_block",
    "gated_delta",
    ("q", "k", "v", "g", "beta", "mask", "state_in"),
    ("y", "tape", "state_out"),
    f"gated_delta_block<T, State, {_SHAPE}, TREE>(q, k, v, g, beta, mask, state_in, y, tape, state_out, q_shape[1],"
    f" {_PLACE}",
)
_REPLAY = Kernel(
    "gated_delta_replay",
    "gated_delta",
    ("k", "g", "mask", "tape", "state_in", "counts"),
    ("state_out",),
    f"gated_delta_replay<T, State, {_SHAPE}>(k, g, mask, tape, state_in, counts, state_out, k_shape[1], {_PLACE}",
)


@dataclass(frozen=True)
class DeltaBlock:
    """One call over T tokens.

    Attributes:
        q, k: [B, T, Hk, Dk].
        v: [B, T, Hv, Dv], Hv a multiple of Hk.
        g: [B, T, Hv], or [B, T, Hv, Dk] with a gate for each column.
        beta: [B, T, Hv].
        state: [B, Hv, Dv, Dk] before the block.
        mask: [B, T] which tokens count; None when all do.
    """

    q: mx.array
    k: mx.array
    v: mx.array
    g: mx.array
    beta: mx.array
    state: mx.array
    mask: mx.array | None = None

    def run(self) -> DeltaResult:
        """Outputs, tape and state, by the kernel where it runs and knows the shape, else by the reference. Lazy."""
        return self.by_kernel() if kernels_run_here() and self.kernel_takes() else self.by_steps()

    def by_steps(self) -> DeltaResult:
        """The reference: mlx ops, one token at a time."""
        state, outputs, tape = self.state, [], []
        repeats = self.v.shape[2] // self.k.shape[2]
        q, k = (mx.repeat(array, repeats, 2) for array in (self.q, self.k))
        for t in range(k.shape[1]):
            key, decayed = k[:, t, :, None, :], _decayed(state, self.g[:, t])
            delta = (self.v[:, t] - (decayed * key).sum(axis=-1)) * self.beta[:, t, :, None]
            grown = decayed + key * delta[..., None]
            counts = None if self.mask is None else self.mask[:, t, None, None]
            read = (grown * q[:, t, :, None, :]).sum(axis=-1)
            state = grown if counts is None else mx.where(counts[..., None], grown, state)
            outputs.append(read if counts is None else mx.where(counts, read, 0))
            tape.append(delta if counts is None else mx.where(counts, delta, 0))
        y = mx.stack(outputs, axis=1).astype(self.q.dtype)
        return DeltaResult(self, y, mx.stack(tape, axis=1).astype(mx.float32), state)

    def kernel_takes(self) -> bool:
        """Whether the kernel knows the shape: whole lanes of columns, one dtype of inputs."""
        columns, dtypes = self.k.shape[3], {array.dtype for array in (self.q, self.k, self.v)}
        return columns % SIMD_LANES == 0 and len(dtypes) == 1

    def by_kernel(self) -> DeltaResult:
        """The kernel: bit for bit the outputs and the state of mlx-lm's kernel for the shape, and the tape."""
        (batch, tokens, heads, values), (out_dtype, state_dtype) = self.v.shape, (self.q.dtype, self.state.dtype)
        y, tape, state = _BLOCK(
            [self.q, self.k, self.v, padded(self.g), padded(self.beta), self._mask(), self.state],
            [(self.v.shape, out_dtype), ((batch, tokens, heads, values), mx.float32), (self.state.shape, state_dtype)],
            template=[*self._template(), ("TREE", self._tree_is_written_out())],
            **self._launch(),
        )
        return DeltaResult(self, y, tape, state)

    def _tree_is_written_out(self) -> bool:
        """Whether mlx-lm takes the kernel that fixes the order of its sums for this shape."""
        whole = self.k.shape[3] == 128 and self.v.shape[3] % 8 == 0
        floats = self.g.dtype == mx.float32 and self.state.dtype == mx.float32
        return self.mask is None and self.g.ndim == 3 and whole and floats

    def _template(self) -> list[tuple[str, Any]]:
        (_, _, key_heads, columns), (_, _, heads, values) = self.k.shape, self.v.shape
        return [
            *(("T", self.q.dtype), ("State", self.state.dtype), ("Dk", columns), ("Dv", values)),
            *(("Hk", key_heads), ("Hv", heads), ("VECTOR", self.g.ndim == 4), ("MASKED", self.mask is not None)),
        ]

    def _launch(self) -> dict[str, tuple[int, int, int]]:
        batch, _, heads, values = self.v.shape
        return {"grid": (SIMD_LANES, values, batch * heads), "threadgroup": (SIMD_LANES, min(4, values), 1)}

    def _mask(self) -> mx.array:
        given = mx.ones((1,), mx.bool_) if self.mask is None else self.mask.reshape(-1)
        return padded(given)


@dataclass(frozen=True)
class DeltaResult:
    """What a block left.

    Attributes:
        block: its inputs.
        y: [B, T, Hv, Dv] in the inputs' dtype.
        tape: [B, T, Hv, Dv] float32, what each token added along its key.
        state: [B, Hv, Dv, Dk] after all tokens.
    """

    block: DeltaBlock
    y: mx.array
    tape: mx.array
    state: mx.array

    def state_after(self, counts: mx.array) -> mx.array:
        """The state after the first `counts` tokens of each row, bit for bit as if the others had not come. Lazy.

        Args:
            counts: [B] int32, 0 to T.

        Cost:
            Keys, gates, tape and state once; no product with queries, and no sum over lanes.
        """
        if not (kernels_run_here() and self.block.kernel_takes()):
            return self._state_after_by_steps(counts)
        block = self.block
        (state,) = _REPLAY(
            [block.k, padded(block.g), block._mask(), self.tape, block.state, padded(counts.astype(mx.int32))],
            [(block.state.shape, block.state.dtype)],
            template=block._template(),
            **block._launch(),
        )
        return state

    def _state_after_by_steps(self, counts: mx.array) -> mx.array:
        block, state = self.block, self.block.state
        keys = mx.repeat(block.k, block.v.shape[2] // block.k.shape[2], 2)
        for t in range(keys.shape[1]):
            grown = _decayed(state, block.g[:, t]) + keys[:, t, :, None, :] * self.tape[:, t, :, :, None]
            kept = counts > t if block.mask is None else (counts > t) & block.mask[:, t]
            state = mx.where(kept[:, None, None, None], grown, state)
        return state


def _decayed(state: mx.array, gate: mx.array) -> mx.array:
    """[B, Hv, Dv, Dk] states times their gates, [B, Hv] or [B, Hv, Dk]."""
    return state * (gate[..., None, None] if gate.ndim == 2 else gate[..., None, :])
