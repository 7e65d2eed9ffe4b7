"""Facts of mlx and mlx-lm that this library rests on or works around. A red test here means: upstream changed.

Each says what would have to be looked at again.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.generate import generate_step, maybe_quantize_kv_cache
from mlx_lm.models.cache import (
    ArraysCache,
    ConcatenateKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
    make_prompt_cache,
)
from mlx_lm.sample_utils import make_sampler

from tests.bits import assert_same_bits, bit_difference
from tests.oracle import independent_copy, rng_key, run_stock
from tests.same_cache import assert_same_cache, cache_difference
from tests.tiny import MIXES, PROMPT, VOCAB, WINDOW, Mix

ON_CPU = mx.default_device().type == mx.cpu
on_cpu = pytest.mark.skipif(not ON_CPU, reason="a fact about mlx's CPU backend")

# Random numbers


def test_seed_puts_a_noted_key_back() -> None:
    """Sampling notes `mx.random.state[0]` per position and returns to one of them with the public `seed`."""
    mx.random.seed(2**63 + 12345)
    for _ in range(3):
        key = rng_key()
        drawn = mx.random.gumbel((5,))
        following = rng_key()
        mx.random.seed((key[0] << 32) | key[1])
        assert rng_key() == key
        assert_same_bits(mx.random.gumbel((5,)), drawn)
        assert rng_key() == following


def test_explicit_key_leaves_the_global_state_alone() -> None:
    """Drafters draw with keys of their own and must not shift the target's sampling."""
    before = rng_key()
    mx.eval(mx.random.categorical(mx.zeros((4, 9)), key=mx.random.key(3)))
    assert rng_key() == before


def test_stock_loop_draws_once_more_than_it_yields() -> None:
    """After n tokens the RNG must stand n + 1 draws further, whether the run was closed or exhausted."""
    calls = 0
    draw = make_sampler(temp=1.0)

    def counting(logprobs: mx.array) -> mx.array:
        nonlocal calls
        calls += 1
        return draw(logprobs)

    model = MIXES["dense"].model()
    for yielded in (1, 2, 6):
        calls = 0
        steps = generate_step(mx.array(PROMPT), model, max_tokens=20, sampler=counting)
        assert len(list(itertools.islice(steps, yielded))) == yielded
        steps.close()
        assert calls == yielded + 1
        calls = 0
        assert len(list(generate_step(mx.array(PROMPT), model, max_tokens=yielded, sampler=counting))) == yielded
        assert calls == yielded + 1


# Handles


def test_plain_reference_follows_a_slice_assignment_and_a_copy_does_not() -> None:
    """`x[a:b] = y` changes the Python object, so only `copy.copy` (or deepcopy) holds the value of before."""
    array = mx.zeros((4, 3))
    reference, handle, deep = array, copy.copy(array), copy.deepcopy(array)
    array[1:3] = 5.0
    assert reference.sum().item() == 30.0
    assert handle.sum().item() == 0.0
    assert deep.sum().item() == 0.0
    handle[0:1] = 1.0
    assert array.sum().item() == 30.0


def test_handle_taken_before_a_lazy_write_keeps_its_value_after_evaluation() -> None:
    cache = KVCache()
    rows = mx.ones((1, 2, 3, 4))
    cache.update_and_fetch(rows, rows)
    mx.eval(cache.state)
    handle = copy.copy(cache.keys)
    cache.update_and_fetch(rows * 2, rows * 2)
    mx.eval(cache.state)
    assert handle.sum().item() == 24.0
    assert cache.keys.sum().item() == 72.0


def test_second_handle_makes_the_next_write_copy_the_whole_buffer() -> None:
    """Why a transaction keeps no handle on append buffers: without one the write happens in place."""
    buffer = mx.zeros((1, 2, 4096, 256))
    mx.eval(buffer)

    def bytes_a_write_takes(kept: mx.array | None) -> int:
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        buffer[:, :, 7:8] = 1.0
        mx.eval(buffer)
        assert kept is None or kept.shape == buffer.shape
        return mx.get_peak_memory() - before

    assert bytes_a_write_takes(None) < buffer.nbytes // 8
    assert bytes_a_write_takes(copy.copy(buffer)) >= buffer.nbytes


def test_advance_of_an_arrays_cache_changes_lengths_in_place() -> None:
    """A reference to `lengths` is no snapshot either."""
    cache = ArraysCache(2)
    cache.prepare(lengths=[5, 3])
    reference, handle = cache.lengths, copy.copy(cache.lengths)
    cache.advance(2)
    assert reference.tolist() == [3, 1]
    assert handle.tolist() == [5, 3]


# Leaves inside a transaction


def _facade(cache: Any) -> Any:
    kind = type(cache)
    view_class = type(f"View{kind.__name__}", (kind,), {"__slots__": ("journal",)})
    view = view_class.__new__(view_class)
    view.__dict__ = cache.__dict__
    view.journal = []
    return view


def test_shared_dict_makes_a_subclass_instance_write_through() -> None:
    """A leaf handed to the model is of the cache's own class and has no state of its own but its slot."""
    real = KVCache()
    view = _facade(real)
    assert isinstance(view, KVCache)
    view.update_and_fetch(mx.ones((1, 2, 3, 4)), mx.ones((1, 2, 3, 6)))
    assert real.offset == 3
    assert real.keys is view.keys
    real.offset = 1
    assert view.offset == 1
    view.extra = 7
    assert real.extra == 7
    assert "journal" not in vars(real)
    assert not hasattr(real, "journal")
    assert type(real) is KVCache


def test_shared_dict_works_for_items_quantized_triples_and_absent_bits() -> None:
    arrays = ArraysCache(2)
    view = _facade(arrays)
    view[1] = mx.ones(3)
    assert arrays[1].sum().item() == 3.0
    with pytest.raises(IndexError):
        view[2]
    assert bool(view)
    quantized = QuantizedKVCache(group_size=32, bits=4)
    _facade(quantized).update_and_fetch(mx.ones((1, 2, 3, 32)), mx.ones((1, 2, 3, 64)))
    assert quantized.offset == 3
    assert hasattr(_facade(quantized), "bits")
    assert not hasattr(_facade(KVCache()), "bits")


# Rolling back with mlx-lm's own means


def _rows(count: int, seed: int = 0) -> tuple[mx.array, mx.array]:
    rng = np.random.default_rng(seed)
    return (
        mx.array(rng.standard_normal((1, 2, count, 4), dtype=np.float32)),
        mx.array(rng.standard_normal((1, 2, count, 6), dtype=np.float32)),
    )


def _ring_after(count: int) -> RotatingKVCache:
    ring = RotatingKVCache(max_size=8)
    keys, values = _rows(20)
    for i in range(count):
        ring.update_and_fetch(keys[:, :, i : i + 1], values[:, :, i : i + 1])
    return ring


def test_trimming_a_wrapped_ring_is_no_rollback() -> None:
    """The overwritten rows are gone; `trim` moves the counters only, and says it took back what was asked."""
    ring = _ring_after(12)
    assert not ring.is_trimmable()
    assert ring.trim(2) == 2
    assert (ring.offset, ring._idx) == (10, _ring_after(10)._idx)
    assert "keys" in (cache_difference(ring, _ring_after(10)) or "")


def test_trimming_an_unwrapped_ring_moves_the_counters_and_leaves_the_rows() -> None:
    ring = _ring_after(6)
    assert ring.trim(2) == 2
    assert "keys" in (cache_difference(ring, _ring_after(4)) or "")
    fresh = _ring_after(4)
    assert_same_bits(ring.keys_and_values()[0], fresh.keys_and_values()[0])


def test_block_into_a_ring_leaves_another_layout_than_single_rows() -> None:
    """The concatenating path reorders the ring and lets it outgrow its size: a multi-token update must avoid it."""
    keys, values = _rows(20)
    block = _ring_after(12)
    block.update_and_fetch(keys[:, :, 12:15], values[:, :, 12:15])
    assert block.keys.shape[2] == 8 + 3 - 1
    assert cache_difference(block, _ring_after(15)) is not None


def test_trimming_a_concatenating_cache_leaves_rows_that_come_back() -> None:
    cache = ConcatenateKVCache()
    keys, values = _rows(6)
    cache.update_and_fetch(keys[:, :, :5], values[:, :, :5])
    assert cache.trim(2) == 2
    cache.update_and_fetch(keys[:, :, 5:], values[:, :, 5:])
    assert cache.offset == 6, "3 rows were kept and 1 added, yet 6 are attended to"


def test_recurrent_caches_cannot_be_trimmed() -> None:
    assert not ArraysCache(2).is_trimmable()
    assert not hasattr(ArraysCache(2), "trim")


def test_max_kv_size_reaches_only_models_without_a_make_cache() -> None:
    """`max_kv_size` is silently ignored by stock where the model makes its own caches."""
    assert type(make_prompt_cache(MIXES["dense"].model(), max_kv_size=15)[0]) is KVCache
    assert type(make_prompt_cache(MIXES["ring_with_keep"].model(), max_kv_size=15)[0]) is RotatingKVCache


# Block forward against one-token forwards

WIDTHS = (2, 3, 5, 8)


def _blocks_that_differ(mix: Mix, dtype: mx.Dtype, keys: int) -> list[int]:
    """Widths at which some position of a block after `keys` tokens has other logits than one-token decode."""
    model = mix.model(dtype)
    ids = np.random.default_rng(keys).integers(0, VOCAB, keys + max(WIDTHS)).tolist()
    cache = mix.new_cache(dtype)
    model(mx.array([ids[:keys]]), cache=cache)
    if "kv_bits" in mix.kv:
        maybe_quantize_kv_cache(cache, 0, mix.kv["kv_group_size"], mix.kv["kv_bits"])
    mx.eval([layer.state for layer in cache])
    single, stepped = independent_copy(cache), []
    for token in ids[keys:]:
        stepped.append(model(mx.array([[token]]), cache=single)[0, 0])
        mx.eval(stepped[-1], [layer.state for layer in single])

    def differs(width: int) -> bool:
        logits = model(mx.array([ids[keys : keys + width]]), cache=independent_copy(cache))[0]
        return any(bit_difference(logits[i], stepped[i]) is not None for i in range(width))

    return [width for width in WIDTHS if differs(width)]


@pytest.mark.part(8)
@on_cpu
@pytest.mark.parametrize("keys", [9, 12, 15, 30, 250, 254, 256])
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["dense", "dense_4bit_weights", "quantized_from_0"])
def test_block_of_plain_attention_has_the_bits_of_single_tokens(name: str, dtype: mx.Dtype, keys: int) -> None:
    """On CPU the stock block is an exact verifier here, key lengths crossing 16, 32 and 256 within the block."""
    assert _blocks_that_differ(MIXES[name], dtype, keys) == []


@on_cpu
@pytest.mark.parametrize("name", ["hybrid", "hybrid_moe", "mamba"])
def test_block_of_recurrent_mixers_has_the_bits_of_single_tokens(name: str) -> None:
    for keys in (9, 30):
        assert _blocks_that_differ(MIXES[name], mx.float32, keys) == []


@on_cpu
@pytest.mark.parametrize(
    ("name", "keys"),
    [("sliding", WINDOW + 3), ("ring_with_keep", 16), ("mla_moe", 9), ("mamba2", 9), ("cache_list", 9)],
)
def test_block_of_models_with_a_one_token_fork_has_other_bits(name: str, keys: int) -> None:
    """Rings past their size, and MLA and Mamba2 whose code branches on one token: stock blocks do not verify."""
    assert _blocks_that_differ(MIXES[name], mx.float32, keys) == list(WIDTHS)


@on_cpu
@pytest.mark.parametrize("name", ["hybrid_moe", "mla_moe", "chunked"])
def test_experts_in_half_precision_do_not_run_on_cpu(name: str) -> None:
    """Why those mixes are tested in float32 only."""
    with pytest.raises(RuntimeError, match="GatherMM"):
        run_stock(MIXES[name].model(mx.bfloat16), PROMPT, 2)


# Sizes of buffers


@pytest.mark.parametrize("make", [KVCache, QuantizedKVCache], ids=["float", "quantized"])
def test_block_and_single_rows_may_end_with_different_capacity(make: Callable[[], Any]) -> None:
    """So capacity is no part of what must be equal."""
    rows = mx.ones((1, 2, 259, 64))

    def fed(*widths: int) -> Any:
        cache, at = make(), 0
        for width in widths:
            cache.update_and_fetch(rows[:, :, at : at + width], rows[:, :, at : at + width])
            at += width
        return cache

    def capacity(cache: Any) -> int:
        return (cache.keys if isinstance(cache.keys, mx.array) else cache.keys[0]).shape[2]

    block, single = fed(255, 3), fed(255, 1, 1, 1)
    assert capacity(block) != capacity(single)
    assert_same_cache(block, single)
