"""A caller is told what every round came to, and may end the run there."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest

from mlx_spec import generate_step
from mlx_spec.engine.row import RoundResult
from mlx_spec.errors import InvalidRequest
from tests.oracle import rng_key
from tests.rounds.runs import CHOICES, SEED, assert_equals_stock, record_stock, speculate, stock
from tests.same_cache import assert_same_cache
from tests.scripted import CyclingDrafter, RecordingDrafter
from tests.tiny import LONG, MIXES, PROMPT, VOCAB


def told_of(mix: str, choice: str, **options: Any) -> tuple[list[tuple[Any, ...]], Any]:
    run, told = stock(mix, choice), []

    def on_round(result: RoundResult) -> None:
        drafts = None if result.next_draft_tokens is None else result.next_draft_tokens.tolist()
        told.append((result.num_accepted, result.next_tokens, drafts))

    drafter = RecordingDrafter(CyclingDrafter(run.ids, VOCAB, (2, 0, 3)))
    got = speculate(MIXES[mix], drafter, on_round=on_round, draft_block_size=4, **CHOICES[choice](), **options)
    return told, got


@pytest.mark.parametrize("mix", ["dense", "hybrid"])
@pytest.mark.parametrize("choice", ["greedy", "top_p"])
def test_it_is_told_after_every_round_and_sees_the_text(mix: str, choice: str) -> None:
    told, got = told_of(mix, choice, max_tokens=LONG)
    run = stock(mix, choice)
    assert_equals_stock(got, run, LONG)
    assert len(told) == got.statistics.rounds
    place = 0
    for number, (accepted, tokens, drafts) in enumerate(told):
        place += accepted[0] + 1
        assert tokens == [run.ids[place - 1]]
        if drafts is not None and number + 1 < len(told):
            stands = told[number + 1][0][0]
            assert drafts[0][:stands] == list(run.ids[place : place + stands])
            assert drafts[0][stands : stands + 1] != list(run.ids[place + stands : place + stands + 1])
    assert [accepted[0] for accepted, _, _ in told[:5]] == [0, 2, 0, 3, 2]
    assert told[0][2] is not None
    assert told[-1][2] is None


def test_plain_rounds_are_told_too() -> None:
    told: list[RoundResult] = []
    list(generate_step(mx.array(PROMPT), MIXES["dense"].model(), max_tokens=5, on_round=told.append))
    assert [(result.num_accepted, result.next_draft_tokens) for result in told] == [([0], None)] * 5
    assert [result.next_tokens[0] for result in told] == list(stock("dense", "greedy").ids[:5])


@pytest.mark.parametrize("mix", ["dense", "sliding", "hybrid"])
@pytest.mark.parametrize("choice", ["greedy", "top_p"])
def test_what_it_raises_ends_the_run_before_the_rounds_last_token(mix: str, choice: str) -> None:
    run, cache, calls = stock(mix, choice), MIXES[mix].new_cache(), []

    def on_round(result: RoundResult) -> None:
        calls.append(result)
        if len(calls) == 3:
            raise RuntimeError("enough")

    mx.random.seed(SEED)
    drafter = CyclingDrafter(run.ids, VOCAB, (2, 1))
    steps = generate_step(
        mx.array(PROMPT),
        MIXES[mix].model(),
        draft_model=drafter,
        draft_block_size=4,
        prompt_cache=cache,
        on_round=on_round,
        **CHOICES[choice](),
    )
    out = []
    with pytest.raises(RuntimeError, match="enough"):
        out.extend(token for token, _ in steps)
    # `extend` keeps nothing of what came before the error, so what came is counted by the rounds: 1, 3 and 1 of 2.
    handed_out = 1 + 3 + 1
    assert_same_cache(cache, stock_cache(mix, choice, handed_out))
    assert rng_key() == run.rng[handed_out]


def stock_cache(mix: str, choice: str, length: int) -> Any:
    return record_stock(MIXES[mix], length, {length}, **CHOICES[choice]()).cache_after(length)


def test_the_random_state_is_then_what_it_is_when_the_rounds_last_token_is_handed_out() -> None:
    run, keys, places = stock("dense", "top_p"), [], [0]

    def on_round(result: RoundResult) -> None:
        places.append(places[-1] + result.num_accepted[0] + 1)
        keys.append(rng_key())

    drafter = CyclingDrafter(run.ids, VOCAB, (2, 0, 3))
    got = speculate(
        MIXES["dense"], drafter, on_round=on_round, draft_block_size=4, max_tokens=LONG, **CHOICES["top_p"]()
    )
    assert_equals_stock(got, run, LONG)
    assert keys == [run.rng[place] for place in places[1:]]


def test_another_thing_than_a_function_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="on_round"):
        generate_step(mx.array(PROMPT), MIXES["dense"].model(), on_round=3)  # type: ignore[arg-type]
