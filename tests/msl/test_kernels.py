"""Our kernels give the bits of MLX's kernels for one row, and the trials that say so can fail."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
import pytest
from mlx import nn

from mlx_spec.ops.base import OWN_KERNEL, Rows
from mlx_spec.ops.block_attention import BlockAttention
from mlx_spec.ops.kernel import metal_text
from mlx_spec.ops.linear import BATCH_AXIS, DenseLinear, row_exact_gemv
from mlx_spec.ops.packed import PackedLinear, Packing, row_exact_qmv
from mlx_spec.ops.walk import ChosenBlock, GreedyBlock
from tests.msl import simulator, stock, trials
from tests.msl.address_spaces import complaints
from tests.msl.kernel import BACKWARD, KernelError, Run, mlx_include
from tests.msl.simulator import RecordedKernel, SimulatedKernel, running, simulated


@pytest.mark.slow
@pytest.mark.parametrize("name", trials.TRIALS)
def test_every_output_has_the_bits_of_the_reference(name: str, thorough: bool, tell: Callable[[str], None]) -> None:
    cases = trials.TRIALS[name](full=False)
    tally = trials.run(cases if thorough else trials.thinned(cases, 4))
    tell(tally.line(name))
    assert tally.differing == 0
    assert len(tally.orders) >= 3


@pytest.mark.deep
@pytest.mark.parametrize("name", trials.TRIALS)
def test_the_whole_plan(name: str, tell: Callable[[str], None]) -> None:
    tally = trials.run(trials.TRIALS[name](full=True))
    tell(tally.line(name))
    assert tally.differing == 0


BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"
MUTATIONS = [
    (
        "row_exact_gemv",
        "order of two adds",
        "distance = SN / 2; distance >= 1; distance >>= 1",
        "distance = 1; distance < SN; distance <<= 1",
    ),
    ("row_exact_gemv", "tail", "whole < K) step<true>", "whole < K - 3) step<true>"),
    (
        "row_exact_gemv",
        "barrier",
        f"r * TILE + m] = sum[r][m];\n      {BARRIER}",
        "r * TILE + m] = sum[r][m];",
    ),
    (
        "row_exact_qmv",
        "order of two adds",
        "total += (columns[0] * q[0] + columns[1] * q[1] + columns[2] * q[2] + columns[3] * q[3]);",
        "total += (columns[3] * q[3] + columns[1] * q[1] + columns[2] * q[2] + columns[0] * q[0]);",
    ),
    ("row_exact_qmv", "rounding before the sum", "return scale * total; }", "return scale * total * 1.0000001f; }"),
    (
        "row_exact_qmv",
        "tail",
        "const int stop = LANES == 4 ? (member + 1) * own : K;",
        "const int stop = LANES == 4 ? (member + 1) * own : K - VALUES;",
    ),
    ("greedy_walk", "ties", "x == value && at < token", "x == value && at > token"),
    ("greedy_walk", "tail", "min(first + 4, to)", "min(first + 4, to - 1)"),
    (
        "greedy_walk",
        "barrier",
        f"is_nan(judged) ? 1 : 0;\n    }}\n  }}\n  {BARRIER}",
        "is_nan(judged) ? 1 : 0;\n    }\n  }",
    ),
    ("block_attention", "one key more", "key >= stops[i]", "key > stops[i]"),
    (
        "block_attention",
        "barrier",
        f"= tile.output[i][j];\n      {BARRIER}",
        "= tile.output[i][j];",
    ),
    (
        "block_attention",
        "order of keys",
        "key = block; key < count; key += blocks",
        "key = block + (count - 1 - block) / blocks * blocks; key >= 0; key -= blocks",
    ),
]


@pytest.mark.part(5)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "what", "text", "mutant"), MUTATIONS, ids=[f"{name}, {what}" for name, what, *_ in MUTATIONS]
)
def test_a_kernel_changed_in_one_line_fails(
    name: str, what: str, text: str, mutant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = metal_text(name)
    assert text in original

    class Changed(SimulatedKernel):
        """A maker of its own, so that no kernel made by another is taken for one of these."""

        def __init__(self, *args: Any, header: str = "", **settings: Any) -> None:
            given = original.replace(text, mutant) if header == original else header
            super().__init__(*args, header=given, **settings)

    monkeypatch.setattr(simulator, "SimulatedKernel", Changed)
    assert fails(trials.TRIALS[name](full=False))


def fails(cases: Iterator[trials.Case]) -> bool:
    """Whether a case differs, or does what Metal forbids. Stops at the first."""
    try:
        return any(tally.differing for tally in trials.each(cases))
    except KernelError:
        return True


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[RecordedKernel]]:
    """The kernels made during a test, of which only the texts are made."""
    found: list[RecordedKernel] = []

    class Noted(RecordedKernel):
        def __init__(self, *args: Any, **settings: Any) -> None:
            super().__init__(*args, **settings)
            found.append(self)

    with simulated():
        monkeypatch.setattr(mx.fast, "metal_kernel", Noted)
        yield found


def call_everything(batch: int, width: int) -> None:
    """Every kernel once, for a batch and a width."""
    rows = batch * width
    weight = mx.random.normal((16, 256))
    row_exact_gemv(weight, mx.random.normal((rows, 256)), mx.random.normal((16,)))
    row_exact_qmv(Packing("affine", 4, 64), *mx.quantize(weight, 64, 4), mx.random.normal((rows, 256)))
    row_exact_qmv(
        Packing("mxfp8", 8, 32), *mx.quantize(weight, 32, 8, mode="mxfp8"), None, mx.random.normal((rows, 256))
    )
    logits = mx.random.normal((batch, width, 100))
    block = GreedyBlock(logits, mx.zeros((batch, width - 1), mx.int32), mx.logsumexp(logits, axis=-1))
    chosen = ChosenBlock(block.choices(), block.proposals, mx.logsumexp(logits, axis=-1))
    mx.eval(block.by_kernel(), chosen.by_kernel())
    keys = mx.random.normal((batch, 1, 40, 64))
    seen = tuple((0, 41 - width + place) for place in range(width))
    BlockAttention(mx.random.normal((batch, 2, width, 64)), keys, keys, 0.1, None, seen).run()
    long = mx.random.normal((batch, 1, 4120, 64))
    seen = tuple((0, 4121 - width + place) for place in range(width))
    BlockAttention(mx.random.normal((batch, 2, width, 64)), long, long, 0.1, None, seen).run()


def test_no_width_and_no_batch_compiles_a_kernel_again(recorded: list[RecordedKernel]) -> None:
    for batch, width in ((1, 2), (1, 16), (3, 5)):
        call_everything(batch, width)
    assert len(recorded) >= 8
    assert {kernel.name: len(kernel.texts) for kernel in recorded} == {kernel.name: 1 for kernel in recorded}


@pytest.mark.slow
def test_the_address_spaces_of_every_kernel_agree(recorded: list[RecordedKernel]) -> None:
    call_everything(1, 3)
    assert {kernel.name: complaints(kernel.texts[0]) for kernel in recorded} == {kernel.name: "" for kernel in recorded}


def test_a_linear_takes_the_kernel_before_tricks_where_there_is_metal() -> None:
    module = nn.Linear(40, 24)
    module.weight = module.weight.astype(mx.bfloat16)
    module.bias = module.bias.astype(mx.bfloat16)
    rows = Rows(module, (mx.random.normal((2, 3, 40)).astype(mx.bfloat16),), 1, 3)
    assert OWN_KERNEL not in DenseLinear(module).routes
    with simulated():
        op = DenseLinear(module)
        assert op.routes.index(OWN_KERNEL) < op.routes.index(BATCH_AXIS)
        out = op.run(OWN_KERNEL, rows)
    wanted = stock.gemv(module.weight, rows.args[0].reshape(6, 40), module.bias)
    assert trials.differing(out, wanted.reshape(2, 3, 24)) == 0


@pytest.mark.slow
def test_a_packed_linear_takes_the_kernel_before_tricks_where_there_is_metal() -> None:
    module = nn.QuantizedLinear(128, 24, bias=True, group_size=32, bits=4)
    rows = Rows(module, (mx.random.normal((2, 3, 128)),), 1, 3)
    assert OWN_KERNEL not in PackedLinear(module).routes
    with simulated():
        op = PackedLinear(module)
        assert op.routes.index(OWN_KERNEL) < op.routes.index(BATCH_AXIS)
        out = op.run(OWN_KERNEL, rows)
    packed = [module.weight, module.scales, module.biases]
    wanted = stock.qmv(Packing("affine", 4, 32), packed, rows.args[0].reshape(6, 128)) + module.bias
    assert trials.differing(out, wanted.reshape(2, 3, 24)) == 0


def test_what_the_kernels_do_not_know_is_left_to_the_next_route() -> None:
    with simulated():
        assert OWN_KERNEL not in DenseLinear(nn.Linear(40, 7)).routes
        module = nn.QuantizedLinear(128, 24, bias=False, group_size=32, bits=4)
        module.bits = 7
        assert OWN_KERNEL not in PackedLinear(module).routes
        assert GreedyBlock(mx.zeros((1, 33, 8)), mx.zeros((1, 32), mx.int32)).kernel_takes() is False
        keys = mx.zeros((1, 1, 8200, 128))
        block = BlockAttention(mx.zeros((1, 8, 2, 128)), keys, keys, 1.0, None, ((0, 8199), (0, 8200)))
        assert block.blocks() is None
        with pytest.raises(ValueError, match="no kernel"):
            block.run()


def test_mixed_dtypes_are_refused() -> None:
    with pytest.raises(ValueError, match="want one dtype"):
        row_exact_gemv(mx.zeros((16, 64)), mx.zeros((2, 64), mx.float16))
    with pytest.raises(ValueError, match="want one dtype"):
        row_exact_qmv(Packing("affine", 4, 64), *mx.quantize(mx.zeros((16, 64))), mx.zeros((2, 64), mx.float16))


DERIVED = {
    "gemv.h": ("row_exact_gemv", "296ef622ea3c67d7"),
    "quantized.h": ("row_exact_qmv", "040ee89ae5855510"),
    "fp_quantized.h": ("row_exact_qmv", "fb4bf0919642717c"),
    "fp4.h": ("row_exact_qmv", "e3159945d7e5ae24"),
    "fp8.h": ("row_exact_qmv", "9a9d77a6295f66b4"),
    "sdpa_vector.h": ("block_attention", "32146cdd4b998272"),
}
"""Text that a kernel of ours was derived from -> that kernel, and the text's digest."""


@pytest.mark.parametrize("name", DERIVED)
def test_the_text_a_kernel_was_derived_from_is_still_the_same(name: str) -> None:
    kernel, digest = DERIVED[name]
    path = mlx_include() / "mlx/backend/metal/kernels" / name
    found = hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    assert found == digest, (
        f"{name} has changed ({found}): read what changed, derive metal/{kernel}.metal again where it touches "
        f"the order of sums, run `make metal-sim`, and note the digest here."
    )


def test_a_race_would_show_in_another_order() -> None:
    weight, rows = mx.random.normal((8, 300)), mx.random.normal((3, 300))
    outs = []
    for order in (0, BACKWARD):
        with simulated(), running(Run(lane_order=order)):
            outs.append(row_exact_gemv(weight, rows))
    assert trials.differing(*outs) == 0
