"""Which verify routes are equal on this machine: nothing is assumed, all is tried against one-token decode."""

from __future__ import annotations

import argparse
import copy
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

from mlx_spec.cache.adopt import Likeness, needs_mixers, new_caches, tokens_held
from mlx_spec.cache.base import Drive
from mlx_spec.demo import demo_target_path
from mlx_spec.environment import certificate_folder
from mlx_spec.errors import MlxSpecError
from mlx_spec.ops.attention import AttentionCall, KeyStretch
from mlx_spec.ops.base import STOCK
from mlx_spec.ops.choose import Subject, choose, distinct, relative_cost
from mlx_spec.pairing import load_without_tokenizer
from mlx_spec.stats import Statistics
from mlx_spec.target import bindings, mixers, routes
from mlx_spec.target.lengths import block_limit
from mlx_spec.target.model import Target
from mlx_spec.target.routes import BLOCK, STEP_THROUGH, Plan, Route, plan_of
from mlx_spec.target.subjects import find_subjects
from mlx_spec.target.trial import (
    CANNOT_TAKE,
    PROBES,
    Probe,
    Situation,
    Trial,
    attention_calls,
    evaluated,
    require_cuttable,
)
from mlx_spec.target.verdicts import Verdicts, facts_of

Verify = Literal["exact", "fast"]


class OpTable:
    """The ops of one model, and the route found for each at each width.

    Attributes:
        verdicts: where findings are kept.

    Cost:
        The first question traces the model. A width is tried when it is first needed, once for every
        distinct op.
    """

    def __init__(self, verdicts: Verdicts) -> None:
        self.verdicts = verdicts
        self._subjects: dict[int, Subject] | None = None
        self._plans: dict[int, Plan] = {}
        self._attention: dict[tuple[AttentionCall, KeyStretch], str] = {}

    def plan(self, model: Any, width: int) -> Plan:
        """What the model's ops do in a verify call of `width` tokens."""
        if width not in self._plans:
            subjects = self.subjects(model)
            found = {key: self.route(subject, width) for key, subject in distinct(list(subjects.values())).items()}
            self._plans[width] = plan_of(subjects, found, width)
        return self._plans[width]

    def route(self, subject: Subject, width: int) -> str:
        """The route of one op at a width."""
        known = self.verdicts.op(subject.key, width)
        if known is None or known not in subject.op.routes:
            known = choose(subject, width)
            self.verdicts.add_op(subject.key, width, known)
        return known

    def attention_route(self, call: AttentionCall, stretch: KeyStretch) -> str:
        """The cheapest way to attend with a block over so many keys that equals single queries."""
        if (call, stretch) not in self._attention:
            key = f"{call} over {stretch}"
            known = self.verdicts.op(key, call.width)
            if known is None or known not in call.ways:
                known = call.route_over(stretch)
                self.verdicts.add_op(key, call.width, known)
                self.verdicts.save()
            self._attention[call, stretch] = known
        return self._attention[call, stretch]

    def subjects(self, model: Any) -> dict[int, Subject]:
        """Every op as the model calls it: id of its module -> subject."""
        if self._subjects is None:
            self._subjects = find_subjects(model)
        return self._subjects


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

    def __init__(self, model: Any, situation: Situation, ops: OpTable | None = None) -> None:
        self.failure: str | None = None
        self._verdicts: dict[tuple[int, Drive], bool] = {}
        self._read: dict[Probe, list[Any]] = {}
        self._attention: dict[int, list[AttentionCall]] = {}
        self._trials: dict[tuple[Probe, int | None], Trial] = {}
        self._ops = ops or OpTable(Verdicts(facts_of(model), None))
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
        model = self._alive()
        plan = self._ops.plan(model, width)
        if drive is Drive.QUERIES:
            plan = replace(plan, by_position=bindings.attach(model).kinds, attention=self._ops.attention_route)
        routes.attach(model, plan)
        return Route(drive, plan or None)

    def _probe(self, width: int, drive: Drive) -> bool:
        model = self._alive()
        try:
            route = self._route(width, drive)
            return all(trial.equal(model, width, route) for trial in self._all_trials(model))
        except CANNOT_TAKE as error:
            # Some models read single tokens only.
            self.failure = f"{type(error).__name__}: {error}"
            return False

    def _all_trials(self, model: Any) -> list[Trial]:
        starts = [(probe, None) for probe in PROBES]
        return [self._trial(model, *start) for start in (*starts, *((PROBES[0], at) for at in self._situation.starts))]

    def _trial(self, model: Any, probe: Probe, length: int | None) -> Trial:
        likeness = self._situation.caches
        if probe not in self._read:
            self._read[probe] = evaluated(probe.read(model, likeness))
        if (probe, length) not in self._trials:
            self._trials[probe, length] = Trial(probe, copy.deepcopy(self._read[probe]), likeness, length)
        return self._trials[probe, length]

    def _alive(self) -> Any:
        model = self._model()
        if model is None:
            raise AssertionError("the certified model is gone")
        return model


_certificates: dict[tuple[int, Situation], Certificate] = {}
_op_tables: dict[int, OpTable] = {}
_certificates_lock = threading.Lock()


def certificate_for(model: Any, situation: Situation) -> Certificate:
    """The certificate of a model in this process; it lives as long as the model does."""
    key = (id(model), situation)
    with _certificates_lock:
        if id(model) not in _op_tables:
            _op_tables[id(model)] = OpTable(Verdicts(facts_of(model), certificate_folder()))
            weakref.finalize(model, _op_tables.pop, id(model), None)
        if key not in _certificates:
            _certificates[key] = Certificate(model, situation, _op_tables[id(model)])
            weakref.finalize(model, _certificates.pop, key, None)
        return _certificates[key]


class Place(NamedTuple):
    """All of a verify call that decides about its route.

    Attributes:
        keys: how many of them there are; None in a short text.
        beyond: it ends beyond the length up to which the model takes blocks.
    """

    width: int
    situation: Situation
    keys: KeyStretch | None
    beyond: bool


class CertifiedRoutes:
    """The routes one request may take. Says in its statistics why a block is not taken.

    Attributes:
        verify: "exact" takes a block only where it is certified; "fast" wherever the caches can undo one.
    """

    def __init__(self, target: Target, verify: Verify, statistics: Statistics) -> None:
        self._target = target
        self._statistics = statistics
        self._verdicts: dict[Place, Route] = {}
        self._likenesses: dict[tuple[type[Any], ...], Likeness] = {}
        self._limit = block_limit(target.model)
        self.verify = verify

    def route(self, width: int, caches: Sequence[Any]) -> Route:
        """The cheapest certified route for a verify call of `width` tokens on these caches."""
        if width == 1:
            return BLOCK
        key = self._key(width, caches)
        if key not in self._verdicts:
            self._verdicts[key] = self._decide(width, caches)
        return self._verdicts[key]

    def _key(self, width: int, caches: Sequence[Any]) -> Place:
        # Within a run caches change their kind only by becoming another class.
        kinds = tuple(map(type, caches))
        if kinds not in self._likenesses:
            self._likenesses[kinds] = Likeness(caches)
        end = tokens_held(caches) + width
        beyond = self._limit is not None and end > self._limit
        return Place(width, Situation.at(self._likenesses[kinds], end), KeyStretch.at(end, width), beyond)

    def _decide(self, width: int, caches: Sequence[Any]) -> Route:
        if needs_mixers(caches):
            mixers.attach(self._target.model)
        place = self._key(width, caches)
        if place.situation.caches.strangers:
            names = ", ".join(place.situation.caches.strangers)
            return self._step_through(f"{names} is none of the caches that are known to keep a part of a block")
        if self.verify == "fast":
            return self._fast(width, place.situation)
        started = time.perf_counter()
        certificate = certificate_for(self._target.model, place.situation)
        route = self._certified(certificate, place)
        self._statistics.certify_ms += (time.perf_counter() - started) * 1e3
        if route is not None:
            return route
        if certificate.failure is not None:
            return self._step_through(f"the model does not take a block ({certificate.failure})")
        return self._step_through("on this machine a block rounds differently from one-token decode")

    def _fast(self, width: int, situation: Situation) -> Route:
        """A plain block, where the model takes one of which a part can be kept."""
        try:
            require_cuttable(self._target.model, width, situation.caches)
        except CANNOT_TAKE as error:
            return self._step_through(f"the model does not take a block ({type(error).__name__}: {error})")
        self._statistics.note("verify=fast: the text may differ from plain decoding where two tokens nearly tie")
        return BLOCK

    def _certified(self, certificate: Certificate, place: Place) -> Route | None:
        """The cheapest route found equal, or None. Beyond the model's block limit a whole block is not looked at."""
        whole = None if place.beyond else self._whole(certificate, place.width, place.keys)
        if whole is not None:
            return whole
        mixers.attach(self._target.model)
        holds = certificate.holds(place.width, Drive.POSITIONS)
        return certificate.route(place.width, Drive.POSITIONS) if holds else None

    def _whole(self, certificate: Certificate, width: int, keys: KeyStretch | None) -> Route | None:
        """The cheapest route found equal by which mixers take the block whole, or None."""
        equal = certificate.holds(width, Drive.BLOCK)
        if equal and keys is None:
            return certificate.route(width, Drive.BLOCK)
        bound = self._bind_attention()
        if bound.refused:
            return None
        if equal and keys is not None and certificate.holds_over(width, keys):
            return certificate.route(width, Drive.BLOCK)
        holds = bool(bound.names) and certificate.holds(width, Drive.QUERIES)
        return certificate.route(width, Drive.QUERIES, keys) if holds else None

    def _bind_attention(self) -> bindings.Bound:
        bound = bindings.attach(self._target.model)
        for sentence in bound.refused:
            self._statistics.note(sentence)
        return bound

    def demote(self, width: int, caches: Sequence[Any], error: Exception) -> None:
        """A route failed where the probe had not looked: step through from here on."""
        self._verdicts[self._key(width, caches)] = self._step_through(str(error))

    def _step_through(self, reason: str) -> Route:
        self._statistics.note(f"verified one token at a time, which cannot be faster than plain decoding: {reason}")
        return STEP_THROUGH


# The command line

WIDTHS = (2, 3, 5, 6, 8, 16)
"""What is tried before anybody asks; any other width is tried when it is first needed."""

_LAST_EDGE = 4096
"""Keys up to which attention is tried before anybody asks."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Certify a model on this machine and print what was found.

    Returns:
        0; 1 where every width is left to step-through; 2 where the model cannot be loaded.
    """
    flags = argparse.ArgumentParser(
        prog="python -m mlx_spec.certify",
        description="Find out by which routes a block of tokens gives the bits of one-token decode on this machine.",
    )
    flags.add_argument("--model", help="path or hub id of the target; without it the embedded demo's")
    flags.add_argument("--widths", nargs="+", type=int, default=WIDTHS, metavar="W", help="tokens per verify call")
    options = flags.parse_args(arguments)
    if min(options.widths) < 2:
        flags.error(f"a block has at least 2 tokens, got widths {options.widths}")
    started = time.perf_counter()
    try:
        model = load_without_tokenizer(options.model or demo_target_path())
    except MlxSpecError as error:
        print(f"certify: {error}", file=sys.stderr)
        return 2
    report = Report(model, options.widths)
    report.print_ops()
    report.print_attention()
    stepped = report.print_blocks()
    verdicts = report.verdicts
    verdicts.save()
    where = "not kept" if verdicts.path is None else f"kept in {verdicts.path}"
    seconds = time.perf_counter() - started
    print(f"{verdicts.kept} findings were known before, all are {where}; {seconds:.1f} s with loading the model")
    return 1 if stepped == len(options.widths) else 0


class Report:
    """What is found out about one model, printed as it is found."""

    def __init__(self, model: Any, widths: Sequence[int]) -> None:
        self._model = model
        self._widths = widths
        self._situation = Situation(Likeness(new_caches(model)))
        self._certificate = certificate_for(model, self._situation)
        self._ops = _op_tables[id(model)]
        self.verdicts = self._ops.verdicts

    def print_ops(self) -> None:
        """Every distinct op: its route at each width, and what that costs in one-row calls."""
        subjects = list(self._ops.subjects(self._model).values())
        counts = Counter(subject.key for subject in subjects)
        print("| op | input | uses | " + " | ".join(f"W={width}" for width in self._widths) + " |")
        print("|---" * (3 + len(self._widths)) + "|")
        for key, subject in distinct(subjects).items():
            cells = [f"{subject.op.kind}: {subject.op.label}", subject.input, str(counts[key])]
            cells += [self._cell(subject, width) for width in self._widths]
            print(f"| {' | '.join(cells)} |", flush=True)

    def print_attention(self) -> None:
        """Every kind of attention the model takes a block by, over key counts that a probe of a short text has not."""
        bindings.attach(self._model)
        calls = {width: self._certificate.attention(width) for width in self._widths}
        for stretch in self._stretches():
            for place, first in enumerate(calls[self._widths[0]]):
                over = [calls[width][place : place + 1] for width in self._widths]
                cells = [f"attention: {first.label}", f"{stretch.edge} keys and more", "-"]
                cells += [" ".join(self._ops.attention_route(call, stretch) for call in found) for found in over]
                print(f"| {' | '.join(cells)} |", flush=True)

    def _stretches(self) -> Iterator[KeyStretch]:
        stretch = KeyStretch.first()
        while stretch.edge <= _LAST_EDGE:
            yield stretch
            stretch = KeyStretch(2 * stretch.edge, False)

    def _cell(self, subject: Subject, width: int) -> str:
        route = self._ops.route(subject, width)
        cost = self.verdicts.cost(subject.key, width)
        if cost is None:
            cost = relative_cost(subject, route, width)
            self.verdicts.add_cost(subject.key, width, cost)
        return f"{route} {cost:.1f}"

    def print_blocks(self) -> int:
        """The route of whole blocks at each width. Returns how many are left to step-through."""
        print(f"\nBlocks on {self._situation.caches}:")
        statistics = Statistics()
        chosen = CertifiedRoutes(Target(self._model), "exact", statistics)
        routes_found = {width: chosen.route(width, new_caches(self._model)) for width in self._widths}
        for width, route in routes_found.items():
            print(f"W={width}: {route.name}")
        for note in statistics.notes:
            print(note)
        return sum(route.stepped for route in routes_found.values())


if __name__ == "__main__":
    sys.exit(main())
