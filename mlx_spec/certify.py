"""Which verify routes are equal on this machine: nothing is assumed, a block is tried against one-token decode."""

from __future__ import annotations

import copy
import threading
import time
import weakref
from collections.abc import Sequence
from typing import Any, Literal

import mlx.core as mx

from mlx_spec.cache.adopt import (
    KVQuantization,
    cache_arrays,
    needs_mixers,
    new_caches,
    quantized_entry,
    tokens_held,
    visible_arrays,
)
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
_BIT_VIEWS = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32, 8: mx.uint64}


class Certificate:
    """What one model was found to do with blocks, for one kind of cache.

    A width is certified for a route when, on a probe of the model itself, a forward over a block of that many
    tokens gives every position the very bits of one-token decode, and the caches left by keeping all of the
    block, all but one token or a single one hold the very bits that one-token decode leaves. (Logits alone would not
    do: in half precision their rounding hides what a recurrent state goes on to amplify.) Each width is tried
    when it is first needed.

    Attributes:
        quantized: (bits, group size) of the caches, or None for float ones.
        failure: what the model raised on a block, None if it took all that were tried.
    """

    def __init__(self, model: Any, quantized: tuple[int, int] | None) -> None:
        self.quantized = quantized
        self.failure: str | None = None
        self._verdicts: dict[tuple[int, str], bool] = {}
        self._steps: list[mx.array] = []
        self._states: list[list[mx.array]] = []
        self._step_caches: list[Any] = []
        self._prompt_caches: list[Any] = []
        self._lock = threading.Lock()
        self._model = weakref.ref(model)

    def holds(self, width: int, route: str = BLOCK) -> bool:
        """Whether a block of `width` tokens equals as many one-token forwards, bit for bit, by this route.

        Cost:
            Once per width and route: up to three block forwards, and one-token forwards up to the width.
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
            self._step_to(model, width)
            parts = {1, width - 1, width} if needs_mixers(self._prompt_caches) else {width}
            return all(self._equal_keeping(model, width, count, drive) for count in sorted(parts, reverse=True))
        except (CannotMix, TransactionError, ValueError, TypeError, IndexError) as error:
            # Some models read single tokens only.
            self.failure = f"{type(error).__name__}: {error}"
            return False

    def _equal_keeping(self, model: Any, width: int, retained: int, drive: Drive) -> bool:
        """Compare the block's rows with the steps', and the caches it leaves with those of as many steps."""
        caches = copy.deepcopy(self._prompt_caches)
        with SpeculativeCacheTransaction(caches, width, drive=drive) as tx:
            block = model(_probe_ids(_PROBE_PROMPT_TOKENS, width), cache=tx.caches)
            mx.eval(block)
            if not all(_same_bits(block[:, index], step) for index, step in enumerate(self._steps[:width])):
                return False
            tx.mark(width)
            tx.commit(retained)
        return all(map(_same_bits, visible_arrays(caches), self._states[retained - 1]))

    def _step_to(self, model: Any, width: int) -> None:
        """One-token forwards until there are `width` of them, from the prompt's end on."""
        if not self._step_caches:
            caches = new_caches(model)
            prompt = model(_probe_ids(0, _PROBE_PROMPT_TOKENS), cache=caches)
            if self.quantized is not None:
                bits, group_size = self.quantized
                KVQuantization(bits, group_size, start=0).convert(caches)
            mx.eval(prompt, cache_arrays(caches))
            self._step_caches, self._prompt_caches = caches, copy.deepcopy(caches)
        while len(self._steps) < width:
            ids = _probe_ids(_PROBE_PROMPT_TOKENS + len(self._steps), 1)
            # A step that fails must leave the caches where the steps noted so far end.
            with SpeculativeCacheTransaction(self._step_caches, 1) as tx:
                logits = model(ids, cache=tx.caches)
                mx.eval(logits, cache_arrays(self._step_caches))
                tx.commit(1)
            step, states = logits[:, 0], [mx.contiguous(array) for array in visible_arrays(self._step_caches)]
            # Evaluated here: another thread may be the next to compare with them, and this one may have ended by then.
            mx.eval(step, states)
            self._steps.append(step)
            self._states.append(states)


_certificates: dict[tuple[int, tuple[int, int] | None], Certificate] = {}
_certificates_lock = threading.Lock()


def certificate_for(model: Any, quantized: tuple[int, int] | None) -> Certificate:
    """The certificate of a model in this process; it lives as long as the model does."""
    key = (id(model), quantized)
    with _certificates_lock:
        if key not in _certificates:
            _certificates[key] = Certificate(model, quantized)
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
        self._verdicts: dict[tuple[int, tuple[int, int] | None, bool], str] = {}
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

    def _key(self, width: int, caches: Sequence[Any]) -> tuple[int, tuple[int, int] | None, bool]:
        beyond = self._limit is not None and tokens_held(caches) + width > self._limit
        return width, quantized_entry(caches), beyond

    def _decide(self, width: int, caches: Sequence[Any]) -> str:
        if needs_mixers(caches):
            attach_mixers(self._target.model)
        if self.verify == "fast":
            self._statistics.note("verify=fast: the text may differ from plain decoding where two tokens nearly tie")
            return BLOCK
        if mx.default_device() != mx.Device(mx.cpu):
            return self._step_through("on this device no block has been shown equal to one-token decode")
        started = time.perf_counter()
        certificate = certificate_for(self._target.model, quantized_entry(caches))
        route = self._certified(certificate, width, beyond=self._key(width, caches)[2])
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
