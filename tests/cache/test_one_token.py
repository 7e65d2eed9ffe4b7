"""A plain step's round: the model is handed the caches themselves, and what it did can be kept or undone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import ArraysCache, KVCache, QuantizedKVCache

from mlx_spec.cache.one_token import OneToken
from mlx_spec.cache.transaction import SpeculativeCacheTransaction, settled_cache
from mlx_spec.errors import TransactionError
from tests.oracle import independent_copy
from tests.same_cache import assert_same_cache


def rows(number: int) -> mx.array:
    return mx.full((1, 2, 1, 64), float(number))


def write(cache: Any, number: int) -> None:
    """What a layer does with one token."""
    if isinstance(cache, ArraysCache):
        before = mx.zeros((1, 3, 4)) if cache[0] is None else cache[0]
        cache[0], cache[1] = before * 0.5 + number, mx.full((1, 2), float(number))
        cache.advance(1)
    else:
        cache.update_and_fetch(rows(number), rows(number) + 1)


def padded() -> ArraysCache:
    cache = ArraysCache(2, left_padding=[2])
    cache.prepare(lengths=[9])
    return cache


KINDS: dict[str, Callable[[], Any]] = {
    "kv": KVCache,
    "quantized": lambda: QuantizedKVCache(group_size=64, bits=8),
    "states": lambda: ArraysCache(2),
    "states of a padded row": padded,
}

EVERY_KIND = pytest.mark.parametrize("kind", KINDS)


def held(kind: str, tokens: int) -> list[Any]:
    """Two caches that have read so many tokens, evaluated."""
    caches = [KINDS[kind](), KINDS[kind]()]
    for number in range(tokens):
        for cache in caches:
            write(cache, number)
    mx.eval([value for cache in caches for value in vars(cache).values() if isinstance(value, mx.array | list)])
    return caches


def step(caches: list[Any], number: int = 77) -> OneToken:
    tx = OneToken(caches)
    tx.open()
    for cache in tx.caches:
        write(cache, number)
    tx.mark(1)
    return tx


@EVERY_KIND
@pytest.mark.parametrize("tokens", [0, 3, 256])
def test_it_is_kept_as_it_was_written_or_undone(kind: str, tokens: int) -> None:
    """256 is where buffers grow."""
    if tokens == 256 and kind != "kv":
        tokens = 5
    before, after = held(kind, tokens), held(kind, tokens)
    for cache in after:
        write(cache, 77)
    kept, undone, revoked = (held(kind, tokens) for _ in range(3))
    step(kept).commit(1)
    assert_same_cache(kept, after)
    step(undone).abort()
    assert_same_cache(undone, before)
    tx = step(revoked)
    tx.commit(1, revocable=True)
    assert_same_cache(revoked, after)
    tx.revoke()
    assert_same_cache(revoked, before)
    for caches in (kept, undone, revoked):
        # Nothing stays locked, and they can be gone on with.
        SpeculativeCacheTransaction(caches, 2).abort()
        step(caches, 5).commit(1)
    assert_same_cache(undone, revoked)


@EVERY_KIND
def test_a_forward_that_fails_half_way_is_undone(kind: str) -> None:
    before, caches = held(kind, 3), held(kind, 3)
    tx = OneToken(caches)
    tx.open()
    write(tx.caches[0], 9)
    tx.abort()
    assert_same_cache(caches, before)


@EVERY_KIND
def test_what_it_cannot_do_is_refused_and_it_stays_open(kind: str) -> None:
    caches = held(kind, 3)
    after = independent_copy(caches)
    for cache in after:
        write(cache, 77)
    tx = OneToken(caches)
    tx.open()
    with pytest.raises(TransactionError, match="opened before"):
        tx.open()
    with pytest.raises(TransactionError, match="0 tokens"):
        tx.commit(1)
    for cache in tx.caches:
        write(cache, 77)
    tx.mark(1)
    for count in (0, 2):
        with pytest.raises(TransactionError, match=f"not {count}"):
            tx.commit(count)
    with pytest.raises(TransactionError, match="in an open transaction"):
        SpeculativeCacheTransaction(caches, 2)
    with pytest.raises(TransactionError, match="in an open transaction"):
        step(caches)
    tx.commit(1)
    with pytest.raises(TransactionError, match="closed"):
        tx.commit(1)
    assert_same_cache(caches, after)


def test_one_that_cannot_be_opened_locks_nothing() -> None:
    caches = held("kv", 3)
    del caches[1].offset
    tx = OneToken(caches)
    with pytest.raises(AttributeError):
        tx.open()
    caches[1].offset = 3
    step(caches).commit(1)
    assert not tx.active


@EVERY_KIND
def test_a_settled_copy_taken_meanwhile_is_what_was_there_before(kind: str) -> None:
    before, caches = held(kind, 3), held(kind, 3)
    tx = step(caches)
    assert_same_cache(settled_cache(caches), before)
    assert (tx.nbytes > 0) is kind.startswith("states")
    tx.commit(1)
    assert tx.nbytes == 0


def test_the_model_is_handed_the_caches_themselves() -> None:
    caches = held("kv", 3)
    tx = step(caches)
    assert tx.caches is caches
    tx.commit(1)
    assert tx.caches == []
    assert len(caches) == 2
