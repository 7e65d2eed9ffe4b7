"""The simulator runs what Metal runs, and catches what Metal does not forgive."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from tests.msl.address_spaces import complaints
from tests.msl.kernel import BACKWARD, FORWARD, HALVES_FIRST, LANE_BY_LANE, SHUFFLED, Kernel, KernelError, Run
from tests.msl.simulator import SimulatedKernel, running
from tests.msl.translate import translate

THREADS = 96


def run_body(body: str, given: np.ndarray, out: np.ndarray, run: Run | None = None) -> Kernel:
    """Run the body of a kernel of one threadgroup of three SIMD-groups; `a` is given, `o` written, `i` the thread."""
    kernel = Kernel(f"""
        [[kernel]] void body(const device float* a [[buffer(0)]], device float* o [[buffer(1)]],
                             uint i [[thread_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]],
                             uint group [[simdgroup_index_in_threadgroup]]) {{ {body} }}""")
    kernel({0: given, 1: out}, (THREADS, 1, 1), (THREADS, 1, 1), run)
    return kernel


def floats(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(count).astype(np.float32)


BLOCK_SUM = """
    threadgroup float part[3];
    const float sum = simd_sum(a[i]);
    if (lane == 0) part[group] = sum;
    BARRIER
    o[i] = part[0] + part[1] + part[2];
"""


def block_sum(barrier: bool) -> str:
    return BLOCK_SUM.replace("BARRIER", "threadgroup_barrier(mem_flags::mem_threadgroup);" if barrier else "")


@pytest.mark.parametrize("order", [FORWARD, BACKWARD, SHUFFLED])
def test_a_sum_over_a_threadgroup(order: int) -> None:
    given, out = floats(THREADS), np.zeros(THREADS, np.float32)
    kernel = run_body(block_sum(barrier=True), given, out, Run(lane_order=order))
    np.testing.assert_allclose(out, np.full(THREADS, given.sum()), rtol=1e-5)
    assert kernel.counters.barriers == 1
    assert kernel.counters.simd_operations == 3


def test_a_missing_barrier_shows_in_another_order() -> None:
    given = floats(THREADS)
    outs = []
    for order in (FORWARD, BACKWARD, SHUFFLED):
        out = np.zeros(THREADS, np.float32)
        run_body(block_sum(barrier=False), given, out, Run(lane_order=order))
        outs.append(out)
    assert any(not np.array_equal(out, outs[0]) for out in outs[1:])
    assert any(np.isnan(out).any() for out in outs)


def test_threadgroup_memory_is_not_zero_before_it_is_written() -> None:
    out = np.zeros(THREADS, np.float32)
    run_body("threadgroup float part[96]; o[i] = part[i];", floats(THREADS), out)
    assert np.isnan(out).all()


@pytest.mark.parametrize(
    ("body", "what"),
    [
        ("o[i] = a[i + 1];", "access outside buffer 0: byte 384 of 384"),
        ("o[i + 1] = a[i];", "access outside buffer 1: byte 384 of 384"),
        ("o[i] = a[i + 100000];", "access outside buffer 0: byte 400000 of 384"),
    ],
)
def test_an_access_past_the_end_is_an_error(body: str, what: str) -> None:
    given, out = floats(THREADS), np.zeros(THREADS, np.float32)
    with pytest.raises(KernelError, match=what):
        run_body(body, given, out)
    assert not out.any()


@pytest.mark.parametrize("body", ["o[i] = a[int(i) - 1];", "o[int(i) - 1] = a[i];"])
def test_an_access_before_the_start_is_an_error(body: str) -> None:
    with pytest.raises(KernelError, match="access outside buffer"):
        run_body(body, floats(THREADS), np.zeros(THREADS, np.float32), Run(at_end=False))


def test_a_write_before_the_start_shows_where_the_end_is_guarded() -> None:
    with pytest.raises(KernelError, match="a write beside an array of 384 bytes"):
        run_body("o[int(i) - 1] = a[i];", floats(THREADS), np.zeros(THREADS, np.float32))


def test_a_diverged_simd_operation_is_an_error() -> None:
    body = "if (lane < 7) o[i] = simd_sum(a[i]); else o[i] = simd_max(a[i]);"
    with pytest.raises(KernelError, match="lanes of one SIMD-group wait at different places"):
        run_body(body, floats(THREADS), np.zeros(THREADS, np.float32))


def test_a_diverged_shuffle_is_an_error() -> None:
    body = "o[i] = 0.0f; if (lane < 7) o[i] = simd_shuffle_down(a[i], 1); threadgroup_barrier(mem_flags::mem_none);"
    with pytest.raises(KernelError, match="wait at different places"):
        run_body(body, floats(THREADS), np.zeros(THREADS, np.float32))


def test_a_read_of_a_lane_that_left_is_counted() -> None:
    kernel = run_body(
        "o[i] = 0.0f; if (lane < 7) o[i] = simd_shuffle(a[i], 9);", floats(THREADS), np.zeros(THREADS, np.float32)
    )
    assert kernel.counters.reads_of_absent_lanes == 3 * 7


def test_a_half_reached_barrier_is_an_error() -> None:
    body = "if (i < 40) return; threadgroup_barrier(mem_flags::mem_none); o[i] = a[i];"
    with pytest.raises(KernelError, match="ended before a barrier"):
        run_body(body, floats(THREADS), np.zeros(THREADS, np.float32))


def test_two_barriers_reached_at_once_are_an_error() -> None:
    body = """
        if (group == 0) { threadgroup_barrier(mem_flags::mem_none); o[i] = a[i]; }
        else { o[i] = 2.0f; threadgroup_barrier(mem_flags::mem_none); }
    """
    with pytest.raises(KernelError, match="different barriers"):
        run_body(body, floats(THREADS), np.zeros(THREADS, np.float32))


def test_the_order_of_a_sum_is_chosen() -> None:
    given = floats(THREADS)
    sums = []
    for order in (0, HALVES_FIRST, LANE_BY_LANE):
        out = np.zeros(THREADS, np.float32)
        run_body("o[i] = simd_sum(a[i]);", given, out, Run(sum_order=order))
        assert np.unique(out[:32]).size == 1
        sums.append(out[0])
    sequential = np.float32(0)
    for value in given[:32]:
        sequential = np.float32(sequential + value)
    assert sums[2] == sequential
    assert len(set(sums)) > 1


def test_denormals_are_flushed() -> None:
    given, out = np.full(THREADS, 1e-30, np.float32), np.zeros(THREADS, np.float32)
    run_body("o[i] = a[i] * 1e-10f;", given, out)
    assert not out.any()
    run_body("o[i] = a[i] * 1e-10f;", given, out, Run(flush_denormals=False))
    assert out.all()


def test_a_multiply_and_add_in_one_expression_rounds_once() -> None:
    given, out = floats(THREADS), np.zeros(THREADS, np.float32)
    run_body("float sum = 1.0f; sum += a[i] * a[95 - i]; o[i] = sum;", given, out)
    exact = 1.0 + given.astype(np.float64) * given[::-1].astype(np.float64)
    assert np.array_equal(out, exact.astype(np.float32))
    run_body("float product = a[i] * a[95 - i]; float sum = 1.0f; sum += product; o[i] = sum;", given, out)
    assert not np.array_equal(out, exact.astype(np.float32))


CONVERSIONS = """
    device ushort* bits = (device ushort*)o;
    bits[2 * i] = as_type<ushort>(bfloat(a[i]));
    bits[2 * i + 1] = as_type<ushort>(half(a[i]));
"""


def test_halves_round_as_mlx_does() -> None:
    given = np.concatenate(
        [floats(80), np.array([0, -0.0, np.inf, -np.inf, np.nan, 65520, 1e-7, 3e38] * 2, np.float32)]
    )
    out = np.zeros(THREADS, np.float32)
    run_body(CONVERSIONS, given, out)
    bits = out.view(np.uint16).reshape(-1, 2)
    array = mx.array(given)
    for column, dtype in enumerate((mx.bfloat16, mx.float16)):
        wanted = np.array(array.astype(dtype).view(mx.uint16))
        numbers = ~np.isnan(given)
        assert np.array_equal(bits[numbers, column], wanted[numbers])


def test_bfloat_arithmetic_rounds_to_bfloat() -> None:
    given, out = floats(THREADS), np.zeros(THREADS, np.float32)
    run_body("const bfloat x = bfloat(a[i]), y = bfloat(a[95 - i]); o[i] = float(x + y) - float(x * y);", given, out)
    x, y = mx.array(given).astype(mx.bfloat16), mx.array(given[::-1].copy()).astype(mx.bfloat16)
    wanted = (x + y).astype(mx.float32) - (x * y).astype(mx.float32)
    assert np.array_equal(out, np.array(wanted))


def test_an_8x8_product() -> None:
    given, out = floats(128), np.zeros(64, np.float32)
    kernel = Kernel("""
        [[kernel]] void product(const device float* a [[buffer(0)]], device float* o [[buffer(1)]]) {
          simdgroup_float8x8 x, y, z;
          simdgroup_load(x, a, 8);
          simdgroup_load(y, a + 64, 8);
          simdgroup_multiply(z, x, y);
          simdgroup_store(z, o, 8);
        }""")
    kernel({0: given, 1: out}, (32, 1, 1), (32, 1, 1))
    np.testing.assert_allclose(out.reshape(8, 8), given[:64].reshape(8, 8) @ given[64:].reshape(8, 8), atol=1e-5)


def test_votes_prefix_sums_and_atomics() -> None:
    given, out = floats(THREADS), np.zeros(THREADS, np.float32)
    body = """
        threadgroup atomic_uint count;
        if (i == 0) atomic_store_explicit(&count, 0u, memory_order_relaxed);
        threadgroup_barrier(mem_flags::mem_threadgroup);
        const bool positive = a[i] > 0.0f;
        if (positive) atomic_fetch_add_explicit(&count, 1u, memory_order_relaxed);
        const uint before = simd_prefix_exclusive_sum(uint(positive));
        const uint all = popcount(uint(uint64_t(simd_ballot(positive))));
        threadgroup_barrier(mem_flags::mem_threadgroup);
        const uint total = atomic_load_explicit(&count, memory_order_relaxed);
        o[i] = float(before) + 100.0f * float(all) + 10000.0f * float(total);
    """
    run_body(body, given, out)
    positive = (given > 0).reshape(3, 32)
    before = np.cumsum(positive, axis=1) - positive
    wanted = before + 100 * positive.sum(axis=1, keepdims=True) + 10000 * positive.sum()
    assert np.array_equal(out, wanted.reshape(-1).astype(np.float32))


def test_the_last_threadgroups_are_cut_at_the_edge_of_the_grid() -> None:
    kernel = Kernel("""
        [[kernel]] void place(device uint* o [[buffer(0)]], uint2 i [[thread_position_in_grid]],
                              uint2 size [[threads_per_grid]], uint lane [[thread_index_in_threadgroup]]) {
          o[i.y * size.x + i.x] = lane;
        }""")
    out = np.full(35, 99, np.uint32)
    kernel({0: out}, (7, 5, 1), (4, 2, 1))
    wanted = [[min(4, 7 - x // 4 * 4) * (y % 2) + x % 4 for x in range(7)] for y in range(5)]
    assert np.array_equal(out.reshape(5, 7), wanted)


def test_more_threads_than_metal_allows_are_refused() -> None:
    kernel = Kernel("[[kernel]] void none(device uint* o [[buffer(0)]]) { o[0] = 1; }")
    with pytest.raises(KernelError, match="more than 1024 threads"):
        kernel({0: np.zeros(1, np.uint32)}, (2048, 1, 1), (2048, 1, 1))


def test_function_constants_and_subscripts_survive_translation() -> None:
    text = "constant bool wide [[function_constant(3)]];\nint f(thread int* p) { return p[p[0]]; }\n"
    assert translate(text, {3: True})[0] == "const bool wide  = 1;\nint f( int* p) { return p[p[0]]; }\n"


KERNEL_BODY = "o[thread_position_in_grid.x] = T(a[thread_position_in_grid.x] * T(count));"


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_a_kernel_of_mlx_runs_with_the_text_mlx_generates(dtype: mx.Dtype) -> None:
    kernel = SimulatedKernel("scaled", ["a", "count"], ["o"], KERNEL_BODY)
    array = mx.random.normal((3, 11)).astype(dtype)
    (out,) = kernel(
        inputs=[array, 3],
        template=[("T", dtype)],
        output_shapes=[(3, 11)],
        output_dtypes=[dtype],
        grid=(33, 1, 1),
        threadgroup=(8, 1, 1),
    )
    assert mx.array_equal(out, array * mx.array(3, dtype))
    assert "[[kernel]] void custom_kernel_scaled" in kernel.texts[0]


def test_an_output_left_unwritten_shows() -> None:
    kernel = SimulatedKernel(
        "lazy", ["a"], ["o"], "if (thread_position_in_grid.x != 5) o[thread_position_in_grid.x] = a[0];"
    )
    (out,) = kernel(
        inputs=[mx.zeros((8,))], output_shapes=[(8,)], output_dtypes=[mx.float32], grid=(8, 1, 1), threadgroup=(8, 1, 1)
    )
    assert np.isnan(np.array(out)).nonzero()[0].tolist() == [5]


@pytest.mark.slow
def test_a_device_pointer_to_a_small_input_is_caught() -> None:
    kernel = SimulatedKernel("pointer", ["a"], ["o"], "const device float* p = a; o[0] = p[0];")
    found = []
    for count in (100, 4):
        kernel(
            inputs=[mx.zeros((count,))],
            output_shapes=[(1,)],
            output_dtypes=[mx.float32],
            grid=(1, 1, 1),
            threadgroup=(1, 1, 1),
        )
        found.append(complaints(kernel.texts[-1]))
    assert found[0] == ""
    assert "__constant" in found[1]


def test_orders_are_set_for_the_calls_inside() -> None:
    body = "o[thread_position_in_grid.x] = simd_sum(a[thread_position_in_grid.x]);"
    kernel = SimulatedKernel("sum", ["a"], ["o"], body)
    array = mx.random.normal((32,))
    outs = []
    for order in (0, LANE_BY_LANE):
        with running(Run(sum_order=order)):
            outs += kernel(
                inputs=[array],
                output_shapes=[(32,)],
                output_dtypes=[mx.float32],
                grid=(32, 1, 1),
                threadgroup=(32, 1, 1),
            )
    assert not mx.array_equal(*outs)
    assert mx.allclose(*outs, rtol=1e-5)
