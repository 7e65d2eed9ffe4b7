"""All layers' caches as one: a round is planned for every layer, then applied to every layer, or undone."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any, cast

import mlx.core as mx

from mlx_spec.cache.adopt import adopt, leaves, rows_held
from mlx_spec.cache.base import Drive, drive_by, is_leaf, too_few
from mlx_spec.errors import TransactionError

_open_caches: weakref.WeakSet[Any] = weakref.WeakSet()
_open_caches_lock = threading.Lock()


class SpeculativeCacheTransaction:
    """Lets a model append up to `width` tokens and then keeps any prefix of them.

    States: open -> committed | aborted. Leaving the `with` block without a commit aborts.
    The caller's cache objects stay the caller's: no method of theirs is replaced, and after a commit
    of n tokens they hold what n one-token forwards would have left.

    Attributes:
        caches: what to hand the model as `cache`.
        width: tokens the round may append.
        active: whether it can still be committed or aborted.
        _settled: the caches are what the round leaves behind; only letting go of it is left to do.

    Cost:
        Opening and committing are O(layers) for full-attention caches and read nothing on the host.
        Any other cache is held by one handle per marked step.

    Example:
        >>> import mlx.core as mx
        >>> from mlx_lm.models.cache import KVCache
        >>> caches = [KVCache()]
        >>> with SpeculativeCacheTransaction(caches, width=3) as tx:
        ...     _ = tx.caches[0].update_and_fetch(mx.ones((1, 2, 3, 4)), mx.ones((1, 2, 3, 4)))
        ...     tx.commit(2)
        >>> caches[0].offset
        2
    """

    def __init__(self, caches: Sequence[Any], width: int, *, drive: Drive = Drive.POSITIONS) -> None:
        """Open a round.

        Args:
            caches: the model's caches, as mlx-lm makes them.
            width: tokens the round may append, >= 1.
            drive: how the model's token mixers take these tokens, once `mlx_spec.attach(model)` was called. Where they
                are not attached they take them whole: windows and recurrent states then refuse a forward over several,
                but with `Drive.WHOLE`, which keeps all of such a forward or nothing.

        Raises:
            TransactionError: width < 1, or a cache is in an open transaction already. Nothing was changed.
        """
        if width < 1:
            raise TransactionError(f"a round needs a width of at least 1 token, got {width}.")
        self.width = width
        self.position = 0
        self.active = False
        self._settled = False
        self._members: list[Any] = []
        members = list(leaves(caches))
        try:
            self._enroll(members)
            self.caches, self._journals = adopt(caches, width, drive)
            self.active = True
        except BaseException:
            self._discharge()
            raise

    def __enter__(self) -> SpeculativeCacheTransaction:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort()

    @property
    def nbytes(self) -> int:
        """Bytes held only because the round is open."""
        return sum(journal.nbytes for journal in self._journals)

    def mark(self, tokens: int) -> None:
        """Tell that one forward over `tokens` tokens is complete.

        Caches that can only be put back to where a forward ended learn their steps from this;
        for full-attention caches it changes nothing.

        Raises:
            TransactionError: closed, more tokens than the width, or another number than a cache has counted.
                The round is still open, and nothing is marked.
        """
        self._require_active("mark a step of")
        if not 0 < tokens <= self.width - self.position:
            raise TransactionError(
                f"{tokens} tokens do not fit: the round was opened for {self.width} and holds {self.position}."
            )
        position = self.position + tokens
        for journal in self._journals:
            counted = journal.counted
            if counted is not None and counted != position:
                raise TransactionError(
                    f"mark({tokens}) says that the round holds {position} tokens, but {journal.kind} has read "
                    f"{counted}. Call mark once after each forward, with the tokens it read."
                )
        self.position = position
        for journal in self._journals:
            journal.mark(position)

    def drive_by(self, drive: Drive) -> None:
        """Let token mixers take the forwards from here on in another way. Not to or from `Drive.WHOLE`."""
        self._require_active("drive")
        drive_by(self._journals, drive)

    def validate(self, retained: int | Sequence[int] | mx.array = 0) -> None:
        """Raise what `commit(retained)` would raise. Changes nothing."""
        self._plan(retained)

    def commit(self, retained: int | Sequence[int] | mx.array) -> None:
        """Keep the first `retained` tokens of the round and close it.

        Args:
            retained: tokens to keep, 0..width: one count, or one per row as a list or [B] array.

        Raises:
            TransactionError: out of range, wrong length, closed, or a cache cannot keep that prefix.
                The round is still open; it can be aborted or committed with another count.
            Anything else: raised while a cache was written. Every cache is back where the round found it.
        """
        plans = self._plan(retained)
        try:
            for apply in plans:
                apply()
            self._settled = True
            self._close()
        except BaseException:
            self.abort()
            raise

    def abort(self) -> None:
        """Undo the round. Does nothing when it is closed already.

        If it is interrupted, the round is still open, and calling it again completes it.
        """
        if not self.active:
            return
        if not self._settled:
            with ExitStack() as every_layer:
                for journal in self._journals:
                    every_layer.callback(journal.restore)
            self._settled = True
        self._close()

    def _plan(self, retained: int | Sequence[int] | mx.array) -> list[Any]:
        self._require_active("commit")
        counts = self._counts(retained)
        self._require_read(max(counts, default=0))
        return [journal.plan(counts) for journal in self._journals]

    def _require_read(self, count: int) -> None:
        """Refuse to keep more tokens than the caches have read, as far as they or the marks tell."""
        read = 0 if self._journals else self.position
        for journal in self._journals:
            seen = journal.counted or journal.marked
            if count and not seen and not journal.counts:
                raise TransactionError(
                    f"cannot keep {count} tokens: {journal.kind} does not count what it is handed. "
                    "Call mark(tokens) after each forward, then commit."
                )
            if seen > read:
                read = seen
        if count > read:
            raise too_few(count, read)

    def _counts(self, retained: int | Sequence[int] | mx.array) -> list[int]:
        if isinstance(retained, mx.array) and retained.ndim > 1:
            raise TransactionError(f"retained counts are one number per row, [B], got shape {retained.shape}.")
        if isinstance(retained, mx.array):
            counts = cast(list[Any], mx.flatten(retained).tolist())
        else:
            counts = list(retained) if isinstance(retained, list | tuple) else [retained]
        if any(isinstance(count, bool) or not isinstance(count, int) for count in counts):
            raise TransactionError(f"retained counts are whole numbers of tokens, got {counts}.")
        if not isinstance(retained, int) and len(counts) != self._rows():
            raise TransactionError(f"one count per row: the caches hold {self._rows()} rows, got {counts}.")
        if any(not 0 <= count <= self.width for count in counts):
            raise TransactionError(f"retained counts lie in 0..{self.width} for this round, got {counts}.")
        return counts

    def _rows(self) -> int:
        return rows_held(self._members) or 1

    def _require_active(self, what: str) -> None:
        if not self.active:
            raise TransactionError(f"cannot {what} this round: it is closed. Open a new transaction.")

    def _enroll(self, members: list[Any]) -> None:
        with _open_caches_lock:
            busy = [type(cache).__name__ for cache in members if cache in _open_caches or is_leaf(cache)]
            if busy:
                raise TransactionError(
                    f"{busy[0]} is in an open transaction already. Commit or abort that one first; "
                    "two requests need two prompt caches."
                )
            # Known as this round's before the first is entered, so that a half-made entry is taken back.
            self._members = members
            _open_caches.update(members)

    def _close(self) -> None:
        """Let go of everything. What was interrupted here can be done again: `active` falls last."""
        for journal in self._journals:
            journal.close()
        self._journals = []
        self.caches = []
        self._discharge()
        self.active = False

    def _discharge(self) -> None:
        with _open_caches_lock:
            _open_caches.difference_update(self._members)
        self._members = []
