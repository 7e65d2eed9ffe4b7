"""Which route of an op gives every row the bits of a one-row call, found by trying, cheapest first."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from mlx_spec.ops.base import ROWS, Call, Draw, Op, Rows, Shape

_BIT_VIEWS = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32, 8: mx.uint64}


@dataclass(frozen=True)
class Subject:
    """An op as one model calls it.

    Attributes:
        op: what is tried.
        call: the stock call, bound to its module.
        shapes: of its arguments for one position; None for what is no array.
        extras: arguments that are no arrays, by place.
        axis: where positions are counted.
    """

    op: Op
    call: Call
    shapes: tuple[Shape | None, ...]
    extras: tuple[tuple[int, Any], ...]
    axis: int

    @property
    def key(self) -> str:
        """Subjects with equal keys share a verdict."""
        return repr((self.op.signature, self.shapes, self.extras, self.axis))

    @property
    def input(self) -> str:
        """The first argument's shape for one position, and its dtype, as people read it."""
        sizes, dtype = next(shape for shape in self.shapes if shape is not None)
        return f"{'x'.join(map(str, sizes))} {str(dtype).rpartition('.')[2]}"

    def rows(self, width: int, draw: Draw) -> Rows:
        """Arguments for `width` positions, of one kind of data."""
        given = [self._widened(shape, width) for shape in self.shapes if shape is not None]
        drawn = iter(self.op.inputs(given, draw))
        extras = dict(self.extras)
        args = (extras[place] if shape is None else next(drawn) for place, shape in enumerate(self.shapes))
        return Rows(self.call, tuple(args), self.axis, width)

    def _widened(self, shape: Shape, width: int) -> Shape:
        sizes, dtype = shape
        if len(sizes) > self.axis and sizes[self.axis] == 1:
            sizes = (*sizes[: self.axis], width, *sizes[self.axis + 1 :])
        return sizes, dtype


def choose(subject: Subject, width: int) -> str:
    """The cheapest route whose rows are bit-equal to one-row calls on every kind of trial data.

    Cost:
        Up to one call per route, and `width` one-row calls, for each kind of data. Everything is evaluated.
    """
    op = subject.op
    trials = [subject.rows(width, draw) for draw in kinds_of_data()]
    wanted = [op.run(ROWS, rows) for rows in trials]
    mx.eval(wanted)
    for route in op.routes[:-1]:
        try:
            equal = all(same_bits(op.run(route, rows), want) for rows, want in zip(trials, wanted, strict=True))
        except (ValueError, TypeError, RuntimeError):
            # A route may ask for what this backend or dtype does not have.
            equal = False
        if equal:
            return route
    return ROWS


def relative_cost(subject: Subject, route: str, width: int) -> float:
    """Time of one call by a route over `width` rows, in stock calls of one row. Both are evaluated, best of several."""
    draw = next(kinds_of_data())
    rows, single = subject.rows(width, draw), subject.rows(1, draw)
    mx.eval([value for value in (*rows.args, *single.args) if isinstance(value, mx.array)])
    return _best_seconds(subject.op, route, rows) / _best_seconds(subject.op, ROWS, single)


def _best_seconds(op: Op, route: str, rows: Rows, repeats: int = 3) -> float:
    spent = []
    for _ in range(repeats):
        started = time.perf_counter()
        mx.eval(op.run(route, rows))
        spent.append(time.perf_counter() - started)
    return min(spent)


def kinds_of_data(seed: int = 0) -> Iterator[Draw]:
    """Ordinary values, magnitudes far apart, sums that nearly cancel, and few distinct values, which tie."""
    keys = mx.random.split(mx.random.key(seed), 6)

    def ordinary(shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
        return mx.random.normal(shape, key=keys[0]).astype(dtype)

    def far_apart(shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
        powers = mx.random.randint(-9, 9, shape, key=keys[1]).astype(mx.float32)
        return (mx.random.normal(shape, key=keys[2]) * 2.0**powers).astype(dtype)

    def cancelling(shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
        signs = 1.0 - 2.0 * (mx.arange(shape[-1]) % 2).astype(mx.float32)
        return (signs * (64.0 + mx.random.normal(shape, key=keys[3]) / 16.0)).astype(dtype)

    def tying(shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
        return (mx.random.randint(-2, 3, shape, key=keys[4]).astype(mx.float32) / 8.0).astype(dtype)

    yield from (ordinary, far_apart, cancelling, tying)


def same_bits(a: Any, b: Any) -> bool:
    """Whether two arrays, or tuples or lists of them, agree in shape, dtype and every bit."""
    if isinstance(a, tuple | list):
        return isinstance(b, tuple | list) and len(a) == len(b) and all(map(same_bits, a, b))
    if not isinstance(a, mx.array):
        return bool(a == b)
    if not isinstance(b, mx.array) or a.dtype != b.dtype or a.shape != b.shape:
        return False
    bits = _BIT_VIEWS[a.dtype.size]
    return bool(mx.array_equal(mx.contiguous(a).view(bits), mx.contiguous(b).view(bits)).item())


def distinct(subjects: Sequence[Subject]) -> dict[str, Subject]:
    """One subject for each key, in order."""
    found: dict[str, Subject] = {}
    for subject in subjects:
        found.setdefault(subject.key, subject)
    return found
