"""A transaction keeps any prefix of a round or none of it, and refuses everything else with the round still open."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import ArraysCache, CacheList, ChunkedKVCache, KVCache, QuantizedKVCache, RotatingKVCache

from mlx_spec import SpeculativeCacheTransaction
from mlx_spec.cache.base import journals_of
from mlx_spec.errors import TransactionError
from tests.cache.kinds import GROWTH, KINDS, RING, Kind, UnknownCache, append
from tests.oracle import independent_copy
from tests.same_cache import assert_same_cache

WIDTH = 5
BLOCK = [90, 91, 92, 93, 94]

EVERY_KIND = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())
BY_LENGTH = pytest.mark.parametrize(
    "kind", [kind for kind in KINDS.values() if kind.by_length], ids=[n for n, kind in KINDS.items() if kind.by_length]
)
STEPWISE = pytest.mark.parametrize(
    "kind",
    [kind for kind in KINDS.values() if kind.stepwise],
    ids=[name for name, kind in KINDS.items() if kind.stepwise],
)


def write(tx: SpeculativeCacheTransaction, tokens: list[int], kind: Kind = KINDS["kv"]) -> None:
    """One-token forwards over every cache of the round, each marked."""
    for token in tokens:
        for leaf in tx.caches:
            append(leaf, [token], kind.batch)
        tx.mark(1)


def starts(kind: Kind) -> Iterator[int]:
    """Lengths before a round: empty, and so that the round crosses the edge with its first, middle or last token."""
    yield 0
    yield from (kind.edge - 1, kind.edge - 3, kind.edge - WIDTH + 1)


# What is kept


@EVERY_KIND
def test_committing_n_tokens_leaves_what_n_single_steps_leave(kind: Kind) -> None:
    for start in sorted({max(0, start) for start in starts(kind)}):
        cache = kind.filled_at_once(range(start))
        for kept in range(WIDTH + 1):
            mine, want = independent_copy(cache), independent_copy(cache)
            with SpeculativeCacheTransaction([mine], WIDTH) as tx:
                write(tx, BLOCK, kind)
                tx.commit(kept)
            kind.step(want, BLOCK[:kept])
            assert_same_cache(mine, want)
            kind.step(mine, [95, 96])
            kind.step(want, [95, 96])
            assert_same_cache(mine, want)


@BY_LENGTH
@pytest.mark.parametrize("split", [(5,), (2, 3), (1, 3, 1)], ids=str)
def test_caches_kept_by_length_take_blocks_of_any_size(kind: Kind, split: tuple[int, ...]) -> None:
    for start in (0, GROWTH - 3):
        for kept in range(WIDTH + 1):
            mine, want = kind.filled_at_once(range(start)), kind.filled_at_once(range(start))
            with SpeculativeCacheTransaction([mine], WIDTH) as tx:
                done = 0
                for count in split:
                    append(tx.caches[0], BLOCK[done : done + count], kind.batch)
                    done += count
                tx.commit(kept)
            kind.step(want, BLOCK[:kept])
            assert_same_cache(mine, want)


@EVERY_KIND
def test_aborting_leaves_the_cache_where_the_round_found_it(kind: Kind) -> None:
    for start in (0, kind.edge - 2):
        for written in range(WIDTH + 1):
            mine = kind.filled_at_once(range(start))
            want = independent_copy(mine)
            tx = SpeculativeCacheTransaction([mine], WIDTH)
            write(tx, BLOCK[:written], kind)
            tx.abort()
            assert_same_cache(mine, want)


@EVERY_KIND
def test_leaving_the_block_without_a_commit_aborts(kind: Kind) -> None:
    mine = kind.filled(range(7))
    want = independent_copy(mine)
    with SpeculativeCacheTransaction([mine], WIDTH) as tx:
        write(tx, BLOCK, kind)
    assert not tx.active
    assert_same_cache(mine, want)


@EVERY_KIND
def test_an_exception_inside_the_block_aborts_and_passes_through(kind: Kind) -> None:
    mine = kind.filled(range(7))
    want = independent_copy(mine)
    tx = SpeculativeCacheTransaction([mine], WIDTH)
    with pytest.raises(KeyError, match="told"):
        _fail_inside(tx, kind)
    assert not tx.active
    assert_same_cache(mine, want)


def _fail_inside(tx: SpeculativeCacheTransaction, kind: Kind) -> None:
    """In the middle of a forward: written, not marked."""
    with tx:
        write(tx, BLOCK[:3], kind)
        append(tx.caches[0], [99], kind.batch)
        raise KeyError("told to")


@EVERY_KIND
def test_a_round_that_wrote_nothing_may_be_committed_with_0(kind: Kind) -> None:
    mine = kind.filled(range(7))
    want = independent_copy(mine)
    with SpeculativeCacheTransaction([mine], WIDTH) as tx:
        tx.commit(0)
    assert_same_cache(mine, want)


def test_all_layers_of_mixed_kinds_are_kept_alike() -> None:
    kinds = [kind for kind in KINDS.values() if kind.batch == 1]
    for kept in range(WIDTH + 1):
        mine = [kind.filled(range(9)) for kind in kinds]
        want = [kind.filled(range(9)) for kind in kinds]
        with SpeculativeCacheTransaction(mine, WIDTH) as tx:
            write(tx, BLOCK)
            tx.commit(kept)
        for kind, cache in zip(kinds, want, strict=True):
            kind.step(cache, BLOCK[:kept])
        assert_same_cache(mine, want)


@pytest.mark.parametrize("make", [KVCache, lambda: RotatingKVCache(RING)], ids=["kv", "ring"])
def test_a_cache_that_two_layers_share_is_kept_once(make: Callable[[], Any]) -> None:
    shared = make()
    caches = [shared, shared, CacheList(shared, KVCache()), None]
    with SpeculativeCacheTransaction(caches, WIDTH) as tx:
        assert tx.caches[0] is tx.caches[1] is tx.caches[2][0]
        assert tx.caches[3] is None
        append(tx.caches[0], BLOCK[:1])
        append(tx.caches[2][1], BLOCK[:1])
        tx.mark(1)
        tx.commit(1)
    assert shared.offset == caches[2][1].offset == 1


@pytest.mark.parametrize(
    ("kept", "batch"),
    [(2, 1), (2, 3), ([2], 1), ((2,), 1), ([2, 2, 2], 3), (mx.array([2]), 1), (mx.array([2, 2, 2]), 3)],
    ids=str,
)
def test_counts_come_as_a_number_a_list_or_an_array(kept: Any, batch: int) -> None:
    cache = KVCache()
    with SpeculativeCacheTransaction([cache], WIDTH) as tx:
        append(tx.caches[0], BLOCK, batch)
        tx.validate(kept)
        tx.commit(kept)
    assert cache.offset == 2


# What is refused

WRONG_COUNTS = {
    "more than the width": (WIDTH + 1, r"in 0\.\.5 .* got \[6\]"),
    "negative": (-1, r"in 0\.\.5 .* got \[-1\]"),
    "one row out of range": ([2, 6, 2], r"in 0\.\.5 .* got \[2, 6, 2\]"),
    "too few rows": ([2, 2], r"hold 3 rows, got \[2, 2\]"),
    "too many rows": (mx.array([2, 2, 2, 2]), r"hold 3 rows, got \[2, 2, 2, 2\]"),
    "no rows": ([], r"hold 3 rows, got \[\]"),
    "rows that differ": ([2, 1, 2], r"same count for every row"),
    "a bool": (True, r"whole numbers of tokens, got \[True\]"),
    "bools": ([True, False, True], r"whole numbers"),
    "an array of bools": (mx.array([True, True, True]), r"whole numbers"),
    "floats": ([2.0, 2.0, 2.0], r"whole numbers"),
    "an array of floats": (mx.array([2.0, 2.0, 2.0]), r"whole numbers"),
    "a float": (2.0, r"whole number"),
    "nothing": (None, r"whole number"),
    "a word": ("222", r"whole number"),
}


@pytest.mark.parametrize("wrong", WRONG_COUNTS)
@pytest.mark.parametrize("kind", [KINDS["kv_of_three_rows"], KINDS["batch_kv"]], ids=lambda kind: kind.name)
def test_a_wrong_count_is_refused_and_the_round_stays_open(kind: Kind, wrong: str) -> None:
    count, message = WRONG_COUNTS[wrong]
    if kind.name == "batch_kv" and wrong == "rows that differ":
        pytest.skip("rows of a batch cache may keep different counts")
    mine = kind.filled(range(7))
    want = independent_copy(mine)
    with SpeculativeCacheTransaction([mine], WIDTH) as tx:
        write(tx, BLOCK, kind)
        for refuse in (tx.validate, tx.commit):
            with pytest.raises(TransactionError, match=message):
                refuse(count)
            assert tx.active
        tx.commit(3)
    kind.step(want, BLOCK[:3])
    assert_same_cache(mine, want)


@EVERY_KIND
def test_a_refused_round_can_be_aborted(kind: Kind) -> None:
    mine = kind.filled(range(7))
    want = independent_copy(mine)
    tx = SpeculativeCacheTransaction([mine], WIDTH)
    write(tx, BLOCK, kind)
    with pytest.raises(TransactionError):
        tx.commit(WIDTH + 1)
    tx.abort()
    assert_same_cache(mine, want)


@EVERY_KIND
def test_validating_changes_nothing(kind: Kind) -> None:
    mine = kind.filled(range(7))
    with SpeculativeCacheTransaction([mine], WIDTH) as tx:
        write(tx, BLOCK, kind)
        want = independent_copy(mine)
        for kept in range(WIDTH + 1):
            tx.validate(kept)
        assert tx.active
        assert_same_cache(mine, want)


@EVERY_KIND
def test_more_tokens_than_were_written_cannot_be_kept(kind: Kind) -> None:
    mine = kind.filled(range(7))
    want = independent_copy(mine)
    with SpeculativeCacheTransaction([mine], WIDTH) as tx:
        write(tx, BLOCK[:2], kind)
        for kept in (3, 4, 5):
            with pytest.raises(TransactionError):
                tx.commit(kept)
        tx.commit(2)
    kind.step(want, BLOCK[:2])
    assert_same_cache(mine, want)


@STEPWISE
def test_a_stepwise_cache_keeps_only_what_ends_at_a_mark(kind: Kind) -> None:
    mine = kind.filled(range(7))
    want = independent_copy(mine)
    with SpeculativeCacheTransaction([mine], WIDTH) as tx:
        for tokens in (BLOCK[:1], BLOCK[1:3], BLOCK[3:]):
            for token in tokens:
                append(tx.caches[0], [token], kind.batch)
            tx.mark(len(tokens))
        for kept in (2, 4):
            with pytest.raises(TransactionError, match=rf"\[0, 1, 3\] or all 5 .* not {kept}"):
                tx.commit(kept)
        tx.commit(3)
    kind.step(want, BLOCK[:3])
    assert_same_cache(mine, want)


def test_a_layer_that_refuses_leaves_the_other_layers_uncommitted() -> None:
    plain, window = KVCache(), UnknownCache()
    with SpeculativeCacheTransaction([plain, window], WIDTH) as tx:
        append(tx.caches[0], BLOCK[:2])
        for token in BLOCK[:2]:
            append(tx.caches[1], [token])
        tx.mark(2)
        with pytest.raises(TransactionError):
            tx.commit(1)
        assert plain.offset == window.offset == 2
    assert plain.offset == window.offset == 0


@BY_LENGTH
def test_tokens_beyond_the_width_are_refused_before_they_are_written(kind: Kind) -> None:
    mine = kind.filled(range(7))
    want = independent_copy(mine)
    with SpeculativeCacheTransaction([mine], WIDTH) as tx:
        append(tx.caches[0], BLOCK[:3], kind.batch)
        if isinstance(mine, ChunkedKVCache):
            # What a layer does before it writes, refused or not.
            tx.caches[0].maybe_trim_front()
        before = independent_copy(mine)
        with pytest.raises(TransactionError, match="opened for 5 tokens and holds 3; 3 more do not fit"):
            append(tx.caches[0], [95, 96, 97], kind.batch)
        assert_same_cache(mine, before)
        append(tx.caches[0], BLOCK[3:], kind.batch)
        tx.commit(WIDTH)
    kind.step(want, BLOCK)
    assert_same_cache(mine, want)


@pytest.mark.parametrize("tokens", [0, -1, 4])
def test_marks_beyond_the_width_or_of_nothing_are_refused(tokens: int) -> None:
    with SpeculativeCacheTransaction([KVCache()], 5) as tx:
        tx.mark(2)
        with pytest.raises(TransactionError, match="do not fit: the round was opened for 5 and holds 2"):
            tx.mark(tokens)
        tx.mark(3)


@pytest.mark.parametrize("width", [0, -3])
def test_a_round_of_no_tokens_cannot_be_opened(width: int) -> None:
    cache = KVCache()
    with pytest.raises(TransactionError, match=f"at least 1 token, got {width}"):
        SpeculativeCacheTransaction([cache], width)
    SpeculativeCacheTransaction([cache], 1).abort()


# Order of use


@pytest.mark.parametrize("end", [lambda tx: tx.commit(1), lambda tx: tx.abort()], ids=["committed", "aborted"])
def test_a_closed_round_refuses_everything_but_abort(end: Callable[[SpeculativeCacheTransaction], None]) -> None:
    cache = KVCache()
    tx = SpeculativeCacheTransaction([cache], WIDTH)
    append(tx.caches[0], BLOCK)
    end(tx)
    held = cache.offset
    for use in (lambda: tx.commit(1), lambda: tx.commit(0), lambda: tx.validate(1), lambda: tx.mark(1)):
        with pytest.raises(TransactionError, match="closed. Open a new transaction"):
            use()
    tx.abort()
    tx.abort()
    assert not tx.active
    assert tx.caches == []
    assert cache.offset == held


@EVERY_KIND
def test_a_leaf_of_a_closed_round_cannot_be_written(kind: Kind) -> None:
    cache = kind.make()
    tx = SpeculativeCacheTransaction([cache], WIDTH)
    leaf = tx.caches[0]
    write(tx, BLOCK[:2], kind)
    tx.commit(2)
    want = independent_copy(cache)
    with pytest.raises(TransactionError):
        append(leaf, BLOCK[2:3], kind.batch)
    assert_same_cache(cache, want)


@EVERY_KIND
def test_a_cache_cannot_be_in_two_open_rounds(kind: Kind) -> None:
    mine = kind.filled(range(3))
    first = SpeculativeCacheTransaction([mine], WIDTH)
    with pytest.raises(TransactionError, match="in an open transaction already"):
        SpeculativeCacheTransaction([mine], 2)
    other = KVCache()
    with pytest.raises(TransactionError, match="in an open transaction already"):
        SpeculativeCacheTransaction([other, CacheList(KVCache(), mine)], 2)
    SpeculativeCacheTransaction([other], 2).abort()
    assert first.active
    first.abort()
    SpeculativeCacheTransaction([mine], 2).abort()


def test_a_member_of_a_nest_is_open_while_the_nest_is() -> None:
    inner = ArraysCache(2)
    tx = SpeculativeCacheTransaction([CacheList(KVCache(), inner)], WIDTH)
    with pytest.raises(TransactionError, match="ArraysCache is in an open transaction"):
        SpeculativeCacheTransaction([inner], 1)
    tx.abort()


@pytest.mark.parametrize("name", ["kv", "quantized", "ring", "arrays", "list_mixed"])
def test_a_round_cannot_be_opened_on_the_leaves_of_an_open_one(name: str) -> None:
    cache = KINDS[name].make()
    tx = SpeculativeCacheTransaction([cache], WIDTH)
    with pytest.raises(TransactionError, match="in an open transaction already"):
        SpeculativeCacheTransaction(tx.caches, 2)
    tx.abort()


def test_a_round_that_cannot_be_opened_leaves_its_caches_free() -> None:
    good, bad = KVCache(), KVCache()
    del bad.offset
    with pytest.raises(AttributeError):
        SpeculativeCacheTransaction([good, bad], WIDTH)
    SpeculativeCacheTransaction([good], WIDTH).abort()


def test_a_forgotten_round_frees_a_cache_that_is_gone_too() -> None:
    cache = KVCache()
    SpeculativeCacheTransaction([cache], WIDTH)
    del cache
    gc.collect()
    SpeculativeCacheTransaction([KVCache()], WIDTH).abort()


def change_length(cache: Any) -> None:
    append(cache, [7], 1)


def change_back(cache: Any) -> None:
    cache.trim(1)


@pytest.mark.parametrize("change", [change_length, change_back])
@pytest.mark.parametrize("make", [KVCache, lambda: QuantizedKVCache(32, 8)], ids=["kv", "quantized"])
def test_a_change_from_outside_is_noticed_at_the_next_write_and_at_commit(
    make: Callable[[], Any], change: Callable[[Any], None]
) -> None:
    cache = make()
    append(cache, range(6))
    with SpeculativeCacheTransaction([cache], WIDTH) as tx:
        append(tx.caches[0], BLOCK[:2])
        change(cache)
        with pytest.raises(TransactionError, match="changed outside its open transaction"):
            append(tx.caches[0], BLOCK[2:3])
        with pytest.raises(TransactionError, match="changed outside its open transaction"):
            tx.commit(1)
        assert tx.active
    assert cache.offset == 6


@pytest.mark.parametrize("name", ["ring", "arrays", "chunked", "model_specific", "batch_kv"])
def test_a_change_from_outside_after_the_last_forward_is_noticed_at_commit(name: str) -> None:
    kind = KINDS[name]
    mine = kind.filled(range(6))
    want = independent_copy(mine)
    with SpeculativeCacheTransaction([mine], WIDTH) as tx:
        write(tx, BLOCK, kind)
        append(mine, [7], kind.batch)
        with pytest.raises(TransactionError, match="changed outside its open transaction"):
            tx.commit(WIDTH)
        assert tx.active
    if name == "ring":
        # The stranger's row replaced one that the round did not know it would need.
        assert mine.offset == want.offset
    else:
        assert_same_cache(mine, want)


class Fault(Exception):
    """What a broken layer raises."""


@pytest.mark.parametrize("times", [1, 2])
def test_a_commit_that_fails_half_way_is_finished_or_undone_in_every_layer(
    times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What fails once, as an interrupt does, is finished; what fails again is undone."""
    caches = [KVCache(), RotatingKVCache(RING), KVCache()]
    for cache in caches:
        append(cache, [1])
    want = independent_copy(caches)
    tx = SpeculativeCacheTransaction(caches, WIDTH)
    write(tx, BLOCK[:2])
    (last,) = journals_of(tx.caches[2])
    apply, calls = last.plan([2]), []

    def fails() -> None:
        calls.append(1)
        if len(calls) <= times:
            raise Fault
        apply()

    monkeypatch.setattr(last, "plan", lambda retained: fails)
    with pytest.raises(Fault):
        tx.commit(2)
    assert not tx.active
    assert tx.committed == (times == 1)
    if tx.committed:
        for cache in want:
            for token in BLOCK[:2]:
                append(cache, [token])
    assert_same_cache(caches, want)


def test_numbers_of_numpy_are_no_silent_truncation() -> None:
    cache = KVCache()
    with SpeculativeCacheTransaction([cache], WIDTH) as tx:
        append(tx.caches[0], BLOCK)
        with pytest.raises(TransactionError, match="whole number"):
            tx.commit([np.float32(2.5)])
        tx.commit(2)
    assert cache.offset == 2
