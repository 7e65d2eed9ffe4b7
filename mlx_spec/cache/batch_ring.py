"""Sliding windows of several rows: the undo log of one ring, and rows that keep different counts."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from mlx_spec.cache.base import Apply, per_row
from mlx_spec.cache.ring import RingJournal, RingPath, RingPlace, rows_of


class BatchRingJournal(RingJournal):
    """One cursor for all rows, an offset and a left padding for each.

    Where the rows keep different counts, every row's window is gathered anew, aligned at its newest token as
    mlx-lm's `merge` does it; that moves the whole of the window.
    """

    def __init__(self, cache: Any, width: int) -> None:
        # Models' own writes count the padding down in place, which would carry a plain reference along.
        self._rows = (copy.copy(cache.offset), copy.copy(cache.left_padding))
        self._rotated = bool(cache.rotated)
        self._ungathered: tuple[mx.array, mx.array] | None = None
        super().__init__(cache, width)

    def plan(self, retained: Sequence[int]) -> Apply:
        counts = per_row(retained, self._rows[0].size)
        if len(set(counts)) == 1:
            return super().plan(counts[:1])
        for count in set(counts):
            super().plan([count])
        return lambda: self._keep(counts)

    def restore(self) -> None:
        if self._ungathered is not None:
            self._cache.keys, self._cache.values = self._ungathered
        super().restore()

    def close(self) -> None:
        super().close()
        self._ungathered = None

    def _path_of(self, cache: Any) -> RingPath:
        start = RingPlace(rows_of(cache), cache._idx, self._offset())
        return RingPath(cache, start, keep=0, wrapped=self._rotated)

    def _offset(self) -> int:
        return int(self._cache._offset)

    def _set_place(self, count: int) -> None:
        cache, place = self._cache, self._path.places[count]
        offset, left_padding = self._rows
        cache._idx, cache._offset = place.cursor, place.offset
        cache.rotated = self._rotated or place.turned > 0
        cache.offset = offset + count
        cache.left_padding = left_padding - place.turned - (self._path.trimmed if count else 0)

    def _keep(self, counts: list[int]) -> None:
        """Every row's window, aligned at the row's newest token."""
        cache, (offset, left_padding) = self._cache, self._rows
        if self._ungathered is not None:
            # An attempt before this one was interrupted.
            cache.keys, cache.values = self._ungathered
        before, longest = self._in_order(), max(counts)
        used = 0 if before is None else before[0].shape[2]
        size = min(cache.max_size, used + longest)
        kept = mx.array(counts)
        padding = mx.maximum(left_padding, 0) if used else left_padding
        # Row r's window ends with its newest token, at used + counts[r] of old and new rows laid side by side.
        places = used + kept[:, None] - size + mx.arange(size)[None]
        index = mx.maximum(places, 0)[:, None, :, None]
        keys, values = (
            mx.take_along_axis(self._side_by_side(before, side, longest), index, axis=2) for side in range(2)
        )
        # Gathering makes new buffers, so holding the old ones costs no copy.
        self._ungathered = cache.keys, cache.values
        cache.keys, cache.values = keys, values
        cache._idx = cache._offset = size
        cache.rotated = False
        cache.offset = offset + kept
        cache.left_padding = mx.maximum(0, padding + size - used - kept)

    def _side_by_side(self, before: tuple[mx.array, mx.array] | None, side: int, longest: int) -> mx.array:
        written = [pair[side] for pair in self._written[:longest]]
        return mx.concatenate([*([] if before is None else [before[side]]), *written], axis=2)

    def _in_order(self) -> tuple[mx.array, mx.array] | None:
        """The window the round found, oldest row first; None where there was none."""
        cursor = self._path.places[0].cursor
        if self._path.places[0].rows == 0:
            return None
        if self._uncut is not None:
            return self._uncut
        keys, values = self._as_after(0)
        if self._rotated:
            return mx.roll(keys, -cursor, 2), mx.roll(values, -cursor, 2)
        return keys[..., :cursor, :], values[..., :cursor, :]
