"""A round of several rows gives each what it gets alone, and reads the host once for all of them."""

from __future__ import annotations

import mlx.core as mx
import pytest

from mlx_spec.drafters import Drafter, NgramDrafter
from tests.engine.rows import Together, Widths, engine_of, make_row
from tests.host_reads import count_host_reads
from tests.oracle import OracleRun, assert_same_output
from tests.rounds.runs import CHOICES, DRAFTERS, record_stock
from tests.same_cache import assert_same_cache
from tests.scripted import CyclingDrafter
from tests.tiny import MIXES, VOCAB

PROMPTS = ((5, 17, 3), (8, 1, 30, 2, 44), (61, 9))
LENGTHS = (14, 5, 9)
"""Rows end at different rounds, in the middle of a block or with its bonus."""

REQUIRED = pytest.mark.parametrize("mix", ["dense", "sliding", "hybrid", "mamba2"])


def stock_rows(mix: str, choice: str) -> list[OracleRun]:
    return [
        record_stock(MIXES[mix], length + 9, {length}, prompt=prompt, **CHOICES[choice]())
        for prompt, length in zip(PROMPTS, LENGTHS, strict=True)
    ]


@pytest.mark.part(4)
@REQUIRED
@pytest.mark.parametrize("choice", ["greedy", "penalties"])
@pytest.mark.parametrize("drafter", ["cycling", "ngram", "eagle3", None])
def test_every_row_is_what_it_is_alone(mix: str, choice: str, drafter: str | None) -> None:
    runs = stock_rows(mix, choice)
    rows = []
    for number, (prompt, length, run) in enumerate(zip(PROMPTS, LENGTHS, runs, strict=True)):
        made = None if drafter is None else DRAFTERS[drafter](mix, run.ids, mx.float32)
        rows.append(make_row(mix, prompt, made, Widths([3 + number, 2, 1]), length, CHOICES[choice]()))
    together = Together(engine_of(mix), rows)
    together.begin()
    while together.going:
        together.round()
    for row, run, out, length in zip(rows, runs, together.handed_out, LENGTHS, strict=True):
        assert_same_output(out, run, length)
        assert_same_cache(row.caches, run.cache_after(length))


@pytest.mark.parametrize("rows", [1, 3])
def test_a_round_reads_the_host_once_for_all_its_rows(rows: int) -> None:
    runs = stock_rows("dense", "greedy")[:rows]
    drafters: list[Drafter] = [CyclingDrafter(run.ids, VOCAB, (1, 3, 0)) for run in runs]
    made = [
        make_row("dense", prompt, drafter, Widths([4]), 24) for prompt, drafter in zip(PROMPTS, drafters, strict=False)
    ]
    together = Together(engine_of("dense"), made)
    together.begin()
    together.round()
    for _ in range(4):
        with count_host_reads() as reads:
            together.round()
        assert reads.count == 1


def test_a_row_that_fails_leaves_the_others_as_they_are() -> None:
    """Whoever drives several rows settles the one whose drafter is interrupted; the round of the rest goes on."""
    runs = stock_rows("dense", "greedy")
    made = [
        make_row("dense", prompt, NgramDrafter(min_ngram=1), Widths([4]), length)
        for prompt, length in zip(PROMPTS, LENGTHS, strict=True)
    ]
    together, engine = Together(engine_of("dense"), made[1:]), engine_of("dense")
    together.begin()
    lone = Together(engine, made[:1])
    lone.begin()
    lone.round()
    together.round()
    engine.settle(made[0])
    while together.going:
        together.round()
    out = len(lone.handed_out[0])
    assert_same_output(lone.handed_out[0], runs[0], out)
    for row, run, handed_out, length in zip(made[1:], runs[1:], together.handed_out, LENGTHS[1:], strict=True):
        assert_same_output(handed_out, run, length)
        assert_same_cache(row.caches, run.cache_after(length))
