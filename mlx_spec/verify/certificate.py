"""Which verify routes are equal on this machine: nothing is assumed, all is tried against one-token decode."""

from __future__ import annotations

import copy
import threading
import weakref
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from mlx import nn

from mlx_spec.cache.base import Drive
from mlx_spec.ops.attention import AttentionCall, KeyStretch
from mlx_spec.ops.base import STOCK
from mlx_spec.progress import tell
from mlx_spec.verify import routes
from mlx_spec.verify.bindings import Bindings
from mlx_spec.verify.exemplar import Exemplar
from mlx_spec.verify.op_table import OpTable
from mlx_spec.verify.routes import Route
from mlx_spec.verify.trial import CANNOT_TAKE, PROBES, Situation, Trial, attention_calls, evaluated


class Certificate:
    """What one model was found to do with blocks, in one situation.

    A width is certified for a drive when, on probes of the model itself, a forward over a block of that many
    tokens gives every position the very bits of one-token decode, and the caches left by keeping a part of the
    block hold the very bits that one-token decode leaves. (Logits alone would not do: in half precision
    their rounding hides what a recurrent state goes on to amplify.) Its ops take the routes found for them.
    Each width is tried when it is first needed.

    Attributes:
        failure: what the model raised on a block, None if it took all that were tried.
    """

    def __init__(self, model: nn.Module, situation: Situation, exemplar: Exemplar, bindings: Bindings) -> None:
        self.failure: str | None = None
        self._verdicts: dict[tuple[int, Drive], bool] = {}
        self._attention: dict[int, list[AttentionCall]] = {}
        self._exemplar = exemplar
        self._ops = exemplar.own_ops
        self._bindings = bindings
        self._lock = threading.Lock()
        self._model = weakref.ref(model)
        self._situation = situation

    def holds(self, width: int, drive: Drive = Drive.BLOCK) -> bool:
        """Whether a block of `width` tokens equals as many one-token forwards, bit for bit, driven this way.

        Cost:
            Once per width and drive: a few block forwards from each of up to four states, and one-token
            forwards up to the width.
        """
        with self._lock:
            if (width, drive) not in self._verdicts:
                self._verdicts[width, drive] = self._known(width, drive)
            return self._verdicts[width, drive]

    def _known(self, width: int, drive: Drive) -> bool:
        """The verdict, from the file if it is there; what a model raised is not kept, so a failure is tried again."""
        verdicts, situation = self._ops.verdicts, str(self._situation)
        known = verdicts.block(situation, width, drive.value)
        if known is None:
            known = self._probe(width, drive)
            if known or self.failure is None:
                verdicts.add_block(situation, width, drive.value, known)
                verdicts.save()
        return known

    def holds_over(self, width: int, stretch: KeyStretch) -> bool:
        """Whether that is so as well with as many keys as the probes do not have, as far as attention is bound."""
        with self._lock:
            return all(self._ops.attention_route(call, stretch) == STOCK for call in self._calls(width))

    def attention(self, width: int) -> list[AttentionCall]:
        """How the model attends with a block of `width` tokens, as far as its attention is bound."""
        with self._lock:
            return self._calls(width)

    def _calls(self, width: int) -> list[AttentionCall]:
        if width not in self._attention:
            route = self._route(width, Drive.BLOCK)
            self._attention[width] = attention_calls(self._alive(), self._situation.caches, width, route)
        return self._attention[width]

    def route(self, width: int, drive: Drive, keys: KeyStretch | None = None) -> Route:
        """What `holds` speaks of, its name for so many keys.

        Its plan's modules are attached; bindings and mixers are the caller's to attach.
        """
        route = self._route(width, drive)
        if drive is not Drive.QUERIES or route.plan is None:
            return route
        with self._lock:
            found = {self._ops.attention_route(call, keys or KeyStretch.short()): call for call in self._calls(width)}
        ways = tuple(sorted(found, key=lambda way: found[way].ways.index(way)))
        return replace(route, plan=replace(route.plan, ways=ways))

    def _route(self, width: int, drive: Drive) -> Route:
        return self._route_on(self._alive(), self._ops, width, drive)

    def _route_on(self, model: nn.Module, ops: OpTable, width: int, drive: Drive) -> Route:
        plan = ops.plan(model, width)
        if drive is Drive.QUERIES:
            plan = replace(plan, by_position=self._bindings.attach(model).kinds, attention=ops.attention_route)
        routes.attach(model, plan)
        return Route(drive, plan or None)

    def _probe(self, width: int, drive: Drive) -> bool:
        try:
            return all(self._equal_on(model, ops, width, drive) for model, ops in self._exemplar.all_tried())
        except CANNOT_TAKE as error:
            # Some models read single tokens only.
            self.failure = f"{type(error).__name__}: {error}"
            return False

    def _equal_on(self, model: nn.Module, ops: OpTable, width: int, drive: Drive) -> bool:
        route = self._route_on(model, ops, width, drive)
        for place, trial in enumerate(self._trials(model)):
            tell("certify", f"certifying W = {width}", place, len(PROBES) + len(self._situation.starts))
            if not trial.equal(model, width, route):
                return False
        return True

    def _trials(self, model: nn.Module) -> Iterator[Trial]:
        """From where each probe ends, and from where the situation has its edges."""
        likeness = self._situation.caches
        for probe in PROBES:
            read = evaluated(probe.read(model, likeness))
            for length in (None, *(self._situation.starts if probe is PROBES[0] else ())):
                yield Trial(probe, copy.deepcopy(read), likeness, length)

    def _alive(self) -> Any:
        model = self._model()
        if model is None:
            raise AssertionError("the certified model is gone")
        return model
