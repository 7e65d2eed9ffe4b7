"""Kinds of fault in going on from a cache: a token short or long, foreign rows, a file, a front that is gone."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import can_trim_prompt_cache, load_prompt_cache, save_prompt_cache, trim_prompt_cache

from mlx_spec.drafters import NgramDrafter
from mlx_spec.model.target import Target
from tests.bits import assert_same_bits, independent_array
from tests.forwards import Forwards
from tests.oracle import OracleRun, independent_copy
from tests.rounds.runs import DRAFTERS, SPARE, assert_counts_add_up, assert_equals_stock, record_stock, speculate
from tests.same_cache import assert_same_cache
from tests.scripted import AlternatingDrafter, CyclingDrafter, RightDrafter, TappingDrafter
from tests.tiny import CHUNK, MIXES, PROMPT, REQUIRED, VOCAB, Mix

WIDTH = 5
EMITTED = 9
FIRST_TURN = range(1, 13)
"""Lengths at which the first turn stops."""
SUFFIX = (33, 71, 4, 12, 90, 2)
"""What the second turn begins with, from the end."""

QUANTIZED = ("quantized_from_0", "quantized_from_20")


@functools.cache
def first_turn(mix: str) -> OracleRun:
    return record_stock(MIXES[mix], max(FIRST_TURN) + 20, [*FIRST_TURN, 20])


def following(mix: Mix, cache: list[Any], suffix: tuple[int, ...], emitted: int = EMITTED, **options: Any) -> OracleRun:
    """The stock run from a warm cache, which is left as it is."""

    class Warm(Mix):
        def new_cache(self, dtype: mx.Dtype = mx.float32) -> list[Any]:
            return cache

        @property
        def warm_kv(self) -> dict[str, int]:
            return mix.warm_kv

    return record_stock(Warm(mix.name, mix.build, mix.caches, {}), emitted + SPARE, {emitted}, prompt=suffix, **options)


def second_turn(mix: Mix, cache: list[Any], suffix: tuple[int, ...], run: OracleRun, **options: Any) -> Any:
    """Ours from a warm cache, with a drafter that is often right."""
    given = {"draft_block_size": WIDTH, "max_tokens": EMITTED, **options}
    return speculate(mix, CyclingDrafter(run.ids, VOCAB, (3, 0, 7)), prompt=suffix, prompt_cache=cache, **given)


# Turn after turn


def lengths_of(mix: str) -> range:
    """All of them for two kinds of rollback, for the other mixes some at each depth of a block."""
    return FIRST_TURN if mix in ("dense", "hybrid") else FIRST_TURN[:: 2 if mix in REQUIRED else 5]


@pytest.mark.part(2)
@pytest.mark.slow
@pytest.mark.parametrize("mix", MIXES)
def test_second_turn_goes_on_from_exactly_the_text_of_the_first(mix: str) -> None:
    """Wherever in a block the first turn stopped: its last token is in the cache, and nothing after it.

    The second begins with other tokens than the model would have chosen, so a row too many or too few shows. What it
    says is what a run over the whole conversation says, which reads the text in blocks.
    """
    made, run = MIXES[mix], first_turn(mix)
    for length in lengths_of(mix):
        ended = {"stop_after": length, "max_tokens": -1} if length % 2 else {"max_tokens": length}
        drafter = (RightDrafter if length % 3 else AlternatingDrafter)(run.ids, VOCAB)
        first = speculate(made, drafter, draft_block_size=WIDTH, **ended)
        assert_equals_stock(first, run, length)
        suffix = SUFFIX[-(1 + length % 6) :]
        want = following(made, run.cache_after(length), suffix)
        got = second_turn(made, first.cache, suffix, want)
        assert_equals_stock(got, want, EMITTED)
        assert_counts_add_up(got)
        assert got.drafted > 0, "speculation must not stop where a prefix was found"
        if mix not in QUANTIZED and length % 4 == 1:
            cold = speculate(made, "ngram", prompt=(*PROMPT, *run.ids[:length], *suffix), max_tokens=EMITTED)
            assert cold.ids == got.ids, f"cold {cold.ids}, warm {got.ids}"


@pytest.mark.part(2)
@pytest.mark.slow
@pytest.mark.parametrize("mix", ["dense", "sliding", "ring_with_keep", "hybrid", "chunked", "cache_list"])
def test_two_conversations_from_one_prefix_do_not_see_each_other(mix: str) -> None:
    """Both go on from a copy of a prefix longer than any window; their rows must not meet in it."""
    made, prefix = MIXES[mix], (*PROMPT, *range(20, 37))
    assert len(prefix) == 24
    shared = speculate(made, None, prompt=prefix, max_tokens=0).cache
    before = copy.deepcopy(shared)
    endings = ((33, 71, 4), (12, 90, 2, 8, 15))
    for suffix in (*endings, endings[0]):
        want = following(made, copy.deepcopy(shared), suffix)
        got = second_turn(made, copy.deepcopy(shared), suffix, want)
        assert_equals_stock(got, want, EMITTED)
        assert got.drafted > 0
        # With rows that are kept for good, it depends on the chunks of a prompt which ones a block of it still sees.
        if mix != "ring_with_keep":
            assert got.ids == speculate(made, None, prompt=(*prefix, *suffix), max_tokens=EMITTED).ids
    assert_same_cache(shared, before)


@pytest.mark.part(4)
@pytest.mark.parametrize("mix", MIXES)
def test_caller_may_trim_after_a_run_what_it_may_trim_after_the_stock_run(mix: str) -> None:
    """A server cuts a cache to the prefix two conversations share; what it is told it may cut must be true."""
    made, run = MIXES[mix], first_turn(mix)
    for length in (4, 20):
        got = speculate(made, CyclingDrafter(run.ids, VOCAB, (4, 1)), max_tokens=length, draft_block_size=WIDTH)
        want = run.cache_after(length)
        assert can_trim_prompt_cache(got.cache) == can_trim_prompt_cache(want)
        shared = len(PROMPT) - 3
        surplus = len(PROMPT) + length - shared
        assert trim_prompt_cache(got.cache, surplus) == trim_prompt_cache(want, surplus)
        if not can_trim_prompt_cache(want) and surplus:
            continue
        other = following(made, want, SUFFIX)
        again = second_turn(made, got.cache, SUFFIX, other)
        assert_equals_stock(again, other, EMITTED)
        if mix not in (*QUANTIZED, "ring_with_keep", "chunked"):
            assert again.ids == speculate(made, None, prompt=(*PROMPT[:shared], *SUFFIX), max_tokens=EMITTED).ids


def test_chunked_cache_whose_front_is_gone_is_continued() -> None:
    mix, run = MIXES["chunked"], first_turn("chunked")
    got = speculate(mix, CyclingDrafter(run.ids, VOCAB, (4, 1)), max_tokens=20, draft_block_size=WIDTH)
    started = [cache.start_position for cache in got.cache if hasattr(cache, "start_position")]
    assert started
    assert all(start > len(PROMPT) + 20 - CHUNK - WIDTH > 0 for start in started)
    want = following(mix, run.cache_after(20), SUFFIX)
    assert_equals_stock(second_turn(mix, got.cache, SUFFIX, want), want, EMITTED)


# What is read again


@pytest.mark.part(3)
@pytest.mark.parametrize("mix", REQUIRED)
@pytest.mark.parametrize("drafter", ["none", "cycling", "eagle3"])
def test_nothing_of_a_cached_prefix_is_read_again(mix: str, drafter: str, forwards: Forwards) -> None:
    """Counted where it costs: the tokens the model is fed before the first one comes out."""
    made, run = MIXES[mix], first_turn(mix)
    cache = speculate(made, None, max_tokens=6).cache
    want = following(made, run.cache_after(6), SUFFIX)
    proposing = None if drafter == "none" else DRAFTERS[drafter](mix, want.ids, mx.float32)
    width = {} if drafter == "none" else {"draft_block_size": WIDTH}
    request: dict[str, Any] = {"prompt": SUFFIX, "max_tokens": EMITTED, "prefill_step_size": 3, **width}
    read, told = forwards.widths(made.model()), []
    # Certifies, at a cost of its own: a model whose forward was replaced is another model.
    speculate(made, proposing, prompt_cache=independent_copy(cache), **request)
    read.clear()

    def progress(processed: int, total: int) -> None:
        told.append((processed, total, sum(read)))

    got = speculate(made, proposing, prompt_cache=cache, prompt_progress_callback=progress, **request)
    assert got.ids == list(want.ids[:EMITTED])
    assert [(processed, total) for processed, total, _ in told] == [(0, 6), (3, 6), (5, 6), (6, 6)]
    assert [fed for _, _, fed in told[:3]] == [0, 3, 5]
    assert got.statistics.prompt_tokens == len(SUFFIX)
    drafted = got.statistics.proposed_tokens - got.statistics.accepted_tokens
    assert sum(read) <= len(SUFFIX) + EMITTED + drafted


@pytest.mark.parametrize("mix", REQUIRED)
def test_hidden_states_after_a_cached_prefix_are_those_of_the_same_places(mix: str) -> None:
    """The drafter is shown the suffix's rows at the suffix's positions, not at the start of a text."""
    made, run, taps = MIXES[mix], first_turn(mix), (0, len(MIXES[mix].model().layers) - 1)
    want = following(made, run.cache_after(6), SUFFIX)

    class Tapping(TappingDrafter):
        kind = "eagle3"

    drafter = Tapping(want.ids, VOCAB, taps)
    cache = speculate(made, None, max_tokens=6).cache
    got = speculate(made, drafter, prompt=SUFFIX, prompt_cache=cache, max_tokens=EMITTED, draft_block_size=WIDTH)
    assert_equals_stock(got, want, EMITTED)
    target, warm, rows = Target(made.model()), run.cache_after(6), []
    target.attach_taps(taps)
    shown = drafter.states[0].ids[0]
    assert shown[: len(SUFFIX)] == list(SUFFIX)
    if mix == "quantized_from_20":
        shown = shown[: 20 - len(PROMPT) - 6]  # what follows is read from converted caches
    for chunk in (shown[: len(SUFFIX) - 1], *([token] for token in shown[len(SUFFIX) - 1 :])):
        hidden = target.forward(mx.array([chunk]), warm, taps).hidden
        assert hidden is not None
        rows.append(independent_array(hidden))
    assert_same_bits(drafter.states[0].hidden[:, : len(shown)], mx.concatenate(rows, axis=1), "tapped rows")


# Files

SAVED: dict[str, Callable[[str, OracleRun], Any]] = {
    "cycling": lambda mix, run: CyclingDrafter(run.ids, VOCAB, (3, 0, 7)),
    "eagle3": lambda mix, run: DRAFTERS["eagle3"](mix, run.ids, mx.float32),
    "ngram": lambda mix, run: NgramDrafter(min_ngram=1),
}


def through_a_file(cache: list[Any], folder: Path) -> list[Any]:
    """The cache as mlx-lm saves and loads it."""
    file = str(folder / "cache.safetensors")
    save_prompt_cache(file, cache, {"note": "of the target alone"})
    loaded, metadata = load_prompt_cache(file, return_metadata=True)
    assert metadata == {"note": "of the target alone"}
    assert [type(each) for each in loaded] == [type(each) for each in cache]
    return list(loaded)


@pytest.mark.part(3)
@pytest.mark.parametrize(
    ("mix", "drafter"),
    [*((mix, "cycling") for mix in MIXES), *((mix, "eagle3") for mix in REQUIRED), ("dense", "ngram")],
)
def test_cache_from_a_file_goes_on_as_if_nobody_had_saved_it(mix: str, drafter: str, tmp_path: Path) -> None:
    """The file holds the target's caches alone, and any drafter may go on from it."""
    made, run = MIXES[mix], first_turn(mix)
    for length in (8, 20) if drafter == "cycling" else (8,):
        left = speculate(made, RightDrafter(run.ids, VOCAB), length, max_tokens=-1, draft_block_size=WIDTH).cache
        assert len(left) == len(made.new_cache())
        token, rest = run.ids[length : length + 1], run.ids[length + 1 :]
        runs = []
        for cache in (through_a_file(left, tmp_path), left):
            proposing = SAVED[drafter](mix, OracleRun((), rest, (), {}, {}))
            runs.append(
                speculate(made, proposing, prompt=token, prompt_cache=cache, max_tokens=EMITTED, draft_block_size=WIDTH)
            )
        loaded, live = runs
        assert tuple(loaded.ids) == rest[:EMITTED]
        assert_same_cache(loaded.cache, live.cache)
        for (_, mine, from_draft), (_, theirs, also) in zip(loaded.tokens, live.tokens, strict=True):
            assert_same_bits(mine, theirs, "log-probabilities from the file and from memory")
            assert from_draft == also, "other proposals were accepted than from the live cache"
        assert loaded.statistics.proposed_by_depth == live.statistics.proposed_by_depth
