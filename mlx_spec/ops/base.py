"""One op of a model inside a verify call: the routes it may take, and the one-row calls they must equal."""

from __future__ import annotations

import abc
import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import mlx.core as mx
from mlx.utils import tree_flatten

STOCK = "stock"
OWN_KERNEL = "own kernel"
ROWS = "row by row"

Call = Callable[..., Any]
Draw = Callable[[tuple[int, ...], mx.Dtype], mx.array]
"""Makes an array of some kind of data."""


@dataclass(frozen=True)
class Rows:
    """One call of an op, and where its positions lie.

    Attributes:
        call: the stock call, bound to the module.
        args: what the model gave.
        axis: the axis of the first array, and of any other as long there, that counts positions.
        width: positions.
    """

    call: Call
    args: tuple[Any, ...]
    axis: int
    width: int

    def by_chunks(self, chunk: int) -> Any:
        """The stock call on `chunk` positions at a time, put together again."""
        parts = [self._part(start, min(start + chunk, self.width)) for start in range(0, self.width, chunk)]
        return _join([self.call(*part) for part in parts], self.axis)

    def _part(self, start: int, stop: int) -> tuple[Any, ...]:
        return tuple(self._cut(value, start, stop) for value in self.args)

    def _cut(self, value: Any, start: int, stop: int) -> Any:
        counts = isinstance(value, mx.array) and value.ndim > self.axis and value.shape[self.axis] == self.width
        return value[(slice(None),) * self.axis + (slice(start, stop),)] if counts else value


class Op(abc.ABC):
    """A module whose result for one row may depend on how many rows come with it.

    The reference is the stock call on one row at a time. Its routes are ways to compute all rows; the cheapest that
    gives the reference's bits on the machine at hand is taken. The first is the stock call, the last the reference
    itself. Every route uses the module's own weights.

    Attributes:
        kind: what reports call it.
    """

    kind: ClassVar[str]

    def __init__(self, module: Any) -> None:
        self.module = module

    @property
    def signature(self) -> tuple[Hashable, ...]:
        """What decides the bits beside the inputs: ops with equal signatures share a verdict."""
        weights = sorted(tree_flatten(self.module.parameters()))
        shapes = tuple((name, tuple(array.shape), str(array.dtype)) for name, array in weights)
        return self.kind, type(self.module).__name__, shapes, self.settings()

    @property
    def label(self) -> str:
        """The module as people tell it from others."""
        return type(self.module).__name__

    def settings(self) -> tuple[Hashable, ...]:
        """Further facts of the module that decide the bits."""
        return ()

    @property
    def routes(self) -> tuple[str, ...]:
        """Names of all routes, cheapest first."""
        return (STOCK, *self.ways(), ROWS)

    def ways(self) -> dict[str, Callable[[Rows], Any]]:
        """The routes between the stock call and the reference, cheapest first: a kernel of our own before tricks."""
        return {}

    def run(self, route: str, rows: Rows) -> Any:
        """Compute all rows by one of `routes`."""
        if route == STOCK:
            return rows.call(*rows.args)
        return rows.by_chunks(1) if route == ROWS else self.ways()[route](rows)

    def inputs(self, shapes: Sequence[Shape], draw: Draw) -> list[Any]:
        """Arguments of a trial, given their shapes and dtypes."""
        return [draw(shape, dtype) for shape, dtype in shapes]


Shape = tuple[tuple[int, ...], mx.Dtype]


def _join(outputs: list[Any], axis: int) -> Any:
    if isinstance(outputs[0], tuple | list):
        return type(outputs[0])(_join(list(parts), axis) for parts in zip(*outputs, strict=True))
    return mx.concatenate(outputs, axis=axis) if isinstance(outputs[0], mx.array) else outputs[-1]


class WeightedModule(Op):
    """Any other module with matrices of its own, of which nothing is known but how it is called."""

    kind = "module"

    def inputs(self, shapes: Sequence[Shape], draw: Draw) -> list[Any]:
        """As `Op.inputs`; integers are taken for places in the shortest of its matrices."""
        rows = min(array.shape[0] for _, array in tree_flatten(self.module.parameters()) if array.ndim >= 2)
        return [
            (mx.arange(math.prod(shape)) % rows).reshape(shape).astype(dtype)
            if mx.issubdtype(dtype, mx.integer)
            else draw(shape, dtype)
            for shape, dtype in shapes
        ]
