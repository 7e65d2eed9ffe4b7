"""Kinds of fault in giving up: a run that goes on, one that cannot be closed, a cache or a drafter spoilt for the next.

How an application cancels is described in docs/threads.md; every way named there is tried here.
"""

from __future__ import annotations

import functools
import gc
import threading
from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
import pytest

from mlx_spec import SpeculativeCacheTransaction
from mlx_spec.drafters import Drafter
from mlx_spec.errors import TransactionError
from mlx_spec.generate import generate_step
from tests.forwards import Forwards
from tests.oracle import OracleRun, assert_same_output, rng_key
from tests.rounds.runs import CHOICES, DRAFTERS, SPARE, assert_equals_stock, record_stock, speculate
from tests.rounds.test_faults import cache_of_prompt
from tests.rounds.test_interleaved import in_a_thread
from tests.same_cache import assert_same_cache
from tests.scripted import AlternatingDrafter, CyclingDrafter, RightDrafter, ScriptedDrafter, ScriptedState
from tests.tiny import MIXES, PROMPT, REQUIRED, VOCAB

WIDTH = 5
EMITTED = 20
KEPT = range(1, EMITTED + 1)
CONTINUED = 7

EVERY_MIX = pytest.mark.parametrize("mix", REQUIRED)


@functools.cache
def stock(mix: str, choice: str = "greedy") -> OracleRun:
    keep = [*KEPT, *(length + 1 + CONTINUED for length in KEPT)]
    return record_stock(MIXES[mix], EMITTED + SPARE, keep, **CHOICES[choice]())


def start(mix: str, drafter: Drafter | None, cache: list[Any], **options: Any) -> Any:
    width = {} if drafter is None else {"draft_block_size": WIDTH}
    given = {"max_tokens": -1, **width, **MIXES[mix].warm_kv, **options}
    return generate_step(mx.array(PROMPT), MIXES[mix].model(), draft_model=drafter, prompt_cache=cache, **given)


def assert_goes_on(mix: str, cache: list[Any], handed_out: int) -> None:
    """The cache is the stock loop's, and a speculative run in this thread goes on from it."""
    run = stock(mix)
    assert_same_cache(cache, run.cache_after(handed_out))
    rest = run.ids[handed_out + 1 :]
    again = speculate(
        MIXES[mix],
        AlternatingDrafter(rest, VOCAB),
        prompt=run.ids[handed_out : handed_out + 1],
        prompt_cache=cache,
        max_tokens=CONTINUED,
        draft_block_size=WIDTH,
    )
    assert tuple(again.ids) == rest[:CONTINUED]
    assert again.drafted > 0
    assert_same_cache(again.cache, run.cache_after(handed_out + 1 + CONTINUED))


# In one thread


@pytest.mark.part(2)
@pytest.mark.parametrize(
    ("mix", "drafter"), [*((mix, "cycling") for mix in REQUIRED), ("dense", "eagle3"), ("hybrid", "eagle3")]
)
def test_runs_closed_after_every_token_leave_the_next_run_its_speculation(mix: str, drafter: str) -> None:
    """Nothing that turns speculation off may stick to the model or the drafter, which all of these runs share."""
    run = stock(mix)
    shared = DRAFTERS[drafter](mix, run.ids, mx.float32)
    untouched = speculate(MIXES[mix], shared, max_tokens=EMITTED, draft_block_size=WIDTH)
    for length in KEPT:
        cache = MIXES[mix].new_cache()
        steps = start(mix, shared, cache)
        assert_same_output([next(steps) for _ in range(length)], run, length)
        steps.close()
        assert_same_cache(cache, run.cache_after(length))
    after = speculate(MIXES[mix], shared, max_tokens=EMITTED, draft_block_size=WIDTH)
    assert_equals_stock(after, run, EMITTED)
    assert [token[2] for token in after.tokens] == [token[2] for token in untouched.tokens]
    assert after.drafted > 0
    assert after.statistics.drafter_failures == 0


# A flag that another thread sets


@pytest.mark.parametrize("length", [1, 2, 4, 5, 6, 11])
@pytest.mark.parametrize("mix", ["dense", "quantized_from_20"])
def test_flag_set_by_another_thread_ends_the_run_before_its_next_forward(
    mix: str, length: int, forwards: Forwards
) -> None:
    """The consumer looks at a flag after every token; between two tokens there is at most one forward."""
    run, cancelled, reached = stock(mix), threading.Event(), threading.Event()
    drafter = CyclingDrafter(run.ids, VOCAB, (4, 1, 0))
    widths = forwards.widths(MIXES[mix].model())
    speculate(MIXES[mix], drafter, EMITTED, max_tokens=-1, draft_block_size=WIDTH)  # certifies, at a cost of its own
    widths.clear()
    other = threading.Thread(target=lambda: (reached.wait(60), cancelled.set()))
    other.start()
    cache, pairs, at = MIXES[mix].new_cache(), [], []
    steps = start(mix, drafter, cache)
    for pair in steps:
        pairs.append(pair)
        at.append(len(widths))
        if len(pairs) == length:
            reached.set()
            other.join()
        if cancelled.is_set():
            break
    steps.close()
    assert len(widths) == at[-1], "giving up cost a forward"
    assert all(later - earlier <= 1 for earlier, later in zip(at, at[1:], strict=False))
    assert_same_output(pairs, run, length)
    assert_goes_on(mix, cache, length)


@pytest.mark.parametrize("drafter", ["none", "right"])
@EVERY_MIX
def test_flag_set_by_another_thread_ends_the_reading_of_the_prompt(mix: str, drafter: str) -> None:
    """The progress callback raises; whole chunks are in the cache then, and the rest can be read later."""
    run, cancelled, reading = stock(mix), threading.Event(), threading.Event()
    cache = MIXES[mix].new_cache()

    def look(processed: int, total: int) -> None:
        if processed:
            reading.set()
            other.join()
        if cancelled.is_set():
            raise InterruptedError(f"cancelled after {processed} of {total} tokens")

    other = threading.Thread(target=lambda: (reading.wait(60), cancelled.set()))
    other.start()
    made = None if drafter == "none" else RightDrafter(run.ids, VOCAB)
    steps = start(mix, made, cache, prefill_step_size=4, prompt_progress_callback=look)
    with pytest.raises(InterruptedError, match="cancelled after 4 of 7 tokens"):
        next(steps)
    assert_same_cache(cache, cache_of_prompt(mix, 4, 4))
    again = speculate(
        MIXES[mix],
        RightDrafter(run.ids, VOCAB),
        prompt=PROMPT[4:],
        prompt_cache=cache,
        max_tokens=EMITTED,
        draft_block_size=WIDTH,
    )
    assert tuple(again.ids) == run.ids[:EMITTED]


# Closing from another thread


class Waiting(ScriptedDrafter):
    """Right; proposing for the second time, it waits, so that the run can be met in the middle of a round."""

    def __init__(self, right: Any, vocab: int) -> None:
        super().__init__(right, vocab)
        self.inside, self.go_on = threading.Event(), threading.Event()

    def script(self, state: ScriptedState, row: int, count: int) -> list[int]:
        if state.round == 1:
            self.inside.set()
            assert self.go_on.wait(60)
        return state.right(row, count)


@EVERY_MIX
def test_closing_a_run_that_is_at_work_in_another_thread_is_refused_and_disturbs_nothing(mix: str) -> None:
    """Python itself refuses it. The run never notices."""
    run, cache = stock(mix), MIXES[mix].new_cache()
    drafter = Waiting(run.ids, VOCAB)
    steps = start(mix, drafter, cache, max_tokens=EMITTED)
    pairs: list[Any] = []
    other = threading.Thread(target=lambda: in_a_thread(lambda: pairs.extend(steps)))
    other.start()
    assert drafter.inside.wait(60)
    with pytest.raises(ValueError, match="already executing"):
        steps.close()
    drafter.go_on.set()
    other.join()
    assert_same_output(pairs, run, EMITTED)
    assert_goes_on(mix, cache, EMITTED)


class Worker:
    """A thread that runs one call at a time and lives until it is let go."""

    def __enter__(self) -> Worker:
        self._calls: list[Callable[[], Any]] = []
        self._wake, self._done = threading.Semaphore(0), threading.Semaphore(0)
        self._thread = threading.Thread(target=self._work)
        self._thread.start()
        return self

    def __exit__(self, *error: Any) -> None:
        self._wake.release()
        self._thread.join()

    def __call__(self, call: Callable[[], Any]) -> Any:
        self._calls.append(call)
        self._wake.release()
        assert self._done.acquire(timeout=60)
        return self._result

    def _work(self) -> None:
        while self._wake.acquire(timeout=60) and self._calls:
            self._result = self._calls.pop()()
            self._done.release()
        mx.synchronize()
        mx.clear_streams()


LENGTHS = (1, 4, 5, 6, 9)
"""Before, at and after the ends of blocks that are kept whole, and of blocks that are not."""


@pytest.mark.part(3)
@pytest.mark.parametrize("ended", [False, True], ids=["idle thread", "ended thread"])
@pytest.mark.parametrize("mix", MIXES)
def test_run_that_is_idle_can_be_closed_by_another_thread(mix: str, ended: bool) -> None:
    """Nothing of the open round may be left to compute that only its own thread could."""
    run = stock(mix)
    for length in LENGTHS if mix in REQUIRED or not ended else LENGTHS[1:3]:
        cache = MIXES[mix].new_cache()
        drafter = AlternatingDrafter(run.ids, VOCAB) if length % 3 else None
        steps = start(mix, drafter, cache)
        with Worker() as worker:
            pairs = worker(lambda steps=steps, length=length: [next(steps) for _ in range(length)])
            if not ended:
                steps.close()
        steps.close()
        assert_same_output(pairs, run, length)
        assert_goes_on(mix, cache, length)


@pytest.mark.part(3)
@pytest.mark.parametrize("drafter", ["none", "cycling"])
@EVERY_MIX
def test_random_state_of_the_thread_that_closes_stays_where_it_is(mix: str, drafter: str) -> None:
    """That thread may be sampling a text of its own."""
    run = stock(mix, "top_p")
    made = None if drafter == "none" else DRAFTERS[drafter](mix, run.ids, mx.float32)
    for length in LENGTHS[::2]:
        cache = MIXES[mix].new_cache()
        steps = start(mix, made, cache, **CHOICES["top_p"]())
        with Worker() as worker:
            worker(lambda: mx.random.seed(11))
            pairs = worker(lambda steps=steps, length=length: [next(steps) for _ in range(length)])
            before = rng_key()
            steps.close()
            assert rng_key() == before
        assert_same_output(pairs, run, length)
        assert_same_cache(cache, run.cache_after(length))


@pytest.mark.part(6)
@pytest.mark.parametrize("mix", MIXES)
def test_run_may_move_to_another_thread_between_any_two_tokens(mix: str) -> None:
    """As where a pool of threads asks for one token at a time; each thread here ends before the next begins."""
    run = stock(mix)
    for drafter in (None, CyclingDrafter(run.ids, VOCAB, (4, 1, 7, 0))):
        cache = MIXES[mix].new_cache()
        steps = start(mix, drafter, cache, max_tokens=14)
        pairs = [in_a_thread(lambda steps=steps: next(steps)) for _ in range(14)]
        assert in_a_thread(lambda steps=steps: next(steps, None)) is None
        assert_same_output(pairs, run, 14)
        assert_same_cache(cache, run.cache_after(14))


@pytest.fixture
def collected_now() -> Iterator[None]:
    """Garbage is collected where a test says so and nowhere else."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("collected_now")
@pytest.mark.parametrize("mix", ["dense", "sliding", "hybrid"])
def test_run_that_another_thread_collects_as_garbage_leaves_its_cache_right(mix: str) -> None:
    run, cache = stock(mix), MIXES[mix].new_cache()

    def abandon() -> None:
        steps = start(mix, RightDrafter(run.ids, VOCAB), cache)
        cycle: list[Any] = [steps]
        cycle.append(cycle)
        for _ in range(5):
            next(steps)

    in_a_thread(abandon)
    with pytest.raises(TransactionError):
        SpeculativeCacheTransaction(cache, 1)
    gc.collect()
    assert_goes_on(mix, cache, 5)
