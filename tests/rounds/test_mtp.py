"""Prediction layers end to end: the stock loop's tokens on a target of each family, and proposals that are accepted."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.sample_utils import make_sampler

from mlx_spec.drafters.base import Drafter
from mlx_spec.drafters.mtp.model import MtpNetwork
from mlx_spec.generate import generate_step, speculative_generate_step
from mlx_spec.pairing import load_drafter
from mlx_spec.stats import Statistics
from tests.double import PATTERNS, double, each_chip
from tests.drafters.native import build_target
from tests.oracle import assert_same_output, rng_key, run_stock
from tests.rounds.runs import SEED, penalties
from tests.same_cache import assert_same_cache
from tests.tiny_mtp import FAMILIES, checkpoint, target, write, write_planted

PROMPT = (5, 17, 42, 8, 61, 3, 29, 11, 50)
LENGTH = 24

Write = Callable[[Path, str], Path]


@functools.cache
def drafter(family: str, write_it: Write = write_planted, mode: str | None = None) -> Drafter:
    quantize = {"group_size": 32, "bits": 8, "mode": mode} if mode else None
    with tempfile.TemporaryDirectory() as folder:
        return load_drafter(write_it(Path(folder) / "checkpoint", family), target(family), quantize=quantize)


def speculate(model: Any, chosen: Drafter, width: int, **options: Any) -> Statistics:
    """Run ours and compare with stock."""
    run = run_stock(model, PROMPT, LENGTH, seed=SEED, **options)
    mx.random.seed(SEED)
    cache, statistics = make_prompt_cache(model), Statistics()
    steps = speculative_generate_step(
        mx.array(PROMPT),
        model,
        chosen,
        num_draft_tokens=width - 1,
        max_tokens=LENGTH,
        statistics=statistics,
        prompt_cache=cache,
        **options,
    )
    assert_same_output([(token, logprobs) for token, logprobs, _ in steps], run)
    assert rng_key() == run.rng[LENGTH]
    assert_same_cache(cache, run.cache_after(LENGTH))
    assert statistics.loop == "mtp"
    return statistics


@pytest.mark.part(3)
@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_a_good_layer_is_accepted_and_the_tokens_are_the_stock_loops(family: str) -> None:
    statistics = speculate(target(family).model, drafter(family), 4)
    # One token of 64 is right by chance.
    assert statistics.accepted_tokens >= 4
    assert statistics.accepted_tokens / statistics.proposed_tokens > 0.06


@pytest.mark.part(2)
@pytest.mark.parametrize("family", ["qwen35_dense_real", "deepseek_v32", "kimi_k25"])
def test_a_random_layer_changes_nothing(family: str) -> None:
    speculate(target(family).model, drafter(family, write), 3)


@pytest.mark.part(2)
@pytest.mark.parametrize("family", ["qwen35_moe_real", "glm_moe_dsa", "mimo"])
@pytest.mark.parametrize("prefill", [3, 4])
def test_sampling_with_penalties_and_a_chunked_prompt_gives_the_stock_loops_tokens(family: str, prefill: int) -> None:
    options = {"sampler": make_sampler(temp=0.8, top_p=0.95), "logits_processors": penalties()}
    speculate(target(family).model, drafter(family), 3, prefill_step_size=prefill, **options)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_next", "deepseek_v3"])
def test_chunks_of_the_prompt_do_not_change_what_is_accepted(family: str) -> None:
    model = target(family).model
    runs = [speculate(model, drafter(family), 3, prefill_step_size=size) for size in (2, 3, 2048)]
    assert len({run.accepted_tokens for run in runs}) == 1


def test_the_targets_own_folder_may_be_named_as_drafter(tmp_path: Path) -> None:
    # It is loaded within the call, which must not disturb what is drawn.
    family, sampler = "qwen35_moe_real", make_sampler(temp=1.0)
    model, folder = target(family).model, write_planted(tmp_path / "own", family)
    run = run_stock(model, PROMPT, LENGTH, seed=SEED, sampler=sampler)
    mx.random.seed(SEED)
    steps = generate_step(mx.array(PROMPT), model, max_tokens=LENGTH, sampler=sampler, draft_model=str(folder))
    assert_same_output(list(steps), run)


@pytest.mark.filterwarnings("ignore:.*not quantized, their rows are no whole groups")
@pytest.mark.parametrize("mode", ["affine", "mxfp8"])
def test_a_quantized_layer_is_still_accepted(mode: str) -> None:
    family = "qwen35_dense_real"
    statistics = speculate(target(family).model, drafter(family, mode=mode), 3)
    assert statistics.accepted_tokens >= 4


@pytest.mark.part(3)
@each_chip
@pytest.mark.parametrize("family", FAMILIES)
def test_where_blocks_round_differently_the_tokens_are_still_the_stock_loops(family: str, chip: str) -> None:
    source = drafter(family)
    # What is found equal on one machine is remembered with the model.
    fresh = build_target(*checkpoint(family)).model
    with double(PATTERNS[chip]):
        statistics = speculate(fresh, source, 4)
    assert statistics.accepted_tokens >= 4


@pytest.mark.parametrize("width", [2, 4])
def test_a_round_costs_one_forward_over_what_was_kept_and_one_per_further_proposal(
    monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    lengths: list[int] = []
    original = MtpNetwork.run

    def counted(self: MtpNetwork, tokens: mx.array, *rest: Any) -> mx.array:
        lengths.append(tokens.shape[1])
        return original(self, tokens, *rest)

    monkeypatch.setattr(MtpNetwork, "run", counted)
    statistics = speculate(target("qwen3_next").model, drafter("qwen3_next"), width)
    # The prompt's last token is read by itself.
    chunk, last, *rest = lengths
    assert (chunk, last) == (len(PROMPT) - 2, 1)
    assert len(rest) == statistics.proposed_tokens
    if width == 4:
        # Within a round all but the first forward is of one pair; the first is of what the last round kept.
        assert sum(length > 1 for length in rest) > 3
        assert sum(rest) <= LENGTH + statistics.proposed_tokens
