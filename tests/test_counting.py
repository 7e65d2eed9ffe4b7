"""What a run may cost besides forwards: one host read per round, no prompt states kept, nothing that piles up."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.sample_utils import greedy_sampler, make_logits_processors, make_sampler

from mlx_spec import Statistics, generate_step
from mlx_spec.drafters import CallableDrafter, Drafter, NgramDrafter
from mlx_spec.drafters.standalone import StandaloneDrafter
from tests.checkpoints import tiny_model
from tests.drafters import eagle3_files
from tests.host_reads import count_host_reads
from tests.recalled import remembered_maps
from tests.scripted import (
    AlternatingDrafter,
    FewerDrafter,
    OutOfRangeDrafter,
    RaisingDrafter,
    RightDrafter,
    ScriptedDrafter,
    WrongDrafter,
)
from tests.tiny import MIXES, PROMPT, REQUIRED, VOCAB

TOKENS = 18
STARTUP_READS = 1
"""The prompt's ids, which a drafter is shown, are read at the start."""

LONG_PROMPT, CHUNK = 1000, 64

GREEDY: dict[str, Any] = {}
SAMPLED: dict[str, Any] = {"sampler": make_sampler(temp=0.8, top_p=0.95)}
PENALISED: dict[str, Any] = {"logits_processors": make_logits_processors(repetition_penalty=1.2)}
OPAQUE: dict[str, Any] = {"sampler": lambda logprobs: greedy_sampler(logprobs)}


class EveryLayerTapped(ScriptedDrafter):
    """Right or wrong like any scripted drafter, and shown hidden states as an EAGLE-3 drafter is; keeps none."""

    kind = "eagle3"

    def __init__(self, right: Any, vocab: int, taps: tuple[int, ...]) -> None:
        super().__init__(right, vocab)
        self.taps = taps

    def script(self, state: Any, row: int, count: int) -> list[int]:
        proposals = state.right(row, count)
        proposals[state.round % count] += state.round % 2
        return proposals


DRAFTERS: dict[str, Callable[[Any], Drafter | None]] = {
    "nobody": lambda ids: None,
    "right": lambda ids: RightDrafter(ids, VOCAB),
    "wrong": lambda ids: WrongDrafter(ids, VOCAB),
    "alternating": lambda ids: AlternatingDrafter(ids, VOCAB),
    "fewer": lambda ids: FewerDrafter(ids, VOCAB),
    "out_of_range": lambda ids: OutOfRangeDrafter(ids, VOCAB),
    "raising": lambda ids: RaisingDrafter(ids, VOCAB, "propose"),
    "tapping": lambda ids: EveryLayerTapped(ids, VOCAB, (0, 2)),
    "ngram": lambda ids: NgramDrafter(min_ngram=1),
    "callable": lambda ids: CallableDrafter(lambda known, count: [known[-1]] * count),
    "standalone": lambda ids: StandaloneDrafter(MIXES["dense"].model()),
}


def reads_of_a_run(name: str, drafter: Drafter | None, **keywords: Any) -> tuple[int, Statistics]:
    """Host reads of a whole run and what it did; certification is warmed first."""
    mix = MIXES[name]
    width = {} if drafter is None else {"draft_block_size": 5}
    for _ in range(2):
        statistics = Statistics()
        mx.random.seed(3)
        with count_host_reads() as reads:
            steps = generate_step(
                mx.array(PROMPT),
                mix.model(),
                draft_model=drafter,
                max_tokens=TOKENS,
                statistics=statistics,
                prompt_cache=mix.new_cache(),
                **width,
                **keywords,
                **mix.warm_kv,
            )
            assert sum(1 for _ in steps) == TOKENS
    return reads.count, statistics


# Reads


@pytest.mark.part(12)
@pytest.mark.parametrize("options", [GREEDY, SAMPLED, PENALISED], ids=["greedy", "sampled", "penalised"])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_a_round_reads_the_host_once(drafter: str, options: dict[str, Any]) -> None:
    ids = MIXES["dense"].oracle().ids
    reads, statistics = reads_of_a_run("dense", DRAFTERS[drafter](ids), **options)
    assert reads == statistics.rounds + STARTUP_READS


@pytest.mark.part(5)
@pytest.mark.parametrize("options", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", REQUIRED)
def test_a_round_reads_the_host_once_whatever_the_cache(name: str, options: dict[str, Any]) -> None:
    drafter = AlternatingDrafter(MIXES[name].oracle().ids, VOCAB)
    reads, statistics = reads_of_a_run(name, drafter, **options)
    assert reads == statistics.rounds + STARTUP_READS
    assert statistics.accepted_tokens > 0 or options is SAMPLED


@pytest.mark.slow
@pytest.mark.parametrize("options", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_round_of_a_real_eagle3_drafter_reads_the_host_once(options: dict[str, Any]) -> None:
    model, statistics = eagle3_files.target().model, Statistics()
    for _ in range(2):
        statistics = Statistics()
        with count_host_reads() as reads:
            steps = generate_step(
                mx.array(PROMPT),
                model,
                draft_model=eagle3_files.drafter(),
                draft_block_size=4,
                max_tokens=TOKENS,
                statistics=statistics,
                **options,
            )
            assert sum(1 for _ in steps) == TOKENS
    assert (statistics.loop, statistics.drafter_failures) == ("eagle3", 0)
    assert reads.count == statistics.rounds + STARTUP_READS


@pytest.mark.parametrize("drafter", ["nobody", "right", "wrong", "alternating"])
def test_callables_that_may_hide_state_cost_one_read_per_token(drafter: str) -> None:
    ids = MIXES["dense"].oracle().ids
    reads, statistics = reads_of_a_run("dense", DRAFTERS[drafter](ids), **OPAQUE)
    assert reads == TOKENS + STARTUP_READS
    assert "<lambda> may hide state, so it is called once per token, in order" in statistics.notes


@pytest.mark.parametrize("length", [2, 65, 200])
def test_a_longer_prompt_costs_no_further_read(length: int) -> None:
    mix = MIXES["dense"]
    with count_host_reads() as reads:
        steps = generate_step(mx.arange(length) % VOCAB, mix.model(), max_tokens=1, prefill_step_size=16)
        next(steps)
        steps.close()
    assert reads.count == 1 + STARTUP_READS


# The prompt


def live_arrays() -> list[mx.array]:
    gc.collect()
    return [thing for thing in gc.get_objects() if isinstance(thing, mx.array)]


def held_besides(caches: list[Any]) -> int:
    """Bytes mlx holds that are not in these caches."""
    gc.collect()
    return mx.get_active_memory() - sum(cache.nbytes for cache in caches)


def tapping(ids: Any) -> EveryLayerTapped:
    return EveryLayerTapped(ids, 96, tuple(range(8)))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["scripted", "eagle3"])
def test_no_hidden_states_of_the_prompt_are_kept(kind: str) -> None:
    if kind == "eagle3":
        model, drafter = eagle3_files.target().model, eagle3_files.drafter()
    else:
        model, drafter = tiny_model(), tapping([1])
    states = len(drafter.taps) * 32
    # Certification keeps caches of its own for the model's lifetime.
    list(generate_step(mx.array(PROMPT), model, draft_model=drafter, draft_block_size=4, max_tokens=1))
    caches = make_prompt_cache(model)
    before = held_besides(caches)
    others = state_chunks(states)
    during: list[int] = []

    def look(processed: int, total: int) -> None:
        if 0 < processed < total and processed % (3 * CHUNK) == 0:
            during.append(len(state_chunks(states)) - len(others))

    steps = generate_step(
        mx.arange(LONG_PROMPT) % 90,
        model,
        draft_model=drafter,
        draft_block_size=4,
        prompt_cache=caches,
        prefill_step_size=CHUNK,
        prompt_progress_callback=look,
    )
    next(steps)
    kept = held_besides(caches) - before
    # The fixture's logits happen to have the size of its tapped states.
    assert max(during) <= (2 if kind == "eagle3" else 1), "no more than the chunk just read"
    assert len(state_chunks(states)) == len(others)
    own_cache = 2 * 16 * 4 * 1024 if kind == "eagle3" else 0
    assert kept <= own_cache + CHUNK * states * 4, f"{kept} bytes; all states are {LONG_PROMPT * states * 4}"
    steps.close()


def state_chunks(states: int) -> list[mx.array]:
    """Live arrays with the shape of a chunk's tapped states, or of one layer's."""
    return [
        array
        for array in live_arrays()
        if array.ndim == 3 and array.shape[1] >= CHUNK - 1 and array.shape[2] in (states, 32)
    ]


# Nothing piles up


def one_layer() -> Any:
    return tiny_model(num_hidden_layers=1)


def follow(model: Any, drafter: Drafter | None, rounds: int, **options: Any) -> list[tuple[int, int, int]]:
    """(live arrays, bytes besides the target's caches, tokens) at five moments of a run of so many rounds."""
    caches = make_prompt_cache(model)
    statistics = Statistics()
    seen: list[tuple[int, int, int]] = []
    steps = generate_step(
        mx.array(PROMPT),
        model,
        draft_model=drafter,
        max_tokens=-1,
        prompt_cache=caches,
        statistics=statistics,
        **options,
    )
    for _ in steps:
        if statistics.rounds >= rounds * (len(seen) + 1) // 5:
            seen.append((len(live_arrays()), held_besides(caches), statistics.emitted_tokens))
        if len(seen) == 5:
            break
    steps.close()
    return seen


def assert_flat(
    seen: list[tuple[int, int, int]], bytes_per_token: int = 0, one_round: int = 32_768, arrays: int = 24
) -> None:
    """What is there late in the run was there early, up to what the one round holds that happens to be open."""
    counts, held, tokens = zip(*seen, strict=True)
    assert max(counts[2:]) - counts[1] <= arrays, seen
    assert max(held[2:]) - held[1] <= one_round + bytes_per_token * (tokens[-1] - tokens[1]), seen


def always_wrong() -> Drafter:
    return CallableDrafter(lambda ids, count: [0] * count)


@pytest.mark.slow
@pytest.mark.parametrize("make", [NgramDrafter, always_wrong], ids=["ngram", "always_wrong"])
def test_arrays_and_memory_are_flat_over_2000_rounds(make: Callable[[], Drafter], thorough: bool) -> None:
    assert_flat(follow(one_layer(), make(), 2000 if thorough else 300, draft_block_size=3))


@pytest.mark.slow
def test_arrays_and_memory_are_flat_where_tokens_are_sampled(thorough: bool) -> None:
    rounds = 300 if thorough else 120
    assert_flat(follow(one_layer(), NgramDrafter(min_ngram=1), rounds, draft_block_size=4, **SAMPLED))


@pytest.mark.slow
def test_arrays_and_memory_are_flat_without_a_drafter(thorough: bool) -> None:
    assert_flat(follow(one_layer(), None, 600 if thorough else 120))


@pytest.mark.slow
def test_processors_cost_the_ids_they_are_shown_and_no_more(thorough: bool) -> None:
    options, rounds = {"draft_block_size": 3, **PENALISED}, 300 if thorough else 120
    assert_flat(follow(one_layer(), NgramDrafter(min_ngram=1), rounds, **options), bytes_per_token=12)


@pytest.mark.slow
def test_arrays_and_memory_are_flat_where_blocks_are_stepped_through(thorough: bool) -> None:
    mix = MIXES["hybrid"]
    states = sum(cache.nbytes for cache in mix.oracle().cache_after(1) if type(cache).__name__ == "ArraysCache")
    seen = follow(mix.model(), NgramDrafter(min_ngram=1), 100 if thorough else 50, draft_block_size=3)
    assert_flat(seen, one_round=32_768 + 3 * states, arrays=24 + len(remembered_maps(mix.model())))


@pytest.mark.slow
def test_arrays_and_memory_are_flat_with_hidden_states_and_a_drafters_own_cache(thorough: bool) -> None:
    model = eagle3_files.target().model
    own_cache_row, rounds = 2 * 2 * 8 * 4, 200 if thorough else 60
    assert_flat(follow(model, eagle3_files.drafter(), rounds, draft_block_size=3), bytes_per_token=2 * own_cache_row)


@pytest.fixture
def without_collector() -> Iterator[None]:
    """Only counted references free anything: what is part of a cycle stays."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("without_collector")
@pytest.mark.parametrize("name", ["dense", "sliding", "hybrid"])
@pytest.mark.parametrize("ending", ["budget", "closed"])
def test_a_finished_run_frees_the_callers_cache_without_waiting_for_the_garbage_collector(
    name: str, ending: str
) -> None:
    mix = MIXES[name]
    caches = mix.new_cache()
    held = [weakref.ref(cache) for cache in caches]
    drafter = RightDrafter(mix.oracle().ids, VOCAB)
    keywords = {"draft_model": drafter, "draft_block_size": 4, "prompt_cache": caches}
    steps = generate_step(mx.array(PROMPT), mix.model(), max_tokens=9, **keywords)
    for _ in range(9 if ending == "budget" else 4):
        next(steps)
    steps.close()
    del caches, keywords, steps
    assert [cache() for cache in held] == [None] * len(held)
