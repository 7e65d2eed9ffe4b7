"""Speculative decoding hands out the stock loop's tokens, whatever drafts, however wide, however a token is chosen."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import pytest

from mlx_spec.generate import generate_step
from tests.oracle import OracleRun, assert_same_output, rng_key, run_stock
from tests.pairwise import all_pairs, pairs_of, pairwise
from tests.rounds.runs import (
    CHOICES,
    DRAFTERS,
    PREFILLS,
    SEED,
    SPARE,
    WIDTHS,
    SpeculativeRun,
    assert_accepts_as_scripted,
    assert_counts_add_up,
    assert_equals_stock,
    speculate,
    stock,
)
from tests.scripted import AlternatingDrafter, RightDrafter, ScriptedDrafter, ScriptedState
from tests.tiny import LONG, MIXES, PROMPT, REQUIRED, VOCAB

AXES = {
    "mix": REQUIRED,
    "drafter": tuple(DRAFTERS),
    "width": WIDTHS,
    "prefill": tuple(PREFILLS),
    "choice": tuple(CHOICES),
}


def shares_stock_runs(row: Mapping[str, Any]) -> bool:
    """One way to read the prompt for each mix and choice: a stock run then serves many rows, and every pair remains."""
    if not {"mix", "prefill", "choice"} <= row.keys():
        return True
    place = REQUIRED.index(row["mix"]) + tuple(CHOICES).index(row["choice"])
    return row["prefill"] == tuple(PREFILLS)[place % len(PREFILLS)]


ROWS = pairwise(AXES, shares_stock_runs)
OTHERS = tuple(name for name in MIXES if name not in REQUIRED)
MODES = ("plain", "right", "alternating", "callable", "ngram", "eagle3")


def run_case(case: dict[str, Any], dtype: mx.Dtype = mx.float32) -> SpeculativeRun:
    """Run one row of the axes and compare it with stock."""
    mix, step = case["mix"], PREFILLS[case["prefill"]]
    run = stock(mix, case["choice"], step, dtype)
    got = speculate(
        MIXES[mix],
        DRAFTERS[case["drafter"]](mix, run.ids, dtype),
        dtype=dtype,
        draft_block_size=case["width"],
        max_tokens=LONG,
        prefill_step_size=step,
        **CHOICES[case["choice"]](),
    )
    assert_equals_stock(got, run, LONG)
    assert_counts_add_up(got)
    if not MIXES[mix].kv.get("quantized_kv_start"):
        assert_accepts_as_scripted(got, case["drafter"], case["width"])
    return got


def drafter_of(mode: str, mix: str = "dense", choice: str = "greedy") -> Any:
    return None if mode == "plain" else DRAFTERS[mode](mix, stock(mix, choice).ids, mx.float32)


# The product


@pytest.mark.part(36)
@pytest.mark.parametrize("case", ROWS, ids=["-".join(map(str, row.values())) for row in ROWS])
def test_run_equals_stock_in_ids_logprobs_cache_and_random_state(case: dict[str, Any]) -> None:
    run_case(case)


def test_every_pair_of_settings_is_among_the_runs() -> None:
    assert set(all_pairs(AXES)) <= {pair for row in ROWS for pair in pairs_of(row)}
    assert len(ROWS) <= 400


@pytest.mark.deep
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("mix", REQUIRED)
def test_every_combination_equals_stock(mix: str, drafter: str) -> None:
    for width in WIDTHS:
        for prefill in PREFILLS:
            for choice in CHOICES:
                case = {"mix": mix, "drafter": drafter, "width": width, "prefill": prefill, "choice": choice}
                try:
                    run_case(case)
                except AssertionError as error:
                    error.add_note(f"in {case}")
                    raise


@pytest.mark.part(4)
@pytest.mark.parametrize("mix", OTHERS)
@pytest.mark.parametrize("choice", ["greedy", "sampled_penalties"])
def test_every_other_cache_mix_equals_stock(mix: str, choice: str) -> None:
    run_case({"mix": mix, "drafter": "alternating", "width": 5, "prefill": "ragged", "choice": choice})


@pytest.mark.part(3)
@pytest.mark.slow
@pytest.mark.parametrize("mix", [name for name in MIXES if MIXES[name].half])
@pytest.mark.parametrize(("drafter", "width", "choice"), [("alternating", 5, "greedy"), ("cycling", 3, "top_p")])
def test_half_precision_equals_stock(mix: str, drafter: str, width: int, choice: str) -> None:
    case = {"mix": mix, "drafter": drafter, "width": width, "prefill": "whole", "choice": choice}
    run_case(case, mx.bfloat16)


DRAFTED_MIXES = (*REQUIRED, "mla_moe", "dense_qk_norm")


@pytest.mark.part(3)
@pytest.mark.parametrize(
    ("mix", "dtype"),
    [(mix, mx.float32) for mix in DRAFTED_MIXES] + [(mix, mx.bfloat16) for mix in DRAFTED_MIXES if MIXES[mix].half],
)
def test_real_drafter_is_often_right_and_often_wrong(mix: str, dtype: mx.Dtype) -> None:
    case = {"mix": mix, "drafter": "eagle3", "width": 3, "prefill": "chunks", "choice": "greedy"}
    got = run_case(case, dtype)
    assert 2 <= got.drafted < got.statistics.proposed_tokens / 2, str(got.statistics)


@pytest.mark.parametrize("budget", [1, 5, 6, 22])
@pytest.mark.parametrize("choice", ["sampled_penalties", "opaque_both"])
@pytest.mark.parametrize("drafter", ["none", "eagle3", "right", "alternating"])
def test_run_without_a_cache_of_the_callers_equals_stock(drafter: str, choice: str, budget: int) -> None:
    run, mix = stock("quantized_from_20", choice), MIXES["quantized_from_20"]
    made = None if drafter == "none" else DRAFTERS[drafter](mix.name, run.ids, mx.float32)
    width = {} if made is None else {"draft_block_size": 5}
    mx.random.seed(SEED)
    options = {"draft_model": made, "max_tokens": budget, **width, **CHOICES[choice](), **mix.kv}
    pairs = list(generate_step(mx.array(PROMPT), mix.model(), **options))
    assert_same_output(pairs, run, budget)
    assert rng_key() == run.rng[budget]


class BeyondTheEdge(ScriptedDrafter):
    """Right, but for the first and the last id of the vocabulary it names ids next to them that no target has."""

    def script(self, state: ScriptedState, row: int, count: int) -> list[int]:
        beyond = {0: -1, self.vocab - 1: 2**31 - 1}
        return [beyond.get(token, token) for token in state.right(row, count)]


@pytest.mark.parametrize("edge", [0, VOCAB - 1])
def test_id_outside_the_vocabulary_is_never_taken_for_the_nearest_one_inside(edge: int) -> None:
    mix, ids = MIXES["dense"], [7, edge, 8, 9, edge, 10, 11, 12, edge, edge, 13, 14, 15, 16, 17]
    wanted = iter(mx.array(ids))

    def dictated(ids: mx.array, logits: mx.array) -> mx.array:
        return mx.where(mx.arange(VOCAB) == next(wanted), 0.0, -mx.inf)[None]

    got = speculate(mix, BeyondTheEdge(ids, VOCAB), max_tokens=12, draft_block_size=4, logits_processors=[dictated])
    assert got.ids == ids[:12]
    assert not any(from_draft for token, _, from_draft in got.tokens if token == edge)
    assert got.drafted > 0


def test_block_with_an_id_outside_the_vocabulary_misses_there() -> None:
    mix, run = MIXES["dense"], stock("dense", "greedy")
    edges = [index for index, token in enumerate(run.ids[:LONG]) if token in (0, VOCAB - 1)]
    assert edges, "the text needs an id at an edge of the vocabulary"
    got = speculate(mix, BeyondTheEdge(run.ids, VOCAB), max_tokens=LONG, draft_block_size=5)
    assert_equals_stock(got, run, LONG)
    assert not any(got.tokens[index][2] for index in edges)
    assert got.drafted > LONG // 2


# Ways to say the width


@pytest.mark.parametrize("width", WIDTHS)
def test_width_minus_one_under_mlx_lms_name_is_the_same_run(width: int) -> None:
    run, mix = stock("dense", "top_p"), MIXES["dense"]
    named = [{"draft_block_size": width}, {"num_draft_tokens": width - 1}]
    ours, theirs = (
        speculate(mix, AlternatingDrafter(run.ids, VOCAB), max_tokens=LONG, **CHOICES["top_p"](), **name)
        for name in named
    )
    for got in (ours, theirs):
        assert_equals_stock(got, run, LONG)
    assert ours.statistics.proposed_by_depth == theirs.statistics.proposed_by_depth
    assert [token[2] for token in ours.tokens] == [token[2] for token in theirs.tokens]


def test_width_left_open_is_the_drafters_own() -> None:
    run = stock("dense", "greedy")
    got = speculate(MIXES["dense"], RightDrafter(run.ids, VOCAB, width=6), max_tokens=LONG)
    assert_equals_stock(got, run, LONG)
    assert_accepts_as_scripted(got, "right", 6)


# Budgets


@functools.cache
def short_stock(mix: str, choice: str, emitted: int) -> OracleRun:
    made = MIXES[mix]
    return run_stock(made.model(), PROMPT, emitted, seed=SEED, **CHOICES[choice](), **made.kv)


@pytest.mark.part(3)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("choice", ["greedy", "sampled_penalties", "opaque_both"])
@pytest.mark.parametrize("mix", ["dense", "quantized_from_20"])
def test_budget_of_none_one_or_no_limit_is_kept(mix: str, choice: str, mode: str) -> None:
    width = {} if mode == "plain" else {"draft_block_size": 5}
    for budget, emitted in ((0, 0), (1, 1), (-1, 30)):
        stop_after = emitted if budget == -1 else None
        drafter = drafter_of(mode, mix, choice)
        got = speculate(MIXES[mix], drafter, stop_after, max_tokens=budget, **width, **CHOICES[choice]())
        assert_equals_stock(got, short_stock(mix, choice, emitted), emitted)
        assert_counts_add_up(got)


@pytest.mark.part(2)
@pytest.mark.parametrize("drafter", ["right", "alternating", "cycling", "eagle3"])
def test_statistics_count_what_was_handed_out_for_every_budget(drafter: str) -> None:
    run = stock("dense", "greedy")
    for budget in range(1, 20):
        got = speculate(
            MIXES["dense"], DRAFTERS[drafter]("dense", run.ids, mx.float32), max_tokens=budget, draft_block_size=5
        )
        assert tuple(got.ids) == run.ids[:budget]
        assert_counts_add_up(got)


# Prompts


@pytest.mark.part(3)
@pytest.mark.parametrize("length", [1, 2, 4, 5, 8, 9])
@pytest.mark.parametrize("mix", REQUIRED)
def test_prompt_around_a_multiple_of_the_chunk_equals_stock(mix: str, length: int) -> None:
    step, emitted = 4, 12
    prompt = (*PROMPT, 2, 50, 71)[:length]
    options = CHOICES["sampled_penalties"]
    run = run_stock(
        MIXES[mix].model(), prompt, emitted + SPARE, seed=SEED, prefill_step_size=step, **options(), **MIXES[mix].kv
    )
    for drafter in (AlternatingDrafter(run.ids, VOCAB), DRAFTERS["eagle3"](mix, run.ids, mx.float32)):
        got = speculate(
            MIXES[mix],
            drafter,
            prompt=prompt,
            max_tokens=emitted,
            draft_block_size=5,
            prefill_step_size=step,
            **options(),
        )
        assert_equals_stock(got, run, emitted)
        assert_counts_add_up(got)


# End tokens


class ProposesAlways(ScriptedDrafter):
    """One id, whatever the text is."""

    token = 0

    def script(self, state: ScriptedState, row: int, count: int) -> list[int]:
        return [self.token] * count


@pytest.mark.part(3)
@pytest.mark.parametrize("mix", REQUIRED)
def test_proposed_end_token_that_the_target_rejects_ends_nothing(mix: str) -> None:
    run = stock(mix, "greedy")
    end = next(token for token in range(VOCAB) if token not in run.ids)
    drafter = ProposesAlways(run.ids, VOCAB)
    drafter.token = end
    got = speculate(MIXES[mix], drafter, max_tokens=LONG, draft_block_size=5, eos_token_ids=[end])
    assert_equals_stock(got, run, LONG)
    assert got.drafted == 0


@pytest.mark.parametrize("depth", [0, 1, 2, 3, 4])
def test_end_token_at_every_depth_of_an_accepted_block_ends_text_cache_and_counts_there(depth: int) -> None:
    mix = MIXES["dense"]
    run = run_stock(mix.model(), PROMPT, LONG + SPARE, seed=SEED)
    # Rounds of a right drafter begin after tokens 0, 5, 10, ...: depth d of the second round is token 6 + d.
    emitted = next(n for n in range(7 + depth, LONG, 5) if run.ids[n - 1] not in run.ids[: n - 1])
    got = speculate(
        mix, RightDrafter(run.ids, VOCAB), max_tokens=LONG, draft_block_size=5, eos_token_ids=[run.ids[emitted - 1]]
    )
    assert_equals_stock(got, run, emitted)
    assert_counts_add_up(got)
    assert got.cache[0].offset == len(PROMPT) + emitted
    assert got.tokens[-1][2] == (depth < 4)


# The comparison can fail


def test_run_of_another_length_or_seed_is_told_apart() -> None:
    run = stock("dense", "top_p")
    got = speculate(MIXES["dense"], None, 20, max_tokens=LONG, **CHOICES["top_p"]())
    with pytest.raises(AssertionError, match="token 20 differs"):
        assert_equals_stock(got, run, LONG)
    short = run_stock(MIXES["dense"].model(), PROMPT, 20, seed=SEED, **CHOICES["top_p"]())
    assert_equals_stock(got, short, 20)
    got.cache[1].offset -= 1
    with pytest.raises(AssertionError, match="layer 1"):
        assert_equals_stock(got, short, 20)
    got.cache[1].offset += 1
    got.rng = short.rng[19]
    with pytest.raises(AssertionError, match="random key"):
        assert_equals_stock(got, short, 20)
