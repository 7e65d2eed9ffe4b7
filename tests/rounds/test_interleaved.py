"""Requests that share a model, a drafter, or a cache across threads each get what they would get alone."""

from __future__ import annotations

import functools
import itertools
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import mlx.core as mx
import pytest

from mlx_spec.accept.proposal import Proposal
from mlx_spec.drafters.base import Drafter, DrafterState
from mlx_spec.generate import generate_step
from mlx_spec.stats import Statistics
from tests.oracle import OracleRun, RngKey, assert_same_output, rng_key
from tests.rounds.runs import (
    CHOICES,
    DRAFTERS,
    SEED,
    SPARE,
    assert_counts_add_up,
    assert_equals_stock,
    record_stock,
    speculate,
)
from tests.same_cache import assert_same_cache
from tests.scripted import AlternatingDrafter, RecordingDrafter
from tests.tiny import MIXES, PROMPT, REQUIRED, VOCAB

EMITTED = 24
WIDTH = 5
CONTINUED = 9
KEPT_LENGTHS = (1, 2, 7, 8, 11, 13, 21)
"""Lengths of runs that end early."""
PROMPTS = (PROMPT, (71, 4, 17, 42, 8, 90, 13, 61, 3))
EVERY_MIX = pytest.mark.parametrize("mix", REQUIRED)

Result = TypeVar("Result")


@functools.cache
def stock(mix: str, prompt: tuple[int, ...] = PROMPT, choice: str = "greedy") -> OracleRun:
    keep = {*KEPT_LENGTHS, *(length + CONTINUED + 1 for length in KEPT_LENGTHS), EMITTED}
    return record_stock(MIXES[mix], EMITTED + SPARE, keep, prompt=prompt, **CHOICES[choice]())


def start(mix: str, prompt: tuple[int, ...], drafter: Drafter, cache: list[Any], **options: Any) -> Iterator[Any]:
    return generate_step(
        mx.array(prompt),
        MIXES[mix].model(),
        draft_model=drafter,
        prompt_cache=cache,
        **{"max_tokens": EMITTED, "draft_block_size": WIDTH, **MIXES[mix].warm_kv, **options},
    )


class Overheard(RecordingDrafter):
    """Writes down what is proposed.

    Attributes:
        proposals: one list of [1][n] ids per request, in order of opening.
    """

    def __init__(self, inner: Drafter) -> None:
        super().__init__(inner)
        self.proposals: list[list[Any]] = []

    def open(self, target: Any, start: int = 0) -> DrafterState:
        state, heard = super().open(target, start), []
        propose = state.propose

        def overheard(bonus: Sequence[int], count: int) -> Proposal:
            proposed = propose(bonus, count)
            heard.append(proposed.ids.tolist())
            return proposed

        state.propose = overheard  # type: ignore[method-assign]
        self.proposals.append(heard)
        return state


def in_turns(steps: list[Iterator[Any]], turns: Callable[[], int]) -> list[list[Any]]:
    """Advance the generators in the given order until all are exhausted."""
    taken: list[list[Any]] = [[] for _ in steps]
    alive = set(range(len(steps)))
    while alive:
        index = turns() % len(steps)
        if index in alive:
            pair = next(steps[index], None)
            if pair is None:
                alive.remove(index)
            else:
                taken[index].append(pair)
    return taken


def in_a_thread(work: Callable[[], Result]) -> Result:
    """Run in a thread of its own that leaves mlx as a worker must: everything evaluated, its streams closed."""

    def worked() -> Result:
        try:
            return work()
        finally:
            mx.synchronize()
            mx.clear_streams()

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(worked).result()


# One thread


@pytest.mark.part(2)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("mix", "drafter", "order"),
    [
        *((mix, "ngram", "at random") for mix in REQUIRED),
        *((mix, "eagle3_random", "one by one") for mix in REQUIRED),
        ("dense", "eagle3", "by fives"),
        ("hybrid", "standalone", "at random"),
    ],
)
def test_two_runs_on_one_drafter_and_one_model_get_their_own_tokens(mix: str, drafter: str, order: str) -> None:
    runs = [stock(mix, prompt) for prompt in PROMPTS]
    shared = Overheard(DRAFTERS[drafter](mix, (), mx.float32))
    caches = [MIXES[mix].new_cache() for _ in PROMPTS]
    counted = [Statistics() for _ in PROMPTS]
    steps = [
        start(mix, prompt, shared, cache, statistics=statistics)
        for prompt, cache, statistics in zip(PROMPTS, caches, counted, strict=True)
    ]
    dice, count = random.Random(3), itertools.count()
    turns = {
        "one by one": lambda: next(count),
        "by fives": lambda: next(count) // 5,
        "at random": lambda: dice.randrange(2),
    }[order]
    taken = in_turns(steps, turns)
    for run, cache, pairs, statistics in zip(runs, caches, taken, counted, strict=True):
        assert_same_output(pairs, run, EMITTED)
        assert_same_cache(cache, run.cache_after(EMITTED))
        assert statistics.emitted_tokens == EMITTED
    # What one run did must not show in what is proposed to the other.
    for prompt in PROMPTS:
        speculate(MIXES[mix], shared, prompt=prompt, max_tokens=EMITTED, draft_block_size=WIDTH)
    assert shared.proposals[:2] == shared.proposals[2:]
    assert all(shared.proposals)


@pytest.mark.part(2)
@pytest.mark.parametrize("widths", [(5, 2), (1, 8)])
@EVERY_MIX
def test_runs_of_other_widths_on_one_scripted_drafter_get_the_stock_tokens(mix: str, widths: tuple[int, int]) -> None:
    run = stock(mix)
    shared = AlternatingDrafter(run.ids, VOCAB)
    caches = [MIXES[mix].new_cache() for _ in widths]
    steps = [
        start(mix, PROMPT, shared, cache, draft_block_size=width) for cache, width in zip(caches, widths, strict=True)
    ]
    ahead = [next(steps[0]) for _ in range(4)]
    taken = in_turns(steps, itertools.count().__next__)
    for pairs, cache in zip((ahead + taken[0], taken[1]), caches, strict=True):
        assert_same_output(pairs, run, EMITTED)
        assert_same_cache(cache, run.cache_after(EMITTED))


def test_run_that_is_closed_leaves_the_other_on_its_drafter_alone() -> None:
    runs = [stock("dense", prompt) for prompt in PROMPTS]
    shared = DRAFTERS["eagle3"]("dense", (), mx.float32)
    caches = [MIXES["dense"].new_cache() for _ in PROMPTS]
    first, second = (start("dense", prompt, shared, cache) for prompt, cache in zip(PROMPTS, caches, strict=True))
    for _ in range(7):
        next(first)
    pairs = [next(second) for _ in range(3)]
    first.close()  # type: ignore[attr-defined]
    pairs += second
    assert_same_cache(caches[0], runs[0].cache_after(7))
    assert_same_output(pairs, runs[1], EMITTED)
    assert_same_cache(caches[1], runs[1].cache_after(EMITTED))


# Several threads


@pytest.mark.parametrize(("end", "length"), [("budget", 1), ("budget", 13), ("close", 2), ("close", 8), ("close", 21)])
@EVERY_MIX
def test_cache_made_in_a_thread_is_right_and_goes_on_in_another(mix: str, end: str, length: int) -> None:
    run = stock(mix)
    drafter = AlternatingDrafter(run.ids, VOCAB)
    ending: dict[str, Any] = {
        "budget": {"max_tokens": length},
        "close": {"stop_after": length, "max_tokens": -1},
    }[end]
    got = in_a_thread(lambda: speculate(MIXES[mix], drafter, draft_block_size=WIDTH, **ending))
    assert_equals_stock(got, run, length)
    assert_counts_add_up(got)
    following = run.ids[length + 1 :]
    again = speculate(
        MIXES[mix],
        AlternatingDrafter(following, VOCAB),
        prompt=[run.ids[length]],
        max_tokens=CONTINUED,
        draft_block_size=WIDTH,
        prompt_cache=got.cache,
    )
    assert tuple(again.ids) == following[:CONTINUED]
    assert_same_cache(again.cache, run.cache_after(length + CONTINUED + 1))


@pytest.mark.parametrize("drafter", ["ngram", "eagle3"])
def test_run_in_the_middle_of_which_a_thread_ends_leaves_the_model_and_the_drafter_usable(drafter: str) -> None:
    run = stock("hybrid")
    shared = DRAFTERS[drafter]("hybrid", (), mx.float32)

    def abandoned() -> list[Any]:
        cache = MIXES["hybrid"].new_cache()
        steps = start("hybrid", PROMPT, shared, cache)
        pairs = [next(steps) for _ in range(11)]
        steps.close()  # type: ignore[attr-defined]
        return [pairs, cache]

    pairs, cache = in_a_thread(abandoned)
    assert_same_output(pairs, run, 11)
    assert_same_cache(cache, run.cache_after(11))
    got = speculate(MIXES["hybrid"], shared, max_tokens=EMITTED, draft_block_size=WIDTH)
    assert_equals_stock(got, run, EMITTED)


@pytest.mark.part(2)
@pytest.mark.slow
@pytest.mark.parametrize("choice", ["greedy", "sampled_penalties", "opaque_both"])
@pytest.mark.parametrize(
    ("mix", "drafter"),
    [("dense", "eagle3"), ("sliding", "standalone"), ("hybrid", "eagle3"), ("quantized_from_20", "ngram")],
)
def test_runs_at_once_in_two_threads_on_one_drafter_get_their_own_tokens(mix: str, drafter: str, choice: str) -> None:
    runs = [stock(mix, prompt, choice) for prompt in PROMPTS]
    shared = DRAFTERS[drafter](mix, (), mx.float32)
    speculate(MIXES[mix], shared, max_tokens=EMITTED, draft_block_size=WIDTH)  # certifies the widths once
    together = threading.Barrier(len(PROMPTS))

    def work(prompt: tuple[int, ...]) -> tuple[list[Any], list[Any], RngKey]:
        cache = MIXES[mix].new_cache()
        mx.random.seed(SEED)
        together.wait(timeout=60)
        try:
            pairs = list(start(mix, prompt, shared, cache, **CHOICES[choice]()))
            mx.eval([logprobs for _, logprobs in pairs])
            return pairs, cache, rng_key()
        finally:
            mx.synchronize()
            mx.clear_streams()

    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        finished = list(pool.map(work, PROMPTS))
    for run, (pairs, cache, key) in zip(runs, finished, strict=True):
        assert_same_output(pairs, run, EMITTED)
        assert_same_cache(cache, run.cache_after(EMITTED))
        assert key == run.rng[EMITTED]
