"""Attention of a block of queries at the end of a text, with the bits that each query gets when it comes alone.

Which kernel attention takes depends on how many keys there are, and so does whether a block is equal. A probe of a
short text cannot tell for a long one; random keys in their number can.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import mlx.core as mx

from mlx_spec.ops.base import OWN_KERNEL, STOCK, Draw
from mlx_spec.ops.block_attention import BlockAttention
from mlx_spec.ops.choose import kinds_of_data, same_bits
from mlx_spec.ops.kernel import kernels_run_here

BY_POSITION = "by position"


def in_chunks_of(size: int) -> str:
    """The way to attend with so many queries at a time, as reports call it."""
    return f"in chunks of {size}"


def chunk_sizes(width: int) -> list[int]:
    """Sizes of chunks to try for a block, largest first: for each number of calls the one that cuts most evenly.

    A larger chunk that needs as many calls would be no cheaper, and may meet another kernel.

    Example:
        >>> chunk_sizes(2), chunk_sizes(5), chunk_sizes(16)
        ([], [3, 2], [8, 6, 4, 3, 2])
    """
    return sorted({-(-width // calls) for calls in range(2, width)}, reverse=True)


Side = mx.array | tuple[mx.array, ...]
"""Keys or values [B, Hk, T, D]; of a quantized cache the packed entries, their scales and biases, each cut alike."""

Attend = Callable[[mx.array, Side, Side, Any], mx.array]
"""The stock call: (queries, keys, values, mask) -> [B, H, L, Dv]."""


@dataclass(frozen=True)
class QueryBlock:
    """Queries of consecutive positions, and the keys up to the last of them.

    One-token decode attends with query i over the keys that stand up to its own position, and with the mask of a
    forward over that token alone. A chunk of queries attends over the keys up to its last one's.

    Attributes:
        attend: the stock call.
        queries: [B, H, W, D].
        keys, values: T rows, the last W of them the block's own.
        mask: the block's.
        mask_of: (start, stop) in the block -> the mask for these queries in a call of their own, over the keys up to
            the last of them.
        scale: of the scores.
        sinks: [H], or None.
    """

    attend: Attend
    queries: mx.array
    keys: Side
    values: Side
    mask: Any
    mask_of: Callable[[int, int], Any]
    scale: float
    sinks: mx.array | None = None

    @property
    def ways(self) -> dict[str, Callable[[], mx.array]]:
        """All ways to attend, [B, H, W, Dv] each, cheapest first. The last is the reference."""
        chunks = {in_chunks_of(size): partial(self.in_chunks, size) for size in chunk_sizes(self.queries.shape[2])}
        return {STOCK: self.together, OWN_KERNEL: self._by_own_kernel, **chunks, BY_POSITION: self.by_position}

    def run(self, way: str) -> mx.array:
        """Attend by one of `ways`, with the masks that single queries are known to meet.

        The own kernel, though found equal, may not take these very keys; then it goes by position.
        """
        if way == STOCK:
            return self.in_chunks(self.queries.shape[2])
        if way == OWN_KERNEL and self.own_kernel() is None:
            way = BY_POSITION
        return self.ways[way]()

    def together(self) -> mx.array:
        """The stock call for all queries, [B, H, W, Dv]."""
        return self.attend(self.queries, self.keys, self.values, self.mask)

    def by_position(self) -> mx.array:
        """The reference: one query at a time, [B, H, W, Dv]."""
        return self.in_chunks(1)

    def in_chunks(self, size: int) -> mx.array:
        """`size` queries at a time, [B, H, W, Dv]. Keys and values are cut as views; nothing is copied."""
        width = self.queries.shape[2]
        return mx.concatenate([self._part(at, min(at + size, width)) for at in range(0, width, size)], axis=2)

    def own_kernel(self) -> BlockAttention | None:
        """The block as the own kernel takes it; None where it does not run or does not know what is asked."""
        keys, values = self.keys, self.values
        if not isinstance(keys, mx.array) or not isinstance(values, mx.array):
            return None
        if isinstance(self.mask, mx.array) or not kernels_run_here():
            return None
        width, count = self.queries.shape[2], rows_of(keys)
        seen = tuple((0, count - width + 1 + position) for position in range(width))
        block = BlockAttention(self.queries, keys, values, self.scale, self.sinks, seen)
        return None if block.blocks() is None else block

    def _by_own_kernel(self) -> mx.array:
        own = self.own_kernel()
        if own is None:
            raise ValueError("no kernel takes this attention")
        return own.run()

    def _part(self, start: int, stop: int) -> mx.array:
        rows = rows_of(self.keys) - self.queries.shape[2] + stop
        queries = self.queries[:, :, start:stop]
        return self.attend(queries, _first(self.keys, rows), _first(self.values, rows), self.mask_of(start, stop))


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

    @classmethod
    def short(cls) -> KeyStretch:
        """Everything before the first of them."""
        return cls(0, False)

    def lengths(self, width: int) -> Sequence[int]:
        """Numbers of keys to try."""
        if not self.edge:
            return width, width + 31, _FIRST_EDGE - 1
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
        scale: of the scores.
        sink_values: [H], or None.
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
    scale: float = field(compare=False, repr=False)
    sink_values: mx.array | None = field(default=None, compare=False, repr=False)

    @property
    def width(self) -> int:
        return self.queries[2]

    @property
    def label(self) -> str:
        """The call as people tell it from others."""
        heads, packing = self.queries[1], "" if self.packing is None else f", keys of {self.packing[1]} bits"
        return f"{heads} heads of {self.queries[3]} over {self.key_heads}, mask {self.mask}{packing}"

    def route_over(self, stretch: KeyStretch) -> str:
        """The cheapest way that gives every query over random keys the bits it gets alone.

        Returns:
            One of `ways` of a block.

        Cost:
            Keys and values of one layer, and attention over them, a few times. Everything is evaluated.
        """
        return next((way for way in self.ways[:-1] if self._equal_over(stretch, way)), BY_POSITION)

    @property
    def ways(self) -> tuple[str, ...]:
        """Names of all ways to attend, cheapest first."""
        return STOCK, OWN_KERNEL, *map(in_chunks_of, chunk_sizes(self.width)), BY_POSITION

    def _equal_over(self, stretch: KeyStretch, way: str) -> bool:
        blocks = (
            self.block(keys, draw)
            for keys in stretch.lengths(self.width)
            for draw in islice(kinds_of_data(), _KINDS_OF_DATA)
        )
        try:
            return all(same_bits(block.ways[way](), block.by_position()) for block in blocks)
        except (ValueError, TypeError, RuntimeError):
            # What cannot be tried is not known to be equal.
            return False

    def block(self, keys: int, draw: Draw) -> QueryBlock:
        """The same call with arrays of one kind of data."""
        queries, size = draw(self.queries, self.dtypes[0]), self.queries[3]
        mask, spare = self._mask(keys), keys - self.width

        def of(start: int, stop: int) -> Any:
            alone = stop - start == 1
            if not self.masked_alone if alone else not isinstance(self.mask, mx.Dtype):
                return None if alone else "causal"
            return mask[start:stop, : spare + stop]

        given = mask if isinstance(self.mask, mx.Dtype) else self.mask
        sides = self._side(keys, size, draw), self._side(keys, self.values, draw)
        return QueryBlock(self.attend, queries, *sides, given, of, self.scale, self.sink_values)

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
