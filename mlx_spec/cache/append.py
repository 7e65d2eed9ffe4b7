"""Full-attention K/V, float and quantized: a round is kept or undone by its length alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mlx_spec.cache.base import Apply, Journal, kept_whole, make_leaf, uniform
from mlx_spec.errors import TransactionError


class AppendJournal(Journal):
    """Remembers the length at which the round began, and nothing else.

    No handle on the key and value buffers is kept: a second handle makes the next in-place write
    copy the whole buffer. Rows past the length are nobody's business, so keeping a prefix is one assignment.
    """

    def __init__(self, cache: Any, width: int) -> None:
        self._cache = cache
        self._base = cache.offset
        self._appended = 0
        self.width = width
        self.leaf = make_leaf(cache, self, _METHODS)

    def admit(self, tokens: int) -> None:
        """Refuse tokens beyond the round's width, before anything is written."""
        if self._appended + tokens > self.width:
            raise TransactionError(
                f"the round was opened for {self.width} tokens and holds {self._appended}; "
                f"{tokens} more do not fit. Open the transaction with the width you verify."
            )
        self._require_untouched()
        self._appended += tokens

    def mark(self, position: int) -> None:
        del position

    def plan(self, retained: Sequence[int]) -> Apply:
        count = uniform(retained, type(self._cache).__name__)
        self._require_untouched()
        if self._appended == 0:
            return kept_whole
        if count > self._appended:
            raise TransactionError(
                f"cannot keep {count} tokens: the round appended {self._appended}. "
                "Run the model on the block before committing it."
            )
        length = self._base + count
        return lambda: setattr(self._cache, "offset", length)

    def restore(self) -> None:
        self._cache.offset = self._base

    @property
    def nbytes(self) -> int:
        return 0

    def _require_untouched(self) -> None:
        want = self._base + self._appended
        if self._cache.offset != want:
            raise TransactionError(
                f"the cache was changed outside its open transaction: length {self._cache.offset}, expected {want}. "
                "Abort the transaction and begin again from a cache nobody else writes to."
            )


def _update_and_fetch(self: Any, keys: Any, values: Any) -> Any:
    self.journal.admit(keys.shape[2])
    return super(type(self), self).update_and_fetch(keys, values)


_METHODS = (("update_and_fetch", _update_and_fetch),)
