"""Rows times a packed matrix, in every mode of mlx's quantization, and what is a linear or a head at all.

One row of a matrix with K = 96 columns, affine, 3 bits in groups of 32. Nothing is padded: K is a multiple of the
group, and a group fills whole words.

    column              0 .. 31           32 .. 63          64 .. 95
    weight, uint32      word 0 1 2        word 3 4 5        word 6 7 8        K * bits / 32 = 9
    scales, biases      0                 1                 2                 K / group size = 3
    lane of the kernel  0   1   2   3     4   5   6   7     8   9   10  11    8 columns each; lanes 12 to 31 have none

    lane 0's pack of 8 values in 3 bytes, bits from high to low, each with its column:

        byte 0                 byte 1                 byte 2
        2 2 1 1 1 0 0 0        5 4 4 4 3 3 3 2        7 7 7 6 6 6 5 5        columns 2 and 5 cross bytes
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import mlx.core as mx
from mlx import nn

from mlx_spec.ops.base import OWN_KERNEL, Op, Rows
from mlx_spec.ops.kernel import LEAST_ELEMENTS, SIMD_LANES, Kernel, gpu_cores, kernels_run_here
from mlx_spec.ops.linear import BATCH_AXIS, DenseLinear, as_given


class Packing(NamedTuple):
    """How a matrix is packed.

    Attributes:
        mode: "affine", "mxfp4", "mxfp8" or "nvfp4".
        group_size: values to a scale.
    """

    mode: str
    bits: int
    group_size: int


class PackedLinear(Op):
    """`nn.QuantizedLinear`, and `nn.QuantizedEmbedding.as_linear`, in every mode."""

    kind = "quantized linear"

    @property
    def label(self) -> str:
        module = self.module
        outputs, packed = module["weight"].shape
        size = f"{packed * 32 // module.bits} to {outputs}"
        return f"{type(module).__name__} {size}, {module.mode} {module.bits} bits in groups of {module.group_size}"

    def settings(self) -> tuple[Hashable, ...]:
        module = self.module
        return module.group_size, module.bits, module.mode

    def ways(self) -> dict[str, Callable[[Rows], Any]]:
        found: dict[str, Callable[[Rows], Any]] = {}
        if kernels_run_here() and qmv_takes(self.packing, self.module["weight"]):
            found[OWN_KERNEL] = self._by_kernel
        return found | {BATCH_AXIS: self._batched}

    @property
    def packing(self) -> Packing:
        return Packing(self.module.mode, self.module.bits, self.module.group_size)

    def _by_kernel(self, rows: Rows) -> mx.array:
        given, module = rows.args[0], self.module
        flat = given.reshape(-1, given.shape[-1])
        out = row_exact_qmv(self.packing, module["weight"], module["scales"], module.get("biases"), flat)
        return as_given(rows, out + module["bias"] if "bias" in module else out)

    def _batched(self, rows: Rows) -> mx.array:
        given, module = rows.args[0], self.module
        biases = module.get("biases")
        out = mx.quantized_matmul(
            given.reshape(-1, 1, given.shape[-1]),
            module["weight"][None],
            scales=module["scales"][None],
            biases=None if biases is None else biases[None],
            transpose=True,
            group_size=module.group_size,
            bits=module.bits,
            mode=module.mode,
        )
        return as_given(rows, out + module["bias"] if "bias" in module else out)


_BITS = {"affine": (2, 3, 4, 5, 6, 8), "mxfp4": (4,), "mxfp8": (8,), "nvfp4": (4,)}
_GROUPS = {"affine": (32, 64, 128), "mxfp4": (32,), "mxfp8": (32,), "nvfp4": (16,)}
_PACK_VALUES = {2: 16, 3: 8, 4: 8, 5: 8, 6: 4, 8: 4}
"""Values in one pack, as MLX's kernels count packs."""

_ROWS_OF_WEIGHT = 2
_ROWS_OF_INPUT = 16

_QMV = {
    family: Kernel(
        f"row_exact_{family}_qmv",
        "row_exact_qmv",
        ("w", "scales", "biases", "x"),
        ("y",),
        f"row_exact_qmv<T, {groups}<T, BITS, GROUP>, BITS, GROUP, VALUES, LANES>(w, scales, biases, x, y, w_shape[0],"
        " x_shape[1], x_shape[0], threadgroup_position_in_grid, simdgroup_index_in_threadgroup,"
        " thread_index_in_simdgroup, simdgroups_per_threadgroup);",
    )
    for family, groups in (("affine", "AffineGroups"), ("float", "FloatGroups"))
}


def qmv_takes(packing: Packing, weight: mx.array) -> bool:
    """Whether `row_exact_qmv` knows a packing."""
    mode, bits, group_size = packing
    known = bits in _BITS.get(mode, ()) and group_size in _GROUPS.get(mode, ())
    return known and weight.shape[0] >= LEAST_ELEMENTS


def row_exact_qmv(
    packing: Packing, weight: mx.array, scales: mx.array, biases: mx.array | None, rows: mx.array
) -> mx.array:
    """`rows @ dequantized(weight).T`, every row with the bits of MLX's Metal product of that row alone.

    Args:
        packing: of the weight.
        weight: [N, K * bits / 32] uint32, N at least 8.
        scales, biases: [N, K / group size] as `mx.quantize` gives them.
        rows: [M, K] of the scales' dtype in affine mode, else of any.

    Returns:
        [M, N] of the rows' dtype, not evaluated.

    Cost:
        The weight is read once for each 16 rows.

    Raises:
        ValueError: the rows' dtype is not the scales'; MLX would convert the scales first.
    """
    if packing.mode == "affine" and rows.dtype != scales.dtype:
        raise ValueError(f"rows of {rows.dtype} and scales of {scales.dtype}: want one dtype")
    (count, inputs), outputs = rows.shape, weight.shape[0]
    lanes, values = _lane_share(packing, inputs)
    simd_groups, team_rows = 4, SIMD_LANES // lanes * _ROWS_OF_WEIGHT
    while simd_groups > 1 and outputs < simd_groups * team_rows * 2 * gpu_cores():
        simd_groups //= 2
    return _QMV["affine" if packing.mode == "affine" else "float"](
        [weight, scales, scales if biases is None else biases, rows],
        [((count, outputs), rows.dtype)],
        template=[
            *(("T", rows.dtype), ("BITS", packing.bits), ("GROUP", packing.group_size)),
            *(("VALUES", values), ("LANES", lanes)),
        ],
        grid=(-(-outputs // (simd_groups * team_rows)) * simd_groups * SIMD_LANES, -(-count // _ROWS_OF_INPUT), 1),
        threadgroup=(simd_groups * SIMD_LANES, 1, 1),
    )[0]


def _lane_share(packing: Packing, inputs: int) -> tuple[int, int]:
    """Lanes to an output and columns to a lane at a time, as MLX has them for one row."""
    _, bits, group_size = packing
    if inputs in (64, 128) and bits in (2, 4, 8):
        return 4, min(inputs // 4, group_size)
    one, two = _PACK_VALUES[bits], _PACK_VALUES[bits] * (1 if bits == 2 else 2)
    return SIMD_LANES, two if inputs % (two * SIMD_LANES) == 0 else one


LINEARS: dict[type[Any], type[Op]] = {
    nn.Linear: DenseLinear,
    nn.QuantizedLinear: PackedLinear,
}
HEADS: dict[type[Any], type[Op]] = {
    nn.Embedding: DenseLinear,
    nn.QuantizedEmbedding: PackedLinear,
}
"""Embeddings whose `as_linear` is an op; looking a row up is none."""
