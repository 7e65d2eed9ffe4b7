"""First speculative runs of a model beside a plain run of it in another thread: what is found is the model's own."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step as stock_generate_step

from mlx_spec import Statistics, generate_step
from mlx_spec.verify.record import ModelRecord, record_of
from tests.double import PATTERNS, double
from tests.tiny import MIXES, PROMPT

EMITTED = 12
WIDTH = 4


@contextmanager
def plain_run_beside(model: Any) -> Iterator[None]:
    """The one-token loop of mlx-lm on the same model, again and again in another thread."""
    done, ready = threading.Event(), threading.Event()

    def decode() -> None:
        try:
            while not done.is_set():
                for _ in stock_generate_step(mx.array(PROMPT), model, max_tokens=EMITTED):
                    ready.set()
                    if done.is_set():
                        break
        finally:
            mx.synchronize()
            mx.clear_streams()

    thread = threading.Thread(target=decode)
    thread.start()
    ready.wait()
    try:
        yield
    finally:
        done.set()
        thread.join()


def ops_of(record: ModelRecord, model: Any) -> Counter[str]:
    """The table of a model's ops: how often each occurs, called in which way."""
    return Counter(subject.key for subject in record.ops.subjects(model).values())


def speculate(model: Any) -> tuple[list[int], Statistics]:
    statistics = Statistics()
    run = generate_step(
        mx.array(PROMPT),
        model,
        max_tokens=EMITTED,
        draft_model="ngram",
        draft_block_size=WIDTH,
        statistics=statistics,
    )
    return [token for token, _ in run], statistics


def build(mix: str) -> Any:
    model = MIXES[mix].build()
    mx.eval(model.parameters())
    return model


def first_runs(mix: str, runs: int) -> None:
    """Compare first runs beside a plain run with what a model alone is found to be."""
    model = build(mix)
    want = ops_of(ModelRecord(model), model)
    for _ in range(runs):
        model = build(mix)
        with plain_run_beside(model):
            ids, statistics = speculate(model)
        got = ops_of(record_of(model), model)
        assert got == want
        alone, undisturbed = speculate(model)
        assert ids == alone
        assert statistics.verify_route == undisturbed.verify_route
        assert ids == [token for token, _ in stock_generate_step(mx.array(PROMPT), model, max_tokens=EMITTED)]


EVERY_KIND = pytest.mark.parametrize("mix", ["dense", "hybrid", "sliding"])
WITH_AND_WITHOUT = pytest.mark.parametrize("rounding", [None, "gen15"], ids=["as here", "double"])


@pytest.mark.part(2)
@EVERY_KIND
@WITH_AND_WITHOUT
def test_a_plain_run_in_another_thread_is_in_no_op_table(mix: str, rounding: str | None) -> None:
    with double(PATTERNS[rounding]) if rounding else nullcontext():
        first_runs(mix, 1)


@pytest.mark.deep
@EVERY_KIND
@WITH_AND_WITHOUT
def test_a_plain_run_in_another_thread_is_in_no_op_table_of_200(mix: str, rounding: str | None) -> None:
    with double(PATTERNS[rounding]) if rounding else nullcontext():
        first_runs(mix, 34)
