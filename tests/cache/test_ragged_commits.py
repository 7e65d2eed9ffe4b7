"""Rows that keep different counts, case by case; `test_ragged_machine.py` tries the rest."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
from mlx_lm.models.cache import ArraysCache, ConcatenateKVCache

from mlx_spec import SpeculativeCacheTransaction
from tests.cache.kinds import append, append_rows
from tests.oracle import independent_copy
from tests.same_cache import assert_same_cache, assert_same_row

WIDTH = 4
TOKENS = ([11, 12, 13, 14], [21, 22, 23, 24], [31, 32, 33, 34])


def alone(tokens: Sequence[int], padding: int = 0) -> ArraysCache:
    """One row's cache after these tokens, of which the first are padding."""
    cache = ArraysCache(2)
    for token in tokens[padding:]:
        append_rows(cache, [[token]])
    return cache


def commit(cache: Any, appended: int, counts: list[int]) -> None:
    """One round, fed token by token, of which each row keeps its own count."""
    with SpeculativeCacheTransaction([cache], WIDTH) as tx:
        for position in range(appended):
            append_rows(tx.caches[0], [row[position : position + 1] for row in TOKENS])
            tx.mark(1)
        tx.commit(counts)


@pytest.mark.parametrize("appended", [2, 3, 4])
def test_rows_of_a_recurrent_cache_keep_any_counts_of_a_round_that_is_not_full(appended: int) -> None:
    for counts in itertools.product(range(appended + 1), repeat=len(TOKENS)):
        cache = ArraysCache(2)
        append_rows(cache, [[1], [2], [3]])
        commit(cache, appended, list(counts))
        for row, count in enumerate(counts):
            want = alone([row + 1, *TOKENS[row][:count]])
            assert_same_row(cache, row, want)


def test_rows_may_keep_different_counts_while_they_are_in_their_left_padding() -> None:
    padding = [3, 0, 2]
    cache = ArraysCache(2, left_padding=padding)
    counts = [1, 4, 2]
    commit(cache, 4, counts)
    assert cache.left_padding.tolist() == [pad - count for pad, count in zip(padding, counts, strict=True)]
    append_rows(cache, [[41, 42, 43], [51, 52, 53], [61, 62, 63]])
    for row, later in enumerate([[41, 42, 43], [51, 52, 53], [61, 62, 63]]):
        want = alone([*TOKENS[row][: counts[row]], *later], padding[row])
        assert_same_row(cache, row, want)


@pytest.mark.parametrize("kept", [0, 1, 3])
def test_a_concatenating_cache_that_was_trimmed_goes_on_as_stock_lets_it(kept: int) -> None:
    mine = ConcatenateKVCache()
    append(mine, [1, 2, 3, 4, 5])
    mine.trim(2)
    want = independent_copy(mine)
    with SpeculativeCacheTransaction([mine], WIDTH) as tx:
        append(tx.caches[0], [6, 7, 8])
        tx.commit(kept)
    for token in [6, 7, 8][:kept]:
        append(want, [token])
    assert_same_cache(mine, want)
