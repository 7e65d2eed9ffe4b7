"""Attention of a block of queries at the end of a text, with the bits that each query gets when it comes alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

Side = mx.array | tuple[mx.array, ...]
"""Keys or values [B, Hk, T, D]; of a quantized cache the packed entries, their scales and biases, each cut alike."""

Attend = Callable[[mx.array, Side, Side, Any], mx.array]
"""The stock call: (queries, keys, values, mask) -> [B, H, L, Dv]."""


@dataclass(frozen=True)
class QueryBlock:
    """Queries of consecutive positions, and the keys up to the last of them.

    One-token decode attends with query i over the keys that stand up to its own position, and with the mask of a
    forward over that token alone.

    Attributes:
        attend: the stock call.
        queries: [B, H, W, D].
        keys, values: T rows, the last W of them the block's own.
        mask_alone: position in the block -> the mask for its query alone, over the keys up to it.
    """

    attend: Attend
    queries: mx.array
    keys: Side
    values: Side
    mask_alone: Callable[[int], Any]

    def by_position(self) -> mx.array:
        """The reference: one query at a time, [B, H, W, Dv]. Keys and values are cut as views; nothing is copied."""
        return mx.concatenate([self._alone(position) for position in range(self.queries.shape[2])], axis=2)

    def _alone(self, position: int) -> mx.array:
        rows = rows_of(self.keys) - self.queries.shape[2] + position + 1
        query = self.queries[:, :, position : position + 1]
        return self.attend(query, _first(self.keys, rows), _first(self.values, rows), self.mask_alone(position))


def rows_of(side: Side) -> int:
    """Rows of keys or values."""
    return (side[0] if isinstance(side, tuple | list) else side).shape[2]


def _first(side: Side, rows: int) -> Side:
    if isinstance(side, tuple | list):
        return tuple(part[:, :, :rows] for part in side)
    return side[:, :, :rows]
