"""On a Mac: our kernels against MLX's own calls of one row, on the device. Elsewhere skipped."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
import pytest

from mlx_spec.ops.block_attention import BlockAttention
from mlx_spec.ops.choose import kinds_of_data, same_bits
from mlx_spec.ops.linear import row_exact_gemv
from mlx_spec.ops.packed import Packing, row_exact_qmv
from mlx_spec.ops.walk import ChosenBlock, GreedyBlock
from tests.msl.trials import PACKINGS

pytestmark = pytest.mark.metal

FLOATS = [mx.float32, mx.float16, mx.bfloat16]
WIDTHS = (2, 3, 5, 8, 16, 17)


def row_by_row(call: Callable[[mx.array], mx.array], rows: mx.array) -> mx.array:
    return mx.concatenate([call(rows[place : place + 1]) for place in range(rows.shape[0])])


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(("outputs", "inputs"), [(4099, 1000), (101, 300), (9, 160), (40, 60), (2048, 4096)])
def test_dense_rows_have_the_bits_of_one_row(outputs: int, inputs: int, dtype: mx.Dtype) -> None:
    for width in WIDTHS:
        for draw in kinds_of_data():
            weight, rows, bias = draw((outputs, inputs), dtype), draw((width, inputs), dtype), draw((outputs,), dtype)
            alone = row_by_row(lambda row, weight=weight: row @ weight.T, rows)
            assert same_bits(row_exact_gemv(weight, rows), alone)
            biased = row_by_row(lambda row, weight=weight, bias=bias: mx.addmm(bias, row, weight.T), rows)
            assert same_bits(row_exact_gemv(weight, rows, bias), biased)


@pytest.mark.parametrize("packing", PACKINGS, ids=str)
def test_packed_rows_have_the_bits_of_one_row(packing: Packing) -> None:
    for dtype in FLOATS:
        for outputs, inputs in ((101, 1024), (64, 384), (75, 128), (2048, 2048)):
            weight = (mx.random.normal((outputs, inputs)) / inputs**0.5).astype(dtype)
            settings = {"group_size": packing.group_size, "bits": packing.bits, "mode": packing.mode}
            packed, scales, *biases = mx.quantize(weight, **settings)
            for width in WIDTHS:
                rows = mx.random.normal((width, inputs)).astype(dtype)
                ours = row_exact_qmv(packing, packed, scales, biases[0] if biases else None, rows)
                alone = row_by_row(
                    lambda row, sides=(packed, scales, *biases), settings=settings: mx.quantized_matmul(
                        row, *sides, transpose=True, **settings
                    ),
                    rows,
                )
                assert same_bits(ours, alone)


@pytest.mark.parametrize("size", [64, 96, 128, 256])
@pytest.mark.parametrize("keys", [70, 1030, 4200, 9000])
@pytest.mark.parametrize("shared", [1, 2, 4, 8])
def test_queries_have_the_bits_of_one_query(shared: int, keys: int, size: int) -> None:
    for dtype, width in ((mx.bfloat16, 5), (mx.float16, 16), (mx.float32, 3)):
        queries = mx.random.normal((2, 2 * shared, width, size)).astype(dtype)
        sides = [mx.random.normal((2, 2, keys + 31, size)).astype(dtype)[:, :, :keys] for _ in range(2)]
        seen = tuple((0, keys - width + 1 + place) for place in range(width))
        block = BlockAttention(queries, *sides, size**-0.5, None, seen)
        if block.blocks() is None:
            continue
        alone = [
            mx.fast.scaled_dot_product_attention(
                queries[:, :, place : place + 1], *(side[:, :, :end] for side in sides), scale=size**-0.5
            )
            for place, (_, end) in enumerate(seen)
        ]
        assert same_bits(block.run(), mx.concatenate(alone, axis=2))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_the_walk_is_that_of_mlx_ops(dtype: mx.Dtype) -> None:
    for batch, width, vocabulary in ((1, 5, 1000), (16, 2, 50_257), (2, 32, 262_144)):
        logits = mx.round(mx.random.normal((batch, width, vocabulary)) * 4).astype(dtype)
        block = GreedyBlock(logits, mx.zeros((batch, width - 1), mx.int32), mx.logsumexp(logits, axis=-1))
        for accepted in range(width):
            proposals = mx.where(mx.arange(width - 1) < accepted, block.choices()[:, :-1], -1)
            given = GreedyBlock(logits, proposals, block.lse)
            assert mx.array_equal(given.by_kernel(), given.by_ops()).item()
            chosen = ChosenBlock(block.choices(), proposals, given.lse)
            assert mx.array_equal(chosen.by_kernel(), given.by_ops()).item()
