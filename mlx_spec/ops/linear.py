"""Rows times a matrix: dense linears, and embeddings used as a head."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
from mlx import nn

from mlx_spec.ops.base import OWN_KERNEL, Op, Rows
from mlx_spec.ops.kernel import LEAST_ELEMENTS, SIMD_LANES, Kernel, gpu_cores, kernels_run_here

BATCH_AXIS = "batch axis"
BATCH_AXIS_BIAS_APART = "batch axis, bias apart"


class DenseLinear(Op):
    """`nn.Linear`, and `nn.Embedding.as_linear`.

    On the batch axis every row is a matrix of one row, so that the kernel for one row is used for each. The weight
    gets a leading axis, since a left operand is flattened against a two-dimensional one; and the
    rows get a singleton axis of stride 1, since otherwise the batch is folded into the rows again. The own kernel
    reads the weight once for all rows.
    """

    kind = "linear"

    @property
    def label(self) -> str:
        outputs, inputs = self.module["weight"].shape
        return f"{type(self.module).__name__} {inputs} to {outputs}"

    def ways(self) -> dict[str, Callable[[Rows], Any]]:
        found: dict[str, Callable[[Rows], Any]] = {}
        if kernels_run_here() and gemv_takes(self.module["weight"]):
            found[OWN_KERNEL] = self._by_kernel
        found[BATCH_AXIS] = self._batched
        if "bias" in self.module:
            found[BATCH_AXIS_BIAS_APART] = self._batched_bias_apart
        return found

    def _by_kernel(self, rows: Rows) -> mx.array:
        given = rows.args[0]
        flat = given.reshape(-1, given.shape[-1])
        return as_given(rows, row_exact_gemv(self.module["weight"], flat, self.module.get("bias")))

    def _batched(self, rows: Rows) -> mx.array:
        bias = self.module.get("bias")
        apart, weight = rows_apart(rows.args[0]), self.module["weight"].T[None]
        return as_given(rows, mx.matmul(apart, weight) if bias is None else mx.addmm(bias, apart, weight))

    def _batched_bias_apart(self, rows: Rows) -> mx.array:
        product = mx.matmul(rows_apart(rows.args[0]), self.module["weight"].T[None])
        return as_given(rows, product + self.module["bias"])


class HeldMatrix(DenseLinear):
    """A matrix that a module holds under some name, and that its model multiplies by without calling any module.

    Attributes:
        name: under which it is held.
    """

    def __init__(self, name: str, matrix: mx.array) -> None:
        super().__init__(_Weight(matrix))
        self.name = name

    @property
    def label(self) -> str:
        outputs, inputs = self.module["weight"].shape
        return f"{self.name} {inputs} to {outputs}"

    def times(self, rows: mx.array) -> mx.array:
        """The stock call."""
        return rows @ self.module["weight"].T


class _Weight(nn.Module):
    def __init__(self, matrix: mx.array) -> None:
        super().__init__()
        self.weight = matrix


_GEMV = Kernel(
    "row_exact_gemv",
    "row_exact_gemv",
    ("w", "x", "bias"),
    ("y",),
    "threadgroup float part[BN > 1 ? (BN - 1) * 32 : 1];"
    " row_exact_gemv<T, BN, SN, HAS_BIAS>(w, x, bias, y, w_shape[0], w_shape[1], x_shape[0],"
    " threadgroup_position_in_grid, simdgroup_index_in_threadgroup, thread_index_in_simdgroup,"
    " simdgroups_per_threadgroup, part);",
)
_GEMV_ROWS_OF_WEIGHT = 8
_GEMV_ROWS_OF_INPUT = 16
_FLOATS = (mx.float32, mx.float16, mx.bfloat16)


def gemv_takes(weight: mx.array) -> bool:
    """Whether `row_exact_gemv` has the bits of what MLX takes for one row: it takes a dot product for one output."""
    outputs, _ = weight.shape
    return weight.dtype in _FLOATS and outputs >= LEAST_ELEMENTS


def row_exact_gemv(weight: mx.array, rows: mx.array, bias: mx.array | None = None) -> mx.array:
    """`rows @ weight.T (+ bias)`, every row with the bits of MLX's Metal product of that row alone.

    Args:
        weight: [N, K], N at least 8.
        rows: [M, K] of the same dtype, any M.
        bias: [N] or None.

    Returns:
        [M, N], not evaluated.

    Cost:
        The weight is read once for each 16 rows.

    Raises:
        ValueError: dtypes differ; no kernel of one dtype gives the bits of a mixed product.
    """
    if rows.dtype != weight.dtype or (bias is not None and bias.dtype != weight.dtype):
        raise ValueError(f"rows of {rows.dtype} and a weight of {weight.dtype}: want one dtype")
    (outputs, inputs), count = weight.shape, rows.shape[0]
    shares, lanes = _gemv_order(outputs, inputs)
    simd_groups = _gemv_simd_groups(outputs, shares, lanes)
    held = simd_groups // shares * (SIMD_LANES // lanes) * _GEMV_ROWS_OF_WEIGHT
    return _GEMV(
        [weight, rows, weight if bias is None else bias],
        [((count, outputs), weight.dtype)],
        template=[("T", weight.dtype), ("BN", shares), ("SN", lanes), ("HAS_BIAS", bias is not None)],
        grid=(-(-outputs // held) * simd_groups * SIMD_LANES, -(-count // _GEMV_ROWS_OF_INPUT), 1),
        threadgroup=(simd_groups * SIMD_LANES, 1, 1),
    )[0]


def _gemv_order(outputs: int, inputs: int) -> tuple[int, int]:
    """How MLX shares the columns of one output out: among SIMD-groups, and among lanes of each."""
    if inputs <= 64:
        return 1, 4
    return (8, 32) if inputs >= 16 * outputs else (1, 32)


def _gemv_simd_groups(outputs: int, shares: int, lanes: int) -> int:
    """SIMD-groups of a threadgroup: fewer where there would be too few threadgroups for the GPU's cores."""
    if shares > 1:
        return shares
    simd_groups, team_rows = 8, SIMD_LANES // lanes * _GEMV_ROWS_OF_WEIGHT
    while simd_groups > 1 and outputs < simd_groups * team_rows * 2 * gpu_cores():
        simd_groups //= 2
    return simd_groups


def rows_apart(given: mx.array) -> mx.array:
    """[..., K] -> [M, 1, K], every row a matrix of one row, laid out so that no call folds them together again."""
    columns = given.shape[-1]
    return mx.as_strided(mx.contiguous(given), (given.size // columns, 1, columns), (columns, 1, 1))


def as_given(rows: Rows, out: mx.array) -> mx.array:
    """Outputs with the leading axes that a call was given."""
    return out.reshape(*rows.args[0].shape[:-1], out.shape[-1])
