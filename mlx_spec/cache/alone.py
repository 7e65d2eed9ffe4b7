"""Tokens read by the model's own forward, on the caller's own caches, where what they do to them can be undone so."""

from __future__ import annotations

from mlx_spec.cache.append import AppendJournal, PackedJournal


class AloneByLength(AppendJournal):
    """Keys and values that are cut by their length. The model is handed the cache itself: nothing stands between."""

    @property
    def counted(self) -> int | None:  # type: ignore[override]
        """By the cache's own length, of which somebody else may have cut what was marked before."""
        return max(self.length - self._base, self._appended) or None

    def mark(self, position: int) -> None:
        self._appended = self.length - self._base
        super().mark(position)


class AlonePacked(AloneByLength, PackedJournal):
    """The same, quantized."""
