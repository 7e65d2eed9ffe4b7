"""Blocks against single tokens, on the model itself: the last word on whether a route is equal."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import mlx.core as mx
from mlx import nn

from mlx_spec.cache.adopt import Likeness, needs_mixers, runs_again, stretch, visible_arrays
from mlx_spec.cache.base import Drive
from mlx_spec.cache.contents import cache_arrays
from mlx_spec.cache.transaction import SpeculativeCacheTransaction
from mlx_spec.errors import CannotMix, TransactionError
from mlx_spec.ops.attention import AttentionCall
from mlx_spec.ops.choose import same_bits
from mlx_spec.verify.bindings import noting
from mlx_spec.verify.routes import Route, verifying

PROMPT_TOKENS = 9
"""Length of the first probe; the others are longer."""

CANNOT_TAKE = (CannotMix, TransactionError, ValueError, TypeError, IndexError)
"""What a model that cannot read a block raises."""


class Situation(NamedTuple):
    """What decides, beside the model itself, whether a block equals single tokens.

    Attributes:
        caches: of what kinds they are.
        edges_passed: how many of the lengths at which some window wraps or is cut the block reaches or has behind it.
    """

    caches: Likeness
    edges_passed: int = 0

    def __str__(self) -> str:
        return f"{self.caches}, {self.edges_passed} edges passed"

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
        return [edge - 2, edge + 5] if edge > PROMPT_TOKENS else [edge + 5]


class Probe(NamedTuple):
    """A short text made of ids that every vocabulary has, the same in every process.

    Attributes:
        tokens: its length.
        stride, modulus: what tells its ids from those of another probe.
    """

    tokens: int
    stride: int
    modulus: int

    def ids(self, start: int, count: int) -> mx.array:
        """[1, count] ids from position `start` on; the text goes on beyond its length."""
        places = range(start, start + count)
        return mx.array([[(self.stride * place + 3) % self.modulus for place in places]])

    def read(self, model: nn.Module, likeness: Likeness) -> list[Any]:
        """Caches that have read it, in one forward or, where a model takes no more, token by token; not evaluated."""
        for step in (self.tokens, 1):
            caches = likeness.fresh()
            try:
                for start in range(0, self.tokens, step):
                    model(self.ids(start, step), cache=caches)
            except CANNOT_TAKE:
                if step == 1:
                    raise
            else:
                break
        return caches


PROBES = (Probe(PROMPT_TOKENS, 7, 13), Probe(PROMPT_TOKENS + 5, 5, 11))


class Trial:
    """Blocks and single tokens from one state of a model's caches on.

    Both are run in the same call: weights may be others by the next.

    Args:
        probe: what goes on from there.
        caches: what the probe left, to be kept.
        likeness: of what kinds they are to become.
        length: tokens they shall stand for; None means the probe's.
    """

    def __init__(self, probe: Probe, caches: list[Any], likeness: Likeness, length: int | None = None) -> None:
        if length is not None:
            stretch(caches, length)
        likeness.quantize(caches)
        self._probe = probe
        self._start = evaluated(caches)

    def equal(self, model: nn.Module, width: int, route: Route) -> bool:
        """Whether the block's rows are the steps', and the caches it leaves those of as many steps as are kept.

        Where a shorter part of the block is kept by running mixers again, every length is tried.
        """
        steps = self._steps(model, width)
        parts = {width}
        if runs_again(self._start):
            parts = set(range(1, width + 1))
        elif needs_mixers(self._start):
            parts = {1, width - 1, width}
        return all(self._equal_keeping(model, steps, count, route) for count in sorted(parts, reverse=True))

    def _equal_keeping(self, model: nn.Module, steps: list[_Step], retained: int, route: Route) -> bool:
        caches, width = copy.deepcopy(self._start), len(steps)
        with SpeculativeCacheTransaction(caches, width, drive=route.drive) as tx:
            with verifying(route.plan):
                block = model(self._probe.ids(self._probe.tokens, width), cache=tx.caches)
            mx.eval(block)
            if not all(same_bits(block[:, index], step.logits) for index, step in enumerate(steps)):
                return False
            tx.mark(width)
            tx.commit(retained)
        return all(map(same_bits, visible_arrays(caches), steps[retained - 1].states))

    def _steps(self, model: nn.Module, width: int) -> list[_Step]:
        """That many one-token forwards."""
        caches, steps = copy.deepcopy(self._start), []
        for place in range(width):
            logits = model(self._probe.ids(self._probe.tokens + place, 1), cache=caches)
            mx.eval(logits, cache_arrays(caches))
            steps.append(_Step(logits[:, 0], [mx.contiguous(array) for array in visible_arrays(caches)]))
            # What stays lazy would see the next step's write.
            mx.eval(*steps[-1])
        return steps


class _Step(NamedTuple):
    """One token.

    Attributes:
        logits: [1, V] what it gave.
        states: the arrays it left in the caches.
    """

    logits: mx.array
    states: list[mx.array]


def evaluated(caches: list[Any]) -> list[Any]:
    """The caches, for other threads to read."""
    mx.eval(cache_arrays(caches))
    return caches


def attention_calls(model: nn.Module, likeness: Likeness, width: int, route: Route) -> list[AttentionCall]:
    """How the model attends with a block, each kind of call once, as far as its attention is bound.

    Cost:
        Two forwards of which nothing is evaluated.
    """
    probe = PROBES[0]
    caches = probe.read(model, likeness)
    likeness.quantize(caches)
    with (
        SpeculativeCacheTransaction(caches, width, drive=route.drive) as tx,
        verifying(route.plan),
        noting(width) as noted,
    ):
        model(probe.ids(probe.tokens, width), cache=tx.caches)
    return noted.calls


def require_cuttable(model: nn.Module, width: int, likeness: Likeness) -> None:
    """Raise unless the model takes a block of `width` tokens of which a single one can be kept. Evaluates nothing.

    Raises:
        One of CANNOT_TAKE.
    """
    probe, caches = PROBES[0], likeness.fresh()
    likeness.quantize(caches)
    with SpeculativeCacheTransaction(caches, width, drive=Drive.BLOCK) as tx:
        model(probe.ids(0, width), cache=tx.caches)
        tx.mark(width)
        tx.validate(1)
