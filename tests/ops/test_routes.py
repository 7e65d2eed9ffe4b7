"""Every route of an op computes what one-row calls compute, and the cheapest that does so bit by bit is taken."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
import pytest
from mlx import nn
from mlx_lm.models.switch_layers import SwitchGLU, SwitchMLP

from mlx_spec.ops.base import ROWS, STOCK, Op, Rows, WeightedModule
from mlx_spec.ops.choose import Subject, choose, distinct, kinds_of_data, relative_cost, same_bits
from mlx_spec.ops.experts import CHUNKS, Experts
from mlx_spec.ops.linear import BATCH_AXIS, BATCH_AXIS_BIAS_APART, DenseLinear
from mlx_spec.ops.packed import PackedLinear
from tests.bits import assert_same_bits
from tests.double import PATTERNS, double

WIDTHS = (2, 3, 5, 8, 16, 17)
INPUTS, OUTPUTS = 128, 40
DTYPES = (mx.float32, mx.float16, mx.bfloat16)
FORMATS = [("affine", bits, group) for bits in (2, 3, 4, 5, 6, 8) for group in (32, 64, 128)]
FORMATS += [("mxfp4", 4, 32), ("mxfp8", 8, 32), ("nvfp4", 4, 16)]


def linear(dtype: mx.Dtype, bias: bool = False) -> nn.Linear:
    module = nn.Linear(INPUTS, OUTPUTS, bias=bias)
    module.set_dtype(dtype)
    return module


def subject(op: Op, shape: tuple[int, ...] = (1, 1, INPUTS), dtype: mx.Dtype = mx.float32, *rest: Any) -> Subject:
    return Subject(op, op.module, ((shape, dtype), *rest), (), 1)


def experts(count: int, chosen: int, dtype: mx.Dtype = mx.float32, kind: type[Any] = SwitchGLU) -> Subject:
    module = kind(INPUTS, 24, count)
    module.set_dtype(dtype)
    return subject(Experts(module), (1, 1, INPUTS), dtype, ((1, 1, chosen), mx.uint32))


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dense_rows_on_the_batch_axis_have_the_bits_of_single_rows(dtype: mx.Dtype, bias: bool, width: int) -> None:
    tried = subject(DenseLinear(linear(dtype, bias)), dtype=dtype)
    for draw in kinds_of_data():
        rows = tried.rows(width, draw)
        assert_same_bits(tried.op.run(BATCH_AXIS, rows), tried.op.run(ROWS, rows))
    if bias:
        assert_same_bits(
            tried.op.run(BATCH_AXIS_BIAS_APART, rows),
            mx.concatenate([row @ tried.op.module.weight.T for row in mx.split(rows.args[0], width, 1)], 1)
            + tried.op.module.bias,
        )


@pytest.mark.parametrize(("mode", "bits", "group"), FORMATS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_packed_rows_on_the_batch_axis_have_the_bits_of_single_rows(
    mode: str, bits: int, group: int, dtype: mx.Dtype
) -> None:
    module = linear(dtype, bias=True).to_quantized(group, bits, mode=mode)
    tried = subject(PackedLinear(module), dtype=dtype)
    for width in (3, 16):
        rows = tried.rows(width, next(kinds_of_data()))
        assert_same_bits(tried.op.run(BATCH_AXIS, rows), tried.op.run(ROWS, rows))
        assert_same_bits(tried.op.run(STOCK, rows), module(rows.args[0]))


@pytest.mark.parametrize("kind", [SwitchGLU, SwitchMLP])
@pytest.mark.parametrize("chosen", [1, 7, 16])
def test_experts_in_unsorted_chunks_have_the_bits_of_single_rows(kind: type[Any], chosen: int) -> None:
    tried = experts(19, chosen, kind=kind)
    for width in WIDTHS:
        rows = tried.rows(width, next(kinds_of_data()))
        assert rows.args[1].shape == (1, width, chosen)
        assert int(rows.args[1].max().item()) < 19
        assert_same_bits(tried.op.run(CHUNKS, rows), tried.op.run(ROWS, rows))


def test_flattened_rows_and_rows_of_heads_are_cut_where_their_positions_lie() -> None:
    module = linear(mx.float32)
    for shape, axis in (((5, INPUTS), 0), ((2, 5, 3, INPUTS), 1), ((1, 3, 5, INPUTS), 2)):
        given = mx.random.normal(shape)
        rows = Rows(module, (given,), axis, 5)
        assert_same_bits(DenseLinear(module).run(ROWS, rows), module(given))
        assert_same_bits(DenseLinear(module).run(BATCH_AXIS, rows), module(given))


def test_a_module_may_give_several_results_and_take_arguments_without_positions() -> None:
    class Gate(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = mx.random.normal((6, INPUTS))

        def __call__(self, x: mx.array, scale: float, table: mx.array) -> tuple[mx.array, mx.array]:
            scores = x @ self.weight.T * scale + table
            return mx.argmax(scores, axis=-1, keepdims=True), scores

    module, given, table = Gate(), mx.random.normal((1, 5, INPUTS)), mx.random.normal((6,))
    rows = Rows(module, (given, 0.5, table), 1, 5)
    for got, want in zip(WeightedModule(module).run(ROWS, rows), module(given, 0.5, table), strict=True):
        assert_same_bits(got, want)


def test_a_module_may_give_a_list_of_results() -> None:
    class Split(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = mx.random.normal((6, INPUTS))

        def __call__(self, x: mx.array) -> list[mx.array]:
            return mx.split(x @ self.weight.T, [2, 3], axis=-1)

    module, given = Split(), mx.random.normal((1, 5, INPUTS))
    got = WeightedModule(module).run(ROWS, Rows(module, (given,), 1, 5))
    assert isinstance(got, list)
    for one, want in zip(got, module(given), strict=True):
        assert_same_bits(one, want)
    assert choose(subject(WeightedModule(module)), 5) == STOCK
    with double(PATTERNS["gen15"]):
        assert choose(subject(WeightedModule(module)), 5) == ROWS


# Choosing


class Wrong(DenseLinear):
    """A linear some of whose routes are an ulp off at one row."""

    def __init__(self, module: Any, wrong: tuple[str, ...]) -> None:
        super().__init__(module)
        self.wrong = wrong

    def run(self, route: str, rows: Rows) -> Any:
        out = super().run(route, rows)
        if route in self.wrong:
            raw = out.view(mx.uint32)
            raw[:, 1, 3] += 1
            out = raw.view(mx.float32)
        return out


@pytest.mark.parametrize(
    ("wrong", "taken"), [((), STOCK), ((STOCK,), BATCH_AXIS), ((STOCK, BATCH_AXIS), ROWS)], ids=str
)
def test_one_bit_of_one_row_moves_an_op_to_its_next_route(wrong: tuple[str, ...], taken: str) -> None:
    assert choose(subject(Wrong(linear(mx.float32), wrong)), 5) == taken


def test_a_route_that_cannot_run_is_passed_over() -> None:
    class Broken(DenseLinear):
        def ways(self) -> dict[str, Callable[[Rows], Any]]:
            def fails(rows: Rows) -> Any:
                raise RuntimeError("no such kernel here")

            return {"a kernel": fails, **super().ways()}

        def run(self, route: str, rows: Rows) -> Any:
            out = super().run(route, rows)
            return out + 1 if route == STOCK else out

    assert choose(subject(Broken(linear(mx.float32))), 3) == BATCH_AXIS


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_that_round_differently_are_noticed_and_gone_round(pattern: str, dtype: mx.Dtype) -> None:
    tried = subject(DenseLinear(linear(dtype)), dtype=dtype)
    with double(PATTERNS[pattern]):
        assert {choose(tried, width) for width in WIDTHS} == {BATCH_AXIS}
    assert choose(tried, 5) == STOCK


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=str)
def test_a_bias_that_single_rows_add_after_rounding_is_added_apart(dtype: mx.Dtype) -> None:
    tried = subject(DenseLinear(linear(dtype, bias=True)), dtype=dtype)
    assert choose(tried, 5) == STOCK
    with double(PATTERNS["gen15"]):
        assert choose(tried, 5) in (BATCH_AXIS, BATCH_AXIS_BIAS_APART)


def test_experts_are_kept_below_the_size_from_which_they_are_sorted() -> None:
    tried = experts(4, 16)
    with double(PATTERNS["gen15"]):
        assert choose(tried, 2) == STOCK
        assert choose(tried, 8) == CHUNKS


def test_trial_data_is_of_four_kinds_and_the_same_every_time() -> None:
    def drawn() -> Iterator[mx.array]:
        return (draw((3, 8), mx.bfloat16) for draw in kinds_of_data())

    first, second = list(drawn()), list(drawn())
    assert len(first) == 4
    for index, (one, other) in enumerate(zip(first, second, strict=True)):
        assert_same_bits(one, other)
        assert not any(same_bits(one, third) for third in first[:index])
    assert not mx.isnan(mx.stack(first)).any().item()


def test_ops_of_one_make_are_tried_once() -> None:
    same = [subject(DenseLinear(linear(mx.float32))) for _ in range(3)]
    other = subject(DenseLinear(linear(mx.bfloat16)), dtype=mx.bfloat16)
    assert list(distinct([*same, other]).values()) == [same[0], other]
    packed = [linear(mx.float32).to_quantized(group, 4) for group in (32, 64)]
    assert len(distinct([subject(PackedLinear(module)) for module in packed])) == 2


def test_a_cost_is_a_time_in_single_rows() -> None:
    tried = subject(DenseLinear(linear(mx.float32)))
    assert relative_cost(tried, ROWS, 8) > 0


def test_equal_bits_mean_shape_dtype_and_sign_of_zero() -> None:
    zero = mx.zeros((2, 3))
    assert same_bits((zero, zero), (zero, mx.zeros((2, 3))))
    for other in (-zero, mx.zeros((3, 2)), zero.astype(mx.float16), (zero,), None):
        assert not same_bits(zero, other)
    assert same_bits(mx.array([float("nan")]), mx.array([float("nan")]))
