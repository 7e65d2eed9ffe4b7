"""The route that a verify call of one request takes."""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from mlx_spec.cache.adopt import Likeness, needs_mixers, tokens_held
from mlx_spec.cache.base import Drive
from mlx_spec.model.target import Target
from mlx_spec.ops.attention import KeyStretch
from mlx_spec.progress import Progress, telling_progress
from mlx_spec.stats import Statistics
from mlx_spec.verify.bindings import Bound
from mlx_spec.verify.certificate import Certificate
from mlx_spec.verify.known import Known
from mlx_spec.verify.record import record_of
from mlx_spec.verify.routes import BLOCK, STEP_THROUGH, Route
from mlx_spec.verify.trial import CANNOT_TAKE, Situation, require_cuttable

Verify = Literal["exact", "fast"]


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

    Args:
        progress: told of every step of what has to be tried.
    """

    def __init__(
        self, target: Target, verify: Verify, statistics: Statistics, progress: Progress | None = None
    ) -> None:
        self._target = target
        self._record = record_of(target.model)
        self._statistics = statistics
        self._progress = progress
        self._verdicts: dict[Place, Route] = {}
        self._likenesses: dict[tuple[type[Any], ...], Likeness] = {}
        self.verify = verify

    @functools.cached_property
    def _known(self) -> Known:
        """What is known of the model as it was when the request began; a plain run asks for nothing."""
        return self._record.now()

    def model_draws(self, caches: Sequence[Any]) -> bool:
        """See `Known.draws`. Of a model with unknown caches its first forward tells."""
        likeness = self._likeness(caches)
        return not likeness.strangers and self._known.draws(likeness)

    def begin(self) -> None:
        """The first token is asked for, maybe long after the request was put together: look at the model again."""
        if "_known" in vars(self) and self._record.now() is not self._known:
            del self._known
            self._verdicts.clear()

    def route(self, width: int, caches: Sequence[Any]) -> Route:
        """The cheapest certified route for a verify call of `width` tokens on these caches."""
        if width == 1:
            return BLOCK
        key = self._key(width, caches)
        if key not in self._verdicts:
            self._verdicts[key] = self._decide(width, caches)
        return self._verdicts[key]

    def _key(self, width: int, caches: Sequence[Any]) -> Place:
        end = tokens_held(caches) + width
        beyond = self._known.block_limit is not None and end > self._known.block_limit
        return Place(width, Situation.at(self._likeness(caches), end), KeyStretch.at(end, width), beyond)

    def _likeness(self, caches: Sequence[Any]) -> Likeness:
        # Within a run caches change their kind only by becoming another class.
        kinds = tuple(map(type, caches))
        if kinds not in self._likenesses:
            self._likenesses[kinds] = Likeness(caches)
        return self._likenesses[kinds]

    def _decide(self, width: int, caches: Sequence[Any]) -> Route:
        if needs_mixers(caches):
            self._known.attach_mixers()
        place = self._key(width, caches)
        if place.situation.caches.strangers:
            names = ", ".join(place.situation.caches.strangers)
            return self._step_through(f"{names} is none of the caches that are known to keep a part of a block")
        if self.verify == "fast":
            return self._fast(width, place.situation)
        complaint = self._known.take_complaint()
        if complaint is not None:
            self._statistics.note(complaint)
        started = time.perf_counter()
        with telling_progress(self._progress):
            certificate = self._known.certificate(place.situation)
            route = self._certified(certificate, place)
        self._statistics.time_certifying((time.perf_counter() - started) * 1e3)
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
        self._known.attach_mixers()
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

    def _bind_attention(self) -> Bound:
        bound = self._record.bindings.attach(self._target.model)
        for sentence in bound.refused:
            self._statistics.note(sentence)
        return bound

    def demote(self, width: int, caches: Sequence[Any], error: Exception) -> None:
        """A route failed where the probe had not looked: step through from here on."""
        self._verdicts[self._key(width, caches)] = self._step_through(str(error))

    def _step_through(self, reason: str) -> Route:
        self._statistics.note(f"verified one token at a time, which cannot be faster than plain decoding: {reason}")
        return STEP_THROUGH
