"""Full attention within chunks: a window that the model cuts at the front before every forward."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from mlx_spec.cache.append import AppendJournal
from mlx_spec.cache.base import Apply, Journal, kept_whole


def _cut_front(self: Any) -> None:
    """What the cache's own method does. Whatever interrupts it, rows and their first position agree."""
    if self.keys is None:
        return
    held = self.offset - self.start_position
    surplus = held - self.chunk_size
    if surplus > 0:
        self.journal.losing(surplus)
        keys, values = (side[..., surplus:held, :] for side in (self.keys, self.values))
        _put(self, keys=keys, values=values, start_position=self.start_position + surplus)


def _put(cache: Any, **fields: Any) -> None:
    """Set several attributes at once: nothing can come between them."""
    vars(cache).update(fields)


class ChunkedJournal(AppendJournal):
    """Remembers the length, and copies the rows that single steps of the round would cut from the front.

    Rows from before the round are copied when it opens. A round wider than a chunk loses rows of its own too: those are
    copied when they are cut.

    One-token decode cuts before every token, so after n tokens a chunk begins at `_start_after(n)`, however the
    block was fed.
    """

    methods = (*AppendJournal.methods, ("maybe_trim_front", _cut_front))
    wants_positions = True

    def __init__(self, cache: Any, width: int) -> None:
        super().__init__(cache, width)
        self._start = self._first_start = cache.start_position
        # A chunk longer than its size, as a prompt leaves it, loses the surplus to the first token whatever is kept.
        surplus = self._start_after(1) > self._start
        self._uncut = (copy.copy(cache.keys), copy.copy(cache.values)) if surplus else None
        # One token more than fits may be cut for before it is refused.
        first, last = self._start_after(1), min(self._start_after(width + 1), self._base)
        self._front: tuple[mx.array, ...] = ()
        if last > first:
            index = mx.arange(first - self._start, last - self._start)
            # A gather makes a buffer of its own; a slice might share the chunk's and make the next write copy it.
            self._front = (mx.take(cache.keys, index, axis=2), mx.take(cache.values, index, axis=2))
            mx.async_eval(*self._front)
        # (position of the first, keys, values), in order.
        self._own: list[tuple[int, mx.array, mx.array]] = []

    @property
    def lost(self) -> int:
        return int(self._cache.start_position - self._first_start)

    def losing(self, count: int) -> None:
        """So many rows are about to be cut from the front."""
        cache = self._cache
        self.require_untouched()
        self._noted = None
        first, last = max(self._base, cache.start_position), cache.start_position + count
        if last > first:
            index = mx.arange(first, last) - cache.start_position
            self._own.append((first, mx.take(cache.keys, index, axis=2), mx.take(cache.values, index, axis=2)))

    def before_position(self, position: int) -> None:
        super().before_position(position)
        if position:
            self.leaf.maybe_trim_front()
        else:
            # The model has cut for the block by now, and made its masks from here on.
            self._first_start = self._cache.start_position

    def shown(self, read: Callable[[], Any]) -> Any:
        return read()

    def plan(self, retained: Sequence[int]) -> Apply:
        super().plan(retained)
        if self._appended == 0 and self._cache.start_position == self._start:
            return kept_whole
        return lambda: self._go_to(retained[0] if self._appended else 0)

    def restore(self) -> None:
        self._go_to(0)

    def onto(self, twin: Any) -> Journal:
        journal = super().onto(twin)
        # The uncut buffers are put into the cache as they are, so each cache needs handles of its own.
        uncut = None if self._uncut is None else tuple(map(copy.copy, self._uncut))
        vars(journal).update(_own=list(self._own), _uncut=uncut)
        return journal

    def close(self) -> None:
        super().close()
        self._front, self._uncut, self._own = (), None, []

    @property
    def nbytes(self) -> int:
        own = [array for _, *sides in self._own for array in sides]
        return sum(array.nbytes for array in (*self._front, *(self._uncut or ()), *own))

    def _start_after(self, count: int) -> int:
        """Position of the first row after so many one-token forwards."""
        if count == 0:
            return self._start
        return max(self._start, self._base + count - 1 - self._cache.chunk_size)

    def _go_to(self, count: int) -> None:
        cache, start, end = self._cache, self._start_after(count), self._base + count
        keys, values = cache.keys, cache.values
        if count == 0 and self._uncut is not None:
            keys, values = self._uncut
        elif end == 0:
            keys = values = None
        elif start != cache.start_position:
            keys, values = (self._rows(side, start, end) for side in range(2))
        _put(cache, keys=keys, values=values, start_position=start, offset=end)

    def _rows(self, side: int, start: int, end: int) -> mx.array:
        """Rows [start, end) by position, from what the cache still has and the copies of its front."""
        held = (self._cache.keys, self._cache.values)[side]
        first = self._cache.start_position
        pieces = []
        if start < first:
            pieces = self._cut(side, start, min(first, end))
        if end > first:
            pieces.append(held[..., max(0, start - first) : end - first, :])
        return mx.contiguous(pieces[0]) if len(pieces) == 1 else mx.concatenate(pieces, axis=2)

    def _cut(self, side: int, start: int, end: int) -> list[mx.array]:
        """Rows [start, end) by position, that were cut from the front."""
        pieces, front_start = [], self._start_after(1)
        if start < self._base:
            pieces.append(self._front[side][..., start - front_start : min(end, self._base) - front_start, :])
        for first, *sides in self._own:
            rows = sides[side][..., max(0, start - first) : max(0, end - first), :]
            if rows.shape[2]:
                pieces.append(rows)
        return pieces
