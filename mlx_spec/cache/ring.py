"""Sliding windows: a round overwrites W rows of a ring, and exactly those can be put back."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import mlx.core as mx

from mlx_spec.cache.base import Apply, Journal, RowsJournal, kept_whole, too_few, uniform
from mlx_spec.cache.stepwise import StepwiseJournal, fingerprint
from mlx_spec.errors import TransactionError


class RingPlace(NamedTuple):
    """Where a ring stands.

    Attributes:
        rows: allocated rows; 0 before the first write.
        cursor: mlx-lm's `_idx`.
        offset: tokens read so far.
        turned: writes of the round made since the ring first wrapped.
    """

    rows: int
    cursor: int
    offset: int
    turned: int = 0


class RingPath:
    """The places a ring passes through over one-token writes, and the row each write lands in.

    Attributes:
        places: places[n] is the place after n writes.
        slots: slots[i] is the row write i lands in.
        trimmed: rows the first write cuts away, left behind by a prompt chunk longer than the window.
    """

    def __init__(self, cache: Any, start: RingPlace, keep: int, wrapped: bool) -> None:
        """
        Args:
            cache: what has `max_size` and `step`; nothing else of it is looked at.
            keep: rows at the front that are never overwritten.
            wrapped: the ring went round before.
        """
        self._max_size, self._step_rows, self._keep = cache.max_size, cache.step, keep
        self._wrapped = wrapped
        self.places = [start]
        self.slots: list[int] = []
        self.trimmed = max(0, start.rows - self._max_size)

    def walk(self, writes: int) -> RingPath:
        """Go on by as many one-token writes."""
        for _ in range(writes):
            self._step()
        return self

    def _step(self) -> None:
        rows, cursor, offset, turned = self.places[-1]
        if rows == 0 or (offset >= rows and rows < self._max_size):
            rows += min(self._step_rows, self._max_size - offset)
            cursor = offset
        if rows > self._max_size:
            rows, cursor = self._max_size, self._max_size
        if cursor == self._max_size:
            cursor, self._wrapped = self._keep, True
        self.slots.append(cursor)
        self.places.append(RingPlace(rows, cursor + 1, offset + 1, turned + self._wrapped))

    def source(self, slot: int) -> int:
        """The row of the present buffers that stands in `slot` once the first write has cut it."""
        return slot if slot < self._keep else slot + self.trimmed


def _update_and_fetch(self: Any, keys: mx.array, values: mx.array) -> Any:
    self.journal.admit(keys, values)
    return super(type(self), self).update_and_fetch(keys, values)


def _keys_and_values(self: Any) -> Any:
    return self.journal.shown(super(type(self), self).keys_and_values)


class RingJournal(RowsJournal):
    """An undo log: the rows a round will overwrite, copied before it, and the rows it writes.

    The log needs writes of one token, as attention over a ring needs them anyway: a row must be
    attended before the write that replaces it. A write of several tokens lays the rows out otherwise than as many
    single ones do, so it is refused.

    A window of 6 rows, the first 2 of them kept for good, that has read tokens 0 to 8; a round of W = 3 over it:

        slot                    0   1   2   3   4   5    cursor  offset
        before the round      | 0   1 | 6   7   8   5 |     5       9
        write i takes slot              i=1 i=2     i=0             slots = [5, 2, 3]: at the end it wraps to row 2
        copied before it                6   7       5
        tokens 9, 10, 11 in   | 0   1 | 10  11  8   9 |     4      12
        commit(1)             | 0   1 | 6   7   8   9 |     6      10   slots 2 and 3 get their copies back, 5 does not

    A round longer than the window writes a slot twice; where the first of the two writes is kept, its row is put back
    and not the copy.
    """

    methods = (("update_and_fetch", _update_and_fetch), ("keys_and_values", _keys_and_values))
    wants_positions = True
    needs_mixer = True

    def __init__(self, cache: Any, width: int) -> None:
        super().__init__(cache, width)
        self._path = self._path_of(cache).walk(width)
        self._written: list[tuple[mx.array, mx.array]] = []
        self._appended = 0
        self._views: dict[int, tuple[mx.array, mx.array]] = {}
        # A cut makes new buffers, so holding the old ones costs no copy.
        self._uncut = (copy.copy(cache.keys), copy.copy(cache.values)) if self._path.trimmed else None
        self._saved = self._save()

    def _path_of(self, cache: Any) -> RingPath:
        start = RingPlace(rows_of(cache), cache._idx, self._offset())
        return RingPath(cache, start, cache.keep, wrapped=False)

    def _offset(self) -> int:
        return int(self._cache.offset)

    def _set_place(self, count: int) -> None:
        place = self._path.places[count]
        self._cache._idx, self._cache.offset = place.cursor, place.offset

    def _save(self) -> dict[int, int]:
        """Copy the rows to be overwritten. Maps a slot to its place in the copies."""
        held = self._path.places[0].rows - self._path.trimmed
        slots = sorted({slot for slot in self._path.slots if slot < held})
        self._copies: tuple[mx.array, ...] = ()
        if slots:
            # A gather makes a buffer of its own; a slice might share the ring's and make the next write copy it.
            index = mx.array([self._path.source(slot) for slot in slots])
            self._copies = (mx.take(self._cache.keys, index, axis=2), mx.take(self._cache.values, index, axis=2))
            mx.async_eval(*self._copies)
        return {slot: place for place, slot in enumerate(slots)}

    def admit(self, keys: mx.array, values: mx.array) -> None:
        """Note a write before it is made."""
        tokens = keys.shape[2]
        self.require_open()
        if self._appended + tokens > self.width:
            raise self.too_many(self._appended, tokens)
        if tokens > 1:
            require_single(self, tokens)
        self.require_untouched()
        self._noted = None
        self._written.append((keys, values))
        self._appended += tokens
        self.counted = self._appended

    def lengths(self) -> tuple[int, int]:
        return self._offset(), self._path.places[0].offset + self._appended

    def trimmed(self) -> int | None:
        place = self._path.places[self._appended]
        surplus = place.offset - self._offset()
        return surplus if surplus == place.cursor - self._cache._idx >= 0 and not self.other_rows else None

    def untrim(self) -> None:
        self._set_place(self._appended)

    def shown(self, read: Callable[[], Any]) -> Any:
        """What the cache shows a mixer that goes by position: the window as it stood there."""
        count = self._appended if self.looking_at is None else self.begun + self.looking_at + 1
        if count >= self._appended:
            return read()
        if count not in self._views:
            self._views[count] = self._as_after(count)
        return self._views[count]

    def mark(self, position: int) -> None:
        self.marked = self.begun = position
        self._fed.clear()
        self._views = {}
        self.note_rows()

    def begin(self, position: int) -> None:
        super().begin(position)
        self._views = {}

    def plan(self, retained: Sequence[int]) -> Apply:
        count = uniform(retained, type(self._cache).__name__)
        self.require_untouched()
        if self._appended == 0 or count == self._appended:
            return kept_whole
        if count > self._appended:
            raise too_few(count, self._appended)
        return lambda: self._go_back_to(count)

    def restore(self) -> None:
        if self._appended:
            self._go_back_to(0)

    def onto(self, twin: Any) -> Journal:
        journal = super().onto(twin)
        # The uncut buffers are put into the cache as they are, so each cache needs handles of its own.
        uncut = None if self._uncut is None else tuple(map(copy.copy, self._uncut))
        vars(journal).update(_written=list(self._written), _views={}, _uncut=uncut)
        return journal

    def close(self) -> None:
        super().close()
        self._copies, self._uncut = (), None
        self._written, self._views = [], {}

    @property
    def nbytes(self) -> int:
        pairs = [*self._written, *self._views.values()]
        arrays = [*self._copies, *(self._uncut or ()), *(array for pair in pairs for array in pair)]
        return sum(array.nbytes for array in arrays)

    def _go_back_to(self, count: int) -> None:
        cache, place = self._cache, self._path.places[count]
        if count == 0 and self._uncut is not None:
            cache.keys, cache.values = self._uncut
        elif place.rows == 0:
            cache.keys = cache.values = None
        else:
            self._put_rows_back(count, place.rows)
        self._set_place(count)

    def _put_rows_back(self, count: int, rows: int) -> None:
        cache = self._cache
        if rows < cache.keys.shape[2]:
            cache.keys, cache.values = (mx.contiguous(array[..., :rows, :]) for array in (cache.keys, cache.values))
        for slot, (keys, values) in self._changed_since(count).items():
            if slot < rows:
                cache.keys[..., slot : slot + 1, :] = keys
                cache.values[..., slot : slot + 1, :] = values

    def _changed_since(self, count: int) -> dict[int, tuple[mx.array, mx.array]]:
        """Slot -> the row that stood there after `count` writes, for every slot written since."""
        latest = {slot: write for write, slot in enumerate(self._path.slots[:count])}
        rows = {}
        for slot in sorted(set(self._path.slots[count : self._appended])):
            if slot in latest:
                rows[slot] = self._written[latest[slot]]
            elif slot in self._saved:
                keys, values = (copies[..., self._saved[slot] : self._saved[slot] + 1, :] for copies in self._copies)
                rows[slot] = keys, values
            else:
                # Allocated within the round, so it held what a new allocation holds.
                keys, values = (array[..., :1, :] for array in (self._cache.keys, self._cache.values))
                rows[slot] = mx.zeros_like(keys), mx.zeros_like(values)
        return rows

    def _as_after(self, count: int) -> tuple[mx.array, mx.array]:
        """The rows a reader would have been shown after `count` writes, in buffers of their own."""
        place = self._path.places[count]
        used = min(place.rows, place.offset)
        changed = {slot: rows for slot, rows in self._changed_since(count).items() if slot < used}
        held = [self._cache.keys[..., :used, :], self._cache.values[..., :used, :]]
        if not changed:
            return held[0], held[1]
        sources = list(range(used))
        for place_of_row, slot in enumerate(changed):
            sources[slot] = used + place_of_row
        index = mx.array(sources)
        keys, values = (
            mx.take(mx.concatenate([array, *(pair[side] for pair in changed.values())], axis=2), index, axis=2)
            for side, array in enumerate(held)
        )
        return keys, values


def require_single(journal: Journal, tokens: int) -> None:
    """Refuse a write of several tokens into a window, before it is made."""
    if tokens > 1:
        journal.require_mixer()
        raise TransactionError(
            f"a mixer wrote {tokens} tokens into a window at once, which lays its rows out otherwise than one-token "
            "decode does. Nothing of this write was made. Abort, and feed the block one token at a time."
        )


class FullRingJournal(StepwiseJournal):
    """A window whose every row is kept for good: mlx-lm writes what comes after its last row to nowhere.

    No row is overwritten, so an undo log has nothing to say; the whole of the few rows is held at each step.
    """

    methods = (("update_and_fetch", _update_and_fetch),)
    needs_mixer = True
    counts = True

    def __init__(self, cache: Any, width: int) -> None:
        super().__init__(cache, width)
        self._base = int(cache.offset)
        self._place = (cache._idx, cache.offset)

    def admit(self, keys: mx.array, values: mx.array) -> None:
        """Note a write before it is made."""
        del values
        self.require_open()
        held, tokens = int(self._cache.offset) - self._base, keys.shape[2]
        if self.by_position:
            if held + tokens > self.width:
                raise self.too_many(held, tokens)
            require_single(self, tokens)
        self.counted = held + tokens

    def mark(self, position: int) -> None:
        super().mark(position)
        self._place = (self._cache._idx, self._cache.offset)

    def trimmed(self) -> int | None:
        cache, (cursor, offset) = self._cache, self._place
        before = fingerprint({**vars(cache), "_idx": cursor, "offset": offset}) if self._standing else []
        surplus = int(offset - cache.offset)
        return surplus if surplus == cursor - cache._idx >= 0 and before == self._standing else None

    def untrim(self) -> None:
        self._cache._idx, self._cache.offset = self._place


def rows_of(cache: Any) -> int:
    """Rows a window has allocated."""
    return 0 if cache.keys is None else int(cache.keys.shape[2])
