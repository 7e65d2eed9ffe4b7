"""Any order of rounds whose rows keep different counts leaves each row as it would be alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from mlx_lm.models.cache import (
    ArraysCache,
    BatchKVCache,
    BatchRotatingKVCache,
    CacheList,
    KVCache,
    RotatingKVCache,
)

from tests.cache.kinds import GROWTH, RING, WINDOW_STEPS, Kind
from tests.cache.lives import Copied, Saved, Trimmed
from tests.cache.machine import Refusals
from tests.cache.machine_runs import run
from tests.cache.ragged import Batch, RaggedMachine, RightPadded
from tests.cache.subjects import StandIn

STEPS = 5


def _batch(name: str, alone: Callable[[], Any], padded: Callable[[list[int]], Any], edge: int, **how: bool) -> Batch:
    return Batch(StandIn(Kind(name, alone, edge, **how)), lambda pads: [padded(pads)], pads_right="ring" not in name)


def _ring(pads: list[int]) -> BatchRotatingKVCache:
    return BatchRotatingKVCache(RING, pads)


BATCHES = {
    batch.name: batch
    for batch in (
        _batch("kv", KVCache, BatchKVCache, GROWTH, by_length=True),
        _batch("ring", lambda: RotatingKVCache(RING), _ring, RING, stepwise=True, can_save=False),
        _batch("arrays", lambda: ArraysCache(2), lambda pads: ArraysCache(2, pads), WINDOW_STEPS, stepwise=True),
        _batch(
            "list",
            lambda: CacheList(KVCache(), ArraysCache(2)),
            lambda pads: CacheList(BatchKVCache(pads), ArraysCache(2, pads)),
            WINDOW_STEPS,
            stepwise=True,
        ),
        _batch(
            "list_with_ring",
            lambda: CacheList(RotatingKVCache(RING), KVCache()),
            lambda pads: CacheList(_ring(pads), BatchKVCache(pads)),
            RING,
            stepwise=True,
            can_save=False,
        ),
    )
}


class BatchMachine(Refusals, Copied, Trimmed, Saved, RaggedMachine):
    """A batch of any kind."""


class ArraysMachine(RightPadded, BatchMachine):
    """A batch whose rows may be padded at the right while rounds go on."""


@pytest.mark.slow
@pytest.mark.parametrize("name", BATCHES)
def test_rows_that_keep_different_counts_stay_as_they_would_be_alone(name: str, tell: Callable[[str], None]) -> None:
    batch = BATCHES[name]
    machine = ArraysMachine if name == "arrays" else BatchMachine
    run(type(machine.__name__, (machine,), {"batch": batch}), batch.alone, STEPS, tell)
