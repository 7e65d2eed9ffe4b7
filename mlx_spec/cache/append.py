"""Full-attention K/V, float and quantized: a round is kept or undone by its length alone."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from operator import is_not
from typing import Any

import mlx.core as mx

from mlx_spec.cache.base import (
    Apply,
    AskedMask,
    Method,
    RowsJournal,
    kept_whole,
    per_row,
    too_few,
    uniform,
)


def _update_and_fetch(self: Any, keys: Any, values: Any) -> Any:
    self.journal.admit(keys.shape[2])
    return super(type(self), self).update_and_fetch(keys, values)


def _keys_and_values(self: Any) -> Any:
    return self.journal.shown(super(type(self), self).keys_and_values)


class AppendJournal(RowsJournal):
    """Remembers the length at which the round began, and nothing else.

    No handle on the key and value buffers is kept: a second handle makes the next in-place write
    copy the whole buffer. Rows past the length are nobody's business, so keeping a prefix is one assignment.
    """

    methods: tuple[tuple[str, Method], ...] = (
        ("update_and_fetch", _update_and_fetch),
        ("keys_and_values", _keys_and_values),
    )
    counter = "offset"
    """The cache's field that counts its rows in use."""

    def __init__(self, cache: Any, width: int) -> None:
        super().__init__(cache, width)
        self._base = self.length
        self._appended = 0

    @property
    def length(self) -> int:
        """Rows of the buffers that are in use."""
        return int(getattr(self._cache, self.counter))

    def admit(self, tokens: int) -> None:
        """Refuse, before anything is written, tokens beyond the round's width and those that another layer must."""
        self.require_open()
        if self._appended + tokens > self.width:
            raise self.too_many(self._appended, tokens)
        if tokens > 1 and self.forward.needs_mixers:
            self.require_mixer()
        self.require_untouched()
        self._noted = None
        self._appended += tokens
        self.counted = self._appended

    def shown(self, read: Callable[[], Any]) -> Any:
        """What the cache shows a mixer that goes by position: nothing that stands behind its position."""
        if self.looking_at is None:
            return read()
        with self._counting(min(self.length, self._base + self.begun + self.looking_at + 1)):
            return read()

    def mask_alone(self, asked: AskedMask, position: int) -> Any:
        """The mask the cache gives for one token when it stands right before this position of the forward."""
        if position not in asked.rows:
            start = getattr(self._cache, self.counter) - self._appended
            with self._counting(start + self.begun + position):
                asked.rows[position] = self.leaf.make_mask(1, *asked.args, **asked.keywords)
        return asked.rows[position]

    @contextmanager
    def _counting(self, rows: int) -> Iterator[None]:
        """Let the cache say that so many rows are in use."""
        before = getattr(self._cache, self.counter)
        setattr(self._cache, self.counter, rows)
        try:
            yield
        finally:
            setattr(self._cache, self.counter, before)

    def mark(self, position: int) -> None:
        self.marked = self.begun = position
        self._fed.clear()
        self.note_rows()

    def plan(self, retained: Sequence[int]) -> Apply:
        count = uniform(retained, type(self._cache).__name__)
        self.require_untouched()
        if self._appended == 0:
            return kept_whole
        if count > self._appended:
            raise too_few(count, self._appended)
        length = self._base + count
        return lambda: setattr(self._cache, "offset", length)

    def restore(self) -> None:
        self._cache.offset = self._base
        even_out(self._cache)

    def trimmed(self) -> int | None:
        surplus = self._base + self._appended - int(getattr(self._cache, self.counter))
        return surplus if surplus >= 0 and not self.other_rows else None

    def untrim(self) -> None:
        setattr(self._cache, self.counter, self._base + self._appended)

    @property
    def nbytes(self) -> int:
        return 0

    def lengths(self) -> tuple[int, int]:
        return getattr(self._cache, self.counter), self._base + self._appended

    @property
    def changed(self) -> bool:
        # Asked of every layer, for each token of a block: without a further call.
        noted, cache = self._noted, self._cache
        if noted is not None and (noted[0] is not cache.keys or noted[1] is not cache.values):
            return True
        return bool(getattr(cache, self.counter) != self._base + self._appended)


def even_out(cache: Any) -> None:
    """A write that was interrupted may have grown the keys and not the values; both have all old rows."""
    if isinstance(cache.keys, mx.array) and cache.keys.shape[2] != cache.values.shape[2]:
        rows = min(cache.keys.shape[2], cache.values.shape[2])
        cache.keys, cache.values = cache.keys[..., :rows, :], cache.values[..., :rows, :]


class PackedJournal(AppendJournal):
    """Quantized keys and values: each several arrays, of which a caller may put in a single one."""

    def note_rows(self) -> None:
        self._noted = self._parts()

    @property
    def other_rows(self) -> bool:
        return self._noted is not None and any(map(is_not, self._noted, self._parts()))

    @property
    def changed(self) -> bool:
        return self.other_rows or self._cache.offset != self._base + self._appended

    def _parts(self) -> tuple[Any, ...]:
        keys, values = self._cache.keys, self._cache.values
        return (None, None) if keys is None or values is None else (*keys, *values)


class ConcatenateJournal(AppendJournal):
    """A cache without spare capacity: its arrays end with its last token, so rows past the length are cut off.

    After a trim its arrays are longer than its offset says, and the next write appends to the arrays.
    """

    def __init__(self, cache: Any, width: int) -> None:
        super().__init__(cache, width)
        self._offset = cache.offset

    @property
    def length(self) -> int:
        return 0 if self._cache.keys is None else int(self._cache.keys.shape[2])

    def shown(self, read: Callable[[], Any]) -> Any:
        keys, values = read()
        if self.looking_at is None:
            return keys, values
        length = self._base + self.begun + self.looking_at + 1
        return keys[..., :length, :], values[..., :length, :]

    def plan(self, retained: Sequence[int]) -> Apply:
        apply = super().plan(retained)
        return apply if apply is kept_whole else lambda: self._cut(retained[0])

    def restore(self) -> None:
        if self._appended:
            self._cut(0)

    def lengths(self) -> tuple[int, int]:
        rows = self.length, self._base + self._appended
        # A trim counts down the offset alone. An older one may stand between it and the rows.
        return rows if rows[0] != rows[1] else (self._cache.offset, self._after(self._appended))

    @property
    def changed(self) -> bool:
        own, expected = self.lengths()
        return own != expected or self.other_rows

    def trimmed(self) -> int | None:
        surplus = self._after(self._appended) - self._cache.offset
        same = self.length == self._base + self._appended and not self.other_rows
        return surplus if surplus >= 0 and same else None

    def untrim(self) -> None:
        self._cache.offset = self._after(self._appended)

    def _after(self, count: int) -> int:
        return self._base + count if count else self._offset

    def _cut(self, count: int) -> None:
        cache, length = self._cache, self._base + count
        cache.offset = length if count else self._offset
        cache.keys, cache.values = (
            (cache.keys[..., :length, :], cache.values[..., :length, :]) if length else (None, None)
        )


class BatchAppendJournal(AppendJournal):
    """The same for rows of different lengths: one cursor for all, an offset and a left padding for each.

    Where the rows keep different counts, the shorter ones are rolled right, as mlx-lm's `prepare` and
    `finalize` do it; that moves the whole of the buffers.
    """

    counter = "_idx"

    def __init__(self, cache: Any, width: int) -> None:
        # Two arrays of one number per row, of which a model's own writes leave these handles alone.
        self._rows = (copy.copy(cache.offset), copy.copy(cache.left_padding))
        self._unrolled: tuple[Any, Any] | None = None
        super().__init__(cache, width)

    def plan(self, retained: Sequence[int]) -> Apply:
        counts = per_row(retained, self._rows[0].size)
        super().plan([max(counts)])
        if self._appended == 0 or min(counts) == self._appended:
            return kept_whole
        return lambda: self._keep(counts)

    def restore(self) -> None:
        self._keep([0] * self._rows[0].size)
        if self._base:
            even_out(self._cache)

    def close(self) -> None:
        super().close()
        self._unrolled = None

    def _keep(self, counts: list[int]) -> None:
        if self._unrolled is not None:
            # An attempt before this one was interrupted.
            self._cache.keys, self._cache.values = self._unrolled
            self._cache._right_padding = None
        longest = max(counts)
        cache, (offset, left_padding) = self._cache, self._rows
        cache._idx = self._base + longest
        cache.offset = offset + longest
        cache.left_padding = copy.copy(left_padding)
        if cache._idx == 0:
            cache.keys = cache.values = None
        if min(counts) < longest:
            # Rolling makes new buffers, so holding the old ones costs no copy.
            self._unrolled = cache.keys, cache.values
            cache.prepare(right_padding=[longest - count for count in counts])
            cache.finalize()
