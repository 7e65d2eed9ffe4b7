"""What a model is handed inside a round behaves as the cache itself, and the caller's cache shows no trace of it."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.cache import ArraysCache, CacheList, ChunkedKVCache, KVCache, QuantizedKVCache

from mlx_spec import SpeculativeCacheTransaction
from tests.bits import assert_same_bits
from tests.cache.kinds import KINDS, RING, Kind, UnknownCache, append, arrays_of
from tests.oracle import independent_copy
from tests.same_cache import assert_same_cache

WIDTH = 4
BUFFER_BYTES = 64 * 2**20

EVERY_KIND = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())


def open_round(cache: Any, width: int = WIDTH) -> tuple[SpeculativeCacheTransaction, Any]:
    tx = SpeculativeCacheTransaction([cache], width)
    return tx, tx.caches[0]


@EVERY_KIND
def test_a_leaf_is_an_instance_of_the_caches_own_class_under_its_own_name(kind: Kind) -> None:
    cache = kind.make()
    tx, leaf = open_round(cache)
    assert leaf is not cache
    assert isinstance(leaf, type(cache))
    assert issubclass(type(leaf), type(cache))
    assert (type(leaf).__name__, type(leaf).__module__) == (type(cache).__name__, type(cache).__module__)
    tx.abort()


@EVERY_KIND
def test_a_leaf_answers_hasattr_as_the_cache_does(kind: Kind) -> None:
    cache = kind.filled(range(3))
    names = sorted({*dir(cache), "bits", "group_size", "keys", "caches", "to_quantized", "__len__", "__bool__"})
    tx, leaf = open_round(cache)
    assert [name for name in names if hasattr(leaf, name) != hasattr(cache, name)] == []
    assert hasattr(leaf, "bits") == isinstance(cache, QuantizedKVCache)
    tx.abort()


@EVERY_KIND
def test_a_leaf_is_as_true_as_the_cache(kind: Kind) -> None:
    cache = kind.make()
    tx, leaf = open_round(cache)
    assert bool(leaf) == bool(cache)
    with pytest.raises(TypeError, match="len"):
        len(leaf)
    tx.abort()


@EVERY_KIND
def test_every_field_written_on_the_leaf_is_written_on_the_cache(kind: Kind) -> None:
    cache = kind.filled(range(3))
    tx, leaf = open_round(cache)
    for name in vars(cache):
        if name != "caches":
            setattr(leaf, name, getattr(leaf, name))
            assert getattr(leaf, name) is getattr(cache, name)
    leaf.a_new_field = 5
    assert cache.a_new_field == 5
    cache.another = 6
    assert leaf.another == 6
    tx.abort()


@EVERY_KIND
def test_a_forward_through_the_leaf_is_seen_on_the_cache_at_once(kind: Kind) -> None:
    cache, want = kind.filled(range(3)), kind.filled(range(4))
    tx, leaf = open_round(cache)
    append(leaf, [3], kind.batch)
    assert_same_cache(cache, want)
    tx.abort()


@EVERY_KIND
def test_methods_and_properties_of_the_leaf_answer_as_those_of_the_cache(kind: Kind) -> None:
    cache = kind.filled(range(5))
    tx, leaf = open_round(cache)
    for name in ("nbytes", "batch_size"):
        if hasattr(type(cache), name):
            assert getattr(leaf, name) == getattr(cache, name)
    for name in ("is_trimmable", "empty", "size"):
        if hasattr(cache, name):
            assert getattr(leaf, name)() == getattr(cache, name)()
    tx.abort()


@EVERY_KIND
def test_the_cache_keeps_its_class_its_fields_and_its_methods(kind: Kind) -> None:
    cache = kind.filled(range(3))
    before = (type(cache), list(vars(cache)), {name: getattr(type(cache), name) for name in dir(type(cache))})
    tx, leaf = open_round(cache)
    append(leaf, [3], kind.batch)
    tx.mark(1)
    during = (type(cache), list(vars(cache)), {name: getattr(type(cache), name) for name in dir(type(cache))})
    assert during == before
    tx.commit(1)
    after = (type(cache), list(vars(cache)), {name: getattr(type(cache), name) for name in dir(type(cache))})
    assert after == before


@EVERY_KIND
def test_a_cache_that_was_in_a_round_can_be_copied_and_used_alone(kind: Kind) -> None:
    cache = kind.filled(range(3))
    tx, leaf = open_round(cache)
    append(leaf, [3], kind.batch)
    tx.mark(1)
    tx.commit(1)
    duplicate = copy.deepcopy(cache)
    kind.step(duplicate, [4])
    kind.step(cache, [4])
    assert_same_cache(duplicate, cache)
    assert_same_cache(cache, kind.filled(range(5)))


# Indexing


@pytest.mark.parametrize(
    ("make", "size"),
    [(lambda: ArraysCache(3), 3), (lambda: CacheList(KVCache(), ArraysCache(2)), 2), (lambda: CacheList(KVCache()), 1)],
    ids=["arrays", "list", "list_of_one"],
)
def test_a_leaf_with_slots_can_be_indexed_and_unpacked(make: Callable[[], Any], size: int) -> None:
    tx, leaf = open_round(make())
    assert len([*leaf]) == size
    assert leaf[size - 1] is leaf[-1]
    for beyond in (size, size + 5, -size - 1):
        with pytest.raises(IndexError):
            leaf[beyond]
    tx.abort()


def test_slots_written_on_an_arrays_leaf_are_the_caches() -> None:
    cache = ArraysCache(2)
    tx, leaf = open_round(cache)
    state = mx.ones((1, 3))
    leaf[0] = state
    first, second = leaf
    assert first is cache[0] is state
    assert second is None
    with pytest.raises(IndexError):
        leaf[2] = state
    tx.abort()


def test_members_of_a_nest_are_leaves_of_the_members() -> None:
    attention, states = KVCache(), ArraysCache(1)
    tx, nest = open_round(CacheList(attention, CacheList(states)))
    first, second = nest
    assert isinstance(second, CacheList)
    assert (type(first).__name__, type(second[0]).__name__) == ("KVCache", "ArraysCache")
    append(first, [7])
    second[0][0] = mx.ones((1, 2))
    assert attention.offset == 1
    assert states[0] is not None
    tx.abort()
    assert attention.offset == 0
    assert states[0] is None


def test_a_plain_kv_leaf_cannot_be_indexed() -> None:
    tx, leaf = open_round(KVCache())
    with pytest.raises(TypeError):
        leaf[0]
    tx.abort()


# What models do to caches besides appending


@pytest.mark.parametrize("length", [1, 3])
@pytest.mark.parametrize("filled", [0, 5, RING, RING + 3])
@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("name", ["kv", "quantized", "ring"])
def test_masks_made_from_a_leaf_are_those_made_from_the_cache(
    name: str, window: int | None, filled: int, length: int
) -> None:
    hidden = mx.zeros((1, length, 6))
    cache = KINDS[name].filled(range(filled))
    want = create_attention_mask(hidden, cache, window_size=window)
    tx, leaf = open_round(cache)
    got = create_attention_mask(hidden, leaf, window_size=window)
    if isinstance(want, mx.array):
        assert_same_bits(got, want, "mask")
    else:
        assert got == want
    tx.abort()


def test_fields_that_a_model_replaces_after_its_write_are_kept_and_undone() -> None:
    """As deepseek_v32 does with its index cache."""
    cache = KVCache()
    for end, length in ((lambda tx: tx.commit(2), 2), (lambda tx: tx.abort(), 2)):
        tx, leaf = open_round(cache)
        leaf.update_and_fetch(mx.ones((1, 2, 3, 8)), mx.ones((1, 2, 3, 8)))
        leaf.values = mx.zeros_like(leaf.keys)
        leaf.keys = mx.depends(leaf.keys, leaf.values)
        end(tx)
        assert cache.offset == length
        assert cache.keys_and_values()[0].sum().item() == 2 * 2 * 8
        assert cache.values.sum().item() == 0


def test_front_trimming_inside_a_round_is_undone() -> None:
    cache = ChunkedKVCache(5)
    for token in range(8):
        append(cache, [token])
    want = independent_copy(cache)
    tx, leaf = open_round(cache)
    for token in (8, 9):
        append(leaf, [token])
        tx.mark(1)
    assert cache.start_position > want.start_position
    tx.abort()
    assert_same_cache(cache, want)


# What an open round holds


@EVERY_KIND
def test_only_caches_that_need_a_snapshot_hold_bytes_and_none_are_held_after_the_round(kind: Kind) -> None:
    cache = kind.filled(range(6))
    for end in (lambda tx: tx.commit(1), lambda tx: tx.abort()):
        tx, leaf = open_round(cache)
        append(leaf, [6], kind.batch)
        tx.mark(1)
        # A chunk that is full loses a row to each token, which must be kept.
        full = isinstance(cache, ChunkedKVCache) and cache.chunk_size < 6
        assert (tx.nbytes > 0) == (full or not kind.by_length)
        end(tx)
        assert tx.nbytes == 0


def test_bytes_held_grow_with_the_marked_steps_and_the_last_step_is_free() -> None:
    cache = UnknownCache()
    append(cache, range(RING))
    tx, leaf = open_round(cache, width=3)
    held = [tx.nbytes]
    for token in (50, 51, 52):
        append(leaf, [token])
        tx.mark(1)
        held.append(tx.nbytes)
    one = cache.keys.nbytes + cache.values.nbytes
    assert held == [one, 2 * one, 3 * one, 3 * one]
    tx.abort()


def bytes_one_write_takes(cache: Any, kept: Any = None) -> int:
    """Peak memory above what is there, over one evaluated one-token write."""
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    cache.update_and_fetch(mx.ones((1, 8, 1, 256)), mx.ones((1, 8, 1, 4)))
    mx.eval(cache.keys, cache.values)
    del kept
    return mx.get_peak_memory() - before


def long_cache() -> KVCache:
    """A key buffer of BUFFER_BYTES with room for more rows."""
    cache = KVCache()
    length = BUFFER_BYTES // (8 * 256 * 4)
    cache.update_and_fetch(mx.zeros((1, 8, length - 100, 256)), mx.zeros((1, 8, length - 100, 4)))
    mx.eval(cache.keys, cache.values)
    assert cache.keys.nbytes == BUFFER_BYTES
    return cache


def test_a_write_inside_a_round_happens_in_place() -> None:
    cache = long_cache()
    alone = bytes_one_write_takes(cache)
    with SpeculativeCacheTransaction([cache], 3) as tx:
        inside = [bytes_one_write_takes(tx.caches[0]) for _ in range(3)]
        tx.commit(2)
    after = bytes_one_write_takes(cache)
    assert max(alone, *inside, after) < BUFFER_BYTES // 8


def test_the_measure_sees_a_second_handle() -> None:
    cache = long_cache()
    assert bytes_one_write_takes(cache, kept=copy.copy(cache.keys)) >= BUFFER_BYTES


def test_an_aborted_and_a_committed_round_leave_no_handle_behind() -> None:
    cache = long_cache()
    for end in (lambda tx: tx.commit(1), lambda tx: tx.abort()):
        tx, leaf = open_round(cache)
        bytes_one_write_takes(leaf)
        end(tx)
        assert bytes_one_write_takes(cache) < BUFFER_BYTES // 8


@pytest.fixture
def without_collector() -> Iterator[None]:
    """Only counted references free anything: what is part of a cycle stays."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("without_collector")
@pytest.mark.parametrize("end", [lambda tx: tx.commit(2), lambda tx: tx.abort()], ids=["committed", "aborted"])
def test_a_stepwise_round_frees_its_snapshots_when_it_closes(end: Callable[[Any], None]) -> None:
    cache = UnknownCache()
    cache.update_and_fetch(mx.zeros((1, 8, 400, 256)), mx.zeros((1, 8, 400, 256)))
    mx.eval(arrays_of(cache))
    before = mx.get_active_memory()
    tx = SpeculativeCacheTransaction([cache], WIDTH)
    for _ in range(WIDTH):
        tx.caches[0].update_and_fetch(mx.ones((1, 8, 1, 256)), mx.ones((1, 8, 1, 256)))
        mx.eval(arrays_of(cache))
        tx.mark(1)
    assert mx.get_active_memory() >= before + cache.keys.nbytes
    end(tx)
    assert mx.get_active_memory() <= before + cache.keys.nbytes // 8


@pytest.mark.usefixtures("without_collector")
@EVERY_KIND
def test_a_round_does_not_keep_a_dropped_cache_alive(kind: Kind) -> None:
    cache = kind.filled(range(6))
    members = [weakref.ref(cache)] + [weakref.ref(member) for member in getattr(cache, "caches", ())]
    tx = SpeculativeCacheTransaction([cache], WIDTH)
    append(tx.caches[0], [6], kind.batch)
    tx.mark(1)
    tx.commit(1)
    del cache
    assert [member() for member in members] == [None] * len(members)


READERS = pytest.mark.parametrize(
    "kind",
    [KINDS[name] for name in ("kv", "quantized", "concatenate", "batch_kv", "ring", "ring_without_keep", "batch_ring")],
)


@READERS
@pytest.mark.parametrize("before_edge", [-3, 1, 2, 4])
def test_a_reader_that_goes_by_position_is_shown_the_rows_as_they_stood_there(kind: Kind, before_edge: int) -> None:
    """As layers that read another layer's keys do, once that one has written the whole block."""
    start = max(1, kind.edge - before_edge)
    cache, stepped = kind.filled_at_once(range(start)), kind.filled_at_once(range(start))
    tx, leaf = open_round(cache)
    for token in range(WIDTH):
        append(leaf, [900 + token], kind.batch)
    for position in range(WIDTH):
        append(stepped, [900 + position], kind.batch)
        leaf.journal.before_position(position)
        shown, want = leaf.keys_and_values(), stepped.keys_and_values()
        for got, wanted in zip(flat(shown), flat(want), strict=True):
            assert_same_bits(got, wanted, f"position {position}")
    leaf.journal.after_positions()
    for got, wanted in zip(flat(leaf.keys_and_values()), flat(cache.keys_and_values()), strict=True):
        assert_same_bits(got, wanted, "no position")
    tx.commit(2)
    assert_same_cache(cache, committed(kind, start))


def committed(kind: Kind, start: int) -> Any:
    cache = kind.filled_at_once(range(start))
    kind.step(cache, [900, 901])
    return cache


def flat(pair: Any) -> list[mx.array]:
    return [array for side in pair for array in (side if isinstance(side, tuple | list) else [side])]
