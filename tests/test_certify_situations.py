"""A certificate is about one situation: kinds of caches, and which windows the text has outgrown."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    ConcatenateKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)

from mlx_spec.cache.adopt import Likeness, stretch
from mlx_spec.verify.mixers import attach as attach_mixers
from mlx_spec.verify.record import ModelRecord, record_of
from mlx_spec.verify.routes import BLOCK, STEP_THROUGH
from mlx_spec.verify.trial import PROBES, Situation
from tests.test_certify import ON_CPU, fresh_model, on_cpu, routes, situation
from tests.tiny import MIXES, PROMPT


class Lengths:
    """Ends, in tokens from the start of the text, of the blocks a window model was given."""

    def __init__(self, wrong_beyond: int | None = None) -> None:
        self.ends: list[int] = []
        self.wrong_beyond = wrong_beyond

    @contextmanager
    def watching(self, model: Any) -> Iterator[None]:
        own, watch = type(model), self

        def call(self: Any, tokens: mx.array, cache: Any = None) -> mx.array:
            logits = own.__call__(self, tokens, cache=cache)
            if tokens.shape[1] == 1:
                return logits
            watch.ends.append(cache[0].offset)
            wrong = watch.wrong_beyond is not None and watch.ends[-1] > watch.wrong_beyond
            return logits + 1 if wrong else logits

        model.__class__ = type(own.__name__, (own,), {"__call__": call, "__module__": own.__module__})
        try:
            yield
        finally:
            model.__class__ = own


def window_of(name: str) -> int:
    (edge,) = Likeness(MIXES[name].new_cache()).edges
    return edge


@on_cpu
def test_a_block_that_is_wrong_only_beyond_the_window_is_taken_before_and_refused_beyond() -> None:
    model, caches = fresh_model("sliding"), MIXES["sliding"].new_cache()
    window = window_of("sliding")
    chosen, _ = routes(model)
    with Lengths(wrong_beyond=PROBES[-1].tokens + 2).watching(model):
        model(mx.array([PROMPT]), cache=caches)
        assert chosen.route(2, caches) == BLOCK
        while caches[0].offset <= window:
            model(mx.array([[5]]), cache=caches)
        assert chosen.route(2, caches) == STEP_THROUGH


def test_blocks_are_tried_from_the_probes_prompt_and_from_every_start_of_the_situation() -> None:
    model, seen = fresh_model("sliding"), Lengths()
    beyond = Situation(situation("sliding").caches, 1)
    attach_mixers(model)
    with seen.watching(model):
        assert ModelRecord(model).certificate(beyond).holds(4) or not ON_CPU
    prompts = {probe.tokens for probe in PROBES}
    assert prompts <= set(seen.ends)
    # The op table was traced over three tokens; all else are prompts, and blocks of four from each of the lengths.
    assert {end - 4 for end in seen.ends if end not in (3, *prompts)} == {*prompts, *beyond.starts}


@pytest.mark.parametrize(("edge", "starts"), [(8, [13]), (9, [14]), (10, [8, 15]), (512, [510, 517])])
def test_blocks_are_tried_across_the_last_edge_passed_and_beyond_it(edge: int, starts: list[int]) -> None:
    assert Situation(Likeness([RotatingKVCache(edge)]), 1).starts == starts
    assert Situation(Likeness([RotatingKVCache(edge)]), 0).starts == []


@pytest.mark.parametrize("end", [0, 1, 2])
def test_a_situation_counts_the_edges_a_block_reaches(end: int) -> None:
    likeness = Likeness([RotatingKVCache(8), KVCache(), RotatingKVCache(20, keep=4), ChunkedKVCache(8)])
    assert likeness.edges == [8, 20]
    assert Situation.at(likeness, (8, 9, 21)[end]).edges_passed == end


@pytest.mark.parametrize("length", [15, 16, 17, 20, 29, 300])
@pytest.mark.parametrize(
    "make",
    [KVCache, ConcatenateKVCache, lambda: RotatingKVCache(16, keep=3), lambda: ChunkedKVCache(16)],
    ids=["kv", "concatenate", "ring", "chunked"],
)
def test_stretched_caches_stand_where_single_steps_leave_them(make: Callable[[], Any], length: int) -> None:
    stepped, stretched = make(), make()
    for cache, tokens in ((stepped, length), (stretched, 9)):
        for token in range(tokens):
            if isinstance(cache, ChunkedKVCache):
                cache.maybe_trim_front()
            row = mx.full((1, 2, 1, 4), float(token))
            cache.update_and_fetch(row, -row)
    stretch([stretched], length)
    if isinstance(stepped, ChunkedKVCache):
        stepped.maybe_trim_front()
    scalars = [
        {name: value for name, value in vars(cache).items() if isinstance(value, int)} for cache in (stretched, stepped)
    ]
    assert scalars[0] == scalars[1]
    shapes = [[array.shape for array in cache.keys_and_values()] for cache in (stretched, stepped)]
    assert shapes[0] == shapes[1]


def test_caches_of_no_known_kind_are_stepped_through_by_name() -> None:
    class PagedCache(KVCache):
        pass

    chosen, statistics = routes(MIXES["dense"].model())
    caches = [PagedCache() for _ in MIXES["dense"].new_cache()]
    assert chosen.route(3, caches) == STEP_THROUGH
    if ON_CPU:
        assert "PagedCache is none of the caches" in statistics.notes[0]


def test_alike_caches_share_a_certificate_and_others_do_not() -> None:
    model = MIXES["dense"].model()
    plain, rings = situation(), Situation(Likeness(MIXES["ring_with_keep"].new_cache()))
    assert record_of(model).certificate(plain) is record_of(model).certificate(situation())
    assert record_of(model).certificate(plain) is not record_of(model).certificate(rings)
    assert rings.caches != Likeness([RotatingKVCache(5, keep=1) for _ in MIXES["dense"].new_cache()])


def test_fresh_caches_are_of_the_kinds_they_were_taken_from() -> None:
    nest = [CacheList(KVCache(), RotatingKVCache(9, keep=2)), ArraysCache(3), None, ChunkedKVCache(5)]
    likeness = Likeness(nest)
    assert Likeness(likeness.fresh()) == likeness
    quantized = Likeness([QuantizedKVCache(32, 4), KVCache()])
    (first, second) = quantized.fresh()
    assert type(first) is type(second) is KVCache
    first.update_and_fetch(mx.zeros((1, 1, 2, 32)), mx.zeros((1, 1, 2, 32)))
    made = [first, second]
    quantized.quantize(made)
    assert Likeness(made) == quantized
