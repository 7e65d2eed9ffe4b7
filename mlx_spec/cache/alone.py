"""One token read by the model's own forward, on the caller's own caches, in a way that can be undone."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from mlx_spec.cache.base import Apply, Journal, kept_whole, uniform


class AloneJournal(Journal):
    """What undoes one token. The model is handed the cache itself, so what it writes is not looked at."""

    def make_leaf(self) -> Any:
        """The cache itself."""
        return self._cache

    def mark(self, position: int) -> None:
        self.marked = position

    def part(self) -> None:
        self.closed = True

    def close(self) -> None:
        self.closed = True

    def plan(self, retained: Sequence[int]) -> Apply:
        return kept_whole if uniform(retained, self.kind) else self.restore

    def require_untouched(self) -> None:
        """Nothing is open on the cache once the caller has it."""

    @property
    def nbytes(self) -> int:
        return 0


class AloneByLength(AloneJournal):
    """Keys and values that are cut by their length."""

    def __init__(self, cache: Any, width: int) -> None:
        super().__init__(cache, width)
        self._length = cache.offset

    def restore(self) -> None:
        cache = self._cache
        cache.offset = self._length
        even_out(cache)


class AloneByState(AloneJournal):
    """States of fixed size: the old ones, by handles of their own."""

    def __init__(self, cache: Any, width: int) -> None:
        super().__init__(cache, width)
        self._state = [*map(copy.copy, cache.cache)]
        self._rows = copy.copy(cache.left_padding), copy.copy(cache.lengths)

    def restore(self) -> None:
        cache = self._cache
        cache.cache[:] = map(copy.copy, self._state)
        cache.left_padding, cache.lengths = map(copy.copy, self._rows)

    def close(self) -> None:
        super().close()
        self._state = []

    def onto(self, twin: Any) -> Journal:
        journal = super().onto(twin)
        vars(journal).update(_state=[*map(copy.copy, self._state)])
        return journal


def even_out(cache: Any) -> None:
    """A write that was interrupted may have grown the keys and not the values; both have all old rows."""
    if isinstance(cache.keys, mx.array) and cache.keys.shape[2] != cache.values.shape[2]:
        rows = min(cache.keys.shape[2], cache.values.shape[2])
        cache.keys, cache.values = cache.keys[..., :rows, :], cache.values[..., :rows, :]
