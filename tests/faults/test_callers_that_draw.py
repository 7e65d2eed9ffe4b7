"""Callers draw from mlx's random state while a sampled run streams: numbers, text and state are those of stock's."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step as stock_step

from mlx_spec import Statistics, generate_step
from tests.oracle import rng_key
from tests.rounds.runs import CHOICES, DRAFTERS
from tests.same_cache import assert_same_cache
from tests.tiny import MIXES, PROMPT

pytestmark = pytest.mark.faults

EMITTED = 9
WIDTH = 4
SAMPLED = ("top_p", "sampled_penalties", "xtc", "opaque_sampler")


def begin(step: Callable[..., Any], mix: str, choice: str, drafter: str = "none", **options: Any) -> Iterator[Any]:
    """A sampled run, with ours a drafter that knows the text that comes out if nobody draws."""
    if step is generate_step and drafter != "none":
        right = text(mix, choice)
        options |= {"draft_model": DRAFTERS[drafter](mix, right, mx.float32), "draft_block_size": WIDTH}
    steps: Iterator[Any] = step(mx.array(PROMPT), MIXES[mix].model(), **CHOICES[choice](), **options)
    return steps


def text(mix: str, choice: str) -> list[int]:
    """What comes out if nobody draws. The caller's random state stays where it is."""
    key = rng_key()
    mx.random.seed(5)
    ids = [token for token, _ in stock_step(mx.array(PROMPT), MIXES[mix].model(), max_tokens=25, **CHOICES[choice]())]
    mx.random.seed((key[0] << 32) | key[1])
    return ids


def draw() -> list[float]:
    drawn: list[float] = mx.random.uniform(shape=(2,)).tolist()  # type: ignore[assignment]
    return drawn


Outcome = tuple[list[int], list[list[float]], Any]
"""Ids, what the caller drew, and where the random state stands at the end."""


def drawing(steps: Iterator[Any], after: Collection[int], taken: int) -> Outcome:
    """Take tokens and draw after some of them; the run is closed then."""
    ids, drawn = [], []
    for place in range(1, taken + 1):
        ids.append(next(steps)[0])
        if place in after:
            drawn.append(draw())
    steps.close()  # type: ignore[attr-defined]
    return ids, drawn, rng_key()


@pytest.mark.parametrize("mix", ["dense", "hybrid", "ring_with_keep"])
@pytest.mark.parametrize("choice", SAMPLED)
@pytest.mark.parametrize("drafter", ["none", "right", "cycling", "wrong"])
@pytest.mark.parametrize("after", [(1,), (2,), (3, 4), (1, 5, 6), (EMITTED,)])
def test_a_caller_that_draws_between_tokens_gets_stocks_numbers_and_stocks_text(
    mix: str, choice: str, drafter: str, after: tuple[int, ...]
) -> None:
    outcomes, caches = [], []
    for step in (stock_step, generate_step):
        cache = MIXES[mix].new_cache()
        mx.random.seed(5)
        steps = begin(step, mix, choice, drafter, max_tokens=EMITTED, prompt_cache=cache)
        outcomes.append(drawing(steps, after, EMITTED))
        caches.append(cache)
    assert outcomes[1] == outcomes[0]
    assert_same_cache(caches[1], caches[0])


@pytest.mark.parametrize("taken", [2, 3, 4, 6])
def test_a_run_that_is_closed_after_its_caller_drew_leaves_the_callers_state(taken: int) -> None:
    outcomes = []
    for step in (stock_step, generate_step):
        mx.random.seed(5)
        outcomes.append(drawing(begin(step, "dense", "top_p", "right", max_tokens=EMITTED), (taken,), taken))
    assert outcomes[1] == outcomes[0]


@pytest.mark.parametrize("drafter", ["none", "right", "wrong"])
def test_a_progress_callback_may_draw(drafter: str) -> None:
    outcomes = []
    for step in (stock_step, generate_step):
        told: list[Any] = []
        options = {"prompt_progress_callback": lambda *at, told=told: told.append((at, draw())), "prefill_step_size": 3}
        mx.random.seed(5)
        steps = begin(step, "dense", "top_p", drafter, max_tokens=EMITTED, **options)
        outcomes.append((told, drawing(steps, (2,), EMITTED)))
    assert outcomes[1] == outcomes[0]


@pytest.mark.parametrize("drafter", ["none", "right", "cycling"])
def test_two_sampled_runs_in_turns_share_the_random_state_as_stocks_do(drafter: str) -> None:
    outcomes = []
    for step in (stock_step, generate_step):
        mx.random.seed(5)
        runs = [begin(step, mix, "top_p", drafter, max_tokens=EMITTED) for mix in ("dense", "sliding")]
        outcomes.append(([next(steps)[0] for _ in range(EMITTED) for steps in runs], rng_key()))
    assert outcomes[1] == outcomes[0]


def test_a_caller_that_seeds_anew_gets_the_text_of_that_seed() -> None:
    outcomes = []
    for step in (stock_step, generate_step):
        mx.random.seed(5)
        steps = begin(step, "dense", "top_p", "right", max_tokens=EMITTED)
        ids = [next(steps)[0] for _ in range(3)]
        mx.random.seed(99)
        outcomes.append((ids + [token for token, _ in steps], rng_key()))
    assert outcomes[1] == outcomes[0]


def test_a_run_that_moves_to_another_thread_draws_on_from_that_threads_state() -> None:
    """The oracle stays in one thread, where the state is replaced at the same place: it could not move itself."""
    mx.random.seed(5)
    steps = begin(stock_step, "dense", "top_p", max_tokens=EMITTED)
    want = [next(steps)[0] for _ in range(3)]
    mx.random.seed(41)
    want += [token for token, _ in steps]
    want_key = rng_key()
    mx.random.seed(5)
    steps = begin(generate_step, "dense", "top_p", "right", max_tokens=EMITTED)
    ids, keys = [next(steps)[0] for _ in range(3)], []

    def go_on() -> None:
        mx.random.seed(41)
        ids.extend(token for token, _ in steps)
        keys.append(rng_key())
        mx.clear_streams()

    thread = threading.Thread(target=go_on)
    thread.start()
    thread.join()
    assert (ids, keys) == (want, [want_key])


def test_where_nobody_draws_no_proposal_is_lost() -> None:
    accepted = []
    for choice in ("greedy", "top_p"):
        statistics = Statistics()
        mx.random.seed(5)
        assert len(list(begin(generate_step, "dense", choice, "right", max_tokens=EMITTED, statistics=statistics))) == 9
        accepted.append(statistics.accepted_tokens)
    assert accepted[0] == accepted[1] == 6
