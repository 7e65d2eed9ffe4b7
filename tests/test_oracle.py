"""The harness itself: the oracle is stock mlx-lm, its snapshots stand still, and the comparator can fail."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.generate import generate_step, maybe_quantize_kv_cache
from mlx_lm.models.cache import (
    ArraysCache,
    BatchKVCache,
    BatchRotatingKVCache,
    CacheList,
    ConcatenateKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)
from mlx_lm.sample_utils import make_sampler

from tests.bits import assert_same_bits, bit_difference, bits
from tests.oracle import (
    OracleRun,
    assert_same_output,
    continue_plainly,
    first_difference,
    independent_copy,
    rng_key,
    run_stock,
    seed_from_key,
)
from tests.same_cache import assert_same_cache, assert_same_row, cache_difference
from tests.tiny import LONG, MIXES, PROMPT, REQUIRED, VOCAB, Mix

EVERY_MIX = pytest.mark.parametrize("mix", MIXES.values(), ids=MIXES.keys())


def _run(mix: Mix, emitted: int, **options: Any) -> OracleRun:
    return run_stock(mix.model(), PROMPT, emitted, **mix.kv, **options)


# Bits


def test_equal_nans_are_equal_and_signed_zeros_are_not() -> None:
    assert bit_difference(mx.array([math.nan, 1.0]), mx.array([math.nan, 1.0])) is None
    difference = bit_difference(mx.array([1.0, -0.0]), mx.array([1.0, 0.0]))
    assert difference == "1 of 2 elements differ, first at index (1,): got -0.0 (bits 0x80000000), want 0.0 (bits 0x0)"


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16, mx.int64, mx.uint8, mx.bool_])
def test_one_flipped_bit_is_found_in_every_dtype(dtype: mx.Dtype) -> None:
    array = (mx.arange(30).reshape(2, 3, 5) % 2).astype(dtype)
    assert bit_difference(array, array.transpose(0, 1, 2)) is None
    difference = bit_difference(_with_flipped_bit(array, (1, 2, 3)), array)
    assert difference is not None
    assert "first at index (1, 2, 3)" in difference


def test_shape_and_dtype_count() -> None:
    assert bit_difference(mx.zeros((2, 3)), mx.zeros((3, 2))) == "shape (2, 3), want (3, 2)"
    assert "dtype" in (bit_difference(mx.zeros(2), mx.zeros(2, mx.uint32)) or "")
    with pytest.raises(AssertionError, match="the logits: shape"):
        assert_same_bits(mx.zeros(2), mx.zeros(3), "the logits")


# The oracle


@pytest.mark.part(6)
@EVERY_MIX
def test_mix_has_the_caches_it_names_and_varied_greedy_output(mix: Mix) -> None:
    run = mix.oracle()
    assert {type(layer).__name__ for layer in run.cache_after(LONG)} == mix.caches
    assert len(set(run.ids)) >= 8, f"{run.ids} is too uniform to tell a shifted answer from a right one"
    assert all(0 <= token < VOCAB for token in run.ids)


def test_required_mixes_exist() -> None:
    assert set(REQUIRED) <= MIXES.keys()


def test_models_are_shared_per_dtype_and_building_one_draws_nothing() -> None:
    key = rng_key()
    mix = MIXES["dense"]
    assert mix.model() is mix.model(mx.float32)
    assert mix.model(mx.float16) is not mix.model()
    assert mix.model(mx.float16).layers[0].self_attn.q_proj.weight.dtype == mx.float16
    assert rng_key() == key


@pytest.mark.part(5)
@EVERY_MIX
def test_oracle_equals_a_loop_written_by_hand(mix: Mix) -> None:
    run = mix.oracle(25)
    model, cache = mix.model(), mix.new_cache()

    def step(ids: list[int]) -> mx.array:
        logits = model(mx.array([ids]), cache=cache)[:, -1, :]
        if "kv_bits" in mix.kv:
            maybe_quantize_kv_cache(cache, mix.kv["quantized_kv_start"], mix.kv["kv_group_size"], mix.kv["kv_bits"])
        return (logits - mx.logsumexp(logits, keepdims=True))[0]

    step(list(PROMPT[:-1]))
    row = step([PROMPT[-1]])
    for emitted, (token, logprobs) in enumerate(zip(run.ids, run.logprobs, strict=True), start=1):
        assert int(mx.argmax(row).item()) == token
        assert_same_bits(row, logprobs, f"logprobs of token {emitted - 1}")
        row = step([token])
        assert_same_cache(cache, run.cache_after(emitted))


@pytest.mark.part(7)
@EVERY_MIX
@pytest.mark.parametrize("emitted", [1, 5, 21])
def test_snapshot_is_what_a_closed_stock_run_leaves(mix: Mix, emitted: int) -> None:
    sampler = make_sampler(temp=1.0)
    run = _run(mix, 25, seed=3, sampler=sampler)
    cache = mix.new_cache()
    mx.random.seed(3)
    steps = generate_step(
        mx.array(PROMPT), mix.model(), max_tokens=-1, prompt_cache=cache, sampler=sampler, **mix.warm_kv
    )
    got = list(itertools.islice(steps, emitted))
    steps.close()
    assert_same_output(got, run, emitted)
    assert_same_cache(cache, run.cache_after(emitted))
    assert rng_key() == run.rng[emitted]


@EVERY_MIX
def test_snapshots_stand_still_and_can_be_continued(mix: Mix) -> None:
    run = mix.oracle()
    before = run.cache_after(18)
    resumed = continue_plainly(mix.model(), before, [run.ids[18]], 15, **mix.warm_kv)
    assert resumed.ids == run.ids[19:34]
    assert_same_cache(resumed.cache_after(15), run.cache_after(34))
    assert_same_cache(before, run.cache_after(18))

    model = mix.model()
    mx.eval(model(mx.array([[1]]), cache=before))
    assert cache_difference(before, run.cache_after(18)) is not None
    assert_same_cache(independent_copy(run.cache_after(18)), run.cache_after(18))


def test_run_without_tokens_keeps_the_state_after_the_prompt() -> None:
    mix = MIXES["dense"]
    run = _run(mix, 0, seed=3, sampler=make_sampler(temp=1.0))
    assert run.ids == ()
    assert run.cache_after(0)[0].offset == len(PROMPT)
    mx.random.seed(3)
    mx.random.categorical(mx.zeros(3))
    assert run.rng[0] == rng_key()


def test_exhausted_run_and_closed_run_leave_the_same() -> None:
    mix = MIXES["hybrid"]
    assert_same_cache(mix.oracle(9).cache_after(9), mix.oracle(12).cache_after(9))


def test_rng_key_survives_a_round_trip() -> None:
    mx.random.uniform(shape=(3,))
    key = rng_key()
    drawn = mx.random.uniform(shape=(3,))
    seed_from_key(key)
    assert rng_key() == key
    assert_same_bits(mx.random.uniform(shape=(3,)), drawn)


def test_warm_cache_of_the_caller_is_left_alone() -> None:
    mix = MIXES["sliding"]
    warm = mix.oracle(8).cache_after(8)
    run_stock(mix.model(), [4, 9, 2], 5, prompt_cache=warm)
    assert_same_cache(warm, mix.oracle(8).cache_after(8))


def test_first_difference() -> None:
    assert first_difference([1, 2, 3], (1, 2, 3)) is None
    assert first_difference([1, 2, 3], [1, 5, 3]) == 1
    assert first_difference([1, 2], [1, 2, 3]) == 2
    assert first_difference([1, 2, None], [1, 2]) == 2


def test_output_comparison_names_the_token_and_the_logprob() -> None:
    run = MIXES["dense"].oracle(6)
    pairs = list(zip(run.ids, run.logprobs, strict=True))
    assert_same_output(pairs, run)
    assert_same_output(pairs[:4], run, 4)
    with pytest.raises(AssertionError, match="token 5 differs"):
        assert_same_output(pairs[:5], run)
    with pytest.raises(AssertionError, match="token 2 differs"):
        assert_same_output([*pairs[:2], (run.ids[2] + 1, run.logprobs[2]), *pairs[3:]], run)
    nudged = _with_flipped_bit(run.logprobs[3], (50,))
    with pytest.raises(AssertionError, match=r"logprobs of token 3 .* first at index \(50,\)"):
        assert_same_output([*pairs[:3], (run.ids[3], nudged), *pairs[4:]], run)


# The comparator can fail


def _with_flipped_bit(array: mx.array, index: tuple[int, ...]) -> mx.array:
    raw = bits(array)
    raw[index] ^= 1
    return mx.array(raw).view(array.dtype)


Change = tuple[str, Callable[[], None]]


def _changes(owner: Any, where: str) -> Iterator[Change]:
    """One small change to each thing a cache holds: name, and what makes the change in place."""
    if isinstance(owner, list | tuple):
        for i, item in enumerate(owner):
            yield from _changes(item, f"{where}[{i}]")
        return
    for name, value in list(vars(owner).items()):
        yield from _changes_of_field(owner, name, value, f"{where}.{name}")


def _changes_of_field(owner: Any, name: str, value: Any, where: str) -> Iterator[Change]:
    def put(new: Any) -> Callable[[], None]:
        return lambda: setattr(owner, name, new)

    if isinstance(value, mx.array):
        yield where, put(_with_flipped_bit(value, (0,) * value.ndim))
    elif isinstance(value, bool | int):
        yield where, put(value + 1)
    elif value is None:
        yield where, put(mx.array([1]))
    else:
        for i, item in enumerate(value):
            if isinstance(item, mx.array):
                changed = _with_flipped_bit(item, (0,) * item.ndim)
                yield f"{where}[{i}]", put([*value[:i], changed, *value[i + 1 :]])
            else:
                yield from _changes(item, f"{where}[{i}]")


@pytest.mark.part(6)
@EVERY_MIX
def test_every_single_bit_and_scalar_of_every_cache_kind_is_seen(mix: Mix) -> None:
    run = mix.oracle(30)
    names = [where for where, _ in _changes(run.cache_after(30), "")]
    assert len(names) >= 3 * len(run.cache_after(30)), "a layer has keys, values and an offset, or slots and lengths"
    for i, expected in enumerate(names):
        cache = run.cache_after(30)
        where, change = list(_changes(cache, ""))[i]
        assert where == expected
        change()
        difference = cache_difference(cache, run.cache_after(30))
        assert difference is not None, f"a change of {where} went unseen"
        layer, field = int(where[1 : where.index("]")]), where.split(".")[-1].split("[")[0]
        assert difference.startswith(f"layer {layer}"), difference
        assert f".{field}" in difference or field in ("offset", "start_position"), difference


def test_difference_names_layer_field_index_and_both_values() -> None:
    run = MIXES["dense"].oracle(12)
    cache = run.cache_after(12)
    cache[2].values[0, 1, 4, 7] = 0.5
    with pytest.raises(AssertionError, match=r"layer 2 \(KVCache\).values: .* \(0, 1, 4, 7\): got 0.5 .*, want "):
        assert_same_cache(cache, run.cache_after(12))
    cache = run.cache_after(12)
    cache[1].offset += 1
    cache[1].offset -= 2
    with pytest.raises(AssertionError, match=r"layer 1 \(KVCache\)"):
        assert_same_cache(cache, run.cache_after(12))


def _visible_rows(layer: Any) -> int:
    return int(layer.offset - getattr(layer, "start_position", 0))


def _held(layer: Any) -> list[mx.array]:
    """All arrays with a row axis."""
    return [*layer.keys, *layer.values] if isinstance(layer, QuantizedKVCache) else [layer.keys, layer.values]


@pytest.mark.parametrize("name", ["dense", "quantized_from_0", "chunked"])
def test_capacity_and_rows_past_the_last_visible_one_of_append_caches_are_free(name: str) -> None:
    run = MIXES[name].oracle(20)
    cache = run.cache_after(20)
    for layer in cache:
        shown = _visible_rows(layer)
        for held in _held(layer):
            assert held.shape[-2] > shown
            held[..., shown:, :] = 7
    assert_same_cache(cache, run.cache_after(20))
    if name == "dense":
        cache[0].keys = mx.concatenate([cache[0].keys, cache[0].keys], axis=2)
        assert_same_cache(cache, run.cache_after(20))


@pytest.mark.parametrize("name", ["dense", "quantized_from_0", "chunked"])
def test_last_visible_row_of_append_caches_counts(name: str) -> None:
    run = MIXES[name].oracle(20)
    for i in range(len(_held(run.cache_after(20)[0]))):
        cache = run.cache_after(20)
        last = _visible_rows(cache[0]) - 1
        _held(cache[0])[i][0, 0, last, 0] += 1
        assert f"first at index (0, 0, {last}, 0)" in (cache_difference(cache, run.cache_after(20)) or "")


def test_rows_past_the_offset_of_a_concatenating_cache_count() -> None:
    def filled(rows: int) -> ConcatenateKVCache:
        cache = ConcatenateKVCache()
        cache.update_and_fetch(mx.ones((1, 2, rows, 3)), mx.ones((1, 2, rows, 5)))
        return cache

    trimmed = filled(5)
    trimmed.trim(2)
    assert trimmed.offset == 3
    assert "keys: shape (1, 2, 5, 3), want (1, 2, 3, 3)" in (cache_difference(trimmed, filled(3)) or "")


def test_slots_of_a_ring_count_whole() -> None:
    run = MIXES["sliding"].oracle(30)
    cache = run.cache_after(30)
    ring = next(layer for layer in cache if isinstance(layer, RotatingKVCache))
    ring.keys = mx.roll(ring.keys, 1, axis=2)
    assert cache_difference(cache, run.cache_after(30)) is not None


def test_class_fields_and_sharing_count() -> None:
    class Wrapped(KVCache):
        pass

    assert "got a Wrapped" in (cache_difference(Wrapped(), KVCache()) or "")
    marked = KVCache()
    marked.journal = None
    assert "got fields" in (cache_difference(marked, KVCache()) or "")
    one, two = ArraysCache(2), ArraysCache(2)
    assert cache_difference([one, one], [two, two]) is None
    assert "shared between layers" in (cache_difference([one, one], [two, ArraysCache(2)]) or "")
    assert "shared between layers" in (cache_difference([one, ArraysCache(2)], [two, two]) or "")
    assert "2 entries, want 1" in (cache_difference([one, two], [one]) or "")
    nested = CacheList(ArraysCache(2), KVCache())
    nested.caches[1].offset = 3
    assert cache_difference([nested], [CacheList(ArraysCache(2), KVCache())]) == (
        "layer 0 (CacheList).caches[1] (KVCache).offset: got 3, want 0"
    )


# Batch forms


def _rows(seed: int, count: int) -> tuple[mx.array, mx.array]:
    rng = np.random.default_rng(seed)
    return (
        mx.array(rng.standard_normal((1, 2, count, 6), dtype=np.float32)),
        mx.array(rng.standard_normal((1, 2, count, 10), dtype=np.float32)),
    )


def _feed(cache: Any, rows: tuple[mx.array, mx.array], begin: int, end: int) -> None:
    for i in range(begin, end):
        cache.update_and_fetch(rows[0][:, :, i : i + 1], rows[1][:, :, i : i + 1])


LENGTHS = (3, 9, 5)


@pytest.mark.parametrize("kind", ["append", "ring"])
@pytest.mark.parametrize("steps", [1, 4, 12])
def test_row_of_a_batch_equals_the_request_alone(kind: str, steps: int) -> None:
    make: Callable[[], Any] = KVCache if kind == "append" else lambda: RotatingKVCache(max_size=8)
    rows = [_rows(i, 40) for i in range(len(LENGTHS))]
    alone = [make() for _ in LENGTHS]
    for cache, fed, length in zip(alone, rows, LENGTHS, strict=True):
        _feed(cache, fed, 0, length)
    batch = type(alone[0]).merge(alone)
    assert isinstance(batch, BatchKVCache | BatchRotatingKVCache)
    for step in range(steps):
        at = [length + step for length in LENGTHS]
        batch.update_and_fetch(
            *(mx.concatenate([fed[side][:, :, i : i + 1] for fed, i in zip(rows, at, strict=True)]) for side in (0, 1))
        )
    for i, (cache, fed, length) in enumerate(zip(alone, rows, LENGTHS, strict=True)):
        _feed(cache, fed, length, length + steps)
        assert_same_row(batch, i, cache)
    with pytest.raises(AssertionError, match="row 0"):
        assert_same_row(batch, 0, alone[1])


def test_batches_compare_row_by_row_and_ignore_padding() -> None:
    def batch() -> BatchKVCache:
        alone = [KVCache() for _ in LENGTHS]
        for i, (cache, length) in enumerate(zip(alone, LENGTHS, strict=True)):
            _feed(cache, _rows(i, 40), 0, length)
        return KVCache.merge(alone)

    padded = batch()
    padded.keys[0, :, 0] = 9.0
    assert_same_cache([padded], [batch()])
    changed = batch()
    changed.keys[2, 1, 8, 5] = 9.0
    assert "extract[2] (KVCache).keys" in (cache_difference([changed], [batch()]) or "")
    moved = batch()
    moved.offset = moved.offset + mx.array([0, 1, 0])
    assert ".offset: 1 of 3 elements differ, first at index (1,)" in (cache_difference([moved], [batch()]) or "")
