"""Low-rank adapters of mlx-lm: a linear map or an embedding, and two thin matrices beside it.

    y = x W + scale (x A) B          W [K, N] of the inner module, A [K, r], B [r, N], r small

The inner product takes a way of the inner module, the thin ones go on the batch axis or row by row. DoRA then scales
the columns by norms of the sum of both, which are the same for all rows and are computed once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import mlx.core as mx
from mlx_lm.tuner.dora import DoRAEmbedding, DoRALinear
from mlx_lm.tuner.lora import LoRAEmbedding, LoRALinear

from mlx_spec.ops.base import STOCK, Draw, Op, Rows, Shape, WeightedModule
from mlx_spec.ops.linear import BATCH_AXIS, rows_apart
from mlx_spec.ops.packed import HEADS, LINEARS

_Times = Callable[[mx.array, mx.array], mx.array]
"""([..., K] rows, [K, N] matrix) -> [..., N], each row as if it came alone."""


def _on_batch_axis(rows: mx.array, matrix: mx.array) -> mx.array:
    out = mx.matmul(rows_apart(rows), matrix[None])
    return out.reshape(*rows.shape[:-1], out.shape[-1])


def _row_by_row(rows: mx.array, matrix: mx.array) -> mx.array:
    flat = rows.reshape(-1, 1, 1, rows.shape[-1])
    out = mx.concatenate([row @ matrix for row in flat])
    return out.reshape(*rows.shape[:-1], out.shape[-1])


_THIN: dict[str, _Times] = {BATCH_AXIS: _on_batch_axis, "rows": _row_by_row}


class Adapter(Op):
    """What is common to all: the scaled product of the thin matrices."""

    kind = "adapter"

    @property
    def label(self) -> str:
        return f"{type(self.module).__name__} of rank {self.module.lora_a.shape[1]}"

    def _through_thin(self, given: mx.array, factors: tuple[mx.array, mx.array], times: _Times) -> mx.array:
        module, (first, second) = self.module, factors
        thin = times(times(module.dropout(given), first), second)
        return (module.scale * thin).astype(given.dtype)


class _AroundOp(Adapter):
    """An adapter that calls its inner module: that one's ways, each with each for the thin matrices."""

    def ways(self) -> dict[str, Callable[[Rows], Any]]:
        inner = self._inner()
        if inner is None:
            return {}
        ways = [STOCK, *inner.ways()]
        return {f"{way}, thin {thin}": partial(self._apart, inner, way, _THIN[thin]) for way in ways for thin in _THIN}

    def _apart(self, inner: Op, way: str, times: _Times, rows: Rows) -> mx.array:
        given = rows.args[0]
        out = inner.run(way, Rows(self._inner_call(), (given,), rows.axis, rows.width))
        return self._scaled(out + self._through_thin(given, self._factors(), times), given.dtype)

    def _inner(self) -> Op | None:
        """The op of the inner module, where it is a known one."""
        raise NotImplementedError

    def _inner_call(self) -> Callable[..., Any]:
        raise NotImplementedError

    def _factors(self) -> tuple[mx.array, mx.array]:
        return self.module.lora_a, self.module.lora_b

    def _scaled(self, out: mx.array, dtype: mx.Dtype) -> mx.array:
        del dtype
        return out


class LowRankLinear(_AroundOp):
    """`LoRALinear`."""

    def _inner(self) -> Op | None:
        return _op_of(self.module.linear, LINEARS)

    def _inner_call(self) -> Callable[..., Any]:
        return self.module.linear


class LowRankHead(_AroundOp):
    """`LoRAEmbedding.as_linear`."""

    def _inner(self) -> Op | None:
        return _op_of(self.module.embedding, HEADS)

    def _inner_call(self) -> Callable[..., Any]:
        return self.module.embedding.as_linear

    def _factors(self) -> tuple[mx.array, mx.array]:
        return self.module.lora_b.T, self.module.lora_a.T


class ScaledHead(LowRankHead):
    """`DoRAEmbedding.as_linear`."""

    def _scaled(self, out: mx.array, dtype: mx.Dtype) -> mx.array:
        del dtype
        module = self.module
        adapted = module.embedding.weight + (module.scale * module.lora_a) @ module.lora_b
        return (module.m / mx.linalg.norm(adapted, axis=1)) * out


class ScaledLinear(Adapter):
    """`DoRALinear`: it multiplies by its inner weight without calling the inner module."""

    def ways(self) -> dict[str, Callable[[Rows], Any]]:
        return {f"weights once, {thin}": partial(self._apart, times) for thin, times in _THIN.items()}

    def _apart(self, times: _Times, rows: Rows) -> mx.array:
        given, module = rows.args[0], self.module
        weight = module._dequantized_weight()
        factors = module.lora_a, module.lora_b
        out = times(given, weight.T) + self._through_thin(given, factors, times)
        adapted = weight + (module.scale * module.lora_b.T) @ module.lora_a.T
        out = (module.m / mx.linalg.norm(adapted, axis=1)).astype(given.dtype) * out
        return out + module.linear.bias if "bias" in module.linear else out


class AdaptedLookup(WeightedModule):
    """Looking rows up in an adapted embedding: unlike in a plain one, the rows are multiplied by a thin matrix."""

    def inputs(self, shapes: Sequence[Shape], draw: Draw) -> list[Any]:
        del draw
        return [self._ids(*shape) for shape in shapes]

    def _ids(self, shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
        count = 1
        for size in shape:
            count *= size
        return ((mx.arange(count) * 7) % self.module.lora_a.shape[0]).reshape(shape).astype(dtype)


ADAPTERS: dict[tuple[type[Any], str], type[Op]] = {
    (LoRALinear, "__call__"): LowRankLinear,
    (DoRALinear, "__call__"): ScaledLinear,
    (LoRAEmbedding, "__call__"): AdaptedLookup,
    (LoRAEmbedding, "as_linear"): LowRankHead,
    (DoRAEmbedding, "__call__"): AdaptedLookup,
    (DoRAEmbedding, "as_linear"): ScaledHead,
}
"""(class, method) -> the op that a call of it is."""


def _op_of(module: Any, known: dict[type[Any], type[Op]]) -> Op | None:
    # What is attached to a module bears the name of the class it stands on; a class derived from it does not.
    name = type(module).__module__, type(module).__qualname__
    made_by = next((op for each, op in known.items() if (each.__module__, each.__qualname__) == name), None)
    return None if made_by is None else made_by(module)
