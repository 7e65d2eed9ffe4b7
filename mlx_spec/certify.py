"""Which verify routes are equal on this machine: nothing is assumed, a block is tried against one-token decode."""

from __future__ import annotations

import copy
import threading
import time
import weakref
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import mlx.core as mx

from mlx_spec.cache.adopt import Likeness, cache_arrays, needs_mixers, stretch, tokens_held, visible_arrays
from mlx_spec.cache.base import Drive
from mlx_spec.cache.transaction import SpeculativeCacheTransaction
from mlx_spec.errors import CannotMix, TransactionError
from mlx_spec.rounds.engine import BLOCK, POSITIONS, STEP_THROUGH
from mlx_spec.stats import Statistics
from mlx_spec.target.lengths import block_limit
from mlx_spec.target.mixers import attach as attach_mixers
from mlx_spec.target.model import Target

Verify = Literal["exact", "fast"]

_PROBE_PROMPT_TOKENS = 9
_CANNOT_TAKE = (CannotMix, TransactionError, ValueError, TypeError, IndexError)
"""What a model that cannot read a block raises."""

_BIT_VIEWS = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32, 8: mx.uint64}


class Situation(NamedTuple):
    """What decides, beside the model itself, whether a block equals single tokens.

    Attributes:
        caches: of what kinds they are.
        edges_passed: how many of the lengths at which some window wraps or is cut the block reaches or has behind it.
    """

    caches: Likeness
    edges_passed: int = 0

    @classmethod
    def at(cls, caches: Likeness, end: int) -> Situation:
        """The situation of a verify call that ends `end` tokens from the start of the text."""
        return cls(caches, sum(end > edge for edge in caches.edges))

    @property
    def starts(self) -> list[int]:
        """Lengths from which blocks are tried, beside the probe's own: before the last edge passed, and beyond it."""
        if self.edges_passed == 0:
            return []
        edge = self.caches.edges[self.edges_passed - 1]
        return [edge - 2, edge + 5] if edge > _PROBE_PROMPT_TOKENS else [edge + 5]


class Trial:
    """Blocks and single tokens from one state of a model's caches on.

    Args:
        caches: what the probe's prompt left, to be kept.
        likeness: of what kinds they are to become.
        length: tokens they shall stand for; None means the prompt's.
    """

    def __init__(self, caches: list[Any], likeness: Likeness, length: int | None) -> None:
        if length is not None:
            stretch(caches, length)
        likeness.quantize(caches)
        mx.eval(cache_arrays(caches))
        self._start = caches
        self._stepped = copy.deepcopy(caches)
        self._logits: list[mx.array] = []
        self._states: list[list[mx.array]] = []

    def equal(self, model: Any, width: int, drive: Drive) -> bool:
        """Whether the block's rows are the steps', and the caches it leaves those of as many steps as are kept."""
        self._step_to(model, width)
        parts = {1, width - 1, width} if needs_mixers(self._start) else {width}
        return all(self._equal_keeping(model, width, count, drive) for count in sorted(parts, reverse=True))

    def _equal_keeping(self, model: Any, width: int, retained: int, drive: Drive) -> bool:
        caches = copy.deepcopy(self._start)
        with SpeculativeCacheTransaction(caches, width, drive=drive) as tx:
            block = model(_probe_ids(_PROBE_PROMPT_TOKENS, width), cache=tx.caches)
            mx.eval(block)
            if not all(_same_bits(block[:, index], step) for index, step in enumerate(self._logits[:width])):
                return False
            tx.mark(width)
            tx.commit(retained)
        return all(map(_same_bits, visible_arrays(caches), self._states[retained - 1]))

    def _step_to(self, model: Any, width: int) -> None:
        """One-token forwards until there are `width` of them."""
        while len(self._logits) < width:
            ids = _probe_ids(_PROBE_PROMPT_TOKENS + len(self._logits), 1)
            # A step that fails must leave the caches where the steps noted so far end.
            with SpeculativeCacheTransaction(self._stepped, 1) as tx:
                logits = model(ids, cache=tx.caches)
                mx.eval(logits, cache_arrays(self._stepped))
                tx.commit(1)
            self._logits.append(logits[:, 0])
            self._states.append([mx.contiguous(array) for array in visible_arrays(self._stepped)])
            mx.eval(self._states[-1])


def _read_prompt(model: Any, likeness: Likeness) -> list[Any]:
    """Caches that have read the probe's prompt, in one forward or, where a model takes no more, token by token."""
    for step in (_PROBE_PROMPT_TOKENS, 1):
        caches = likeness.fresh()
        try:
            for start in range(0, _PROBE_PROMPT_TOKENS, step):
                mx.eval(model(_probe_ids(start, step), cache=caches), cache_arrays(caches))
        except _CANNOT_TAKE:
            if step == 1:
                raise
        else:
            break
    return caches


class Certificate:
    """What one model was found to do with blocks, in one situation.

    A width is certified for a route when, on a probe of the model itself, a forward over a block of that many
    tokens gives every position the very bits of one-token decode, and the caches left by keeping all of the
    block, all but one token or a single one hold the very bits that one-token decode leaves. (Logits alone would not
    do: in half precision their rounding hides what a recurrent state goes on to amplify.) Each width is tried
    when it is first needed.

    Attributes:
        failure: what the model raised on a block, None if it took all that were tried.
    """

    def __init__(self, model: Any, situation: Situation) -> None:
        self.failure: str | None = None
        self._verdicts: dict[tuple[int, str], bool] = {}
        self._prompted: list[Any] = []
        self._trials: dict[int | None, Trial] = {}
        self._lock = threading.Lock()
        self._model = weakref.ref(model)
        self._situation = situation

    def holds(self, width: int, route: str = BLOCK) -> bool:
        """Whether a block of `width` tokens equals as many one-token forwards, bit for bit, by this route.

        Cost:
            Once per width and route: up to three block forwards from each of up to three states, and one-token
            forwards up to the width.
        """
        with self._lock:
            if (width, route) not in self._verdicts:
                self._verdicts[width, route] = self._probe(width, route)
            return self._verdicts[width, route]

    def _probe(self, width: int, route: str) -> bool:
        model = self._model()
        if model is None:
            raise AssertionError("the certified model is gone")
        drive = Drive.POSITIONS if route == POSITIONS else Drive.BLOCK
        try:
            return all(
                self._trial(model, length).equal(model, width, drive) for length in (None, *self._situation.starts)
            )
        except _CANNOT_TAKE as error:
            # Some models read single tokens only.
            self.failure = f"{type(error).__name__}: {error}"
            return False

    def _trial(self, model: Any, length: int | None) -> Trial:
        likeness = self._situation.caches
        if not self._prompted:
            self._prompted = _read_prompt(model, likeness)
        if length not in self._trials:
            self._trials[length] = Trial(copy.deepcopy(self._prompted), likeness, length)
        return self._trials[length]


_certificates: dict[tuple[int, Situation], Certificate] = {}
_certificates_lock = threading.Lock()


def certificate_for(model: Any, situation: Situation) -> Certificate:
    """The certificate of a model in this process; it lives as long as the model does."""
    key = (id(model), situation)
    with _certificates_lock:
        if key not in _certificates:
            _certificates[key] = Certificate(model, situation)
            weakref.finalize(model, _certificates.pop, key, None)
        return _certificates[key]


class CertifiedRoutes:
    """The routes one request may take. Says in its statistics why a block is not taken.

    Attributes:
        verify: "exact" takes a block only where it is certified; "fast" wherever the caches can undo one.
    """

    def __init__(self, target: Target, verify: Verify, statistics: Statistics) -> None:
        self._target = target
        self._statistics = statistics
        self._verdicts: dict[tuple[int, Situation, bool], str] = {}
        self._likenesses: dict[tuple[type[Any], ...], Likeness] = {}
        self._limit = block_limit(target.model)
        self.verify = verify

    def route(self, width: int, caches: Sequence[Any]) -> str:
        """BLOCK, POSITIONS or STEP_THROUGH for a verify call of `width` tokens on these caches."""
        if width == 1:
            return BLOCK
        key = self._key(width, caches)
        if key not in self._verdicts:
            self._verdicts[key] = self._decide(width, caches)
        return self._verdicts[key]

    def _key(self, width: int, caches: Sequence[Any]) -> tuple[int, Situation, bool]:
        # Within a run caches change their kind only by becoming another class.
        kinds = tuple(map(type, caches))
        if kinds not in self._likenesses:
            self._likenesses[kinds] = Likeness(caches)
        end = tokens_held(caches) + width
        return width, Situation.at(self._likenesses[kinds], end), self._limit is not None and end > self._limit

    def _decide(self, width: int, caches: Sequence[Any]) -> str:
        if needs_mixers(caches):
            attach_mixers(self._target.model)
        if self.verify == "fast":
            self._statistics.note("verify=fast: the text may differ from plain decoding where two tokens nearly tie")
            return BLOCK
        if mx.default_device() != mx.Device(mx.cpu):
            return self._step_through("on this device no block has been shown equal to one-token decode")
        _, situation, beyond = self._key(width, caches)
        if situation.caches.strangers:
            names = ", ".join(situation.caches.strangers)
            return self._step_through(f"{names} is none of the caches that are known to keep a part of a block")
        started = time.perf_counter()
        certificate = certificate_for(self._target.model, situation)
        route = self._certified(certificate, width, beyond)
        self._statistics.certify_ms += (time.perf_counter() - started) * 1e3
        if route is None:
            if certificate.failure is not None:
                return self._step_through(f"the model does not take a block ({certificate.failure})")
            return self._step_through("on this machine a block rounds differently from one-token decode")
        return route

    def _certified(self, certificate: Certificate, width: int, beyond: bool) -> str | None:
        """The cheapest route found equal, or None. Beyond the model's block limit a whole block is not looked at."""
        if not beyond and certificate.holds(width, BLOCK):
            return BLOCK
        attach_mixers(self._target.model)
        return POSITIONS if certificate.holds(width, POSITIONS) else None

    def demote(self, width: int, caches: Sequence[Any], error: Exception) -> None:
        """A route failed where the probe had not looked: step through from here on."""
        self._verdicts[self._key(width, caches)] = self._step_through(str(error))

    def _step_through(self, reason: str) -> str:
        self._statistics.note(f"verified one token at a time, which cannot be faster than plain decoding: {reason}")
        return STEP_THROUGH


def _probe_ids(start: int, count: int) -> mx.array:
    """[1, count] ids every vocabulary has, the same in every process."""
    return mx.array([[(7 * position + 3) % 13 for position in range(start, start + count)]])


def _same_bits(a: mx.array, b: mx.array) -> bool:
    bits = _BIT_VIEWS[a.dtype.size]
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return bool(mx.array_equal(mx.contiguous(a).view(bits), mx.contiguous(b).view(bits)).item())
