"""A run that moves to another thread, what it leaves to be kept, and what it holds no longer than it must."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest

from mlx_spec import generate_step, speculative_generate_step, worker_thread
from mlx_spec.accept.exact import Exact
from mlx_spec.accept.proposal import Proposal
from mlx_spec.accept.walks import Block, open_walk
from mlx_spec.drafters.base import Rows
from mlx_spec.engine.run import run as run_row
from mlx_spec.model.target import Target
from tests.engine.rows import Widths, engine_of, make_row, pull, sampling_of
from tests.oracle import assert_same_output
from tests.rounds.runs import CHOICES, DRAFTERS, stock
from tests.scripted import RightDrafter, TappingDrafter
from tests.tiny import LONG, MIXES, PROMPT, VOCAB


def in_a_thread(work: Callable[[], Any]) -> Any:
    out: list[Any] = []

    def worked() -> None:
        with worker_thread():
            out.append(work())

    thread = threading.Thread(target=worked)
    thread.start()
    thread.join()
    (result,) = out
    return result


@pytest.mark.part(3)
@pytest.mark.parametrize("choice", ["greedy", "penalties", "opaque_processor"])
@pytest.mark.parametrize("drafter", ["eagle3", "standalone", "cycling", "ngram"])
@pytest.mark.parametrize("mix", ["dense", "hybrid"])
def test_every_token_may_be_asked_for_by_another_thread(mix: str, drafter: str, choice: str) -> None:
    run = stock(mix, choice)
    for tokens in (2, 9):
        steps = speculative_generate_step(
            mx.array(PROMPT),
            MIXES[mix].model(),
            DRAFTERS[drafter](mix, run.ids, mx.float32),
            draft_block_size=4,
            max_tokens=tokens,
            prompt_cache=MIXES[mix].new_cache(),
            **CHOICES[choice](),
        )
        got = [in_a_thread(steps.__next__) for _ in range(tokens)]
        # The rows are usable here, where none of them was made.
        assert_same_output([(token, logprobs) for token, logprobs, _ in got], run, tokens)
        steps.close()


def test_a_parked_run_may_move_too() -> None:
    run = stock("dense", "greedy")
    row = make_row("dense", PROMPT, DRAFTERS["eagle3"]("dense", run.ids, mx.float32), Widths([1, 1, 1, 4]), 12)
    steps = iter_of(row)
    got = [in_a_thread(steps.__next__) for _ in range(12)]
    assert_same_output(got, run, 12)


def iter_of(row: Any) -> Any:
    return run_row(engine_of("dense"), row, lambda emission: (emission.token, emission.logprobs))


@pytest.mark.parametrize("choice", ["greedy", "top_p", "repetition"])
def test_a_row_that_is_kept_keeps_no_more_than_itself(choice: str) -> None:
    columns = 60_000
    logits, ids = mx.random.normal((1, 8, columns)), mx.zeros((1, 8), mx.int32)
    block = Block(8, logits, ids, Proposal(ids[:, 1:]), None, 9)
    walk = open_walk(Exact(), sampling_of(CHOICES[choice]()), block)
    assert walk.packed is not None
    mx.eval(walk.pending())
    walk.receive(walk.packed.tolist())  # type: ignore[arg-type]
    row = walk.take(0).logprobs
    del walk, block, logits
    gc.collect()
    held_bytes = mx.get_active_memory()
    del row
    gc.collect()
    assert columns * 4 <= held_bytes - mx.get_active_memory() < 1.5 * columns * 4


@pytest.mark.parametrize("drafted", [False, True])
def test_the_caches_may_be_given_as_a_tuple(drafted: bool) -> None:
    run, cache = stock("dense", "greedy"), tuple(MIXES["dense"].new_cache())
    steps = generate_step(
        mx.array(PROMPT),
        MIXES["dense"].model(),
        draft_model=RightDrafter(run.ids, VOCAB) if drafted else None,
        draft_block_size=4 if drafted else None,
        max_tokens=LONG,
        prompt_cache=cache,  # type: ignore[arg-type]
    )
    assert_same_output(list(steps), run, LONG)


class GivesUp(TappingDrafter):
    """Cannot read its prompt."""

    def open(self, target: Target, start: int = 0) -> Any:
        state = super().open(target, start)

        def refuse(ids: Rows, hidden: mx.array | None) -> None:
            raise RuntimeError("no")

        state.read_prompt = refuse  # type: ignore[method-assign]
        return state


def test_who_gave_up_over_the_prompt_is_not_tapped_for() -> None:
    run = stock("dense", "greedy")
    row = make_row("dense", PROMPT, GivesUp(run.ids, VOCAB, (0, 1)), Widths([4]), 9)
    assert_same_output(pull("dense", row), run, 9)
    assert row.drafting.taps == ()
    assert row.statistics.drafter_failures == 1


def test_caches_that_the_last_block_made_us_quantize_were_not_changed_by_others() -> None:
    run = stock("quantized_from_20", "greedy")
    mix = MIXES["quantized_from_20"]
    for width in (5, 8):
        steps = generate_step(
            mx.array(PROMPT),
            mix.model(),
            draft_model=RightDrafter(run.ids, VOCAB),
            draft_block_size=width,
            max_tokens=14,
            **mix.warm_kv,
        )
        assert [token for token, _ in steps] == list(run.ids[:14])
