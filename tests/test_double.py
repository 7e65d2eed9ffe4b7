"""The double bites, only where it should, and lets go."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from tests.bits import assert_same_bits, bit_difference
from tests.double import PATTERNS, double
from tests.double.patterns import Dense, Order, Pattern
from tests.double.switch import compiles, replacements

GEN13, GEN15, GEN17 = PATTERNS["gen13"], PATTERNS["gen15"], PATTERNS["gen17"]
DTYPES = (mx.float32, mx.bfloat16, mx.float16)
K, N, EXPERTS = 192, 104, 5
FORMATS = (
    *(("affine", bits, 32) for bits in (2, 3, 4, 5, 6, 8)),
    ("affine", 4, 64),
    ("mxfp4", 4, 32),
    ("mxfp8", 8, 32),
    ("nvfp4", 4, 16),
)

Op = Callable[[mx.array], mx.array]


def normal(*shape: int, dtype: mx.Dtype = mx.float32, seed: int = 0) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed + sum(shape))).astype(dtype)


def dense(dtype: mx.Dtype, outputs: int = N, terms: int = K) -> Op:
    weight = normal(outputs, terms, dtype=dtype)
    return lambda x: x @ weight.T


def with_bias(dtype: mx.Dtype) -> Op:
    weight, bias = normal(N, K, dtype=dtype), normal(N, dtype=dtype)
    return lambda x: mx.addmm(bias, x, weight.T)


def quantized(dtype: mx.Dtype, mode: str, bits: int, group_size: int) -> Op:
    weight = normal(N, K, dtype=dtype)
    parts = mx.quantize(weight, group_size=group_size, bits=bits, mode=mode)
    return lambda x: mx.quantized_matmul(x, *parts, transpose=True, group_size=group_size, bits=bits, mode=mode)


def ops(dtype: mx.Dtype) -> dict[str, Op]:
    """[M, K] -> [M, N], by name; each looks its mlx function up when it is called."""
    weight, single = normal(N, K, dtype=dtype), normal(1, K, dtype=dtype)
    found = {
        "operator": dense(dtype),
        "matmul": lambda x: mx.matmul(x, weight.T),
        "one output": lambda x: x @ single.T,
        "vector": lambda x: x @ single[0],
        "addmm": with_bias(dtype),
    }
    for each in FORMATS:
        found[f"quantized {each}"] = quantized(dtype, *each)
    return found


def run(op: Op, x: mx.array, pattern: Pattern | None) -> mx.array:
    """The op's result, evaluated, under a pattern or stock."""
    if pattern is None:
        result = op(x)
        mx.eval(result)
        return result
    with double(pattern):
        return run(op, x, None)


def one_by_one(op: Op, x: mx.array) -> mx.array:
    return mx.concatenate([op(x[row : row + 1]) for row in range(x.shape[0])])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("pattern", PATTERNS.values(), ids=lambda pattern: pattern.name)
def test_calls_of_one_row_have_the_stock_bits(pattern: Pattern, dtype: mx.Dtype) -> None:
    x = normal(3, K, dtype=dtype)
    for name, op in ops(dtype).items():
        assert_same_bits(run(lambda rows, op=op: one_by_one(op, rows), x, pattern), one_by_one(op, x), name)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_batch_axis_on_the_weight_makes_every_row_a_call_of_its_own(dtype: mx.Dtype) -> None:
    weight, x = normal(N, K, dtype=dtype), normal(5, K, dtype=dtype)
    parts = mx.quantize(weight, group_size=32, bits=4)
    batched: dict[str, Op] = {
        "matmul": lambda x: (x[:, None] @ weight.T[None])[:, 0],
        "quantized": lambda x: mx.quantized_matmul(x[:, None], *(part[None] for part in parts), group_size=32, bits=4),
    }
    for name, op in batched.items():
        assert_same_bits(run(op, x, GEN15), op(x), name)


def test_rows_of_every_batch_count_where_the_weight_has_none() -> None:
    weight, x = normal(N, K), normal(6, K)
    flat = run(lambda x: x @ weight.T, x, GEN15)
    assert bit_difference(flat, one_by_one(dense(mx.float32), x)) is not None
    for shape in ((6, 1, K), (2, 3, K)):
        cube = run(lambda x, shape=shape: x.reshape(shape) @ weight.T, x, GEN15)
        assert_same_bits(cube.reshape(6, N), flat, str(shape))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("pattern", PATTERNS.values(), ids=lambda pattern: pattern.name)
def test_every_row_of_several_differs_unless_the_pattern_spares_the_op(pattern: Pattern, dtype: mx.Dtype) -> None:
    x = normal(3, K, dtype=dtype)
    for name, op in ops(dtype).items():
        several, alone = run(op, x, pattern), one_by_one(op, x)
        if "affine" in name and pattern.quantized.affine is None:
            assert_same_bits(several, alone, name)
            continue
        rows = range(1) if several.shape[-1:] != (N,) else range(3)
        for row in rows:
            same = several[row] if len(rows) > 1 else several
            assert bit_difference(same, alone[row] if len(rows) > 1 else alone) is not None, f"{name}, row {row}"


def bands(pattern: Pattern, dtype: mx.Dtype) -> list[list[int]]:
    """Numbers of rows up to 20, those that share an order together, by comparing the bits of their first row."""
    x, op = normal(20, K, dtype=dtype), dense(dtype)
    groups: list[tuple[mx.array, list[int]]] = []
    for rows in range(1, 21):
        first = run(op, x[:rows], pattern)[0]
        if groups and bit_difference(first, groups[-1][0]) is None:
            groups[-1][1].append(rows)
        else:
            groups.append((first, [rows]))
    return [rows for _, rows in groups]


def spans(*edges: int) -> list[list[int]]:
    return [list(range(start, stop)) for start, stop in zip((1, *edges), (*edges, 21), strict=True)]


def test_dense_orders_change_where_each_generation_changes_kernels() -> None:
    half, single = mx.bfloat16, mx.float32
    assert bands(GEN13, half) == bands(GEN13, single) == bands(GEN15, single) == spans(2, 17)
    assert bands(GEN15, half) == spans(2, 6, 16, 17)
    assert bands(GEN17, half) == spans(2, 6, 16)
    assert bands(GEN17, single) == spans(2)


def test_rows_of_odd_length_and_few_outputs_have_orders_of_their_own() -> None:
    rules = GEN15.dense
    assert rules.order(3, 192, 104, mx.bfloat16, single=True) != rules.order(3, 190, 104, mx.bfloat16, single=True)
    assert rules.order(9, 192, 104, mx.bfloat16, single=True) != rules.order(9, 192, 64, mx.bfloat16, single=True)
    assert rules.order(3, 192, 104, mx.bfloat16, single=True) != rules.order(3, 192, 104, mx.bfloat16, single=False)
    assert rules.order(1, 192, 1, mx.bfloat16, single=True) is None
    assert rules.order(2, 192, 1, mx.bfloat16, single=True) is rules.column
    assert rules.order(2, 1, 104, mx.bfloat16, single=True) is None


@pytest.mark.parametrize(
    ("name", "limits"),
    [("gen13", (14, 10, 6)), ("gen15", (13, 15, 13)), ("gen17", (33, 25, 13)), ("ultra", (32, 18, 12))],
)
def test_quantized_orders_change_at_the_vector_limit_of_each_generation(name: str, limits: tuple[int, ...]) -> None:
    rules = PATTERNS[name].quantized
    for size, limit in zip((2048, 4096, 8192), limits, strict=True):
        for mode, below in (("affine", rules.affine), ("nvfp4", rules.fp)):
            assert [rules.order(rows, 96, size, mode, 4) for rows in (1, 2, limit - 1)] == [None, below, below]
            assert rules.order(limit, size, 96, mode, 4) is rules.gemm
    assert rules.order(5, 64, 96, "mxfp4", 4) is None
    assert rules.order(5, 128, 96, "affine", 6) is rules.affine


def test_quantized_bits_change_at_the_vector_limit() -> None:
    op, x = quantized(mx.float32, "affine", 4, 32), normal(16, K)
    alone = op(x[:1])
    assert_same_bits(run(op, x[:13], GEN13)[:1], alone)
    assert bit_difference(run(op, x[:14], GEN13)[:1], alone) is not None
    below, beyond = run(op, x[:12], GEN15)[:1], run(op, x[:13], GEN15)[:1]
    assert bit_difference(below, alone) is not None
    assert bit_difference(below, beyond) is not None


def test_quantized_values_depend_on_rows_and_on_the_number_of_keys() -> None:
    rules = GEN15.quantized
    assert [rules.order_plain(rows, 300) for rows in (1, 2, 3, 4)] == [None, None, None, rules.plain]
    assert [rules.order_plain(rows, 1024) for rows in (1, 2, 3, 4)] == [None, rules.split, rules.split, rules.plain]
    parts = mx.quantize(normal(40, 64), group_size=32, bits=8)
    op: Op = lambda x: mx.quantized_matmul(x, *parts, transpose=False, group_size=32, bits=8)  # noqa: E731
    scores = mx.softmax(normal(4, 40), axis=-1)
    assert_same_bits(run(op, scores[:3], GEN15), one_by_one(op, scores[:3]))
    assert bit_difference(run(op, scores, GEN15), one_by_one(op, scores)) is not None


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_depends_on_nothing_but_itself_and_the_order(dtype: mx.Dtype) -> None:
    x = normal(5, K, dtype=dtype)
    for name, op in ops(dtype).items():
        want = run(op, x, GEN15)
        for rows in ([0, 1], [3, 2, 4], [4, 4, 4, 4, 1]):
            got = run(op, x[mx.array(rows)], GEN15)
            assert_same_bits(got, want[mx.array(rows)], f"{name}, rows {rows}")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_another_order_errs_no_more_than_rounding_can(dtype: mx.Dtype) -> None:
    weight, x = normal(N, K, dtype=dtype), normal(3, K, dtype=dtype)
    got = np.array(run(lambda x: x @ weight.T, x, GEN17).astype(mx.float32), dtype=np.float64)
    left, right = (np.array(each.astype(mx.float32), dtype=np.float64) for each in (x, weight))
    # Each of K float sums, and each partial sum and its addition in the result's dtype, errs by half an ulp of at most
    # the sum of the terms' sizes.
    sizes = np.abs(left) @ np.abs(right).T
    half_ulp = {mx.float32: 2.0**-24, mx.bfloat16: 2.0**-8, mx.float16: 2.0**-11}[dtype]
    bound = (K * 2.0**-24 + 2 * 7 * half_ulp) * sizes
    assert (np.abs(got - left @ right.T) <= bound).all()


def test_a_bias_is_added_after_rounding_and_scaled() -> None:
    weight, bias, x = (normal(*shape, dtype=mx.bfloat16) for shape in ((N, K), (N,), (3, K)))
    got = run(lambda x: mx.addmm(bias, x, weight.T, 2.0, 0.5), x, GEN13)
    assert_same_bits(got, 2.0 * run(lambda x: x @ weight.T, x, GEN13) + 0.5 * bias)


def expert_ops(dtype: mx.Dtype) -> dict[str, Callable[..., mx.array]]:
    weight = normal(EXPERTS, N, K, dtype=dtype)
    parts = mx.quantize(weight, group_size=32, bits=4)
    return {
        "dense": lambda x, ids, **how: mx.gather_mm(x, weight.swapaxes(-1, -2), rhs_indices=ids, **how),
        "quantized": lambda x, ids, **how: mx.gather_qmm(x, *parts, rhs_indices=ids, group_size=32, bits=4, **how),
    }


def test_experts_keep_their_bits_until_they_are_sorted() -> None:
    for name, op in expert_ops(mx.float32).items():
        for slices, sorted_changes in ((1, False), (19, name == "dense"), (20, True)):
            x, ids = normal(slices, 1, K), mx.sort(mx.arange(slices) % EXPERTS)
            alone = mx.concatenate([op(x[i : i + 1], ids[i : i + 1]) for i in range(slices)])
            assert_same_bits(run(lambda x, op=op, ids=ids: op(x, ids), x, GEN15), alone, name)
            grouped = run(lambda x, op=op, ids=ids: op(x, ids, sorted_indices=True), x, GEN15)
            assert (bit_difference(grouped, alone) is not None) == sorted_changes, (name, slices)


def test_several_rows_an_expert_differ_from_one() -> None:
    x, ids = normal(2, 3, K), mx.array([1, 4])
    for name, op in expert_ops(mx.float32).items():
        stock = op(x, ids)
        assert bit_difference(run(lambda x, op=op: op(x, ids), x, GEN13), stock) is not None, name
        assert_same_bits(run(lambda x, op=op: op(x[:, :1], ids), x, GEN13), op(x[:, :1], ids), name)


def attributes() -> list[Any]:
    return [vars(owner)[name] for owner, name, _ in replacements(GEN13)]


def test_leaving_puts_back_every_attribute_and_the_bits() -> None:
    x, op = normal(3, K), dense(mx.float32)
    before, stock = attributes(), op(x)

    def fails_within() -> None:
        with double(GEN13):
            assert all(mine is not theirs for mine, theirs in zip(attributes(), before, strict=True))
            raise KeyError

    with pytest.raises(KeyError):
        fails_within()
    assert all(mine is theirs for mine, theirs in zip(attributes(), before, strict=True))
    assert_same_bits(op(x), stock)


def test_it_cannot_be_nested_and_can_be_entered_again() -> None:
    with double(GEN13), pytest.raises(RuntimeError, match="on already"), double(GEN15):
        pass
    with double(GEN15):
        pass


def test_in_place_matmul_is_reached_too() -> None:
    weight, x = normal(K, K), normal(3, K)

    def in_place(x: mx.array) -> mx.array:
        x = x + 0
        x @= weight
        return x

    assert_same_bits(run(in_place, x, GEN13), run(lambda x: x @ weight, x, GEN13))


def test_compiled_functions_follow_the_context() -> None:
    weight, x = normal(N, K), normal(3, K)

    def product(x: mx.array) -> mx.array:
        return x @ weight.T

    stock, other = product(x), run(product, x, GEN13)
    before, within = mx.compile(product), mx.compile(product)
    assert_same_bits(before(x), stock, "traced before")
    assert_same_bits(run(before, x, GEN13), other, "traced before, called within")
    assert_same_bits(run(within, x, GEN13), other, "first called within")
    assert_same_bits(before(x), stock, "traced before, called after")
    assert_same_bits(within(x), stock, "first called within, called after")


def test_compilation_stays_off_where_it_was_off() -> None:
    assert compiles()
    try:
        mx.disable_compile()
        with double(GEN13):
            assert not compiles()
        assert not compiles()
    finally:
        mx.enable_compile()
    with double(GEN13):
        assert not compiles()
    assert compiles()


def test_an_order_in_as_many_parts_as_terms_is_still_a_sum() -> None:
    many = Order("more parts than terms", 9)
    rules = Dense(half=((2, many),), half_narrow=((2, many),), other=((2, many),), batched=((2, many),))
    pattern = Pattern(name="many", dense=rules, quantized=GEN13.quantized)
    x, weight = normal(3, 2), normal(N, 2)
    got = run(lambda x: x @ weight.T, x, pattern)
    assert_same_bits(got, x[:, :1] @ weight[:, :1].T + x[:, 1:] @ weight[:, 1:].T)
