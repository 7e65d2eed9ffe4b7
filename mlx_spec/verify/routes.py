"""How a verify call goes through a model: how its mixers take the block, and which route each of its ops takes.

Where an op does not take the stock route its module's class is swapped; outside a verify call it is stock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from typing import Any, NamedTuple

import mlx.core as mx
from mlx import nn

from mlx_spec.cache.base import Drive
from mlx_spec.model.swap import lock, own_class, swap_class, swap_of
from mlx_spec.ops.attention import BY_POSITION, AttentionCall, KeyStretch
from mlx_spec.ops.base import STOCK, Op, Rows
from mlx_spec.ops.choose import Subject
from mlx_spec.ops.linear import HeldMatrix
from mlx_spec.ops.packed import HEADS, LINEARS
from mlx_spec.verify.products import Multiply, holding_class
from mlx_spec.verify.recall import RUNS_AGAIN, recalled, remembering

ATTENTION = "attention"
"""What attention is called among the things that go by position."""

_AS_HEAD = "as_linear"

_ROUTE = "route"
"""Kind of the swap."""


class Routed(NamedTuple):
    """An op, the route it takes, and the axis on which it is given positions."""

    op: Op
    route: str
    axis: int


@dataclass(frozen=True)
class Plan:
    """What the ops of one model do in a verify call of one width.

    Attributes:
        width: tokens; a call over any other number of rows is left to the stock op.
        routed: key of an op -> its route, for those that do not take the stock one.
        by_position: what is computed for one position at a time though mixers take the block whole: attention over
            the keys that stand up to the query, state updates from the state before the position.
        attention: tells by which way a call of attention that goes by position may be computed all the same, for
            numbers of keys; None when it was not found out.
        ways: the ways that it tells for the keys there are, cheapest first; for the name alone.
    """

    width: int
    routed: Mapping[int, Routed] = field(default_factory=dict)
    by_position: tuple[str, ...] = ()
    attention: Callable[[AttentionCall, KeyStretch], str] | None = field(default=None, compare=False, repr=False)
    ways: tuple[str, ...] = field(default=(), compare=False)

    def __bool__(self) -> bool:
        """Whether anything is done otherwise than stock does it."""
        return bool(self.by_position or self.routed)

    @property
    def name(self) -> str:
        """The routes taken, in words; empty when all are stock."""
        ops = sorted({f"{each.op.kind} {each.route}" for each in self.routed.values()})
        return ", ".join([*self._mixing(), *ops])

    def _mixing(self) -> list[str]:
        """How mixers that take the block whole go about it."""
        kinds, attention = list(self.by_position), []
        if ATTENTION in kinds and set(self.ways) - {BY_POSITION}:
            kinds.remove(ATTENTION)
            # Where something else goes by position, what is not named is stock.
            attention = [] if kinds and self.ways == (STOCK,) else [f"{ATTENTION} {' or '.join(self.ways)}"]
        return attention + ([f"{' and '.join(kinds)} {BY_POSITION}"] if kinds else [])


@dataclass(frozen=True)
class Route:
    """One way to verify a block.

    Attributes:
        drive: how the token mixers take it.
        plan: what the ops do; None leaves all of them stock.
        stepped: by one-token forwards instead, whatever the others say.
    """

    drive: Drive = Drive.BLOCK
    plan: Plan | None = None
    stepped: bool = False

    @cached_property
    def name(self) -> str:
        """As statistics and reports call it."""
        if self.stepped:
            return "step-through"
        ops = "" if self.plan is None else self.plan.name
        return ", ".join(part for part in (_DRIVES[self.drive], ops) if part)


_DRIVES = {
    Drive.WHOLE: "block",
    Drive.BLOCK: "block",
    Drive.QUERIES: "block",
    Drive.POSITIONS: "block, mixers by position",
}

BLOCK = Route()
POSITIONS = Route(Drive.POSITIONS)
STEP_THROUGH = Route(stepped=True)

_plan: ContextVar[Plan | None] = ContextVar("mlx_spec_plan", default=None)
"""What is in force for the forward that is being built in this context; None outside a verify call."""


def plan_in_force() -> Plan | None:
    """The plan of the verify call being built here, if it routes anything."""
    return _plan.get()


@contextmanager
def verifying(plan: Plan | None) -> Iterator[None]:
    """Let a model's ops and its attention take the routes of a plan over one forward."""
    token = _plan.set(plan or None)
    try:
        yield
    finally:
        _plan.reset(token)


def attach(model: nn.Module, plan: Plan) -> None:
    """Let the modules of a plan be routed. Outside `verifying` they compute what they always did."""
    remember(model)
    with lock:
        for module in model.modules():
            routed = plan.routed.get(id(module)) or plan.routed.get(~id(module))
            if routed is not None and swap_of(module, _ROUTE) is None:
                op, base = routed.op, type(module)
                made = _holding_class(base, op.name) if isinstance(op, HeldMatrix) else _routed_class(base)  # type: ignore[arg-type]
                module.__class__ = made


def remember(model: nn.Module) -> None:
    """Let the linear maps in mixers that run again, where these are attached, answer from the first run."""
    with lock:
        mixers = [module for module in model.modules() if getattr(type(module), RUNS_AGAIN, False)]
        for module in (each for mixer in mixers for each in mixer.modules()):
            if own_class(type(module)) in LINEARS and swap_of(module, _ROUTE) is None:
                module.__class__ = _routed_class(type(module))  # type: ignore[arg-type]


def op_key(module: Any, method: str) -> int:
    """By what a plan knows an op: the id of its module; the complement where that has two and this is the second.

    An embedding looks rows up, which is no op, and is a head; an adapted one multiplies for both.
    """
    return ~id(module) if _is_second(type(module), method) else id(module)


def _is_second(made: type[Any], method: str) -> bool:
    return method == _AS_HEAD and own_class(made) not in HEADS


@cache
def _routed_class(base: Any) -> type[Any]:
    names = [name for name in ("__call__", _AS_HEAD) if hasattr(base, name)]
    if own_class(base) in HEADS:
        names = [_AS_HEAD]
    return swap_class(base, _ROUTE, **{name: _routed_method(base, name) for name in names})


def _routed_method(base: Any, name: str) -> Callable[..., Any]:
    second = _is_second(base, name)

    def stock(self: Any, *args: Any, **keywords: Any) -> Any:
        return getattr(base, name)(self, *args, **keywords)

    def call(self: Any, *args: Any, **keywords: Any) -> Any:
        if _plan.get() is None and remembering() is None:
            return getattr(base, name)(self, *args, **keywords)
        return recalled(self, lambda: compute(self, *args, **keywords))

    def compute(self: Any, *args: Any, **keywords: Any) -> Any:
        plan = _plan.get()
        routed = None if plan is None else plan.routed.get(~id(self) if second else id(self))
        if plan is None or routed is None or not _holds(args, routed.axis, plan.width):
            return stock(self, *args, **keywords)
        rows = Rows(partial(stock, self, **keywords), args, routed.axis, plan.width)
        return routed.op.run(routed.route, rows)

    return call


@cache
def _holding_class(base: Any, name: str) -> type[Any]:
    def asked(module: Any, held: HeldMatrix) -> Multiply | None:
        plan = _plan.get()
        routed = None if plan is None else plan.routed.get(id(module))
        return None if plan is None or routed is None else partial(_multiplied, held, routed, plan.width)

    return holding_class(base, _ROUTE, name, asked)


def _multiplied(held: HeldMatrix, routed: Routed, width: int, rows: mx.array) -> mx.array:
    if not _holds((rows,), routed.axis, width):
        return held.times(rows)
    out: mx.array = held.run(routed.route, Rows(held.times, (rows,), routed.axis, width))
    return out


def _holds(args: tuple[Any, ...], axis: int, width: int) -> bool:
    given = args[0] if args else None
    return isinstance(given, mx.array) and given.ndim > axis and given.shape[axis] == width


def plan_of(subjects: Mapping[int, Subject], routes: Mapping[str, str], width: int) -> Plan:
    """The plan that follows from the route chosen for each subject's key."""
    routed = {
        module: Routed(subject.op, routes[subject.key], subject.axis)
        for module, subject in subjects.items()
        if routes[subject.key] != STOCK
    }
    return Plan(width, routed)
