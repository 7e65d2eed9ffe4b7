"""A cache while a run streams on it: stock's between any two plain tokens, and a settled copy inside blocks."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx import nn
from mlx_lm.generate import generate_step as stock_step
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    can_trim_prompt_cache,
    load_prompt_cache,
    save_prompt_cache,
    trim_prompt_cache,
)

from mlx_spec import attach, settled_cache
from mlx_spec.cache.transaction import SpeculativeCacheTransaction
from mlx_spec.drafters.base import Drafter
from mlx_spec.errors import CacheChanged, TransactionError
from mlx_spec.generate import generate_step
from mlx_spec.verify.mix import Mix
from tests.faults.mixes import WITH_BATCH, stock_run
from tests.oracle import OracleRun, independent_copy
from tests.rounds.runs import DRAFTERS
from tests.same_cache import assert_same_cache
from tests.tiny import PROMPT

pytestmark = pytest.mark.faults

EMITTED = 14
WIDTH = 5
Steps = Generator[tuple[int, mx.array], None, None]

MID_RUN = tuple(mix for mix in WITH_BATCH if mix not in ("dense_qk_norm", "dense_4bit_weights"))
EVERY_MIX = pytest.mark.parametrize("mix", MID_RUN)
TRIMMABLE = pytest.mark.parametrize("mix", ["dense", "sliding", "quantized_from_0", "chunked", "batch"])


def stock(mix: str) -> OracleRun:
    return stock_run(mix, EMITTED + 9)


def begin(mix: str, cache: list[Any], drafter: str | None = None, step: Callable[..., Any] = generate_step) -> Steps:
    options: dict[str, Any] = {}
    if drafter is not None:
        made_drafter: Drafter = DRAFTERS[drafter](mix, stock(mix).ids, mx.float32)
        options = {"draft_model": made_drafter, "draft_block_size": WIDTH}
    prompt = mx.array(PROMPT)
    made = WITH_BATCH[mix]
    steps: Steps = step(prompt, made.model(), prompt_cache=cache, max_tokens=EMITTED, **made.warm_kv, **options)
    return steps


def take(steps: Steps, count: int) -> list[int]:
    return [next(steps)[0] for _ in range(count)]


# Width 1


@EVERY_MIX
@pytest.mark.part(3)
def test_between_two_plain_tokens_the_cache_is_stocks_and_nothing_is_open_on_it(mix: str) -> None:
    cache, run = WITH_BATCH[mix].new_cache(), stock(mix)
    steps = begin(mix, cache)
    for length in range(1, EMITTED + 1):
        assert take(steps, 1) == [run.ids[length - 1]]
        if length % 4 == 1 or mix == "quantized_from_20":
            assert_same_cache(copy.deepcopy(cache), run.cache_after(length))
            SpeculativeCacheTransaction(cache, 2).abort()
            assert_same_cache(settled_cache(cache), run.cache_after(length))
    assert list(steps) == []
    assert_same_cache(cache, run.cache_after(EMITTED))


def first_is_kept(steps: list[Steps]) -> None:
    """Nothing happens to the first run until everything was compared."""


def first_is_closed(steps: list[Steps]) -> None:
    steps.pop().close()


def first_is_collected(steps: list[Steps]) -> None:
    steps.clear()
    gc.collect()


@pytest.mark.part(3)
@pytest.mark.parametrize("fate", [first_is_kept, first_is_closed, first_is_collected])
@TRIMMABLE
def test_a_cache_trimmed_under_a_live_plain_run_is_the_second_runs(mix: str, fate: Callable[..., None]) -> None:
    left = []
    for step in (stock_step, generate_step):
        cache = WITH_BATCH[mix].new_cache()
        runs = [begin(mix, cache, step=step)]
        take(runs[0], 2)
        trimmed = trim_prompt_cache(cache, 3)
        second = begin(mix, cache, step=step)
        first_half = take(second, 2)
        if step is generate_step:
            fate(runs)
        ids = [*first_half, *take(second, 3)]
        second.close()
        left.append((trimmed, ids, independent_copy(cache)))
    (want_trimmed, want_ids, want_cache), (trimmed, ids, got_cache) = left
    assert (trimmed, ids) == (want_trimmed, want_ids)
    assert trimmed == 3
    assert_same_cache(got_cache, want_cache)


@pytest.mark.part(3)
@TRIMMABLE
def test_a_plain_run_goes_on_over_a_changed_cache_as_stock_does(mix: str) -> None:
    left = []
    for step in (stock_step, generate_step):
        cache = WITH_BATCH[mix].new_cache()
        steps = begin(mix, cache, step=step)
        ids = take(steps, 3)
        trim_prompt_cache(cache, 2)
        ids += take(steps, 4)
        steps.close()
        left.append((ids, cache))
    assert left[1][0] == left[0][0]
    assert_same_cache(left[1][1], left[0][1])


@pytest.mark.part(2)
@pytest.mark.parametrize("mix", ["hybrid", "mamba2", "ring_with_keep"])
def test_a_closed_plain_run_leaves_alone_what_another_wrote(mix: str) -> None:
    """Caches that cannot be trimmed: a second run goes on where the first one stands."""
    left = []
    for step in (stock_step, generate_step):
        cache = WITH_BATCH[mix].new_cache()
        first = begin(mix, cache, step=step)
        take(first, 3)
        second = begin(mix, cache, step=step)
        ids = take(second, 4)
        if step is generate_step:
            first.close()
        ids += take(second, 2)
        second.close()
        left.append((ids, cache))
    assert left[1][0] == left[0][0]
    assert_same_cache(left[1][1], left[0][1])


def test_a_cache_saved_between_two_plain_tokens_is_stocks(tmp_path: Path) -> None:
    cache, run = WITH_BATCH["hybrid"].new_cache(), stock("hybrid")
    steps = begin("hybrid", cache)
    take(steps, 4)
    save_prompt_cache(str(tmp_path / "cache.safetensors"), cache)
    assert_same_cache(load_prompt_cache(str(tmp_path / "cache.safetensors")), run.cache_after(4))
    assert take(steps, 5) == list(run.ids[4:9])


# Inside a block


@EVERY_MIX
@pytest.mark.parametrize("drafter", ["wrong", "right", "cycling"])
@pytest.mark.part(3)
def test_a_settled_copy_is_stocks_cache_and_the_run_goes_on_as_if_nobody_had_asked(mix: str, drafter: str) -> None:
    cache, run = WITH_BATCH[mix].new_cache(), stock(mix)
    steps = begin(mix, cache, drafter)
    asked = (1, 2, 3, 6, 9, 12)
    copies = []
    for length in range(1, EMITTED + 1):
        assert take(steps, 1) == [run.ids[length - 1]]
        if length in asked:
            copies.append(settled_cache(cache))
    assert list(steps) == []
    for length, settled in zip(asked, copies, strict=True):
        assert_same_cache(settled, run.cache_after(length))
    assert_same_cache(cache, run.cache_after(EMITTED))


def test_a_settled_copy_can_be_trimmed_and_continued_beside_the_run() -> None:
    cache, run = WITH_BATCH["dense"].new_cache(), stock("dense")
    steps = begin("dense", cache, "cycling")
    take(steps, 4)
    fork = settled_cache(cache)
    trim_prompt_cache(fork, 2)
    other = generate_step(mx.array(run.ids[2:4]), WITH_BATCH["dense"].model(), prompt_cache=fork, max_tokens=3)
    assert [token for token, _ in other] == list(run.ids[4:7])
    assert take(steps, 4) == list(run.ids[4:8])
    steps.close()
    assert_same_cache(cache, run.cache_after(8))


@pytest.mark.parametrize("mix", ["dense", "quantized_from_0", "chunked", "batch"])
@pytest.mark.parametrize("length", [1, 3, 4])
@pytest.mark.part(4)
def test_a_trim_inside_a_block_stands_on_the_text_handed_out(mix: str, length: int) -> None:
    for goes_on in (False, True):
        cache = WITH_BATCH[mix].new_cache()
        steps = begin(mix, cache, "right")
        take(steps, length)
        assert trim_prompt_cache(cache, 3) == 3
        if goes_on:
            with pytest.raises(CacheChanged, match="settled_cache"):
                next(steps)
        else:
            steps.close()
        want = stock(mix).cache_after(length)
        trim_prompt_cache(want, 3)
        assert_same_cache(cache, want)
        SpeculativeCacheTransaction(cache, 1).abort()


def test_a_window_that_is_full_with_what_is_open_is_not_trimmed_and_says_so() -> None:
    for taken in (3, 11):
        cache, run = WITH_BATCH["sliding"].new_cache(), stock("sliding")
        steps = begin("sliding", cache, "right")
        take(steps, taken)
        assert not can_trim_prompt_cache(cache)
        assert trim_prompt_cache(cache, 3) == 0
        # Before it is full without the block, the settled copy can be trimmed as stock's cache can.
        room = can_trim_prompt_cache(run.cache_after(taken))
        assert can_trim_prompt_cache(settled_cache(cache)) == room == (taken == 3)
        assert take(steps, 2) == list(run.ids[taken : taken + 2])
        steps.close()
        assert_same_cache(cache, run.cache_after(taken + 2))


@pytest.mark.parametrize("mix", ["dense", "hybrid", "quantized_from_20"])
def test_another_cache_in_the_list_is_noticed_inside_a_block_and_left_alone(mix: str) -> None:
    for goes_on in (False, True):
        cache = WITH_BATCH[mix].new_cache()
        steps = begin(mix, cache, "right")
        take(steps, 3)
        theirs = cache[1] = WITH_BATCH[mix].new_cache()[1]
        if goes_on:
            with pytest.raises(CacheChanged, match="settled_cache"):
                next(steps)
        else:
            steps.close()
        assert cache[1] is theirs
        assert theirs.empty()
        assert_same_cache([cache[0]], [stock(mix).cache_after(3)[0]])


@pytest.mark.part(2)
@pytest.mark.parametrize("mix", ["dense", "hybrid", "ring_with_keep"])
def test_what_else_is_written_inside_a_block_is_one_clear_error_and_is_left_alone(mix: str) -> None:
    for goes_on in (False, True):
        cache = WITH_BATCH[mix].new_cache()
        steps = begin(mix, cache, "wrong")
        take(steps, 3)
        mx.eval(WITH_BATCH[mix].model()(mx.array([[5, 6]]), cache=cache))
        theirs = independent_copy(cache)
        with pytest.raises(CacheChanged, match="changed"):
            next(steps) if goes_on else steps.close()
        assert_same_cache(cache, theirs)
        SpeculativeCacheTransaction(cache, 1).abort()


def test_a_second_run_on_a_cache_inside_a_block_is_refused_before_anything_is_changed() -> None:
    cache, run = WITH_BATCH["dense"].new_cache(), stock("dense")
    steps = begin("dense", cache, "right")
    ids = take(steps, 3)
    with pytest.raises(TransactionError, match="in an open transaction already"):
        take(begin("dense", cache), 1)
    ids += take(steps, 4)
    steps.close()
    assert ids == list(run.ids[:7])
    assert_same_cache(cache, run.cache_after(7))


# Arrays put into a cache inside a block


def replaced(held: Any) -> Any:
    """Another object of the same shape."""
    return held + 1 if isinstance(held, mx.array) else [*held[:-1], held[-1] * 2]


def put_other_keys(cache: Any) -> None:
    cache.keys = replaced(cache.keys)


def put_other_values(cache: Any) -> None:
    cache.values = replaced(cache.values)


def put_other_state(cache: Any) -> None:
    cache[1] = replaced(cache[1])


def trim_and_put_other_keys(cache: Any) -> None:
    cache.trim(1)
    put_other_keys(cache)


PUT: dict[str, tuple[str, int, Callable[[Any], None]]] = {
    "keys of the first layer": ("dense", 0, put_other_keys),
    "values of the last layer": ("dense", -1, put_other_values),
    "keys of a window": ("sliding", 0, put_other_keys),
    "keys of full attention beside windows": ("sliding", 2, put_other_keys),
    "values of a window that keeps its first rows": ("ring_with_keep", 1, put_other_values),
    "the last array of packed keys": ("quantized_from_0", 1, put_other_keys),
    "keys of a chunk": ("chunked", 0, put_other_keys),
    "keys of a batch": ("batch", 1, put_other_keys),
    "a recurrent state": ("hybrid", 0, put_other_state),
    "a nested recurrent state": ("cache_list", 1, lambda cache: put_other_state(cache[0])),
    "nested keys": ("cache_list", 2, lambda cache: put_other_keys(cache[1])),
    "a trim and keys": ("dense", 1, trim_and_put_other_keys),
}


@pytest.mark.parametrize("what", PUT)
def test_arrays_put_into_any_layer_inside_a_block_are_noticed_and_left_alone(what: str) -> None:
    mix, layer, put = PUT[what]
    for goes_on in (True, False):
        cache = WITH_BATCH[mix].new_cache()
        steps = begin(mix, cache, "right")
        take(steps, 3)
        put(cache[layer])
        theirs = independent_copy(cache)
        with pytest.raises(CacheChanged, match="changed"):
            next(steps) if goes_on else steps.close()
        assert_same_cache(cache, theirs)
        SpeculativeCacheTransaction(cache, 1).abort()


@pytest.mark.parametrize("mix", ["dense", "ring_with_keep", "quantized_from_0"])
def test_arrays_put_in_beside_a_trim_of_all_caches_are_no_trim(mix: str) -> None:
    cache = WITH_BATCH[mix].new_cache()
    steps = begin(mix, cache, "right")
    take(steps, 3)
    trim_prompt_cache(cache, 1)
    put_other_keys(cache[1])
    theirs = independent_copy(cache)
    with pytest.raises(CacheChanged, match="changed"):
        steps.close()
    assert_same_cache(cache, theirs)


@pytest.mark.parametrize("what", PUT)
def test_arrays_put_between_mark_and_commit_are_refused_and_the_round_can_be_aborted(what: str) -> None:
    mix, layer, put = PUT[what]
    model, cache = WITH_BATCH[mix].model(), stock(mix).cache_after(4)
    attach(model)
    with SpeculativeCacheTransaction(cache, 3) as tx:
        mx.eval(model(mx.array([[5, 6, 7]]), cache=tx.caches))
        tx.mark(3)
        assert not tx.changed
        tx.validate(2)
        put(cache[layer])
        assert tx.changed
        for refused in (tx.validate, tx.commit):
            with pytest.raises(CacheChanged, match="outside"):
                refused(2)
    SpeculativeCacheTransaction(cache, 1).abort()


def test_a_round_without_caches_was_changed_by_nobody() -> None:
    with SpeculativeCacheTransaction([None], 2) as tx:
        assert not tx.changed
        tx.mark(2)
        tx.commit(1)


class _Sums(nn.Module):
    """A recurrence whose mixer is handed the cache list itself, with one state in it."""

    def __call__(self, x: mx.array, cache: Any) -> mx.array:
        held = cache[0][0]
        sums = mx.cumsum(x, axis=1) + (0 if held is None else held)
        cache[0][0] = sums[:, -1:]
        return sums


def test_a_settled_copy_of_a_state_alone_in_its_list_is_brought_there_and_the_cache_is_not() -> None:
    mixer, x = _Sums(), mx.arange(1.0, 9.0)[None, :, None]
    caches = [CacheList(ArraysCache(1))]
    mixer(x[:, :4], caches[0])
    whole = mx.sum(x, axis=1, keepdims=True)
    with SpeculativeCacheTransaction(caches, 4) as tx:
        Mix(mixer, {"x": x[:, 4:], "cache": tx.caches[0]}, {}).run()
        tx.mark(4)
        tx.certain = 2
        settled = settled_cache(caches)
        assert mx.array_equal(settled[0][0][0], mx.sum(x[:, :6], axis=1, keepdims=True))
        assert mx.array_equal(caches[0][0][0], whole)
        tx.commit(4)
    assert mx.array_equal(caches[0][0][0], whole)
