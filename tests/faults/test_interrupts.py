"""Promise 2 at every instruction: an interrupt costs no token, adds none, and locks nothing."""

from __future__ import annotations

import functools
import itertools
import random
import signal
import time
from collections.abc import Generator, Sequence
from typing import Any

import mlx.core as mx
import pytest

from mlx_spec.cache.transaction import SpeculativeCacheTransaction
from mlx_spec.drafters.base import Drafter
from mlx_spec.generate import generate_step
from mlx_spec.stats import Statistics
from tests.faults.mixes import WITH_BATCH, stock_run
from tests.faults.signal_places import Places
from tests.oracle import OracleRun, assert_same_output, rng_key
from tests.rounds.runs import CHOICES, SEED
from tests.same_cache import assert_same_cache
from tests.scripted import CyclingDrafter
from tests.tiny import PROMPT, VOCAB

pytestmark = pytest.mark.faults

WIDTH = 6
EMITTED = 12
PATTERN = (2, 5, 0)
"""Accepted proposals per round: a part of a block, all of it, none."""

EVERY_MIX = pytest.mark.parametrize("mix", ["dense", "sliding", "hybrid", "mamba2", "batch"])
EVERY_CHOICE = pytest.mark.parametrize("choice", ["greedy", "top_p"])


def stock(mix: str, choice: str) -> OracleRun:
    return stock_run(mix, EMITTED + 9, choice)


class Attempt:
    """One run of ours on a warm engine, to be interrupted."""

    def __init__(self, mix: str, choice: str, width: int = WIDTH) -> None:
        self.mix, self.choice = mix, choice
        self.cache, self.statistics = WITH_BATCH[mix].new_cache(), Statistics()
        self.tokens: list[tuple[int, mx.array]] = []
        drafter: Drafter | None = None
        if width > 1:
            drafter = CyclingDrafter(stock(mix, choice).ids, VOCAB, PATTERN)
        mx.random.seed(SEED)
        self.steps: Generator[tuple[int, mx.array], None, None] = generate_step(
            mx.array(PROMPT),
            WITH_BATCH[mix].model(),
            draft_model=drafter,
            draft_block_size=width if width > 1 else None,
            prompt_cache=self.cache,
            statistics=self.statistics,
            max_tokens=EMITTED,
            **CHOICES[choice](),
        )

    def take(self, count: int) -> Attempt:
        self.tokens.extend(itertools.islice(self.steps, count))
        return self

    def assert_right(self) -> None:
        """Prompt and the tokens handed out, stock's random state, counts that agree, and nothing locked."""
        run, out = stock(self.mix, self.choice), len(self.tokens)
        assert_same_output(self.tokens, run, out)
        assert_same_cache(self.cache, run.cache_after(out))
        assert rng_key() == run.rng[out]
        counted = self.statistics
        assert counted.emitted_tokens == out
        assert sum(counted.accepted_by_depth) == counted.accepted_tokens <= counted.proposed_tokens
        SpeculativeCacheTransaction(self.cache, 1).abort()

    def assert_goes_on(self) -> None:
        run, out = stock(self.mix, self.choice), len(self.tokens)
        rest = run.ids[out + 1 :]
        again = generate_step(
            mx.array([run.ids[out]]),
            WITH_BATCH[self.mix].model(),
            draft_model=CyclingDrafter(rest, VOCAB, PATTERN),
            draft_block_size=4,
            prompt_cache=self.cache,
            max_tokens=2,
            **CHOICES[self.choice](),
        )
        ids = [token for token, _ in again]
        if self.choice == "greedy":
            assert tuple(ids) == rest[:2]


def interrupted(attempt: Attempt, places: Places, ends: bool) -> bool:
    """One more token, or the end of the run. Returns whether it was interrupted."""
    try:
        with places.watching():
            if ends:
                attempt.steps.close()
            else:
                attempt.tokens.append(next(attempt.steps))
    except KeyboardInterrupt as error:
        # What the traceback holds must not be needed for anything to be right.
        attempt.assert_right()
        del error
        return True
    return False


Moment = tuple[int, bool]
"""Tokens out, and whether the run is closed then instead of asked for one more."""

EVERY_MOMENT: list[Moment] = list(itertools.product(range(1, 6), (False, True)))
TURN_OF_A_ROUND: list[Moment] = [(3, False), (2, True), (1, False)]
"""The token with which a round is committed and the next one is dispatched, a close in a block, an accepted token."""


def try_places(
    mix: str, choice: str, width: int, folders: tuple[str, ...] = (), moments: Sequence[Moment] = (), step: int = 1
) -> int:
    """Interrupt at every `step`-th line in these folders, or at every place of our code, at each of the moments.

    Returns how many were tried.
    """
    places_of = functools.partial(Places, folders=folders or ("",), by_line=bool(folders))
    Attempt(mix, choice, width).take(EMITTED).steps.close()
    tried = 0
    for out, ends in moments or EVERY_MOMENT:
        counted = places_of()
        interrupted(Attempt(mix, choice, width).take(out), counted, ends)
        for at in range(tried % step, counted.passed, step):
            attempt, places = Attempt(mix, choice, width).take(out), places_of(at)
            stopped = interrupted(attempt, places, ends)
            try:
                assert stopped == (places.raised_at is not None)
                attempt.steps.close()
                attempt.assert_right()
                if tried % 16 == 0:
                    attempt.assert_goes_on()
            except Exception as error:
                error.add_note(f"interrupted at {places.raised_at}, {out} tokens out, {ends=}, place {at}")
                raise
            tried += 1
    return tried


COMMIT_SETTLE_AND_COUNT_OUT = ("engine/", "cache/transaction")


@pytest.mark.slow
def test_an_interrupt_at_any_line_of_commit_settle_and_count_out_loses_no_token_and_adds_none(thorough: bool) -> None:
    # Draws cost most of a run's time, and have a place of their own among the lines of a round's turn.
    turn, others = TURN_OF_A_ROUND[:1], TURN_OF_A_ROUND[1:]
    step = 1 if thorough else 3
    assert try_places("dense", "greedy", WIDTH, COMMIT_SETTLE_AND_COUNT_OUT, turn, step=step) > 60 // step
    assert try_places("dense", "top_p", WIDTH, COMMIT_SETTLE_AND_COUNT_OUT, turn, step=2 * step) > 30 // step
    assert try_places("dense", "greedy", WIDTH, COMMIT_SETTLE_AND_COUNT_OUT, others, step=3 * step) > 20 // step
    assert try_places("dense", "greedy", 1, COMMIT_SETTLE_AND_COUNT_OUT, turn, step=4 * step) > 8 // step


@pytest.mark.slow
@pytest.mark.part(2)
@EVERY_CHOICE
@EVERY_MIX
def test_an_interrupt_in_a_cache_of_any_kind_leaves_it_right_and_unlocked(mix: str, choice: str) -> None:
    assert try_places(mix, choice, WIDTH, ("cache/", "engine/"), TURN_OF_A_ROUND, step=83) > 3


@pytest.mark.deep
@EVERY_CHOICE
@EVERY_MIX
@pytest.mark.parametrize("width", [1, WIDTH])
def test_the_same_at_every_place_of_our_code(mix: str, width: int, choice: str) -> None:
    assert try_places(mix, choice, width) > 100


# Signals that come when they come


def signalled(attempt: Attempt, after_ms: float) -> bool:
    """Run under an alarm. Returns whether it came in time."""
    try:
        signal.setitimer(signal.ITIMER_REAL, after_ms / 1e3)
        # An append and the next step of the loop have no place between them at which a token could be dropped.
        for pair in attempt.steps:
            attempt.tokens.append(pair)
        signal.setitimer(signal.ITIMER_REAL, 0)
    except KeyboardInterrupt:
        return True
    return False


def test_a_signal_at_any_time_loses_no_token_adds_none_and_locks_nothing(thorough: bool) -> None:
    def alarm(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    chance, came, tries = random.Random(4), 0, 200 if thorough else 9
    before = signal.signal(signal.SIGALRM, alarm)
    try:
        for number in range(tries):
            mix = ("dense", "hybrid")[number % 2] if thorough else "dense"
            whole = Attempt(mix, "top_p")
            started = time.perf_counter()
            whole.take(EMITTED)
            took_ms = (time.perf_counter() - started) * 1e3
            whole.steps.close()
            attempt = Attempt(mix, "top_p").take(1)
            came += signalled(attempt, chance.uniform(0.05, 1.0) * took_ms)
            attempt.steps.close()
            attempt.assert_right()
            attempt.assert_goes_on()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert came > tries // 3, f"only {came} of {tries} signals came while the run was at work"
