"""Matmuls, dense, quantized and by expert, that add up several rows in the order of a pattern.

A call of one row goes to the stock function unchanged. In a call of several, each output is the sum of partial
products, so that a row's bits depend on the row and the order alone. Rows are counted as mlx counts them: all of the
left operand's where the right one is a single matrix of two axes, those of one slice where it has a batch axis. (On the
hardware such an axis of size 1 joins the rows again when the left operand is contiguous; strides are not seen here.)
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from math import prod
from typing import Any, NamedTuple

import mlx.core as mx

from tests.double.patterns import Order, Pattern

Call = Callable[..., Any]


class Stock(NamedTuple):
    """The functions as mlx has them."""

    matmul: Call
    operator: Call
    in_place: Call
    addmm: Call
    quantized_matmul: Call
    gather_mm: Call
    gather_qmm: Call
    attention: Call

    @classmethod
    def now(cls) -> Stock:
        return cls(
            mx.matmul,
            vars(mx.array)["__matmul__"],
            vars(mx.array)["__imatmul__"],
            mx.addmm,
            mx.quantized_matmul,
            mx.gather_mm,
            mx.gather_qmm,
            mx.fast.scaled_dot_product_attention,
        )


def runs(terms: int, parts: int) -> list[tuple[int, int]]:
    """(start, stop) of each run of about equal length; fewer runs where there are fewer terms."""
    parts = min(parts, terms)
    edges = [terms * index // parts for index in range(parts + 1)]
    return list(pairwise(edges))


def summed(parts: list[mx.array]) -> mx.array:
    """The parts added up, first to last, in their dtype."""
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def in_order(order: Order, x: mx.array, product: Call) -> mx.array:
    """A product over the last axis of `x`, in another order.

    Args:
        product: computes it for an `x` of the same shape. It is given zeros where a run does not reach, which
            fits every packing of the other operand.
    """
    place = mx.arange(x.shape[-1])
    zero = mx.zeros((), x.dtype)
    cut = [mx.where((place >= start) & (place < stop), x, zero) for start, stop in runs(x.shape[-1], order.parts)]
    return summed([product(part) for part in cut])


class Matmuls:
    """The replacements for one pattern. Their signatures are those of mlx."""

    def __init__(self, pattern: Pattern, stock: Stock) -> None:
        self._pattern = pattern
        self._stock = stock

    def matmul(self, a: Any, b: Any, /, **keywords: Any) -> mx.array:
        order = self._dense_order(a, b)
        if order is None:
            return self._stock.matmul(a, b, **keywords)
        return self._in_parts(order, a, b, keywords)

    def operator(self, a: mx.array, b: Any, /) -> Any:
        order = self._dense_order(a, b)
        return self._stock.operator(a, b) if order is None else self._in_parts(order, a, b, {})

    def in_place(self, a: mx.array, b: Any, /) -> Any:
        order = self._dense_order(a, b)
        return self._stock.in_place(a, b) if order is None else self._in_parts(order, a, b, {})

    def addmm(
        self, c: mx.array, a: mx.array, b: mx.array, /, alpha: float = 1.0, beta: float = 1.0, **keywords: Any
    ) -> mx.array:
        """Several rows round the product before the bias is added, one row, here, after."""
        order = self._dense_order(a, b)
        if order is None:
            return self._stock.addmm(c, a, b, alpha, beta, **keywords)
        product = self._in_parts(order, a, b, keywords)
        return _times(alpha, product) + _times(beta, c)

    def quantized_matmul(self, x: mx.array, w: mx.array, /, *args: Any, **keywords: Any) -> mx.array:
        given = _named(_QUANTIZED_ARGUMENTS, args, keywords)
        order = self._quantized_order(x, w, given)
        if order is None:
            return self._stock.quantized_matmul(x, w, **given)
        return in_order(order, x, lambda part: self._stock.quantized_matmul(part, w, **given))

    def gather_mm(self, a: mx.array, b: mx.array, /, *args: Any, **keywords: Any) -> mx.array:
        given = _named(_GATHER_ARGUMENTS, args, keywords)
        experts, slices = self._pattern.experts, _slices(a, b, given)
        order = None
        if a.ndim > 1 and a.shape[-2] > 1:
            order = experts.rows
        elif given.get("sorted_indices") and slices > 1:
            order = experts.sorted_dense
        if order is None:
            return self._stock.gather_mm(a, b, **given)
        return in_order(order, a, lambda part: self._stock.gather_mm(part, b, **given))

    def gather_qmm(self, x: mx.array, w: mx.array, /, *args: Any, **keywords: Any) -> mx.array:
        given = _named(_GATHER_QUANTIZED_ARGUMENTS, args, keywords)
        experts, slices = self._pattern.experts, _slices(x, w, given)
        order = None
        if x.shape[-2] > 1:
            order = experts.rows
        elif given.get("sorted_indices") and slices >= max(experts.slices, experts.per_expert * prod(w.shape[:-2])):
            order = experts.sorted_quantized
        if order is None:
            return self._stock.gather_qmm(x, w, **given)
        return in_order(order, x, lambda part: self._stock.gather_qmm(part, w, **given))

    def _dense_order(self, a: Any, b: Any) -> Order | None:
        if not (_floats(a) and _floats(b)) or a.ndim == 0 or b.ndim == 0 or a.size == 0 or b.size == 0:
            return None
        single = prod(b.shape[:-2]) == 1
        if a.ndim == 1:
            rows = 1
        elif b.ndim > 2:
            rows = a.shape[-2]
        else:
            rows = a.size // a.shape[-1]
        outputs = 1 if b.ndim == 1 else b.shape[-1]
        dtype = a.dtype if a.dtype == b.dtype else mx.float32
        return self._pattern.dense.order(rows, a.shape[-1], outputs, dtype, single)

    def _in_parts(self, order: Order, a: mx.array, b: mx.array, keywords: dict[str, Any]) -> mx.array:
        cut = runs(a.shape[-1], order.parts)
        right = [b[start:stop] if b.ndim == 1 else b[..., start:stop, :] for start, stop in cut]
        left = [a[..., start:stop] for start, stop in cut]
        return summed([self._stock.matmul(*pair, **keywords) for pair in zip(left, right, strict=True)])

    def _quantized_order(self, x: mx.array, w: mx.array, given: dict[str, Any]) -> Order | None:
        if x.size == 0:
            return None
        rules, terms = self._pattern.quantized, x.shape[-1]
        rows = x.size // terms if w.ndim == 2 else x.shape[-2]
        if not given.get("transpose", True):
            return rules.order_plain(rows, terms)
        # Where the number of bits is left out, it is the mode's own: a power of two in each.
        return rules.order(rows, terms, w.shape[-2], given.get("mode", "affine"), given.get("bits") or 4)


_QUANTIZED_ARGUMENTS = ("scales", "biases", "transpose", "group_size", "bits", "mode")
_GATHER_ARGUMENTS = ("lhs_indices", "rhs_indices")
_GATHER_QUANTIZED_ARGUMENTS = (
    *("scales", "biases", "lhs_indices", "rhs_indices", "transpose", "group_size", "bits", "mode"),
    "global_scale",
)


def _named(names: tuple[str, ...], args: tuple[Any, ...], keywords: dict[str, Any]) -> dict[str, Any]:
    return {**dict(zip(names, args, strict=False)), **keywords}


def _floats(value: Any) -> bool:
    return isinstance(value, mx.array) and mx.issubdtype(value.dtype, mx.floating)


def _times(factor: float, value: mx.array) -> mx.array:
    return value if factor == 1.0 else factor * value


def _slices(a: mx.array, b: mx.array, given: dict[str, Any]) -> int:
    """Matrix products one gathered call makes."""
    left, right = given.get("lhs_indices"), given.get("rhs_indices")
    shapes = (a.shape[:-2] if left is None else left.shape, b.shape[:-2] if right is None else right.shape)
    return prod(mx.broadcast_shapes(*shapes))
