"""Matrix times rows: dense and quantized linears, and embeddings used as a head."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import mlx.core as mx
from mlx import nn

from mlx_spec.ops.base import Op, Rows

BATCH_AXIS = "batch axis"
BATCH_AXIS_BIAS_APART = "batch axis, bias apart"


class DenseLinear(Op):
    """`nn.Linear`, and `nn.Embedding.as_linear`.

    On the batch axis every row is a matrix of one row, so that the kernel for one row is used for each. The weight
    gets a leading axis, since a left operand is flattened against a two-dimensional one; and the
    rows get a singleton axis of stride 1, since otherwise the batch is folded into the rows again.
    """

    kind = "linear"

    @property
    def label(self) -> str:
        outputs, inputs = self.module["weight"].shape
        return f"{type(self.module).__name__} {inputs} to {outputs}"

    def ways(self) -> dict[str, Callable[[Rows], Any]]:
        if "bias" in self.module:
            return {BATCH_AXIS: self._batched, BATCH_AXIS_BIAS_APART: self._batched_bias_apart}
        return {BATCH_AXIS: self._batched}

    def _batched(self, rows: Rows) -> mx.array:
        bias = self.module.get("bias")
        apart, weight = self._rows_apart(rows), self.module["weight"].T[None]
        return _as_given(rows, mx.matmul(apart, weight) if bias is None else mx.addmm(bias, apart, weight))

    def _batched_bias_apart(self, rows: Rows) -> mx.array:
        product = mx.matmul(self._rows_apart(rows), self.module["weight"].T[None])
        return _as_given(rows, product + self.module["bias"])

    @staticmethod
    def _rows_apart(rows: Rows) -> mx.array:
        given = rows.args[0]
        columns = given.shape[-1]
        return mx.as_strided(mx.contiguous(given), (given.size // columns, 1, columns), (columns, 1, 1))


def _as_given(rows: Rows, out: mx.array) -> mx.array:
    return out.reshape(*rows.args[0].shape[:-1], out.shape[-1])


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
        return {BATCH_AXIS: self._batched}

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
        return _as_given(rows, out + module["bias"] if "bias" in module else out)


LINEARS: dict[type[Any], type[Op]] = {
    nn.Linear: DenseLinear,
    nn.QuantizedLinear: PackedLinear,
}
HEADS: dict[type[Any], type[Op]] = {
    nn.Embedding: DenseLinear,
    nn.QuantizedEmbedding: PackedLinear,
}
"""Embeddings whose `as_linear` is an op; looking a row up is none."""
