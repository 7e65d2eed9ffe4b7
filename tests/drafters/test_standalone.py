"""A language model as drafter: its state follows the committed tokens, whatever was accepted, in any kind of cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx import nn
from mlx.utils import tree_flatten, tree_unflatten

from mlx_spec import Statistics, generate_step
from mlx_spec.cache.adopt import needs_mixers
from mlx_spec.drafters.standalone import PENDING_LIMIT, StandaloneDrafter, StandaloneState
from mlx_spec.errors import IncompatiblePair
from mlx_spec.model.anatomy import ANATOMY_BY_MODULE
from mlx_spec.model.target import Target
from tests.double import PATTERNS, double, each_chip
from tests.host_reads import count_host_reads
from tests.oracle import assert_same_output, independent_copy, run_stock
from tests.rounds.runs import CHOICES, assert_equals_stock, speculate, stock
from tests.same_cache import assert_same_cache
from tests.tiny import LONG, MIXES, PROMPT, REQUIRED, VOCAB, from_mlx_lm, randomise

DRAFTING = tuple(name for name, mix in MIXES.items() if not mix.kv)
"""Mixes by the caches their model makes of itself."""


def open_state(mix: str) -> StandaloneState:
    model = MIXES[mix].model()
    return StandaloneDrafter(model).open(Target(model))


def read_plainly(mix: str, caches: list[Any], *blocks: Sequence[int]) -> None:
    """Let plain mlx-lm read these blocks of tokens."""
    for block in blocks:
        mx.eval(MIXES[mix].model()(mx.array([list(block)]), cache=caches))


def run_round(state: StandaloneState, bonus: int, count: int, accepted: int) -> list[int]:
    """Propose and keep this many proposals; the tokens committed."""
    proposals = state.propose([bonus], count).ids
    mx.eval(proposals, state.arrays())
    kept = [bonus, *proposals[0, :accepted].tolist()]
    state.catch_up([kept], None)
    mx.eval(state.arrays())
    return kept


# The state


ROUND = st.integers(1, 6).flatmap(lambda count: st.tuples(st.just(count), st.integers(0, count)))
TOKEN = st.integers(0, VOCAB - 1)


@pytest.mark.part(3)
@pytest.mark.parametrize("mix", DRAFTING)
@settings(max_examples=3)
@given(rounds=st.lists(st.tuples(TOKEN, ROUND), min_size=3, max_size=6), chunk=st.sampled_from([3, 4, 7]))
def test_after_every_round_the_caches_are_those_of_one_token_decode_over_the_committed_tokens(
    mix: str, rounds: list[tuple[int, tuple[int, int]]], chunk: int
) -> None:
    state, plain = open_state(mix), MIXES[mix].new_cache()
    for at in range(0, len(PROMPT), chunk):
        state.read_prompt([list(PROMPT[at : at + chunk])], None)
        read_plainly(mix, plain, PROMPT[at : at + chunk])
    pending: list[int] = []
    for bonus, (count, accepted) in rounds:
        block, *rest = run_round(state, bonus, count, accepted)
        # Latent attention takes another branch for a block than for a single token.
        first = [[*pending, block]] if mix == "mla_moe" else [[token] for token in (*pending, block)]
        read, pending = rest[: count - 1], rest[count - 1 :]
        assert state.pending == len(pending)
        read_plainly(mix, plain, *first, *([token] for token in read))
        assert_same_cache(state.cache_tree([])["draft"], plain)


@pytest.mark.part(6)
@pytest.mark.parametrize("mix", DRAFTING)
def test_a_round_of_each_outcome_leaves_what_a_cold_drafter_has(mix: str) -> None:
    for accepted in (0, 2, 4):
        state = open_state(mix)
        state.read_prompt([list(PROMPT)], None)
        text = [*PROMPT, *run_round(state, 11, 4, accepted)]
        cold = open_state(mix)
        cold.read_prompt([text], None)
        got, want = state.propose([23], 5).ids, cold.propose([23], 5).ids
        assert got.tolist() == want.tolist(), f"{accepted} accepted"


@pytest.mark.parametrize("mix", DRAFTING)
def test_tokens_that_were_not_proposed_are_run_as_they_are(mix: str) -> None:
    state, cold = open_state(mix), open_state(mix)
    state.read_prompt([list(PROMPT)], None)
    proposals = state.propose([11], 4).ids[0].tolist()
    other = [11, proposals[0], (proposals[1] + 1) % VOCAB, 7]
    state.catch_up([other], None)
    assert state.pending == 2
    cold.read_prompt([[*PROMPT, *other]], None)
    assert state.propose([23], 5).ids.tolist() == cold.propose([23], 5).ids.tolist()


@pytest.mark.parametrize("mix", DRAFTING)
@pytest.mark.parametrize("parked", [5, 2 * PENDING_LIMIT + 9])
def test_a_parked_stretch_is_read_before_the_next_proposal(mix: str, parked: int) -> None:
    state, cold = open_state(mix), open_state(mix)
    stretch = [(7 * index + 3) % VOCAB for index in range(parked)]
    state.read_prompt([list(PROMPT)], None)
    run_round(state, 11, 3, 0)
    for token in stretch:
        state.catch_up([[token]], None)
        assert state.pending <= PENDING_LIMIT
    cold.read_prompt([[*PROMPT, 11, *stretch]], None)
    assert state.propose([23], 5).ids.tolist() == cold.propose([23], 5).ids.tolist()
    run_round(state, 23, 3, 1)
    assert state.pending == 0


@pytest.mark.parametrize("mix", DRAFTING)
def test_proposing_again_and_aborting_change_nothing(mix: str) -> None:
    state = open_state(mix)
    state.read_prompt([list(PROMPT)], None)
    mx.eval(state.arrays())
    before = independent_copy(state.cache_tree([])["draft"])
    first = state.propose([11], 4).ids.tolist()
    assert state.propose([11], 4).ids.tolist() == first
    state.abort()
    state.abort()
    mx.eval(state.arrays())
    assert_same_cache(state.cache_tree([])["draft"], before)
    assert state.propose([11], 2).ids.tolist() == [first[0][:2]]


class Lost:
    """Stands for logits that cannot be had."""

    def __getitem__(self, place: Any) -> mx.array:
        raise RuntimeError("the third token cannot be had")


@pytest.mark.parametrize("within", [True, False])
@pytest.mark.parametrize("mix", ["dense", "mamba", "sliding"])
def test_a_forward_that_fails_leaves_the_state_as_it_was(
    mix: str, within: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = open_state(mix)
    state.read_prompt([list(PROMPT)], None)
    want = state.propose([11], 4).ids.tolist()
    state.abort()
    kind = type(MIXES[mix].model())
    forward, calls = kind.__call__, iter([0, 1, 2])

    def failing(self: nn.Module, *inputs: Any, **options: Any) -> Any:
        logits = forward(self, *inputs, **options)
        if next(calls) < 2:
            return logits
        # The caches are written by now.
        return Lost()[-1] if within else Lost()

    monkeypatch.setattr(kind, "__call__", failing)
    with pytest.raises(RuntimeError, match="third token"):
        state.propose([11], 4)
    assert next(calls, None) is None
    monkeypatch.undo()
    assert state.propose([11], 4).ids.tolist() == want


def test_several_rows_go_together() -> None:
    rows = [list(PROMPT), [token + 1 for token in PROMPT]]
    state = open_state("dense")
    state.read_prompt(rows, None)
    proposals = state.propose([11, 40], 4).ids
    kept = [[11, *proposals[0, :2].tolist()], [40, *proposals[1, :2].tolist()]]
    state.catch_up(kept, None)
    together = state.propose([23, 9], 4).ids.tolist()
    for row, bonus in ((0, 23), (1, 9)):
        alone = open_state("dense")
        alone.read_prompt([rows[row] + kept[row]], None)
        assert alone.propose([bonus], 4).ids.tolist() == [together[row]]


# What it costs


@contextmanager
def forwards(model: nn.Module) -> Iterator[list[int]]:
    """Widths of the forwards of a model within the block."""
    widths: list[int] = []
    base: Any = type(model)

    def call(self: Any, tokens: mx.array, *args: Any, **keywords: Any) -> Any:
        widths.append(tokens.shape[1])
        return base.__call__(self, tokens, *args, **keywords)

    model.__class__ = type(base.__name__, (base,), {"__call__": call, "__module__": base.__module__})  # type: ignore[assignment]
    try:
        yield widths
    finally:
        model.__class__ = base


@pytest.mark.parametrize("mix", DRAFTING)
@pytest.mark.parametrize("accepted", [2, 4])
def test_a_round_costs_as_many_forwards_as_proposals_and_one_more_where_blocks_cannot_be_cut(
    mix: str, accepted: int
) -> None:
    model = MIXES[mix].model()
    state = open_state(mix)
    state.read_prompt([list(PROMPT)], None)
    run_round(state, 11, 4, accepted)
    with forwards(model) as widths:
        run_round(state, 23, 4, 4)
    pending = int(accepted == 4)
    apart = pending and needs_mixers(MIXES[mix].new_cache())
    assert widths == ([1, 1, 1, 1, 1] if apart else [1 + pending, 1, 1, 1])


def test_a_round_reads_nothing_from_the_device() -> None:
    state = open_state("dense")
    state.read_prompt([list(PROMPT)], None)
    kept = [11, *state.propose([11], 4).ids[0, :2].tolist()]
    state.abort()
    with count_host_reads() as reads:
        mx.eval(state.propose([11], 4).ids)
        state.catch_up([kept], None)
    assert reads.count == 0


# The pair


@pytest.mark.part(3)
@pytest.mark.parametrize("mix", MIXES)
def test_a_model_that_drafts_for_itself_is_always_right(mix: str) -> None:
    run = stock(mix, "greedy")
    drafter = StandaloneDrafter(MIXES[mix].model())
    got = speculate(MIXES[mix], drafter, max_tokens=LONG, draft_block_size=4)
    assert_equals_stock(got, run, LONG)
    counted = got.statistics
    assert (counted.loop, counted.drafter, counted.drafter_failures) == ("standalone", drafter.name, 0)
    if MIXES[mix].kv:
        # The target's cache was told to be another one than the drafter's.
        assert counted.accepted_tokens > 0
    else:
        assert counted.accepted_tokens == counted.proposed_tokens == 29


@pytest.mark.part(2)
@pytest.mark.parametrize(("width", "choice"), [(2, "sampled_penalties"), (5, "greedy")])
@pytest.mark.parametrize("mix", REQUIRED)
def test_ids_are_those_of_one_token_decode_whoever_drafts(mix: str, width: int, choice: str) -> None:
    run = stock(mix, choice, 3)
    drafter = StandaloneDrafter(MIXES["sliding" if width == 2 else "hybrid"].model())
    options = CHOICES[choice]()
    got = speculate(MIXES[mix], drafter, max_tokens=LONG, draft_block_size=width, prefill_step_size=3, **options)
    assert_equals_stock(got, run, LONG)
    assert got.statistics.drafter_failures == 0
    assert got.statistics.proposed_tokens > 0


@pytest.mark.part(2)
@each_chip
@pytest.mark.parametrize("mix", REQUIRED)
def test_ids_are_the_same_where_several_rows_round_differently_from_one(mix: str, chip: str) -> None:
    # What is found equal on one machine is remembered with the model.
    model, draft = (randomise(MIXES[mix].build, MIXES[mix].seed) for _ in range(2))
    statistics = Statistics()
    with double(PATTERNS[chip]):
        run = run_stock(model, PROMPT, LONG)
        options = {"draft_model": StandaloneDrafter(draft), "draft_block_size": 4, "statistics": statistics}
        assert_same_output(list(generate_step(mx.array(PROMPT), model, max_tokens=LONG, **options)), run, LONG)
    assert statistics.drafter_failures == 0
    assert statistics.accepted_tokens > 0


def test_no_more_need_be_known_of_a_model_than_that_it_decodes(monkeypatch: pytest.MonkeyPatch) -> None:
    run = stock("dense", "greedy")
    monkeypatch.delitem(ANATOMY_BY_MODULE, "llama")
    got = speculate(MIXES["dense"], StandaloneDrafter(MIXES["dense"].model()), max_tokens=LONG, draft_block_size=4)
    assert_equals_stock(got, run, LONG)
    assert got.statistics.accepted_tokens == 29


def test_two_requests_share_one_drafter() -> None:
    mix = MIXES["dense"]
    drafter = StandaloneDrafter(mix.model())
    target = Target(mix.model())
    first, second = drafter.open(target), drafter.open(target)
    first.read_prompt([list(PROMPT)], None)
    second.read_prompt([[3, 1, 4]], None)
    one, two = first.propose([11], 4).ids, second.propose([11], 4).ids
    assert one.tolist() == open_and_propose(drafter, target, PROMPT)
    assert two.tolist() == open_and_propose(drafter, target, (3, 1, 4))


def open_and_propose(drafter: StandaloneDrafter, target: Target, prompt: Sequence[int]) -> Any:
    state = drafter.open(target)
    state.read_prompt([list(prompt)], None)
    return state.propose([11], 4).ids.tolist()


def test_text_it_was_not_shown_is_told() -> None:
    mix = MIXES["dense"]
    drafter = StandaloneDrafter(mix.model())
    warm = speculate(mix, None, max_tokens=4).cache
    got = speculate(mix, drafter, prompt_cache=warm, max_tokens=6, prompt=(8, 61))
    assert any("has not seen the 11 tokens" in note for note in got.statistics.notes)
    assert not any("has not seen" in note for note in speculate(mix, drafter, max_tokens=6).statistics.notes)


# Vocabularies


def llama(vocab: int, seed: int = 1) -> nn.Module:
    """A model of one layer."""

    def build() -> nn.Module:
        return from_mlx_lm(
            "llama",
            vocab_size=vocab,
            hidden_size=24,
            num_hidden_layers=1,
            intermediate_size=36,
            num_attention_heads=3,
            num_key_value_heads=1,
            rms_norm_eps=1e-5,
            tie_word_embeddings=False,
        )

    return randomise(build, seed)


@pytest.mark.parametrize(
    ("drafts", "target", "fits"),
    [(97, 97, True), (97, 112, True), (128, 97, True), (104, 97, True), (151_936, 152_064, True)]
    + [(97, 41, False), (41, 97, False), (64, 97, False), (97, 150, False), (50_257, 49_152, False)],
)
def test_sizes_may_differ_by_padding_alone(drafts: int, target: int, fits: bool) -> None:
    drafter = type("Padded", (StandaloneDrafter,), {"vocab_size": drafts})(llama(97))
    other = Target(llama(97))
    stand_in: Any = type("Sized", (), {"name": other.name, "vocab_size": target})()
    if fits:
        drafter.check(stand_in)
        return
    with pytest.raises(IncompatiblePair, match=rf"vocabulary of {drafts}.*one of {target}\b"):
        drafter.check(stand_in)


def test_ids_that_the_target_lacks_are_never_proposed() -> None:
    padded = llama(128)
    weights = dict(tree_flatten(padded.parameters()))
    head = np.array(weights["lm_head.weight"])
    # Rows of padding that would win nearly always.
    head[97:] = 9 * head[:31]
    weights["lm_head.weight"] = mx.array(head)
    padded.update(tree_unflatten(list(weights.items())))
    target = Target(MIXES["dense"].model())
    unbounded = StandaloneState(padded, 128, 128)
    state = StandaloneDrafter(padded).open(target)
    proposed = []
    for each in (unbounded, state):
        each.read_prompt([list(PROMPT)], None)
        proposed.append([token for bonus in range(0, 97, 8) for token in each.propose([bonus], 4).ids[0].tolist()])
    assert max(proposed[0]) >= 97
    assert max(proposed[1]) < 97
    run = stock("dense", "greedy")
    assert_equals_stock(speculate(MIXES["dense"], StandaloneDrafter(padded), max_tokens=LONG), run, LONG)


def test_ids_that_the_drafter_lacks_are_read_as_its_last_one() -> None:
    small = llama(104)
    drafter = StandaloneDrafter(small)
    target = Target(llama(112, seed=2))
    drafter.check(target)
    state, last = drafter.open(target), drafter.open(target)
    state.read_prompt([[5, 111, 17]], None)
    last.read_prompt([[5, 103, 17]], None)
    assert state.propose([108], 4).ids.tolist() == last.propose([103], 4).ids.tolist()


def test_a_random_drafter_of_another_size_costs_no_token() -> None:
    run = stock("dense", "greedy")
    for vocab in (96, 100, 128):
        got = speculate(MIXES["dense"], StandaloneDrafter(llama(vocab)), max_tokens=LONG, draft_block_size=5)
        assert_equals_stock(got, run, LONG)
        assert got.statistics.drafter_failures == 0
