"""State-space updates of a block of positions, with the bits that each gets when it comes alone.

For several positions mlx-lm computes Mamba-2's recurrence in its dual form, products of matrices; for one it takes
the step itself where there is a kernel for it. The two round differently, and so do blocks of the dual form.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

Update = Callable[..., tuple[mx.array, mx.array]]
"""The stock call: (x, A_log, B, C, D, dt, dt_bias, state, ...) -> output of x's shape, state."""


@dataclass(frozen=True)
class StateUpdates:
    """One call over W positions.

    Attributes:
        update: the stock call.
        x: [B, W, H, D] the inputs.
        inward, outward: [B, W, G, N] how inputs enter the state, and how it is read.
        steps: [B, W, H] step sizes, before their bias.
        state: [B, H, D, N] before the block; None stands for zeros.
        weights: A_log, D and the bias of the steps, each [H].
        limits: of the step sizes.
        mask: [B, W] which positions count; None when all do.
    """

    update: Update
    x: mx.array
    inward: mx.array
    outward: mx.array
    steps: mx.array
    state: mx.array | None
    weights: tuple[mx.array, mx.array, mx.array]
    limits: Any
    mask: mx.array | None

    def by_position(self) -> tuple[mx.array, mx.array]:
        """The reference: one position at a time, [B, W, H, D] and the state after the last."""
        outputs, state = [], self.state
        decay, skip, bias = self.weights
        for position in range(self.x.shape[1]):
            row = slice(position, position + 1)
            mask = None if self.mask is None else self.mask[:, row]
            output, state = self.update(
                *(self.x[:, row], decay, self.inward[:, row], self.outward[:, row], skip, self.steps[:, row], bias),
                *(state, self.limits, mask),
            )
            outputs.append(output)
        assert state is not None  # a block has positions
        return mx.concatenate(outputs, axis=1), state
