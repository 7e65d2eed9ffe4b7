"""Attention of a block is compared with that of its single queries over as many keys as there are."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest

from mlx_spec.ops.attention import BY_POSITION, AttentionCall, KeyStretch, QueryBlock, chunk_sizes, in_chunks_of
from mlx_spec.ops.base import STOCK
from mlx_spec.ops.choose import kinds_of_data
from tests.bits import assert_same_bits
from tests.double import PATTERNS, double

SCALE = 0.1


def attend(queries: mx.array, keys: Any, values: Any, mask: Any) -> mx.array:
    out: mx.array = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=SCALE, mask=mask)
    return out


def call(width: int, mask: str | mx.Dtype | None = "causal", alone: bool = False, dtype: mx.Dtype = mx.float32) -> Any:
    return AttentionCall(
        attend=attend,
        queries=(1, 6, width, 64),
        key_heads=3,
        values=64,
        dtypes=(dtype, dtype),
        packing=None,
        mask=mask,
        masked_alone=alone,
        sinks=False,
        scale=SCALE,
    )


def drawn(keys: int, width: int, mask: Any = "causal", alone: Any = None) -> QueryBlock:
    draw = next(kinds_of_data())
    block: QueryBlock = call(width).block(keys, draw)
    return QueryBlock(
        attend, block.queries, block.keys, block.values, mask, (lambda *_: None) if alone is None else alone, SCALE
    )


# The reference


@pytest.mark.parametrize(("width", "keys"), [(2, 2), (3, 8), (5, 300), (16, 31)])
def test_each_query_attends_over_the_keys_up_to_its_own(width: int, keys: int) -> None:
    block = drawn(keys, width)
    rows = []
    for position in range(width):
        end = keys - width + 1 + position
        assert isinstance(block.keys, mx.array)
        assert isinstance(block.values, mx.array)
        rows.append(
            attend(block.queries[:, :, position : position + 1], block.keys[:, :, :end], block.values[:, :, :end], None)
        )
    assert_same_bits(block.by_position(), mx.concatenate(rows, axis=2))
    assert mx.allclose(block.by_position(), block.together(), atol=1e-5).item()


# Where findings hold


def test_short_texts_are_left_to_the_models_own_probe() -> None:
    assert KeyStretch.at(511, 4) is None
    assert KeyStretch.at(512, 4) == (512, True)


@pytest.mark.parametrize("width", [2, 5, 16])
@pytest.mark.parametrize("edge", [512, 1024, 4096])
def test_every_length_belongs_to_one_stretch_and_blocks_across_an_edge_are_tried_one_by_one(
    edge: int, width: int
) -> None:
    crossing = [keys for keys in range(edge, 2 * edge) if KeyStretch.at(keys, width) == (edge, True)]
    assert crossing == list(KeyStretch(edge, True).lengths(width))
    # The first block beyond the edge: even one key less than its first query has reaches it.
    assert KeyStretch.at(edge + width, width) == (edge, False)
    inside = KeyStretch(edge, False).lengths(width)
    assert {KeyStretch.at(keys, width) for keys in inside} == {(edge, False)}
    assert (inside[0], inside[-1]) == (edge + width, 2 * edge - 1)


# The choice


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=str)
def test_stock_attention_is_equal_here(dtype: mx.Dtype) -> None:
    for mask, alone in (("causal", False), (mx.bool_, False), (mx.bool_, True), (dtype, True)):
        assert call(3, mask, alone, dtype).route_over(KeyStretch(512, True)) == STOCK
        assert call(3, mask, alone, dtype).route_over(KeyStretch(512, False)) == STOCK


def test_a_block_without_a_mask_sees_what_single_tokens_do_not() -> None:
    # In chunks the mask is the chunk's own, whatever the block's.
    assert call(3, mask=None).route_over(KeyStretch(512, False)) == in_chunks_of(2)
    assert call(2, mask=None).route_over(KeyStretch(512, False)) == BY_POSITION


def test_chunks_that_need_as_many_calls_are_tried_once_and_cut_evenly() -> None:
    for width in range(2, 33):
        sizes = chunk_sizes(width)
        calls = [-(-width // size) for size in sizes]
        assert calls == sorted(set(calls))
        assert all(-(-width // (size - 1)) > count for size, count in zip(sizes, calls, strict=True))


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=str)
@pytest.mark.parametrize(("width", "keys"), [(3, 8), (5, 300), (16, 31)])
def test_chunks_of_any_size_have_the_bits_of_single_queries_here(width: int, keys: int, dtype: mx.Dtype) -> None:
    for mask, alone in (("causal", False), (mx.bool_, False), (mx.bool_, True), (dtype, True)):
        block = call(width, mask, alone, dtype).block(keys, next(kinds_of_data()))
        for way in (in_chunks_of(size) for size in chunk_sizes(width)):
            assert_same_bits(block.run(way), block.by_position(), f"{mask} {way}")


@pytest.mark.parametrize(
    ("heads", "width", "way"),
    [(24, 5, in_chunks_of(3)), (24, 8, in_chunks_of(4)), (48, 5, in_chunks_of(2)), (6, 16, in_chunks_of(8))],
)
def test_chunks_are_as_large_as_the_kernel_for_single_queries_takes_them(heads: int, width: int, way: str) -> None:
    """Three key heads; the kernel takes up to 8 queries, and up to 32 that share a key head."""
    with double(PATTERNS["gen13"]):
        grouped = replace(call(width), queries=(1, heads, width, 64))
        assert grouped.route_over(KeyStretch.short()) == way
        for mask, alone in ((mx.bool_, False), (mx.bool_, True)):
            grouped = replace(call(width, mask, alone), queries=(1, heads, width, 64))
            assert grouped.route_over(KeyStretch.short()) == way
    with double(PATTERNS["gen17"]):
        # No kernel for single queries takes a mask that is an array.
        assert grouped.route_over(KeyStretch.short()) == BY_POSITION


@pytest.mark.slow
def test_an_edge_counts_where_the_kernel_changes_at_it() -> None:
    with double(PATTERNS["max"]):
        # Two blocks of keys' worth: 64 blocks for one query of two heads a key head, 128 for three queries.
        assert call(3).route_over(KeyStretch(512, False)) == STOCK
        assert call(3).route_over(KeyStretch(1024, False)) == in_chunks_of(2)
        assert call(2).route_over(KeyStretch(1024, False)) == STOCK
    with double(PATTERNS["gen13"]):
        assert call(3).route_over(KeyStretch(1024, True)) == STOCK
        assert call(3).route_over(KeyStretch(4096, True)) == BY_POSITION


def test_what_cannot_be_tried_is_not_equal() -> None:
    broken = AttentionCall(
        attend=attend,
        queries=(1, 6, 3, 64),
        key_heads=4,
        values=64,
        dtypes=(mx.float32, mx.float32),
        packing=None,
        mask="causal",
        masked_alone=False,
        sinks=False,
        scale=SCALE,
    )
    assert broken.route_over(KeyStretch(512, False)) == BY_POSITION


@pytest.mark.parametrize("bits", [4, 8])
def test_quantized_keys_are_tried_as_packed(bits: int) -> None:
    seen: list[Any] = []

    def packed(queries: mx.array, keys: Any, values: Any, mask: Any) -> mx.array:
        seen.append((keys, values))
        keys, values = (mx.dequantize(*side, group_size=32, bits=bits) for side in (keys, values))
        return attend(queries, keys, values, mask)

    tried = AttentionCall(
        attend=packed,
        queries=(1, 6, 3, 64),
        key_heads=3,
        values=96,
        dtypes=(mx.float32, mx.float32),
        packing=(32, bits),
        mask="causal",
        masked_alone=False,
        sinks=False,
        scale=SCALE,
    )
    assert tried.route_over(KeyStretch(512, False)) == STOCK
    keys, values = seen[0]
    assert [part.shape for part in keys] == [(1, 3, 515, 2 * bits), (1, 3, 515, 2), (1, 3, 515, 2)]
    assert values[0].shape == (1, 3, 515, 3 * bits)
