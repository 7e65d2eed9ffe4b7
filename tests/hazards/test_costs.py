"""Kinds of fault that no token shows: states copied every round, a prompt held in memory, forwards nobody needed."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import ArraysCache, KVCache, RotatingKVCache

from mlx_spec import SpeculativeCacheTransaction, Statistics, generate_step
from mlx_spec.cache.adopt import state_arrays
from mlx_spec.cache.contents import cache_arrays
from mlx_spec.drafters import CallableDrafter, Drafter, NgramDrafter
from mlx_spec.model.target import Target
from mlx_spec.verify.mixers import attach
from mlx_spec.verify.routes import remember
from tests.cache.kinds import KINDS, Kind, append, arrays_of
from tests.checkpoints import tiny_model
from tests.drafters import eagle3_files
from tests.forwards import Forwards
from tests.oracle import run_stock
from tests.recalled import remembered_maps
from tests.scripted import ScriptedDrafter
from tests.tiny import MIXES, PROMPT, VOCAB

WIDTH = 5
BLOCK = [90, 91, 92, 93, 94]


def bytes_taken(work: Callable[[], Any]) -> int:
    """Peak of mlx's memory over a piece of work, above what there was before."""
    gc.collect()
    # mlx's thread lets go of a buffer a moment after it was waited for; what is held twice is copied when written to.
    mx.synchronize()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    work()
    # Where nothing is allocated, the peak stays at nothing.
    return max(0, mx.get_peak_memory() - before)


# Keeping a round


@pytest.mark.part(4)
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())
def test_keeping_a_whole_block_moves_nothing_whatever_the_cache(kind: Kind) -> None:
    """The common case when a drafter is good: no state is saved to somewhere or brought back."""
    cache = kind.filled(range(kind.edge + 3 if kind.edge < 100 else 40))
    tx = SpeculativeCacheTransaction([cache], WIDTH)
    for token in BLOCK:
        append(tx.caches[0], [token], kind.batch)
        mx.eval(arrays_of(cache))
        tx.mark(1)

    def keep() -> None:
        tx.commit(WIDTH)
        mx.eval(arrays_of(cache))

    assert bytes_taken(keep) == 0
    assert tx.nbytes == 0


def ring_of(rows: int) -> RotatingKVCache:
    """A window long full."""
    cache = RotatingKVCache(rows)
    cache.update_and_fetch(mx.zeros((1, 8, rows, 256)), mx.zeros((1, 8, rows, 64)))
    cache.update_and_fetch(mx.zeros((1, 8, 1, 256)), mx.zeros((1, 8, 1, 64)))
    mx.eval(cache.keys, cache.values)
    return cache


def rows_of(rows: int) -> KVCache:
    cache = KVCache()
    cache.update_and_fetch(mx.zeros((1, 8, rows, 256)), mx.zeros((1, 8, rows, 64)))
    mx.eval(cache.keys, cache.values)
    return cache


ONE_ROW = 8 * (256 + 64) * 4


@pytest.mark.slow
@pytest.mark.parametrize("make", [ring_of, rows_of], ids=["ring", "full attention"])
def test_keeping_part_of_a_block_moves_as_much_whatever_the_length_of_the_cache(
    make: Callable[[int], Any],
) -> None:
    """And while the round is open it holds no more: at most the rows it overwrites and those it writes."""
    seen = []
    for rows in (200, 2000):
        cache = make(rows)
        for kept in (0, 2):
            tx = SpeculativeCacheTransaction([cache], WIDTH)

            def write(tx: SpeculativeCacheTransaction = tx, cache: Any = cache) -> None:
                for _ in BLOCK:
                    tx.caches[0].update_and_fetch(mx.ones((1, 8, 1, 256)), mx.ones((1, 8, 1, 64)))
                    mx.eval(cache.keys, cache.values)
                    mx.synchronize()
                    tx.mark(1)

            def keep(tx: SpeculativeCacheTransaction = tx, cache: Any = cache, kept: int = kept) -> None:
                tx.commit(kept)
                mx.eval(cache.keys, cache.values)

            taken = (bytes_taken(write), tx.nbytes, bytes_taken(keep))
            assert max(taken) <= 4 * WIDTH * ONE_ROW < rows * ONE_ROW // 8, f"{taken} with {rows} rows"
            seen.append((kept, *taken[1:]))
    assert seen[:2] == seen[2:]


@pytest.mark.parametrize("name", ["dense", "sliding", "hybrid", "mamba", "cache_list"])
def test_open_round_holds_as_much_after_a_long_text_as_after_a_short_one(name: str) -> None:
    """Past the window, where there is one. Recurrent layers hold their state, the block's inputs and projections."""
    mix, held = MIXES[name], []
    attach(mix.model())
    remember(mix.model())
    projected = sum(part.weight.shape[0] for part in remembered_maps(mix.model()))
    for length in (40, 400):
        cache = mix.new_cache()
        mx.eval(mix.model()(mx.arange(length)[None] % VOCAB, cache=cache), cache_arrays(cache))
        mx.eval(mix.model()(mx.array([[3]]), cache=cache), cache_arrays(cache))
        tx = SpeculativeCacheTransaction(cache, WIDTH)
        mx.eval(mix.model()(mx.array([BLOCK]), cache=tx.caches))
        tx.mark(WIDTH)
        held.append(tx.nbytes)
        states = [leaf for leaf in _leaves(cache) if isinstance(leaf, ArraysCache)]
        tx.commit(2)
        assert tx.nbytes == 0
        if name == "dense":
            assert held[-1] == 0
        if states:
            inputs = 4 * WIDTH * Target(mix.model()).hidden_size * len(states)
            assert held[-1] == sum(state.nbytes for state in states) + inputs + 4 * WIDTH * projected
    assert held[0] == held[1]


def _leaves(caches: Any) -> list[Any]:
    return [leaf for cache in caches for leaf in (_leaves(cache.caches) if hasattr(cache, "caches") else [cache])]


@pytest.mark.parametrize("name", ["hybrid", "mamba", "cache_list"])
def test_whole_block_costs_a_recurrent_model_no_copy_of_its_states(name: str) -> None:
    mix = MIXES[name]
    attach(mix.model())
    cache = mix.new_cache()
    mx.eval(mix.model()(mx.array([PROMPT]), cache=cache), cache_arrays(cache))
    for kept in (WIDTH, 0):
        tx = SpeculativeCacheTransaction(cache, WIDTH)
        mx.eval(mix.model()(mx.array([BLOCK]), cache=tx.caches), cache_arrays(cache))
        tx.mark(WIDTH)

        def keep(tx: SpeculativeCacheTransaction = tx, kept: int = kept) -> None:
            tx.commit(kept)
            mx.eval(state_arrays(cache))

        assert bytes_taken(keep) == 0


# Reading the prompt


LONG_PROMPT = (np.random.default_rng(5).integers(3, 90, 500)).tolist()
CHUNK = 64


class Tapping(ScriptedDrafter):
    """Is shown the outputs of every layer and keeps none."""

    kind = "eagle3"
    taps = tuple(range(8))


PROMPT_READERS: dict[str, Callable[[], tuple[Any, Drafter | None]]] = {
    "nobody": lambda: (tiny_model(), None),
    "ngram": lambda: (tiny_model(), NgramDrafter()),
    "tapping": lambda: (tiny_model(), Tapping([1], 96)),
    "eagle3": lambda: (eagle3_files.target().model, eagle3_files.drafter()),
}


def read_prompt(model: Any, drafter: Drafter | None, step: int, emitted: int = 1) -> list[int]:
    width = {} if drafter is None else {"draft_block_size": 4}
    options = {"draft_model": drafter, "max_tokens": emitted, "prefill_step_size": step, **width}
    return [token for token, _ in generate_step(mx.array(LONG_PROMPT), model, **options)]


def bytes_of_reading(model: Any, drafter: Drafter | None, step: int) -> int:
    mx.clear_cache()
    return bytes_taken(lambda: read_prompt(model, drafter, step))


@pytest.mark.part(2)
@pytest.mark.slow
@pytest.mark.parametrize("reader", PROMPT_READERS)
def test_drafter_leaves_the_prompt_in_chunks_and_memory_bounded(reader: str) -> None:
    """Reading all at once takes many times the memory; a drafter may add a chunk of states and a cache of its own."""
    model, drafter = PROMPT_READERS[reader]()
    list(generate_step(mx.array(PROMPT), model, draft_model=drafter, max_tokens=2))  # certifies
    whole, chunked = (bytes_of_reading(model, drafter, step) for step in (2048, CHUNK))
    plain = bytes_of_reading(model, None, CHUNK)
    states = CHUNK * 8 * 32 * 4
    own_cache = 2 * 2 * 8 * 4 * 1024
    assert chunked <= plain + 8 * states + 2 * own_cache, f"{chunked} bytes, {plain} without a drafter"
    assert whole > 3 * chunked, "the measure sees nothing"


@pytest.mark.part(2)
@pytest.mark.slow
@pytest.mark.parametrize("reader", PROMPT_READERS)
def test_prompt_in_chunks_gives_the_tokens_of_the_prompt_at_once(reader: str) -> None:
    model, drafter = PROMPT_READERS[reader]()
    want = run_stock(model, LONG_PROMPT, 6, prefill_step_size=CHUNK)
    for step in (CHUNK, 499):
        assert read_prompt(model, drafter, step, 6) == list(want.ids), f"in chunks of {step}"


@pytest.mark.part(2)
@pytest.mark.parametrize("reader", PROMPT_READERS)
def test_drafter_costs_the_prompt_no_forward(reader: str, forwards: Forwards) -> None:
    """Width after width, the target is fed what it is fed without one."""
    model, drafter = PROMPT_READERS[reader]()
    fed = forwards.widths(model)
    read_prompt(model, drafter, CHUNK, 6)  # certifies
    fed.clear()
    read_prompt(model, drafter, CHUNK)
    assert fed == [CHUNK] * 7 + [51, 1]


# A drafter that was made for shorter texts


@pytest.mark.slow
def test_text_longer_than_the_drafter_was_made_for_goes_on(tmp_path: Any) -> None:
    """The target's context is the limit, not the number in the drafter's config."""
    folder = eagle3_files.write(tmp_path / "short", lambda config: config.update(max_position_embeddings=16))
    model, statistics = eagle3_files.target().model, Statistics()
    want = run_stock(model, PROMPT, 40)
    options = {
        "draft_model": eagle3_files.load(folder),
        "draft_block_size": 4,
        "max_tokens": 40,
        "statistics": statistics,
    }
    assert [token for token, _ in generate_step(mx.array(PROMPT), model, **options)] == list(want.ids)
    assert statistics.drafter_failures == 0
    assert statistics.proposed_by_depth[0] >= 8


@pytest.mark.parametrize("ids", [[-1], [VOCAB], [2**31 - 1], [-(2**31), -1, VOCAB]], ids=str)
def test_proposals_that_are_no_tokens_are_dropped_not_read(ids: list[int]) -> None:
    """A filler such as -1 must not index a row of the embedding that is not there."""
    mix, statistics = MIXES["dense"], Statistics()
    run = mix.oracle()

    def propose(known: list[int], count: int) -> list[int]:
        right = run.ids[len(known) - len(PROMPT) :][:1]
        return ([*right, *ids] * count)[:count]

    options = {"draft_block_size": WIDTH, "max_tokens": 20, "statistics": statistics}
    steps = generate_step(mx.array(PROMPT), mix.model(), draft_model=CallableDrafter(propose), **options)
    assert [token for token, _ in steps] == list(run.ids[:20])
    assert statistics.accepted_by_depth[0] > 0
    assert statistics.accepted_by_depth[1] == 0
