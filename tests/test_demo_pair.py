"""The embedded pair, end to end: the text of the real target with the real drafter is plain mlx-lm's, bit for bit."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.generate import generate_step as stock_generate_step
from mlx_lm.sample_utils import make_sampler

import mlx_spec
from mlx_spec.demo import demo_drafter_path, demo_target_path
from mlx_spec.demo.target import WHEEL_COMMAND, WHEEL_PACKAGE
from mlx_spec.drafters import Drafter
from mlx_spec.drafters.checkpoint import read_config
from mlx_spec.drafters.registry import resolve_family
from tests.bits import bit_difference
from tests.oracle import first_difference, rng_key

CAPITAL = "What is the capital of France?"

PROMPTS = (
    "List five uses of a paper clip.",
    "Why is the sky blue?",
    "Write a haiku about winter.",
    "Give me a recipe for pancakes.",
    CAPITAL,
    "Explain recursion to a beginner.",
    "Translate 'good morning' into Spanish.",
    "Name three planets and one fact about each.",
    "Write a Python function that adds two numbers.",
    "Summarise the plot of Romeo and Juliet.",
    "How do plants make food?",
    "Tell me a joke about computers.",
    "What is 17 times 23?",
    "Describe a rainy day in the city.",
    "Count from one to ten in words.",
    "What are the benefits of regular exercise?",
    "Write an email declining a meeting.",
    "How does a bicycle stay upright?",
    "List the months of the year.",
    "Who wrote The Odyssey, and what is it about?",
)


CERTIFIED_SOON = 2
"""Near the end of a budget every narrower width is certified too, which takes seconds for each; this one has none."""


@dataclass(frozen=True)
class Pair:
    """The loaded demo pair."""

    model: nn.Module
    tokenizer: Any
    drafter: Drafter

    def ids(self, text: str) -> mx.array:
        """The chat prompt."""
        return mx.array(
            self.tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True)
        )


@pytest.fixture(scope="module")
def pair() -> Pair:
    if importlib.util.find_spec(WHEEL_PACKAGE) is None:
        pytest.skip(f"needs the demo target: {WHEEL_COMMAND}")
    model, tokenizer = mlx_spec.load(str(demo_target_path()))
    return Pair(model, tokenizer, mlx_spec.load_drafter(str(demo_drafter_path()), target=model))


def compare(
    pair: Pair, prompt: mx.array, tokens: int, sampler: Any = None, seed: int = 0, width: int | None = None
) -> tuple[list[int], mlx_spec.Statistics]:
    """Decode both ways and assert that ids, log-probabilities and the random state agree."""
    mx.random.seed(seed)
    want = list(stock_generate_step(prompt, pair.model, max_tokens=tokens, sampler=sampler))
    want_key = rng_key()
    mx.random.seed(seed)
    statistics = mlx_spec.Statistics()
    got = list(
        mlx_spec.generate_step(
            prompt,
            pair.model,
            max_tokens=tokens,
            sampler=sampler,
            draft_model=pair.drafter,
            draft_block_size=width,
            statistics=statistics,
        )
    )
    where = first_difference([token for token, _ in got], [token for token, _ in want])
    assert where is None, f"token {where} differs: {[token for token, _ in got]}, want {[token for token, _ in want]}"
    for index, ((_, mine), (_, theirs)) in enumerate(zip(got, want, strict=True)):
        difference = bit_difference(mine, theirs)
        assert difference is None, f"log-probabilities of token {index}: {difference}"
    assert rng_key() == want_key
    return [token for token, _ in got], statistics


def test_the_embedded_drafter_says_what_it_is() -> None:
    assert resolve_family(read_config(demo_drafter_path())).name == "eagle3"


@pytest.mark.slow
def test_greedy_text_is_that_of_the_one_token_loop_and_proposals_are_accepted(pair: Pair, thorough: bool) -> None:
    ids, statistics = compare(pair, pair.ids(CAPITAL), 9, width=None if thorough else CERTIFIED_SOON)
    assert pair.tokenizer.decode(ids).startswith("The capital of France is Paris.")
    assert statistics.verify_route == "block"
    accepted = statistics.accepted_tokens
    for text in PROMPTS[:3] if thorough else ():
        accepted += compare(pair, pair.ids(text), 10)[1].accepted_tokens
    assert accepted > 0


@pytest.mark.deep
def test_sampled_text_is_that_of_the_one_token_loop_with_the_same_seed(pair: Pair) -> None:
    _, statistics = compare(pair, pair.ids(PROMPTS[3]), 32, make_sampler(0.8, top_p=0.95), seed=11)
    assert statistics.accepted_tokens > 0


@pytest.mark.deep
@pytest.mark.parametrize("text", PROMPTS)
def test_long_greedy_text_is_that_of_the_one_token_loop(pair: Pair, text: str) -> None:
    assert compare(pair, pair.ids(text), 96)[1].rounds > 0


@pytest.mark.deep
@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("text", PROMPTS[:10])
def test_long_sampled_text_is_that_of_the_one_token_loop(pair: Pair, text: str, seed: int) -> None:
    assert compare(pair, pair.ids(text), 96, make_sampler(0.8, top_p=0.95), seed=seed)[1].rounds > 0
