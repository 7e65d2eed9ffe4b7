"""Every EAGLE-3 variant end to end: the text is the stock loop's, and a planted drafter is often right."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlx_spec.generate import generate_step
from mlx_spec.model.target import Target
from mlx_spec.pairing import load_drafter
from mlx_spec.stats import Statistics
from tests.double import PATTERNS, double, each_chip
from tests.drafters import eagle3_made
from tests.oracle import assert_same_output, run_stock
from tests.planted_eagle import PLANTED, planted_variant
from tests.rounds.runs import (
    CHOICES,
    PREFILLS,
    SpeculativeRun,
    assert_counts_add_up,
    assert_equals_stock,
    speculate,
    stock,
)
from tests.tiny import LONG, MIXES, PROMPT, randomise
from tests.tiny_eagle import planted_drafter

WIDTH = 4


def run(variant: str, choice: str, prefill: str = "chunks") -> SpeculativeRun:
    return speculate(
        MIXES[PLANTED[variant].mix],
        planted_variant(variant),
        draft_block_size=WIDTH,
        max_tokens=LONG,
        prefill_step_size=PREFILLS[prefill],
        **CHOICES[choice](),
    )


@pytest.mark.part(3)
@pytest.mark.parametrize(
    ("variant", "choice"),
    [(name, "greedy") for name in PLANTED] + [(name, "sampled_penalties") for name in ("eagle31", "latent", "affine")],
)
def test_text_is_that_of_the_stock_loop_and_proposals_are_accepted(variant: str, choice: str) -> None:
    got = run(variant, choice)
    assert_equals_stock(got, stock(PLANTED[variant].mix, choice, PREFILLS["chunks"]), LONG)
    assert_counts_add_up(got)
    if choice == "greedy":
        assert got.drafted > 0, str(got.statistics)


@pytest.mark.part(2)
@pytest.mark.parametrize("variant", ["eagle31", "two_layers", "latent"])
def test_how_the_prompt_was_cut_changes_no_proposal(variant: str) -> None:
    cut, whole = run(variant, "greedy", "chunks"), run(variant, "greedy", "whole")
    assert cut.statistics.accepted_by_depth == whole.statistics.accepted_by_depth


@pytest.mark.part(2)
@each_chip
@pytest.mark.parametrize("variant", ["two_layers", "eagle31", "latent"])
def test_text_is_that_of_the_stock_loop_where_blocks_round_differently(variant: str, chip: str) -> None:
    mix, drafter, statistics = MIXES[PLANTED[variant].mix], planted_variant(variant), Statistics()
    # A model of its own: what was found out about a model without the double does not hold with it.
    model = randomise(mix.build, mix.seed)
    with double(PATTERNS[chip]):
        want = run_stock(model, PROMPT, LONG)
        got = list(
            generate_step(
                mx.array(PROMPT),
                model,
                draft_model=drafter,
                draft_block_size=WIDTH,
                max_tokens=LONG,
                statistics=statistics,
            )
        )
    assert_same_output(got, want, LONG)
    assert statistics.accepted_tokens > 0


@pytest.mark.parametrize("stop_after", [2, 17, LONG])
@pytest.mark.parametrize("variant", ["two_layers", "eagle31", "latent"])
def test_after_a_run_the_drafter_is_where_one_is_that_read_the_text(
    variant: str, stop_after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter, opened = planted_variant(variant), []
    monkeypatch.setattr(drafter, "open", lambda target, start=0: opened.append(open_state(target, start)) or opened[-1])
    open_state = type(drafter).open.__get__(drafter)
    mix = MIXES[PLANTED[variant].mix]
    got = speculate(
        mix, drafter, stop_after, draft_block_size=WIDTH, max_tokens=LONG, prefill_step_size=PREFILLS["chunks"]
    )
    (state,) = opened
    state.abort()
    read = state.cache_tree(got.cache)["draft"][0].offset + state.pending
    assert read >= len(PROMPT)
    ids, target = [*PROMPT, *got.ids][:read], Target(mix.model())
    target.attach_taps(drafter.taps)
    hidden = target.forward(mx.array([[*ids, 7]]), mix.new_cache(), drafter.taps).hidden
    cold = open_state(target, 0)
    cold.read_prompt([ids], hidden[:, :read])
    caches = []
    for one in (state, cold):
        # What is pending is run with the next token that is read.
        one.read_prompt([[7]], hidden[:, read:])
        caches.append(one.cache_tree(got.cache)["draft"])
    for ours, theirs in zip(*caches, strict=True):
        assert ours.offset == theirs.offset == read
        for left, right in ((ours.keys, theirs.keys), (ours.values, theirs.values)):
            assert mx.allclose(left[..., :read, :], right[..., :read, :], rtol=1e-4, atol=1e-4).item()


@pytest.mark.part(1)
@pytest.mark.slow
@pytest.mark.parametrize("variant", ["latent", "heads_for_deepseek"])
def test_text_of_a_kimi_target_is_that_of_the_stock_loop(variant: str, tmp_path: Path) -> None:
    model = randomise(eagle3_made.kimi, seed=6)
    drafter = load_drafter(eagle3_made.write_made(tmp_path, variant), model)
    want = run_stock(model, PROMPT, LONG)
    statistics = Statistics()
    got = list(generate_step(mx.array(PROMPT), model, draft_model=drafter, max_tokens=LONG, statistics=statistics))
    assert_same_output(got, want, LONG)
    assert statistics.proposed_tokens > 0


@pytest.mark.slow
@pytest.mark.parametrize("mix", ["quantized_from_0", "quantized_from_20"])
def test_the_caches_of_a_drafter_are_not_quantized_with_the_targets(mix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    drafter, opened = planted_drafter(mix), []
    open_state = type(drafter).open.__get__(drafter)
    monkeypatch.setattr(drafter, "open", lambda target, start=0: opened.append(open_state(target, start)) or opened[-1])
    got = speculate(MIXES[mix], drafter, draft_block_size=WIDTH, max_tokens=LONG)
    assert all(hasattr(cache, "bits") for cache in got.cache)
    caches = opened[0].cache_tree(got.cache)["draft"]
    assert not any(hasattr(cache, "bits") for cache in caches)
    assert {cache.keys.dtype for cache in caches} == {mx.float32}


def test_a_quantized_drafter_is_quantized_and_its_target_is_as_it_was() -> None:
    drafter = planted_variant("mxfp8")
    assert drafter.network.modules.layers[0].self_attn.v_proj.mode == "mxfp8"
    assert MIXES["dense"].model().layers[0].self_attn.v_proj.weight.dtype == mx.float32


def test_a_round_costs_one_batched_forward_and_one_of_a_token_for_each_further_proposal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    network, lengths, heads = planted_variant("two_layers").network, [], []
    forward, choose = type(network).run, type(network).choose

    def run_counted(self: Any, tokens: mx.array, *rest: Any) -> mx.array:
        lengths.append(tokens.shape[1])
        return forward(self, tokens, *rest)

    def choose_counted(self: Any, states: mx.array, *rest: Any) -> mx.array:
        heads.append(states.shape[1])
        return choose(self, states, *rest)

    monkeypatch.setattr(type(network), "run", run_counted)
    monkeypatch.setattr(type(network), "choose", choose_counted)
    got = run("two_layers", "greedy", "whole")
    in_prompt, in_rounds = lengths[:2], lengths[2:]
    assert in_prompt == [len(PROMPT) - 2, 1]
    assert len(in_rounds) == len(heads) == got.statistics.proposed_tokens
    assert set(heads) == {1}
    batched = [length for index, length in enumerate(in_rounds) if index % (WIDTH - 1) == 0]
    assert sum(in_rounds) - sum(batched) == len(in_rounds) - len(batched), in_rounds
