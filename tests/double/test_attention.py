"""Attention under the double: a query keeps its bits exactly where it meets the kernel it would meet alone."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.base import create_causal_mask

from tests.bits import assert_same_bits, bit_difference
from tests.double import PATTERNS, Pattern, double
from tests.double.attention import CHUNKS, STEEL, UNFUSED, VECTOR, BlockedAttention, Shape, as_alone, kernel_for
from tests.double.orders import Stock

GEN13, GEN17, MAX, ULTRA = (PATTERNS[name] for name in ("gen13", "gen17", "max", "ultra"))
BATCH, GROUP, KEY_HEADS = 2, 2, 3
SCALE = 0.11
EPS = 2.0**-24


class Case:
    """Random queries at the end of a text, with its keys and values."""

    def __init__(self, queries: int, keys: int, dims: tuple[int, int] = (64, 64), dtype: mx.Dtype = mx.float32) -> None:
        draw = iter(mx.random.split(mx.random.key(keys), 3))
        shapes = ((GROUP * KEY_HEADS, queries, dims[0]), (KEY_HEADS, keys, dims[0]), (KEY_HEADS, keys, dims[1]))
        arrays = [
            mx.random.normal((BATCH, *shape), key=key).astype(dtype) for shape, key in zip(shapes, draw, strict=True)
        ]
        self.q, self.k, self.v = arrays

    def together(self, pattern: Pattern | None, **given: Any) -> mx.array:
        """All queries in one call."""
        if pattern is None:
            result = mx.fast.scaled_dot_product_attention(self.q, self.k, self.v, scale=SCALE, **given)
            mx.eval(result)
            return result
        with double(pattern):
            return self.together(None, **given)

    def alone(self, pattern: Pattern | None = None, **given: Any) -> mx.array:
        """Each query in a call of its own, over its own keys."""
        if pattern is not None:
            with double(pattern):
                return self.alone(**given)
        rows = []
        for row in range(self.q.shape[2]):
            end = self.k.shape[2] - self.q.shape[2] + 1 + row
            q, k, v = self.q[:, :, row : row + 1], self.k[:, :, :end], self.v[:, :, :end]
            rows.append(mx.fast.scaled_dot_product_attention(q, k, v, scale=SCALE, **given))
        result = mx.concatenate(rows, axis=2)
        mx.eval(result)
        return result

    def differing(self, pattern: Pattern, **given: Any) -> list[int]:
        """Queries whose bits are not those they have alone."""
        got, want = self.together(pattern, **given), self.alone()
        rows = range(self.q.shape[2])
        return [row for row in rows if bit_difference(got[:, :, row], want[:, :, row]) is not None]


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16], ids=str)
def test_single_queries_have_the_stock_bits(dtype: mx.Dtype) -> None:
    sinks = mx.random.normal((GROUP * KEY_HEADS,)).astype(dtype)
    for dims in ((64, 64), (20, 12)):
        case = Case(3, 40, dims, dtype)
        for given in ({}, {"sinks": sinks}, {"mask": mx.array(True)}):
            for pattern in PATTERNS.values():
                assert_same_bits(case.alone(pattern, **given), case.alone(**given), f"{pattern.name} {dims} {given}")


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16], ids=str)
def test_the_vector_kernel_treats_each_query_as_if_it_came_alone(dtype: mx.Dtype) -> None:
    for queries in (2, 8):
        assert Case(queries, 300, dtype=dtype).differing(GEN13, mask="causal") == []


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16], ids=str)
@pytest.mark.parametrize(
    ("queries", "dims"), [(9, (64, 64)), (3, (20, 20)), (3, (192, 192))], ids=["more than 8", "head of 20", "of 192"]
)
def test_beyond_the_vector_kernel_every_query_differs(queries: int, dims: tuple[int, int], dtype: mx.Dtype) -> None:
    assert Case(queries, 40, dims, dtype).differing(GEN13, mask="causal") == list(range(queries))


def test_array_masks_differ_where_the_pattern_says_so() -> None:
    case = Case(4, 40)
    mask = create_causal_mask(4, 36)
    assert case.differing(GEN13, mask=mask) == []
    assert case.differing(GEN17, mask=mask) == [0, 1, 2, 3]
    assert case.differing(MAX, mask=mx.where(mask, 0.0, -float("inf"))) == [0, 1, 2, 3]


def test_two_passes_are_equal_where_the_number_of_blocks_is() -> None:
    assert Case(2, 1500).differing(MAX, mask="causal") == []
    assert Case(3, 1500).differing(MAX, mask="causal") == [0, 1, 2]
    assert Case(2, 1026).differing(MAX, mask="causal") == []
    assert Case(4, 1025).differing(ULTRA, mask="causal") == [0, 1]


def test_queries_before_the_two_pass_threshold_of_grouped_heads_differ() -> None:
    case = Case(4, 4098)
    # Alone the first query comes before 4096 keys, and those beyond take 32 blocks where together it is 64.
    assert case.differing(GEN13, mask="causal") == [0, 1, 2, 3]
    shape = Shape(queries=1, keys=4098, group=4, dims=(64, 64))
    assert as_alone(GEN13.attention, shape._replace(queries=4), causal=True) == [False, True, True, True]


def test_kernels_follow_the_table() -> None:
    one = Shape(queries=1, keys=300, group=4, dims=(128, 128))
    base, top = GEN13.attention, ULTRA.attention
    assert kernel_for(base, one) is VECTOR
    assert kernel_for(base, one._replace(queries=8)) is VECTOR
    assert kernel_for(base, one._replace(queries=8, group=5)) is UNFUSED
    assert kernel_for(base, one._replace(queries=9)) is STEEL
    assert kernel_for(base, one._replace(queries=9, dims=(256, 256))) is UNFUSED
    assert kernel_for(base, one._replace(group=8, keys=8192)) is CHUNKS
    assert kernel_for(base, one._replace(group=8, keys=8192, sinks=True)).blocks == 64
    assert kernel_for(base, one._replace(group=2, keys=4096)).blocks == 32
    assert kernel_for(base, one._replace(group=1, keys=4096)) is VECTOR
    assert kernel_for(base, one._replace(keys=4096)).blocks == 64
    assert [kernel_for(MAX.attention, one._replace(queries=2, keys=keys)).blocks for keys in (1024, 1025, 8193)] == [
        64,
        128,
        256,
    ]
    assert [kernel_for(top, one._replace(queries=2, keys=keys)).blocks for keys in (8192, 16384, 65536)] == [
        128,
        512,
        1024,
    ]
    assert kernel_for(top, one._replace(group=2, keys=8193)).blocks == 256
    assert not any(as_alone(base, one._replace(group=8, queries=2, keys=9000), causal=True))


@pytest.mark.parametrize("blocks", [1, 3, 32, 64])
def test_a_query_depends_on_its_own_keys_and_the_number_of_blocks(blocks: int) -> None:
    attention = BlockedAttention(GEN13.attention, Stock.now())
    case = Case(9, 70)
    together = attention.in_blocks(case.q, case.k, case.v, {"scale": SCALE, "mask": "causal"}, blocks)
    for row in (0, 4):
        end = 70 - 8 + row
        cut = [case.q[:, :, : row + 1], case.k[:, :, :end], case.v[:, :, :end]]
        fewer = attention.in_blocks(*cut, {"scale": SCALE, "mask": "causal"}, blocks)
        assert_same_bits(fewer, together[:, :, : row + 1], f"{row + 1} of 9 queries")


@pytest.mark.parametrize("sinks", [False, True], ids=["no sinks", "sinks"])
@pytest.mark.parametrize("kind", ["none", "causal", "bool", "added", "per head"])
def test_another_order_errs_no_more_than_rounding_can(kind: str, sinks: bool) -> None:
    case, bias = Case(9, 40, (20, 12)), mx.random.normal((BATCH, GROUP * KEY_HEADS, 9, 40))
    masks: dict[str, Any] = {
        "none": None,
        "causal": "causal",
        "bool": create_causal_mask(9, 31, window_size=7),
        "added": mx.where(create_causal_mask(9, 31), 0.0, -float("inf")),
        "per head": bias,
    }
    given = {"mask": masks[kind], "sinks": mx.random.normal((GROUP * KEY_HEADS,)) if sinks else None}
    got, stock = case.together(GEN13, **given), case.together(None, **given)
    assert bit_difference(got, stock) is not None
    # Scores err by (20 + 2) roundings of at most 20 products of a few units, exp passes that on as a relative error,
    # and 40 keys are summed twice over; values are a few units large.
    assert float(mx.abs(got - stock).max()) < 2 * (22 * 20 + 2 * 40) * EPS * 4


def test_a_row_that_sees_nothing_is_what_stock_makes_of_it() -> None:
    case, mask = Case(9, 12, (20, 12)), mx.zeros((9, 12), mx.bool_)
    got, stock = (np.array(case.together(pattern, mask=mask)) for pattern in (GEN13, None))
    assert np.allclose(got, stock, atol=1e-6)
