"""Step-through, the route that asks for nothing to be shown, equals the stock loop for every mix of caches."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest

from mlx_spec.cache.adopt import leaves
from mlx_spec.verify.certified_routes import CertifiedRoutes
from mlx_spec.verify.routes import BLOCK, STEP_THROUGH
from tests.rounds.runs import (
    CHOICES,
    DRAFTERS,
    SPARE,
    assert_counts_add_up,
    assert_equals_stock,
    record_stock,
    speculate,
)
from tests.tiny import LONG, MIXES, Mix

WIDTH = 5
CLOSED = (1, 2, 9, 24)


@pytest.fixture
def stepping(monkeypatch: pytest.MonkeyPatch) -> None:
    """No block is certified, on any machine."""
    monkeypatch.setattr(CertifiedRoutes, "route", lambda self, width, caches: STEP_THROUGH if width > 1 else BLOCK)


@functools.cache
def unknown_class(known: type[Any]) -> type[Any]:
    """A class of caches that nobody knows, though they keep what those of `known` keep."""
    own: dict[str, Any] = {"known": known}
    if hasattr(known, "to_quantized"):
        own["to_quantized"] = lambda self, **settings: made_unknown(known.to_quantized(self, **settings))
    return type(f"Unknown{known.__name__}", (known,), own)


def made_unknown(cache: Any) -> Any:
    cache.__class__ = unknown_class(type(cache))
    return cache


def as_known(cache: Any) -> Any:
    """A cache in the same state, of the class that is known."""
    seen = copy.copy(cache)
    seen.__class__ = getattr(cache, "known", type(cache))
    return seen


class OfUnknownCaches(Mix):
    """A mix with caches of unknown classes; stock mlx-lm takes these for what they are."""

    def new_cache(self, dtype: mx.Dtype = mx.float32) -> list[Any]:
        caches = super().new_cache(dtype)
        for cache in leaves(caches):
            made_unknown(cache)
        return caches


@pytest.fixture(params=[False, True], ids=["known caches", "unknown caches"])
def made(request: pytest.FixtureRequest) -> Callable[[str], Mix]:
    """Makes a mix by name, with or without the journals that know its caches."""
    return (lambda name: OfUnknownCaches(**vars(MIXES[name]))) if request.param else MIXES.__getitem__


@pytest.fixture
def taken_for_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks are certified as if the classes of the caches were known."""
    route = CertifiedRoutes.route
    monkeypatch.setattr(
        CertifiedRoutes, "route", lambda self, width, caches: route(self, width, list(map(as_known, caches)))
    )


@pytest.mark.part(4)
@pytest.mark.usefixtures("stepping")
@pytest.mark.parametrize(("drafter", "choice"), [("alternating", "greedy"), ("cycling", "sampled_penalties")])
@pytest.mark.parametrize("mix", MIXES)
def test_stepping_through_equals_stock_at_every_end(
    mix: str, drafter: str, choice: str, made: Callable[[str], Mix]
) -> None:
    run = record_stock(made(mix), LONG + SPARE, {*CLOSED, LONG}, **CHOICES[choice]())
    endings: list[tuple[int, dict[str, Any]]] = [(LONG, {"max_tokens": LONG})]
    endings += [(length, {"stop_after": length, "max_tokens": -1}) for length in CLOSED]
    for length, ending in endings:
        drafting = DRAFTERS[drafter](mix, run.ids, mx.float32)
        got = speculate(made(mix), drafting, draft_block_size=WIDTH, **ending, **CHOICES[choice]())
        assert_equals_stock(got, run, length)
        assert_counts_add_up(got)
        if length > 2:
            assert got.statistics.verify_route == STEP_THROUGH.name
            assert got.drafted > 0


WIDE = 17
"""More tokens than a window or a chunk holds: a round loses rows of its own."""


@pytest.mark.part(1)
@pytest.mark.slow
@pytest.mark.parametrize("way", ["stepping", "taken_for_known"])
@pytest.mark.parametrize("mix", ["chunked", "sliding", "ring_with_keep"])
def test_blocks_wider_than_a_window_equal_stock(
    mix: str, way: str, made: Callable[[str], Mix], request: pytest.FixtureRequest
) -> None:
    request.getfixturevalue(way)
    run = record_stock(made(mix), LONG + SPARE, {LONG})
    for drafter in ("alternating", "cycling"):
        drafting = DRAFTERS[drafter](mix, run.ids, mx.float32)
        got = speculate(made(mix), drafting, draft_block_size=WIDE, max_tokens=LONG)
        assert_equals_stock(got, run, LONG)
        assert got.drafted > 0
        assert (got.statistics.verify_route == STEP_THROUGH.name) == (way == "stepping")
