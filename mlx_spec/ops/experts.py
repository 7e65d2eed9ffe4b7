"""Experts: a token's rows go through the few matrices its router chose."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchGLU, SwitchLinear, SwitchMLP
from mlx_lm.tuner.lora import LoRASwitchLinear

from mlx_spec.ops.base import Draw, Op, Rows, Shape

CHUNKS = "unsorted chunks"

_SORTED_FROM = 64
"""Entries of `indices` from which mlx-lm sorts them, and takes another kernel."""


class Experts(Op):
    """mlx-lm's blocks of experts: (rows [B, W, H], indices [B, W, k]) -> [B, W, k, H]."""

    kind = "experts"

    @property
    def label(self) -> str:
        return f"{type(self.module).__name__} of {self.count}"

    def ways(self) -> dict[str, Callable[[Rows], Any]]:
        return {CHUNKS: self._unsorted}

    def settings(self) -> tuple[Hashable, ...]:
        packed = [part for part in self.module.modules() if isinstance(part, QuantizedSwitchLinear)]
        return tuple((part.group_size, part.bits, part.mode) for part in packed)

    @property
    def count(self) -> int:
        """Experts to choose from."""
        part = next(part for part in self.module.modules() if isinstance(part, SwitchLinear | QuantizedSwitchLinear))
        return int(part.num_experts)

    @staticmethod
    def _unsorted(rows: Rows) -> Any:
        per_row = max(1, rows.args[1].size // rows.width)
        return rows.by_chunks(max(1, (_SORTED_FROM - 1) // per_row))

    def inputs(self, shapes: Sequence[Shape], draw: Draw) -> list[Any]:
        (rows, dtype), (indices, index_dtype), *rest = shapes
        # Some experts are chosen by several rows, most by one.
        entries = (mx.arange(math.prod(indices)) * 7) % self.count
        further = [draw(shape, other_dtype) for shape, other_dtype in rest]
        return [draw(rows, dtype), entries.reshape(indices).astype(index_dtype), *further]


EXPERTS: dict[type[Any], type[Op]] = {SwitchGLU: Experts, SwitchMLP: Experts, LoRASwitchLinear: Experts}
"""The last where a model calls it by itself: its plain kin are modules of one matrix."""
