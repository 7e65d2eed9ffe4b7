"""The mixes of `tests/tiny.py` and one more, a batch cache of one row, with the stock loop's run on each."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx_lm.models.cache import BatchKVCache

from tests.oracle import OracleRun, run_stock
from tests.rounds.runs import CHOICES, SEED
from tests.tiny import MIXES, PROMPT, Mix


class _OneRowBatch(Mix):
    def model(self, dtype: mx.Dtype = mx.float32) -> nn.Module:
        return MIXES["dense"].model(dtype)

    def new_cache(self, dtype: mx.Dtype = mx.float32) -> list[Any]:
        return [BatchKVCache([0]) for _ in MIXES["dense"].new_cache(dtype)]


WITH_BATCH: Mapping[str, Mix] = {
    **MIXES,
    "batch": _OneRowBatch("batch", MIXES["dense"].build, frozenset({"BatchKVCache"})),
}


@functools.cache
def stock_run(name: str, emitted: int, choice: str = "greedy") -> OracleRun:
    """What the stock loop does on an empty cache of the mix, whose rows may be asked for up to `emitted`."""
    mix = WITH_BATCH[name]
    options = {"seed": SEED, "prompt_cache": mix.new_cache(), **mix.warm_kv, **CHOICES[choice]()}
    return run_stock(mix.model(), PROMPT, emitted, **options)
