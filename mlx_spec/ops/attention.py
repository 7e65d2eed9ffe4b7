"""Attention of a block of queries at the end of a text, with the bits that each query gets when it comes alone.

Which kernel attention takes depends on how many keys there are, and so does whether a block is equal. A probe of a
short text cannot tell for a long one; random keys in their number can.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple

import mlx.core as mx

from mlx_spec.ops.base import Draw
from mlx_spec.ops.choose import kinds_of_data, same_bits

BY_POSITION = "by position"

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
        mask: the block's.
        mask_alone: position in the block -> the mask for its query alone, over the keys up to it.
    """

    attend: Attend
    queries: mx.array
    keys: Side
    values: Side
    mask: Any
    mask_alone: Callable[[int], Any]

    def together(self) -> mx.array:
        """The stock call for all queries, [B, H, W, Dv]."""
        return self.attend(self.queries, self.keys, self.values, self.mask)

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


class KeyStretch(NamedTuple):
    """Numbers of keys for which one finding holds.

    Kernels change at powers of two of them. A block that has such an edge among its own keys is a case by itself.

    Attributes:
        edge: the power of two that the block's last query reaches or has behind it.
        crossed: some of the block's queries have not.
    """

    edge: int
    crossed: bool

    @classmethod
    def at(cls, keys: int, width: int) -> KeyStretch | None:
        """Where a block of `width` ends after `keys`; None in a text so short that probes of the model speak for it."""
        if keys < _FIRST_EDGE:
            return None
        edge = 1 << (keys.bit_length() - 1)
        return cls(edge, keys - width < edge)

    @classmethod
    def first(cls) -> KeyStretch:
        """The shortest of them."""
        return cls(_FIRST_EDGE, False)

    def lengths(self, width: int) -> Sequence[int]:
        """Numbers of keys to try."""
        if self.crossed:
            return range(self.edge, self.edge + width)
        return self.edge + width, self.edge * 3 // 2 + 1, self.edge * 2 - 1


_FIRST_EDGE = 512
_CACHE_STEP = 256
"""Rows by which caches grow: keys are a view of a buffer of a multiple of that."""

_KINDS_OF_DATA = 2
"""Kinds of random data tried. With many keys all of them would take long, and the first two differ most in rounding."""


@dataclass(frozen=True)
class AttentionCall:
    """How a model attends with a block, whatever the number of keys.

    Attributes:
        attend: the stock call.
        queries: shape [B, H, W, D].
        key_heads, values: Hk and Dv.
        dtypes: of queries, and of keys and values before they are packed.
        packing: (group size, bits) of a quantized cache.
        mask: of the block: None, "causal", or the dtype of an array.
        masked_alone: a query alone gets an array.
        sinks: whether there are any.
    """

    attend: Attend = field(compare=False, repr=False)
    queries: tuple[int, ...]
    key_heads: int
    values: int
    dtypes: tuple[mx.Dtype, mx.Dtype]
    packing: tuple[int, int] | None
    mask: str | mx.Dtype | None
    masked_alone: bool
    sinks: bool

    @property
    def width(self) -> int:
        return self.queries[2]

    @property
    def label(self) -> str:
        """The call as people tell it from others."""
        heads, packing = self.queries[1], "" if self.packing is None else f", keys of {self.packing[1]} bits"
        return f"{heads} heads of {self.queries[3]} over {self.key_heads}, mask {self.mask}{packing}"

    def equal_over(self, stretch: KeyStretch) -> bool:
        """Whether stock attention over random keys gives every query the bits it gets alone.

        Cost:
            Keys and values of one layer, and attention over them, a few times. Everything is evaluated.
        """
        blocks = (
            self.block(keys, draw)
            for keys in stretch.lengths(self.width)
            for draw in islice(kinds_of_data(), _KINDS_OF_DATA)
        )
        try:
            return all(same_bits(block.together(), block.by_position()) for block in blocks)
        except (ValueError, TypeError, RuntimeError):
            # What cannot be tried is not known to be equal.
            return False

    def block(self, keys: int, draw: Draw) -> QueryBlock:
        """The same call with arrays of one kind of data."""
        queries, size = draw(self.queries, self.dtypes[0]), self.queries[3]
        mask = self._mask(keys)

        def alone(position: int) -> Any:
            row = slice(position, position + 1)
            return mask[row, : keys - self.width + position + 1] if self.masked_alone else None

        given = mask if isinstance(self.mask, mx.Dtype) else self.mask
        return QueryBlock(
            self.attend, queries, self._side(keys, size, draw), self._side(keys, self.values, draw), given, alone
        )

    def _side(self, keys: int, size: int, draw: Draw) -> Side:
        rows = -(-keys // _CACHE_STEP) * _CACHE_STEP
        drawn = draw((self.queries[0], self.key_heads, rows, size), self.dtypes[1])
        if self.packing is None:
            return _first(drawn, keys)
        group_size, bits = self.packing
        return _first(tuple(mx.quantize(drawn, group_size=group_size, bits=bits)), keys)

    def _mask(self, keys: int) -> mx.array:
        seen = mx.arange(keys - self.width, keys)[:, None] >= mx.arange(keys)
        if not isinstance(self.mask, mx.Dtype) or self.mask == mx.bool_:
            return seen
        return mx.where(seen, 0.0, -float("inf")).astype(self.mask)
