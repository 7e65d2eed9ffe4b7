"""Sliding windows: a round overwrites W rows of a ring, and exactly those can be put back."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, NamedTuple

import mlx.core as mx

from mlx_spec.cache.base import Apply, Journal, changed_outside, kept_whole, uniform
from mlx_spec.cache.stepwise import Snapshot, StepwiseJournal
from mlx_spec.errors import TransactionError


class RingPlace(NamedTuple):
    """Where a ring stands.

    Attributes:
        rows: allocated rows; 0 before the first write.
        cursor: mlx-lm's `_idx`.
        offset: tokens read so far.
    """

    rows: int
    cursor: int
    offset: int


class RingPath:
    """The places a ring passes through over one-token writes, and the row each write lands in.

    Attributes:
        places: places[n] is the place after n writes.
        slots: slots[i] is the row write i lands in.
        trimmed: rows the first write cuts away, left behind by a prompt chunk longer than the window.
    """

    def __init__(self, cache: Any, writes: int) -> None:
        self._cache = cache
        rows = 0 if cache.keys is None else cache.keys.shape[2]
        self.places = [RingPlace(rows, cache._idx, cache.offset)]
        self.slots: list[int] = []
        self.trimmed = max(0, rows - cache.max_size)
        for _ in range(writes):
            self._step()

    def _step(self) -> None:
        cache = self._cache
        rows, cursor, offset = self.places[-1]
        if rows == 0 or (offset >= rows and rows < cache.max_size):
            rows += min(cache.step, cache.max_size - offset)
            cursor = offset
        if rows > cache.max_size:
            rows, cursor = cache.max_size, cache.max_size
        if cursor == cache.max_size:
            cursor = cache.keep
        self.slots.append(cursor)
        self.places.append(RingPlace(rows, cursor + 1, offset + 1))

    def source(self, slot: int) -> int:
        """The row of the present buffers that stands in `slot` once the first write has cut it."""
        return slot if slot < self._cache.keep else slot + self.trimmed


def _update_and_fetch(self: Any, keys: mx.array, values: mx.array) -> Any:
    self.journal.admit(keys, values)
    return super(type(self), self).update_and_fetch(keys, values)


class RingJournal(Journal):
    """An undo log: the rows a round will overwrite, copied before it, and the rows it writes.

    The log needs writes of one token, as attention over a ring needs them anyway: a row must be
    attended before the write that replaces it. A write of several tokens is kept or undone whole.
    """

    methods = (("update_and_fetch", _update_and_fetch),)
    wants_positions = True

    def __init__(self, cache: Any, width: int) -> None:
        super().__init__(cache, width)
        self._path = RingPath(cache, width)
        self._written: list[tuple[mx.array, mx.array]] = []
        self._whole: Snapshot | None = None
        self._appended = 0
        # A cut makes new buffers, so holding the old ones costs no copy.
        self._uncut = (copy.copy(cache.keys), copy.copy(cache.values)) if self._path.trimmed else None
        self._saved = self._save()

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
            raise TransactionError(
                f"the round was opened for {self.width} tokens and holds {self._appended}; "
                f"{tokens} more do not fit. Open the transaction with the width you verify."
            )
        self._require_untouched()
        if tokens > 1 and self._whole is None:
            if self._appended:
                raise TransactionError(
                    "a ring takes a round either token by token or in one write of several, not mixed. "
                    "Abort, and feed the block one way."
                )
            self._whole = Snapshot(self._cache)
        self._appended += tokens
        self._written.append((keys, values))

    def _require_untouched(self) -> None:
        want = self._path.places[0].offset + self._appended
        if self._cache.offset != want:
            raise changed_outside(f"length {self._cache.offset}, expected {want}")

    def mark(self, position: int) -> None:
        del position

    def plan(self, retained: Sequence[int]) -> Apply:
        count = uniform(retained, type(self._cache).__name__)
        self._require_untouched()
        if self._appended == 0 or count == self._appended:
            return kept_whole
        if count > self._appended:
            raise TransactionError(
                f"cannot keep {count} tokens: the round appended {self._appended}. "
                "Run the model on the block before committing it."
            )
        if self._whole is not None and count:
            raise TransactionError(
                f"cannot keep {count} of {self._appended} tokens that were written into a ring at once. "
                "Feed the block one token at a time."
            )
        return lambda: self._go_back_to(count)

    def restore(self) -> None:
        if self._appended:
            self._go_back_to(0)

    def close(self) -> None:
        super().close()
        self._copies, self._uncut, self._whole = (), None, None
        self._written = []

    @property
    def nbytes(self) -> int:
        arrays = [*self._copies, *(self._uncut or ()), *(array for pair in self._written for array in pair)]
        return sum(array.nbytes for array in arrays)

    def _go_back_to(self, count: int) -> None:
        if self._whole is not None:
            self._whole.restore()
            return
        cache, place = self._cache, self._path.places[count]
        if count == 0 and self._uncut is not None:
            cache.keys, cache.values = self._uncut
        elif place.rows == 0:
            cache.keys = cache.values = None
        else:
            self._put_rows_back(count, place.rows)
        cache._idx, cache.offset = place.cursor, place.offset

    def _put_rows_back(self, count: int, rows: int) -> None:
        cache = self._cache
        if rows < cache.keys.shape[2]:
            cache.keys, cache.values = (mx.contiguous(array[..., :rows, :]) for array in (cache.keys, cache.values))
        latest = {slot: write for write, slot in enumerate(self._path.slots[:count])}
        for slot in sorted(set(self._path.slots[count : self._appended])):
            if slot >= rows:
                continue
            if slot in latest:
                keys, values = self._written[latest[slot]]
            elif slot in self._saved:
                keys, values = (copies[..., self._saved[slot] : self._saved[slot] + 1, :] for copies in self._copies)
            else:
                # Allocated within the round, so it held what a new allocation holds.
                keys, values = (mx.zeros_like(array) for array in self._written[0])
            cache.keys[..., slot : slot + 1, :] = keys
            cache.values[..., slot : slot + 1, :] = values


class BatchRingJournal(StepwiseJournal):
    """A ring of several rows: one handle per position; rows that keep different counts are taken apart and merged."""

    def plan(self, retained: Sequence[int]) -> Apply:
        if len(set(retained)) == 1:
            return super().plan(retained)
        for count in set(retained):
            super().plan([count])
        return lambda: self._keep_ragged(list(retained))

    def _keep_ragged(self, counts: list[int]) -> None:
        cache = self._cache
        self._steps[self.width] = Snapshot(cache)
        rows = []
        for row, count in enumerate(counts):
            self._steps[count].restore()
            rows.append(cache.extract(row))
        merged = type(cache).merge(rows)
        cache.__dict__.clear()
        cache.__dict__.update(merged.__dict__)
