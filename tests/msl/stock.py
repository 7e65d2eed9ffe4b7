"""MLX's own kernels for one row, from the headers of the installed wheel, launched as MLX's dispatcher would.

Only the rules of dispatch are restated here.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from tests.msl.kernel import Kernel, Run
from tests.msl.simulator import to_mlx, to_numpy

_KERNELS = "mlx/backend/metal/kernels"
_TYPES = {mx.float32: "float", mx.float16: "float16_t", mx.bfloat16: "bfloat16_t"}

LOOSE = Run(strict=False)
"""MLX's product over shares of columns reaches its barrier with one lane of each SIMD-group."""


@functools.cache
def _built(headers: tuple[str, ...], function: str, constants: tuple[tuple[int, int], ...] = ()) -> Kernel:
    included = ("utils.h", *headers)
    text = "".join(f'#include "{_KERNELS}/{header}"\n' for header in included)
    return Kernel(text, function, dict(constants))


def _int32(*values: int) -> np.ndarray:
    return np.array(values if len(values) != 1 else values[0], np.int32)


def _unwritten(shape: Sequence[int], like: np.ndarray) -> np.ndarray:
    out = np.zeros(shape, like.dtype)
    out.reshape(-1).view(np.uint8)[:] = 0xFF
    return out


def gemv_layout(outputs: int, inputs: int) -> tuple[int, int, int, int, int, int]:
    """MLX's bm, bn, sm, sn, tm, tn for `x[1, K] @ w[N, K].T`."""
    bm, bn, sm, sn = (8 if outputs >= 4096 else 4), 1, 1, 32
    if inputs <= 64:
        bm, sm, sn = 1, 8, 4
    elif inputs >= 16 * outputs:
        bm, bn = 1, 8
    return bm, bn, sm, sn, (1 if outputs < 4 else 4), 4


def gemv(weight: mx.array, rows: mx.array, bias: mx.array | None = None, run: Run = LOOSE) -> mx.array:
    """[M, N]: `gemv` on each of the rows, as a batch of single rows."""
    (outputs, inputs), count = weight.shape, rows.shape[0]
    bm, bn, sm, sn, tm, tn = gemv_layout(outputs, inputs)
    has_bias = "true" if bias is not None else "false"
    kernel = _built(("gemv.h",), f"gemv<{_TYPES[weight.dtype]}, {bm}, {bn}, {sm}, {sn}, {tm}, {tn}, false, {has_bias}>")
    given = [to_numpy(array) for array in (weight, rows)]
    out = _unwritten((count, outputs), given[0])
    one, stride = np.array(1, np.float32), np.array([inputs], np.int64)
    buffers: dict[int, Any] = {0: given[0], 1: given[1], 3: out, 4: _int32(inputs), 5: _int32(outputs)}
    buffers |= {6: _int32(inputs), 7: one, 8: one, 9: _int32(1), 10: np.array([count], np.int32), 11: stride}
    buffers |= {12: np.zeros(1, np.int64), 13: np.zeros(1, np.int64), 14: _int32(1)}
    if bias is not None:
        buffers[2] = to_numpy(bias)
    groups = -(-outputs // (bm * sm * tm))
    kernel(buffers, (groups * 32, bn, bm * count), (32, bn, bm), run)
    return to_mlx(out, weight.dtype)


_VALUES_IN_PACK = {2: 16, 3: 8, 4: 8, 5: 8, 6: 4, 8: 4}
_AFFINE_HEADERS = ("quantized_utils.h", "steel/gemm/gemm.h", "quantized.h")
_FLOAT_HEADERS = ("quantized_utils.h", "steel/gemm/gemm.h", "fp_quantized.h")


def qmv(packing: Any, packed: Sequence[mx.array], rows: mx.array, run: Run | None = None) -> mx.array:
    """[M, N]: the kernel MLX takes for one row, over each of the rows.

    Args:
        packing: mode, bits and group size.
        packed: what `mx.quantize` gives.
        rows: [M, K].
    """
    mode, bits, group_size = packing
    inputs, outputs = rows.shape[1], packed[0].shape[0]
    affine, dtype = mode == "affine", _TYPES[rows.dtype]
    prefix, setting = (
        ("affine", f"{dtype}, {group_size}, {bits}") if affine else ("fp", f"{dtype}, {group_size}, {bits}")
    )
    count = rows.shape[0]
    if inputs in (64, 128) and bits in (2, 4, 8):
        function = f"{prefix}_qmv_quad<{setting}, {inputs}, false>"
        grid, threads = (count * 32, -(-outputs // 64), 1), (32, 1, 1)
    else:
        grid, threads = (count * 32, -(-outputs // 8) * 2, 1), (32, 2, 1)
        aligned = inputs % (_VALUES_IN_PACK[bits] * (1 if bits == 2 else 2) * 32) == 0
        partial = "true" if outputs % 8 else "false"
        function = f"{prefix}_qmv_fast<{setting}, false, {partial}>" if aligned else f"{prefix}_qmv<{setting}, false>"
    kernel = _built(_AFFINE_HEADERS if affine else _FLOAT_HEADERS, function)
    out = _unwritten((count, outputs), to_numpy(rows))
    # MLX's kernel of four lanes reads scales of rows past the end, and leaves them.
    arrays = [to_numpy(packed[0]), *(to_numpy(mx.pad(array, ((0, -outputs % 64), (0, 0)))) for array in packed[1:])]
    has_global = not affine and "quad" not in function
    given = [*arrays, *([np.zeros(1, np.float32)] if has_global else []), to_numpy(rows), out]
    given += [_int32(inputs), _int32(outputs), _int32(0), np.zeros(4, np.int32), np.zeros(4, np.int64)]
    given += [_int32(0), np.zeros(4, np.int32), *[np.zeros(4, np.int64)] * 3]
    kernel(dict(enumerate(given)), grid, threads, run)
    return to_mlx(out, rows.dtype)


@dataclass(frozen=True)
class OneQuery:
    """Attention of one query over all keys.

    Attributes:
        queries: [B, H, 1, D].
        keys, values: [B, Hk, N, D].
        mask: [N] bool, or None.
        sinks: [H], or None.
    """

    queries: mx.array
    keys: mx.array
    values: mx.array
    scale: float
    mask: mx.array | None = None
    sinks: mx.array | None = None

    def run(self, blocks: int, run: Run | None = None) -> mx.array:
        """[B, H, 1, D] by MLX's kernel: in one pass where `blocks` is 0, else in two."""
        out = _unwritten(self.queries.shape, to_numpy(self.queries))
        if blocks:
            self._two_passes(blocks, out, run)
        else:
            (batch, heads, _, _), key_heads = self.queries.shape, self.keys.shape[1]
            arrays = [*self._sides(), out, _int32(heads // key_heads), *self._sizes(), _int32(heads)]
            self._kernel("sdpa_vector", 2, blocks)(_present(arrays), (batch * heads * 1024, 1, 1), (1024, 1, 1), run)
        return to_mlx(out, self.queries.dtype)

    def _two_passes(self, blocks: int, out: np.ndarray, run: Run | None) -> None:
        (batch, heads, _, size), key_heads = self.queries.shape, self.keys.shape[1]
        shared = heads // key_heads
        partial = _unwritten((batch, heads, 1, blocks, size), out)
        sums, highest = np.full((2, batch, heads, 1, blocks), np.nan, np.float32)
        arrays = [*self._sides(), partial, sums, highest, None, *self._sizes()]
        first = self._kernel("sdpa_vector_2pass_1", 2, blocks)
        first(_present(arrays), (key_heads * 32, batch * shared, blocks), (32, shared, 1), run)
        second = self._kernel("sdpa_vector_2pass_2", 1, blocks)
        merged = _present([partial, sums, highest, out, _int32(blocks)])
        second(merged, (batch * heads * 1024, 1, 1), (1024, 1, 1), run)

    def _kernel(self, name: str, sizes: int, blocks: int) -> Kernel:
        constants = {20: self.mask is not None, 23: self.mask is not None, 25: self.sinks is not None, 26: blocks}
        values = ", ".join([str(self.queries.shape[3])] * sizes)
        return _built(("sdpa_vector.h",), f"{name}<{_TYPES[self.queries.dtype]}, {values}>", tuple(constants.items()))

    def _sides(self) -> list[np.ndarray]:
        return [to_numpy(mx.contiguous(array)) for array in (self.queries, self.keys, self.values)]

    def _sizes(self) -> list[np.ndarray | None]:
        """Keys, strides of heads and rows, scale, masks with their strides, and sinks."""
        count, size = self.keys.shape[2:]
        strides = [np.array(stride, np.uint64) for stride in (count * size, size, count * size, size)]
        masks = [None if self.mask is None else to_numpy(self.mask), None, _int32(1), _int32(count), _int32(0)]
        sinks = None if self.sinks is None else to_numpy(self.sinks)
        return [_int32(count), *strides, np.array(self.scale, np.float32), *masks, sinks]


def _present(arrays: Sequence[np.ndarray | None]) -> dict[int, np.ndarray]:
    return {index: array for index, array in enumerate(arrays) if array is not None}
