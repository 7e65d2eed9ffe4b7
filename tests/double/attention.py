"""Attention of several queries, in the blocks of keys of a pattern.

A single query goes to the stock function. So does every query of a call that, by the pattern's rules, meets the same
kernel with the same number of blocks as it would alone over its own keys. The other queries deal their keys to blocks
in turn, take a softmax in each, and merge these in float: a query's bits depend on its own keys and the number of
blocks.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import mlx.core as mx

from tests.double.orders import Stock
from tests.double.patterns import Attention

LOWEST = float(mx.finfo(mx.float32).min)


class Kernel(NamedTuple):
    """What a call runs on.

    Attributes:
        blocks: how many blocks the keys are dealt to where it differs from a single query.
        per_query: each query is treated as if it came alone, so kernels that are equal give equal bits.
    """

    name: str
    blocks: int
    per_query: bool


VECTOR = Kernel("sdpa_vector", 32, per_query=True)
CHUNKS = Kernel("sdpa_vector_2pass over chunks of grouped heads", 7, per_query=True)
UNFUSED = Kernel("matmul, softmax, matmul", 3, per_query=False)
STEEL = Kernel("steel attention", 5, per_query=False)


class Shape(NamedTuple):
    """What the choice of a kernel looks at.

    Attributes:
        group: query heads per key head.
        dims: (of queries, of values).
        array_mask: the mask is an array.
    """

    queries: int
    keys: int
    group: int
    dims: tuple[int, int]
    array_mask: bool = False
    sinks: bool = False


def kernel_for(rules: Attention, shape: Shape) -> Kernel:
    """The kernel that MLX takes."""
    if shape.queries > rules.most_queries:
        return STEEL if shape.dims in rules.steel_dims else UNFUSED
    fits = shape.queries * shape.group <= rules.most_rows and shape.dims in rules.head_dims
    if not fits or (shape.array_mask and not rules.array_masks):
        return UNFUSED
    key, value = shape.dims
    bare = shape.queries == 1 and key == value and not shape.array_mask and not shape.sinks
    if bare and shape.keys >= rules.chunk_keys and key in dict(rules.chunks).get(shape.group, ()):
        return CHUNKS
    grouped = shape.group > 1 and shape.keys >= rules.two_pass_keys_grouped
    if not grouped and shape.keys < rules.two_pass_keys:
        return VECTOR
    blocks = next(row.blocks for row in rules.blocks if row.fits(shape.queries * shape.group, shape.keys))
    return Kernel("sdpa_vector_2pass", blocks, per_query=True)


def as_alone(rules: Attention, shape: Shape, causal: bool) -> list[bool]:
    """For each query of a call, whether it has the bits it would have alone.

    A query alone reads the keys up to its own, or, in a call without a mask, all of them, and needs no mask.
    """
    together = kernel_for(rules, shape)
    if not together.per_query:
        return [False] * shape.queries
    alone = shape._replace(queries=1, array_mask=False)
    own = [shape.keys - shape.queries + 1 + index if causal else shape.keys for index in range(shape.queries)]
    return [kernel_for(rules, alone._replace(keys=keys)) == together for keys in own]


class BlockedAttention:
    """The replacement for `mx.fast.scaled_dot_product_attention` for one pattern."""

    def __init__(self, rules: Attention, stock: Stock) -> None:
        self._rules = rules
        self._stock = stock

    def attention(self, q: mx.array, k: mx.array, v: mx.array, **given: Any) -> mx.array:
        if q.shape[-2] == 1 or q.size == 0:
            return self._stock.attention(q, k, v, **given)
        mask, sinks = given.get("mask"), given.get("sinks")
        shape = Shape(
            queries=q.shape[-2],
            keys=k.shape[-2],
            group=q.shape[-3] // k.shape[-3],
            dims=(q.shape[-1], v.shape[-1]),
            array_mask=isinstance(mask, mx.array),
            sinks=sinks is not None,
        )
        alone = as_alone(self._rules, shape, causal=mask is not None)
        if all(alone):
            return self._stock.attention(q, k, v, **given)
        blocked = self.in_blocks(q, k, v, given, kernel_for(self._rules, shape).blocks)
        if not any(alone):
            return blocked
        return mx.where(mx.array(alone)[:, None], self._stock.attention(q, k, v, **given), blocked)

    def in_blocks(self, q: mx.array, k: mx.array, v: mx.array, given: dict[str, Any], blocks: int) -> mx.array:
        """[B, H, L, Dv] attention over keys dealt to `blocks` blocks in turn."""
        batch, heads, length, _ = q.shape
        key_heads, keys = k.shape[-3], k.shape[-2]
        group = heads // key_heads
        query = (q.astype(mx.float32) * given["scale"]).reshape(batch, key_heads, group * length, -1)
        scores = self._stock.matmul(query, k.astype(mx.float32).swapaxes(-1, -2))
        scores = _masked(scores.reshape(batch, heads, length, keys), given.get("mask"))
        each = -(-keys // blocks)
        spare = each * blocks - keys
        # [B, Hk, blocks, G*L, each]
        scores = mx.pad(scores, [(0, 0)] * 3 + [(0, spare)], constant_values=-float("inf"))
        scores = scores.reshape(batch, key_heads, group * length, each, blocks).transpose(0, 1, 4, 2, 3)
        tops = mx.maximum(scores.max(axis=-1, keepdims=True), LOWEST)
        # A last column of ones sums the weights in the order of the values.
        ones = mx.ones((*v.shape[:-1], 1), mx.float32)
        values = mx.pad(mx.concatenate([v.astype(mx.float32), ones], axis=-1), [(0, 0), (0, 0), (0, spare), (0, 0)])
        values = values.reshape(batch, key_heads, each, blocks, -1).transpose(0, 1, 3, 2, 4)
        sums = self._stock.matmul(mx.exp(scores - tops), values)
        return self._merged(q, sums, tops, given.get("sinks"))

    def _merged(self, q: mx.array, sums: mx.array, tops: mx.array, sinks: mx.array | None) -> mx.array:
        """One softmax from those of the blocks.

        Args:
            sums: [B, Hk, blocks, G*L, Dv + 1] sums of values, and of weights, relative to the block's top.
            tops: [B, Hk, blocks, G*L, 1] highest score of each block.
        """
        batch, heads, length, _ = q.shape
        top = tops.max(axis=2, keepdims=True)
        if sinks is not None:
            sink = mx.repeat(sinks.astype(mx.float32), length).reshape(1, tops.shape[1], 1, -1, 1)
            top = mx.maximum(top, sink)
        shares = mx.exp(tops - top).transpose(0, 1, 3, 4, 2)  # [B, Hk, G*L, 1, blocks]
        total = self._stock.matmul(shares, sums.transpose(0, 1, 3, 2, 4))[..., 0, :]
        weight = total[..., -1:]
        if sinks is not None:
            weight = weight + mx.exp(sink - top)[:, :, 0]
        return (total[..., :-1] / weight).reshape(batch, heads, length, -1).astype(q.dtype)


def _masked(scores: mx.array, mask: Any) -> mx.array:
    if mask is None:
        return scores
    if isinstance(mask, str):
        queries, keys = scores.shape[-2:]
        mask = mx.arange(keys - queries, keys)[:, None] >= mx.arange(keys)
    if mask.dtype == mx.bool_:
        return mx.where(mask, scores, LOWEST)
    return scores + mask.astype(mx.float32)
