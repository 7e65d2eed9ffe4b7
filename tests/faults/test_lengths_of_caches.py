"""How much a cache has read is told by caches that count, and by no other; those of a batch are taken as they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import ArraysCache, BatchKVCache, BatchRotatingKVCache, CacheList, KVCache, RotatingKVCache

from mlx_spec import Statistics, generate_step
from mlx_spec.cache.adopt import Likeness, tokens_held
from mlx_spec.cache.contents import tokens_read
from mlx_spec.drafters import CallableDrafter, Drafter, NgramDrafter
from mlx_spec.drafters.standalone import StandaloneDrafter
from tests.cache.kinds import append
from tests.oracle import assert_same_output, independent_copy, run_stock
from tests.same_cache import assert_same_cache
from tests.scripted import AlternatingDrafter
from tests.tiny import MIXES, PROMPT, VOCAB, Mix

pytestmark = pytest.mark.faults

EMITTED = 12
WIDTH = 4


class Remembering(AlternatingDrafter):
    """One that is the worse for not having seen the text."""

    remembers = True


def warm_caches(mix: Mix) -> list[Any]:
    caches = mix.new_cache()
    mx.eval(mix.model()(mx.array([PROMPT]), cache=caches))
    return caches


def speculate(mix: Mix, caches: list[Any], **options: Any) -> Statistics:
    """A run that goes on from these caches, compared with stock's from a copy of them."""
    run = run_stock(mix.model(), [5, 9], EMITTED, prompt_cache=independent_copy(caches), **options)
    statistics = Statistics()
    out = list(
        generate_step(
            mx.array([5, 9]),
            mix.model(),
            max_tokens=EMITTED,
            prompt_cache=caches,
            draft_model=Remembering([*run.ids, *[0] * WIDTH], VOCAB, WIDTH),
            draft_block_size=WIDTH,
            statistics=statistics,
            **options,
        )
    )
    assert_same_output(out, run)
    assert_same_cache(caches, run.cache_after(EMITTED))
    return statistics


SEEN = {"dense_qk_norm": "7 tokens", "hybrid": "7 tokens", "cache_list": "7 tokens", "mamba2": "text", "mamba": "text"}
NEEDS_SECONDS = ("cache_list", "mamba2", "hybrid")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in NEEDS_SECONDS else []) for name in SEEN]
)
@pytest.mark.part(2)
def test_a_drafter_that_has_not_seen_the_text_says_so_whatever_holds_it(name: str) -> None:
    mix = MIXES[name]
    told = f"the drafter has not seen the {SEEN[name]} already in the cache"
    assert any(note.startswith(told) for note in speculate(mix, warm_caches(mix)).notes)


EVERY_DRAFTER_WITHOUT_TAPS: dict[str, Callable[[], Drafter]] = {
    "ngram": NgramDrafter,
    "callable": lambda: CallableDrafter(lambda ids, count: []),
    "standalone": lambda: StandaloneDrafter(MIXES["dense"].model()),
}


@pytest.mark.every_case
@pytest.mark.parametrize("kind", EVERY_DRAFTER_WITHOUT_TAPS)
def test_whoever_works_from_the_text_it_was_shown_says_what_it_was_not(kind: str) -> None:
    mix = MIXES["dense"]
    for caches, said in ((warm_caches(mix), True), (mix.new_cache(), False)):
        statistics, drafter = Statistics(), EVERY_DRAFTER_WITHOUT_TAPS[kind]()
        options = {"prompt_cache": caches, "statistics": statistics, "draft_block_size": 2}
        list(generate_step(mx.array([5, 9]), mix.model(), draft_model=drafter, max_tokens=2, **options))
        assert ("the drafter has not seen the 7 tokens already in the cache" in statistics.notes) == said


def test_of_fresh_caches_nothing_is_said() -> None:
    for name in ("dense_qk_norm", "mamba"):
        mix = MIXES[name]
        assert not any("has not seen" in note for note in speculate(mix, mix.new_cache()).notes)


def read(cache: Any, tokens: int, batch: int = 1) -> Any:
    append(cache, range(tokens), batch)
    return cache


@pytest.mark.parametrize(
    ("caches", "tokens", "columns"),
    [
        (lambda: [], 0, 0),
        (lambda: [None, KVCache(), ArraysCache(2)], 0, 0),
        (lambda: [read(KVCache(), 6)], 6, 6),
        (lambda: [read(RotatingKVCache(4), 9)], 9, 9),
        (lambda: [read(ArraysCache(2), 6)], None, 0),
        (lambda: [ArraysCache(2, left_padding=[2])], 0, 0),
        (lambda: [read(ArraysCache(2), 6), read(KVCache(), 6)], 6, 6),
        (lambda: [CacheList(read(ArraysCache(2), 6), read(KVCache(), 6))], 6, 6),
        (lambda: [BatchKVCache([0])], 0, 0),
        (lambda: [BatchKVCache([3, 1])], 0, 0),
        (lambda: [read(BatchKVCache([3, 1]), 6, 2)], 5, 6),
        (lambda: [read(BatchRotatingKVCache(4, [3, 1]), 9, 2)], 8, 9),
        (lambda: [read(ArraysCache(2), 6), read(BatchKVCache([2]), 6)], 4, 6),
    ],
)
def test_lengths_are_those_of_the_caches_that_count(
    caches: Callable[[], list[Any]], tokens: int | None, columns: int
) -> None:
    assert tokens_read(caches()) == tokens
    assert tokens_held(caches()) == columns


def merged(caches: list[Any]) -> list[Any]:
    return [type(cache).merge([cache]) for cache in caches]


@pytest.mark.parametrize(
    "name",
    [
        "dense_qk_norm",
        "ring_with_keep",
        pytest.param("sliding", marks=pytest.mark.deep),
        pytest.param("hybrid", marks=pytest.mark.deep),
        pytest.param("cache_list", marks=pytest.mark.deep),
        pytest.param("mla_moe", marks=pytest.mark.deep),
    ],
)
def test_a_batch_of_one_row_is_read_in_blocks_and_left_as_stock_leaves_it(name: str) -> None:
    mix = MIXES[name]
    caches = merged(warm_caches(mix))
    assert any(type(cache).__name__.startswith(("Batch", "CacheList")) for cache in caches)
    statistics = speculate(mix, caches)
    assert "step-through" not in statistics.verify_route
    assert statistics.accepted_tokens > 0
    assert any("has not seen the 7 tokens" in note for note in statistics.notes)


@pytest.mark.part(1)
@pytest.mark.parametrize("pad", [3, 1])
def test_padding_of_a_batch_is_no_text(pad: int) -> None:
    mix = MIXES["dense_qk_norm"]
    caches = [BatchKVCache([pad]) for _ in mix.model().layers]
    mx.eval(mix.model()(mx.array([[0] * pad + list(PROMPT)]), cache=caches))
    statistics = speculate(mix, caches)
    assert "step-through" not in statistics.verify_route
    assert any("has not seen the 7 tokens" in note for note in statistics.notes)


@pytest.mark.part(1)
@pytest.mark.parametrize("size", [5, 9])
def test_a_window_of_a_batch_that_goes_round_is_exact(size: int) -> None:
    mix = MIXES["dense_qk_norm"]
    caches = [BatchRotatingKVCache(size, [0]) for _ in mix.model().layers]
    mx.eval(mix.model()(mx.array([PROMPT]), cache=caches))
    assert "step-through" not in speculate(mix, caches).verify_route


@pytest.mark.parametrize(
    ("cache", "name"),
    [
        (BatchKVCache([0, 0]), "BatchKVCache of 2 rows"),
        (ArraysCache(2, left_padding=[1, 0]), "ArraysCache of 2 rows"),
        (RotatingKVCache(3, keep=4), "RotatingKVCache(max_size=3, keep=4), a window without a row to overwrite,"),
    ],
)
def test_what_no_route_is_certified_for_is_named(cache: Any, name: str) -> None:
    assert Likeness([cache, KVCache()]).strangers == [name]


def test_a_prompt_that_is_padded_on_the_right_is_not_read_in_blocks() -> None:
    cache = ArraysCache(2)
    cache.prepare(lengths=[3])
    assert Likeness([cache]).strangers == ["ArraysCache in the middle of a padded prompt"]
    cache.finalize()
    assert Likeness([cache]).strangers == []
