"""Step-through, the route that asks for nothing to be shown, equals the stock loop for every mix of caches."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest

from mlx_spec.cache import adopt
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
from tests.tiny import LONG, MIXES

WIDTH = 5
CLOSED = (1, 2, 9, 24)


@pytest.fixture
def stepping(monkeypatch: pytest.MonkeyPatch) -> None:
    """No block is certified, on any machine."""
    monkeypatch.setattr(CertifiedRoutes, "route", lambda self, width, caches: STEP_THROUGH if width > 1 else BLOCK)


@pytest.fixture(params=[False, True], ids=["known caches", "unknown caches"])
def caches_known(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With or without the journals that know a kind of cache."""
    if request.param:
        monkeypatch.setattr(adopt, "_KEPT_IN_PART", {})
        monkeypatch.setattr(adopt, "_KEPT_BY_LENGTH", {})


@pytest.mark.usefixtures("stepping", "caches_known")
@pytest.mark.parametrize(("drafter", "choice"), [("alternating", "greedy"), ("cycling", "sampled_penalties")])
@pytest.mark.parametrize("mix", MIXES)
def test_stepping_through_equals_stock_at_every_end(mix: str, drafter: str, choice: str) -> None:
    made = MIXES[mix]
    run = record_stock(made, LONG + SPARE, {*CLOSED, LONG}, **CHOICES[choice]())
    endings: list[tuple[int, dict[str, Any]]] = [(LONG, {"max_tokens": LONG})]
    endings += [(length, {"stop_after": length, "max_tokens": -1}) for length in CLOSED]
    for length, ending in endings:
        drafting = DRAFTERS[drafter](mix, run.ids, mx.float32)
        got = speculate(made, drafting, draft_block_size=WIDTH, **ending, **CHOICES[choice]())
        assert_equals_stock(got, run, length)
        assert_counts_add_up(got)
        if length > 2:
            assert got.statistics.verify_route == STEP_THROUGH.name
            assert got.drafted > 0


WIDE = 17
"""More tokens than a window or a chunk holds: a round loses rows of its own."""


@pytest.mark.slow
@pytest.mark.usefixtures("caches_known")
@pytest.mark.parametrize("stepped", [True, False])
@pytest.mark.parametrize("mix", ["chunked", "sliding", "ring_with_keep"])
def test_blocks_wider_than_a_window_equal_stock(mix: str, stepped: bool, request: pytest.FixtureRequest) -> None:
    if stepped:
        request.getfixturevalue("stepping")
    made = MIXES[mix]
    run = record_stock(made, LONG + SPARE, {LONG})
    for drafter in ("alternating", "cycling"):
        drafting = DRAFTERS[drafter](mix, run.ids, mx.float32)
        got = speculate(made, drafting, draft_block_size=WIDE, max_tokens=LONG)
        assert_equals_stock(got, run, LONG)
        assert got.drafted > 0
