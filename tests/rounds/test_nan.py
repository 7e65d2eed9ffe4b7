"""NaN in the target's logits ends the run where it would be chosen from, with the position, and nowhere else."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest
from mlx import nn

from mlx_spec.cache.adopt import tokens_held
from mlx_spec.cache.transaction import SpeculativeCacheTransaction
from mlx_spec.errors import NonFiniteLogits
from tests.forwards import Forwards
from tests.oracle import OracleRun, assert_same_output, rng_key, run_stock
from tests.rounds.runs import CHOICES, DRAFTERS, SEED, SPARE, SpeculativeRun, assert_equals_stock, speculate
from tests.rounds.test_faults import cache_of_prompt, run_into
from tests.same_cache import assert_same_cache
from tests.tiny import MIXES, PROMPT, REQUIRED, VOCAB

EMITTED = 8
WIDTH = 5
FIRST = len(PROMPT) - 1
"""Input position whose logits give the first token."""

Poisons = Callable[[mx.array, mx.array], mx.array]
"""([W] input positions, [W] ids) -> [W] bool, which rows of logits become NaN."""

EVERY_MIX = pytest.mark.parametrize("mix", REQUIRED)
EVERY_MIX_AND_CHOICE = pytest.mark.parametrize(
    ("mix", "choice"), [*((mix, "greedy") for mix in REQUIRED), ("dense", "top_p"), ("sliding", "opaque_both")]
)


@pytest.fixture
def poison(forwards: Forwards) -> Callable[[str, Poisons], None]:
    """Replace rows of a mix's logits by NaN until the test ends."""

    def wrap(mix: str, poisons: Poisons) -> None:
        def poisoned(forward: Any, model: nn.Module, inputs: mx.array, cache: Any = None) -> mx.array:
            positions = mx.arange(inputs.shape[1]) + tokens_held(cache)
            bad = poisons(positions, inputs[0])
            return mx.where(bad[None, :, None], mx.nan, forward(model, inputs, cache=cache))

        certify_unpoisoned(mix, forwards)
        forwards.wrap(MIXES[mix].model(), poisoned)

    return wrap


@functools.cache
def certify_unpoisoned(mix: str, forwards: Forwards) -> None:
    """Find the routes before there is any NaN, so that blocks are what NaN is looked for in."""
    forwards.wrap(MIXES[mix].model(), lambda forward, *args, **given: forward(*args, **given))
    run_poisoned(mix, "greedy", "right", stock(mix, "greedy"), max_tokens=EMITTED)


@functools.cache
def stock(mix: str, choice: str) -> OracleRun:
    made = MIXES[mix]
    return run_stock(made.model(), PROMPT, EMITTED + SPARE, seed=SEED, **CHOICES[choice](), **made.kv)


def drafter_for(name: str, mix: str, run: OracleRun) -> Any:
    return None if name == "none" else DRAFTERS[name](mix, run.ids, mx.float32)


def run_poisoned(mix: str, choice: str, name: str, run: OracleRun, **ending: Any) -> SpeculativeRun:
    width = {} if name == "none" else {"draft_block_size": WIDTH}
    return speculate(MIXES[mix], drafter_for(name, mix, run), **width, **CHOICES[choice](), **ending)


@pytest.mark.part(3)
@pytest.mark.parametrize("drafter", ["none", "right", "alternating"])
@EVERY_MIX_AND_CHOICE
def test_nan_ends_the_run_at_the_token_it_would_have_chosen(mix: str, drafter: str, choice: str, poison: Any) -> None:
    run = stock(mix, choice)
    speculate(MIXES[mix], drafter_for("right", mix, run), max_tokens=EMITTED, draft_block_size=WIDTH)  # certifies
    bad = {}
    poison(mix, lambda positions, ids: positions == bad["position"])
    for index in range(EMITTED):
        bad["position"] = FIRST + index
        mx.random.seed(SEED)
        broken = run_into(mix, drafter_for(drafter, mix, run), prefill_step_size=2048, **CHOICES[choice]())
        assert isinstance(broken.error, NonFiniteLogits)
        assert broken.error.position == len(PROMPT) + index
        assert str(broken.error.position) in str(broken.error)
        assert_same_output(broken.tokens, run, index)
        if index:
            assert rng_key() == run.rng[index], f"random state after {index} tokens and NaN"
        assert_same_cache(broken.cache, run.cache_after(index) if index else cache_of_prompt(mix, len(PROMPT), 2048))
        SpeculativeCacheTransaction(broken.cache, 1).abort()


@pytest.mark.part(3)
@pytest.mark.parametrize("drafter", ["none", "right", "alternating"])
@EVERY_MIX_AND_CHOICE
def test_nan_after_the_last_token_of_any_budget_ends_nothing(mix: str, drafter: str, choice: str, poison: Any) -> None:
    run = stock(mix, choice)
    ends = {}
    poison(mix, lambda positions, ids: positions >= FIRST + ends["length"])
    for length in range(1, EMITTED):
        ends["length"] = length
        got = run_poisoned(mix, choice, drafter, run, max_tokens=length)
        assert_equals_stock(got, run, length)


@pytest.mark.parametrize("drafter", ["wrong", "cycling", "out_of_range"])
@EVERY_MIX_AND_CHOICE
def test_nan_behind_a_rejected_proposal_ends_nothing(mix: str, drafter: str, choice: str, poison: Any) -> None:
    run = stock(mix, choice)
    text = mx.array([*PROMPT, *run.ids])

    def off_the_text(positions: mx.array, ids: mx.array) -> mx.array:
        return text[positions] != ids

    poison(mix, off_the_text)
    got = run_poisoned(mix, choice, drafter, run, max_tokens=EMITTED)
    assert_equals_stock(got, run, EMITTED)
    assert got.statistics.proposed_tokens > got.statistics.accepted_tokens


@EVERY_MIX
def test_nan_inside_the_prompt_ends_nothing(mix: str, poison: Any) -> None:
    run = stock(mix, "greedy")
    poison(mix, lambda positions, ids: positions < FIRST)
    assert_equals_stock(run_poisoned(mix, "greedy", "right", run, max_tokens=EMITTED), run, EMITTED)


@pytest.mark.parametrize("drafter", ["none", "right", "alternating"])
def test_logits_of_minus_infinity_are_ordinary(drafter: str, forwards: Forwards) -> None:
    never = mx.arange(VOCAB) % 3 == 0
    forwards.wrap(
        MIXES["dense"].model(), lambda forward, *args, **given: mx.where(never, -mx.inf, forward(*args, **given))
    )
    run = stock.__wrapped__("dense", "top_p")
    assert all(token % 3 for token in run.ids)
    assert_equals_stock(run_poisoned("dense", "top_p", drafter, run, max_tokens=EMITTED), run, EMITTED)
