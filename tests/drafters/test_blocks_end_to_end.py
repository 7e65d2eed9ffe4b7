"""Block drafters in the loop: the text is that of one-token decoding, and a good drafter is accepted."""

from __future__ import annotations

import functools
from typing import Any
from unittest import mock

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.sample_utils import make_sampler

from mlx_spec.config import SpeculativeConfig
from mlx_spec.drafters.dflash.model import BlockDrafter, BlockNetwork
from mlx_spec.errors import InvalidRequest, UnsupportedOption
from mlx_spec.generate import speculative_generate_step
from mlx_spec.model.target import Target
from mlx_spec.stats import Statistics
from tests.double import PATTERNS, double, each_chip
from tests.oracle import OracleRun, assert_same_output, run_stock
from tests.same_cache import assert_same_cache
from tests.tiny import MIXES, randomise
from tests.tiny_blocks import BLOCK, FAMILIES, planted_drafter, random_drafter
from tests.zoo.menagerie import whole_zoo

PROMPT = (5, 17, 42, 8, 61, 3, 29, 11, 70, 2, 33, 50)
TOKENS = 30
SEED = 11

TARGETS = {
    "dflash": "dense_qk_norm",
    "dflash_causal": "hybrid",
    "dflash2": "dense_qk_norm",
    "dspark": "hybrid",
    "dspark_gated": "dense_qk_norm",
    "dspark_rnn": "sliding",
    "gemma4_dspark": "gemma4_text",
    "muse_glimmer_assistant": "muse_glimmer",
    "laguna_dflash": "laguna",
}
"""Family -> a mix of caches, or an architecture of the zoo."""

PAIRS = [*TARGETS.items(), ("dflash", "gemma4_text"), ("dflash", "sliding")]


@functools.cache
def model(name: str) -> nn.Module:
    return new_model(name)


def new_model(name: str) -> nn.Module:
    if name in MIXES:
        return randomise(MIXES[name].build, MIXES[name].seed)
    return next(specimen for specimen in whole_zoo() if specimen.module == name).build("float32")


@functools.cache
def stock(name: str, sampled: bool = False) -> OracleRun:
    """The stock run after the prompt."""
    options = {"sampler": make_sampler(temp=0.8)} if sampled else {}
    return run_stock(model(name), PROMPT, TOKENS, seed=SEED, **options)


def drafter(family: str, name: str, planted: bool) -> BlockDrafter:
    target = Target(model(name))
    return planted_drafter(family, target, stock(name).ids) if planted else random_drafter(family, target)


def speculate(name: str, source: BlockDrafter, run: OracleRun, **options: Any) -> Statistics:
    """Run ours on a target of that name and compare ids, log-probabilities and cache with the stock run."""
    return speculate_on(model(name), source, run, **options)


def speculate_on(target: nn.Module, source: BlockDrafter, run: OracleRun, **options: Any) -> Statistics:
    statistics, cache = Statistics(), make_prompt_cache(target)
    mx.random.seed(SEED)
    steps = speculative_generate_step(
        mx.array(PROMPT),
        target,
        source,
        max_tokens=TOKENS,
        prompt_cache=cache,
        statistics=statistics,
        verify="exact",
        **options,
    )
    got = [(token, logprobs) for token, logprobs, _ in steps]
    assert_same_output(got, run)
    assert_same_cache(cache, run.cache_after(TOKENS))
    assert statistics.drafter_failures == 0, statistics.notes
    return statistics


def test_every_family_is_tried() -> None:
    assert TARGETS.keys() == FAMILIES.keys()


@pytest.mark.part(3)
@pytest.mark.parametrize(("family", "name"), PAIRS)
def test_the_text_is_that_of_one_token_decoding_and_a_good_drafter_is_accepted(family: str, name: str) -> None:
    for planted in (True, False):
        statistics = speculate(name, drafter(family, name, planted), stock(name), draft_block_size=None)
        assert statistics.proposed_tokens > 0
        if planted:
            assert statistics.accepted_tokens >= 3


@pytest.mark.part(2)
@each_chip
@pytest.mark.parametrize(("family", "name"), TARGETS.items())
def test_the_text_is_the_same_where_several_rows_round_differently_from_one(family: str, name: str, chip: str) -> None:
    # What was found out about a target elsewhere must not answer here.
    source, target = drafter(family, name, planted=True), new_model(name)
    with double(PATTERNS[chip]):
        run = run_stock(target, PROMPT, TOKENS, seed=SEED)
        # The double makes some architectures step through, which speculates only when a width is named.
        statistics = speculate_on(target, source, run, draft_block_size=source.default_width)
    assert statistics.accepted_tokens > 0


@pytest.mark.part(2)
@pytest.mark.parametrize("family", ["dflash", "dspark", "dflash2"])
def test_a_sampled_text_is_the_same(family: str) -> None:
    name = TARGETS[family]
    source = drafter(family, name, planted=True)
    speculate(name, source, stock(name, sampled=True), sampler=make_sampler(temp=0.8), draft_block_size=None)


@pytest.mark.part(2)
@pytest.mark.slow
@pytest.mark.parametrize("prefill", [1, 3, 5])
def test_the_drafts_do_not_depend_on_the_prompts_chunks(prefill: int) -> None:
    source = drafter("dflash_causal", "hybrid", planted=False)
    whole = speculate("hybrid", source, stock("hybrid"), draft_block_size=None)
    parts = speculate("hybrid", source, stock("hybrid"), draft_block_size=None, prefill_step_size=prefill)
    assert (parts.proposed_tokens, parts.accepted_tokens) == (whole.proposed_tokens, whole.accepted_tokens)


@pytest.mark.part(5)
@pytest.mark.parametrize(("family", "name"), TARGETS.items())
def test_a_round_is_one_forward_of_the_drafter(family: str, name: str) -> None:
    source, ran = drafter(family, name, planted=True), []
    original = BlockNetwork.run

    def counting(network: BlockNetwork, *args: Any) -> mx.array:
        ran.append(1)
        return original(network, *args)

    with mock.patch.object(BlockNetwork, "run", counting):
        statistics = speculate(name, source, stock(name), draft_block_size=source.default_width)
    drafted = statistics.proposed_by_depth[0]
    assert len(ran) == drafted > 0


@pytest.mark.parametrize("width", [2, 3, BLOCK])
def test_every_width_up_to_the_trained_one_is_exact(width: int) -> None:
    statistics = speculate(
        "dense_qk_norm", drafter("dflash", "dense_qk_norm", True), stock("dense_qk_norm"), draft_block_size=width
    )
    assert statistics.accepted_tokens > 0


def test_a_width_the_checkpoint_was_not_trained_for_is_refused_before_the_first_token() -> None:
    for family, width in (("dflash", BLOCK + 1), ("dflash2", BLOCK - 1), ("dspark", BLOCK + 2)):
        name = TARGETS[family]
        with pytest.raises(UnsupportedOption, match=f"got {width}"):
            speculate(name, drafter(family, name, planted=False), stock(name), draft_block_size=width)


def test_a_method_with_another_width_than_the_checkpoints_is_refused() -> None:
    source = drafter("dflash", "dense_qk_norm", planted=True)
    config = SpeculativeConfig(speculative_method="dflash", num_speculative_tokens=2)
    with pytest.raises(InvalidRequest, match="num_speculative_tokens=2, but the checkpoint of .* fixes it at 4"):
        speculate("dense_qk_norm", source, stock("dense_qk_norm"), speculative=config)
    for tokens in (4, None):
        config = SpeculativeConfig(speculative_method="dflash", num_speculative_tokens=tokens)
        statistics = speculate("dense_qk_norm", source, stock("dense_qk_norm"), speculative=config)
        assert len(statistics.proposed_by_depth) == 4


def test_a_block_that_is_cut_by_confidence_is_exact() -> None:
    source = drafter("dspark_gated", "dense_qk_norm", planted=False)
    whole = speculate("dense_qk_norm", source, stock("dense_qk_norm"), draft_block_size=None)
    source.confidence_threshold = 0.5
    cut = speculate("dense_qk_norm", source, stock("dense_qk_norm"), draft_block_size=None)
    assert cut.proposed_tokens < whole.proposed_tokens


@pytest.mark.parametrize("taps", [(-1, 1), (-1,)])
def test_a_drafter_that_reads_the_embedding_is_exact(taps: tuple[int, ...]) -> None:
    name = "dense_qk_norm"
    source = random_drafter("dflash", Target(model(name)), target_layer_ids=list(taps))
    assert source.taps == taps[1:]
    assert speculate(name, source, stock(name), draft_block_size=None).proposed_tokens > 0


@pytest.mark.parametrize("family", ["dflash_causal", "dspark_gated", "dflash2"])
def test_half_precision_is_exact(family: str) -> None:
    target = randomise(MIXES["dense_qk_norm"].build, MIXES["dense_qk_norm"].seed, mx.bfloat16)
    run = run_stock(target, PROMPT, TOKENS, seed=SEED)
    source = random_drafter(family, Target(target))
    assert speculate_on(target, source, run, draft_block_size=source.default_width).proposed_tokens > 0


def test_a_warm_cache_starts_the_drafter_at_its_offset() -> None:
    name = "dense_qk_norm"
    source = drafter("dflash", name, planted=True)
    cache, statistics = make_prompt_cache(model(name)), Statistics()
    model(name)(mx.array([PROMPT[:7]]), cache=cache)
    steps = speculative_generate_step(
        mx.array(PROMPT[7:]), model(name), source, max_tokens=TOKENS, prompt_cache=cache, statistics=statistics
    )
    assert [token for token, _, _ in steps] == list(stock(name).ids)
    assert statistics.accepted_tokens > 0
