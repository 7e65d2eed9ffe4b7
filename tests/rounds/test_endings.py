"""However a run ends, at every length: the caller's cache holds prompt and handed-out tokens, and can be continued."""

from __future__ import annotations

import functools
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step as stock_generate_step

from mlx_spec.generate import generate_step, stream_generate
from mlx_spec.stats import Statistics
from tests.bits import assert_same_bits
from tests.oracle import OracleRun, assert_same_output, rng_key, seed_from_key
from tests.rounds.letters import letter, tokenizer
from tests.rounds.runs import (
    CHOICES,
    DRAFTERS,
    SEED,
    SPARE,
    SpeculativeRun,
    assert_counts_add_up,
    assert_equals_stock,
    record_stock,
    speculate,
)
from tests.same_cache import assert_same_cache
from tests.scripted import AlternatingDrafter
from tests.tiny import LONG, MIXES, PROMPT, REQUIRED, VOCAB

WIDTH = 5
LENGTHS = range(1, LONG + 1)
CLOSED_LENGTHS = range(1, 21)
CONTINUED = 6
"""Tokens a run is continued by: more than one round."""

SLOW = ("sliding", "hybrid")

EVERY_MIX = pytest.mark.parametrize("mix", REQUIRED)
BOTH_DRAFTERS = pytest.mark.parametrize("drafter", ["right", "alternating"])


@functools.cache
def stock(mix: str, choice: str = "greedy", emitted: int = LONG) -> OracleRun:
    """A stock run with its cache after every token, `SPARE` tokens longer than asked."""
    return record_stock(MIXES[mix], emitted + SPARE, range(1, emitted + SPARE + 1), **CHOICES[choice]())


def drafter_for(name: str, mix: str, run: OracleRun) -> Any:
    return DRAFTERS[name](mix, run.ids, mx.float32)


def assert_continues(mix: str, got: SpeculativeRun, run: OracleRun, *, plainly: bool, sampler: Any = None) -> None:
    """From the cache as it was left, the stock loop, or ours, goes on as the stock run did.

    The cache holds every token handed out, so the next input is the token the stock run emitted next.
    """
    emitted = len(got.tokens)
    made, start = MIXES[mix], emitted + 1
    options: dict[str, Any] = {"max_tokens": CONTINUED, "prompt_cache": got.cache, "sampler": sampler, **made.warm_kv}
    if plainly:
        steps = stock_generate_step(mx.array([run.ids[emitted]]), made.model(), **options)
    else:
        drafter = AlternatingDrafter(run.ids[start:], VOCAB)
        steps = generate_step(
            mx.array([run.ids[emitted]]), made.model(), draft_model=drafter, draft_block_size=WIDTH, **options
        )
    pairs = list(steps)
    assert tuple(token for token, _ in pairs) == run.ids[start : start + CONTINUED]
    for (_, logprobs), wanted in zip(pairs, run.logprobs[start:], strict=False):
        assert_same_bits(logprobs, wanted, "log-probabilities after going on")
    assert_same_cache(got.cache, run.cache_after(start + CONTINUED))


# By budget


def lengths_of_both_drafters() -> list[Any]:
    """Mix, drafter and length. By default the mixes that take longest give each length to one of the drafters;
    a block being five wide, either one still ends at every depth of a block.
    """
    return [
        pytest.param(mix, drafter, length, marks=[pytest.mark.deep] if mix in SLOW and length % 2 == place else [])
        for mix in REQUIRED
        for place, drafter in enumerate(("right", "alternating"))
        for length in LENGTHS
    ]


@pytest.mark.part(18)
@pytest.mark.slow
@pytest.mark.parametrize(("mix", "drafter", "length"), lengths_of_both_drafters())
def test_run_that_spends_its_budget_can_be_continued(mix: str, drafter: str, length: int) -> None:
    run = stock(mix)
    got = speculate(MIXES[mix], drafter_for(drafter, mix, run), max_tokens=length, draft_block_size=WIDTH)
    assert_equals_stock(got, run, length)
    assert_counts_add_up(got)
    assert_continues(mix, got, run, plainly=drafter == "right")


# By closing


@pytest.mark.parametrize("length", CLOSED_LENGTHS)
@BOTH_DRAFTERS
@EVERY_MIX
def test_closed_run_can_be_continued(mix: str, drafter: str, length: int) -> None:
    run = stock(mix)
    got = speculate(MIXES[mix], drafter_for(drafter, mix, run), length, max_tokens=-1, draft_block_size=WIDTH)
    assert_equals_stock(got, run, length)
    assert_continues(mix, got, run, plainly=drafter == "alternating")


def test_run_that_is_closed_before_it_began_leaves_everything_alone() -> None:
    mix, key = MIXES["dense"], rng_key()
    cache = mix.new_cache()
    steps = generate_step(mx.array(PROMPT), mix.model(), draft_model="ngram", prompt_cache=cache)
    steps.close()
    assert_same_cache(cache, mix.new_cache())
    assert rng_key() == key


def test_forgotten_run_settles_when_it_is_collected() -> None:
    run, mix = stock("dense"), MIXES["dense"]
    cache = mix.new_cache()
    steps = generate_step(
        mx.array(PROMPT), mix.model(), draft_model=drafter_for("right", "dense", run), prompt_cache=cache
    )
    got = [next(steps) for _ in range(9)]
    del steps
    assert_same_output(got, run, 9)
    assert_same_cache(cache, run.cache_after(9))


# By an end token


def first_occurrences(run: OracleRun) -> list[int]:
    """Lengths whose last token has not been emitted before."""
    return [length for length in LENGTHS if run.ids[length - 1] not in run.ids[: length - 1]]


@pytest.mark.part(3)
@BOTH_DRAFTERS
@EVERY_MIX
def test_run_that_meets_its_end_token_can_be_continued(mix: str, drafter: str) -> None:
    run = stock(mix)
    never = [token for token in range(VOCAB) if token not in run.ids]
    # Neighbouring lengths go to different drafters, to different places in a block all the same.
    lengths = first_occurrences(run)[drafter == "right" :: 2]
    for length in lengths:
        got = speculate(
            MIXES[mix],
            drafter_for(drafter, mix, run),
            max_tokens=LONG,
            draft_block_size=WIDTH,
            eos_token_ids=[run.ids[length - 1], *never],
        )
        assert_equals_stock(got, run, length)
        assert_counts_add_up(got)
        assert_continues(mix, got, run, plainly=drafter == "alternating")
    assert len(lengths) >= 8


# By a stop string


def stop_string(text: str, length: int) -> str:
    """The shortest string that the text completes with its letter number `length` and not before."""
    return next(text[start:length] for start in range(length - 1, -1, -1) if text.find(text[start:length]) == start)


@pytest.mark.part(18)
@pytest.mark.parametrize(
    ("mix", "length"),
    [
        pytest.param(mix, length, marks=[pytest.mark.deep] if mix in SLOW and length % 2 else [])
        for mix in REQUIRED
        for length in LENGTHS
    ],
)
def test_run_that_completes_a_stop_string_can_be_continued(mix: str, length: int) -> None:
    run = stock(mix)
    text = "".join(map(letter, run.ids))
    stop = stop_string(text, length)
    cache, statistics = MIXES[mix].new_cache(), Statistics()
    mx.random.seed(SEED)
    responses = list(
        stream_generate(
            MIXES[mix].model(),
            tokenizer(),
            list(PROMPT),
            LONG + 3,
            drafter_for("right" if length % 4 < 2 else "alternating", mix, run),
            draft_block_size=WIDTH,
            stop=[stop, "no letter of the text"],
            prompt_cache=cache,
            statistics=statistics,
            **MIXES[mix].warm_kv,
        )
    )
    tokens = [(response.token, response.logprobs, response.from_draft) for response in responses]
    got = SpeculativeRun(tokens, cache, rng_key(), statistics)
    assert_equals_stock(got, run, length)
    assert_counts_add_up(got)
    assert "".join(response.text for response in responses) == text[: length - len(stop)]
    assert [response.finish_reason for response in responses] == [None] * (length - 1) + ["stop"]
    if length % 3 == 0:
        assert_continues(mix, got, run, plainly=length % 4 == 0)


# With a sampler


@pytest.mark.part(3)
@pytest.mark.parametrize("length", [1, 2, 6, 13, 27, 40])
@pytest.mark.parametrize(
    ("end", "drafter"), [("budget", "cycling"), ("close", "right"), ("close", "cycling"), ("end token", "right")]
)
@EVERY_MIX
def test_sampled_run_goes_on_with_the_stock_draws(mix: str, end: str, drafter: str, length: int) -> None:
    run, made = stock(mix, "top_p"), MIXES[mix]
    if end == "end token":
        length = min(first_occurrences(run), key=lambda candidate: abs(candidate - length))
    ending: dict[str, Any] = {
        "budget": {"max_tokens": length},
        "close": {"stop_after": length, "max_tokens": -1},
        "end token": {"max_tokens": LONG, "eos_token_ids": [run.ids[length - 1]]},
    }[end]
    sampler = CHOICES["top_p"]()["sampler"]
    got = speculate(made, drafter_for(drafter, mix, run), draft_block_size=WIDTH, sampler=sampler, **ending)
    assert_equals_stock(got, run, length)
    seed_from_key(got.rng)
    assert_continues(mix, got, run, plainly=False, sampler=sampler)
    assert rng_key() == run.rng[length + 1 + CONTINUED]


@pytest.mark.part(4)
@pytest.mark.parametrize(
    ("mix", "choice"),
    [*((mix, "sampled_penalties") for mix in REQUIRED), *(("dense", choice) for choice in ("xtc", "opaque_both"))],
)
def test_random_state_after_every_closed_length_is_stocks(mix: str, choice: str) -> None:
    run = stock(mix, choice, 8)
    for length in range(1, 9):
        drafter = drafter_for("cycling" if length % 2 else "right", mix, run)
        got = speculate(MIXES[mix], drafter, length, max_tokens=-1, draft_block_size=WIDTH, **CHOICES[choice]())
        assert_equals_stock(got, run, length)
