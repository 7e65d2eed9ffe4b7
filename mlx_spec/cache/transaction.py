"""All layers' caches as one: a round is planned for every layer, then applied to every layer, or undone."""

from __future__ import annotations

import copy
import threading
import weakref
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any, cast

import mlx.core as mx

from mlx_spec.cache.adopt import adopt, leaves
from mlx_spec.cache.base import Apply, Drive, Journal, drive_by, is_leaf, too_few
from mlx_spec.cache.contents import cache_arrays, rows_held
from mlx_spec.errors import TransactionError

_open_rounds: dict[int, weakref.ref[SpeculativeCacheTransaction]] = {}
"""id of a cache -> the round it is in. A round holds its caches, so while it lives no other object has such an id; one
that is gone holds none."""
_open_rounds_lock = threading.Lock()


class SpeculativeCacheTransaction:
    """Lets a model append up to `width` tokens and then keeps any prefix of them.

    States: [unopened ->] open -> committed | aborted. Leaving the `with` block without a commit aborts.
    The caller's cache objects stay the caller's: no method of theirs is replaced, and after a commit
    of n tokens they hold what n one-token forwards would have left.

    Attributes:
        caches: what to hand the model as `cache`.
        width: tokens the round may append.
        active: whether it can still be committed or aborted.
        committed: tokens of it are kept, however the call of `commit` ended.
        certain: tokens of the round that are part of the text whatever happens: what `settled_cache` shows of it. Its
            owner writes it.
        _decided: what a commit was to keep, and the calls that do it, from the moment it began to write.
        _settled: the caches are what the round leaves behind; only letting go of it is left to do.
        _revocable: its commit may still be revoked, so no `abort` lets go of what that needs.

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

    def __init__(
        self, caches: Sequence[Any], width: int, *, drive: Drive = Drive.POSITIONS, opened: bool = True
    ) -> None:
        """Open a round.

        Args:
            caches: the model's caches, as mlx-lm makes them.
            width: tokens the round may append, >= 1.
            drive: how the model's token mixers take these tokens, once `mlx_spec.attach(model)` was called. Where they
                are not attached they take them whole: windows and recurrent states then refuse a forward over several,
                but with `Drive.WHOLE`, which keeps all of such a forward or nothing.
            opened: False leaves it to `open` or to the `with` statement, so that whoever will close the round can hold
                it before there is anything to close.

        Raises:
            TransactionError: width < 1, or a cache is in an open transaction already. Nothing was changed.
        """
        if width < 1:
            raise TransactionError(f"a round needs a width of at least 1 token, got {width}.")
        self.width = width
        self.position = 0
        self.active = False
        self.committed = False
        self.certain: int | list[int] = 0
        self._given, self._drive = caches, drive
        self._unopened = True
        self._settled = False
        self._revocable = False
        self._decided: tuple[list[int], list[Apply]] | None = None
        self._entry = weakref.ref(self)
        self._members: list[Any] = []
        self._journals: list[Journal] = []
        self.caches: list[Any] = []
        if opened:
            self.open()

    def open(self) -> None:
        """Open a round that was made unopened.

        Raises:
            TransactionError: it was opened before, or a cache is in an open transaction already.
        """
        if not self._unopened:
            raise TransactionError("this round was opened before. Make a new transaction.")
        try:
            members = list(leaves(self._given))
            self._enroll(members)
            self.caches, self._journals = adopt(self._given, members, self.width, self._drive)
            self._unopened, self.active = False, True
        except BaseException:
            self._discharge()
            raise

    def __enter__(self) -> SpeculativeCacheTransaction:
        try:
            if self._unopened:
                self.open()
        except BaseException:
            self.abort()
            raise
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
        self._require_active("commit")
        self._plan(self._counts(retained))

    def commit(self, retained: int | Sequence[int] | mx.array, *, revocable: bool = False) -> None:
        """Keep the first `retained` tokens of the round and close it.

        Args:
            retained: tokens to keep, 0..width: one count, or one per row as a list or [B] array.
            revocable: what `revoke` needs is held until `release`.

        Raises:
            TransactionError: out of range, wrong length, closed, or a cache cannot keep that prefix.
                The round is still open; it can be aborted or committed with another count.
            Anything else: raised while a cache was written. The tokens are kept all the same and the round is closed;
                only where a cache cannot be written at all is every cache back where the round found it.
                Where the second attempt was interrupted too, the round is open, and the same commit finishes it.
        """
        counts = self._counts(retained)
        if self._decided is None or self._decided[0] != counts:
            self._decided = None
            self._decided = (counts, self._plan(counts))
        self._require_active("commit")
        self._revocable = revocable
        try:
            self._finish(revocable)
        except BaseException:
            self._finish_or_undo(revocable)
            raise

    def _finish(self, revocable: bool) -> None:
        """Do what was decided. Every call of it can be made again, so what was interrupted is done from the start."""
        if not self._settled:
            for apply in () if self._decided is None else self._decided[1]:
                apply()
            self._settled = self.committed = True
        self._part()
        if not revocable:
            self.release()

    def _finish_or_undo(self, revocable: bool) -> None:
        try:
            self._finish(revocable)
        except Exception:  # noqa: BLE001  the first fault is told; this one only says that there is no finishing
            self.abort()

    def abort(self) -> None:
        """Undo the round. One that is closed already is left as it is.

        If it is interrupted, calling it again completes it.
        """
        if not self.active:
            if not self._revocable:
                # What closed it may have been interrupted before it had let go of everything.
                self.release()
            return
        if not self._settled:
            self._restore()
            self._settled = True
        self._part()
        self.release()

    def revoke(self) -> None:
        """Undo a commit that was revocable and was not released. If it is interrupted, call it again."""
        if self.committed or not self._settled:
            self._restore()
            self._settled, self.committed = True, False
        if self.active:
            self._part()
        self.release()

    def release(self) -> None:
        """Let go of everything the round held, and of the caches. Nothing can be undone afterwards."""
        for journal in self._journals:
            journal.close()
        self._journals = []
        self._decided = None

    def give_way(self) -> bool:
        """Close a round on whose caches somebody else wrote, without touching what is theirs.

        Where all they did was to trim every cache, the certain tokens are kept and the trim is done on them.

        Returns:
            Whether that is so. Otherwise the caches stay as they were made, with the tokens of the round in them.
        """
        trims = {journal.trimmed() for journal in self._journals}
        count = trims.pop() if len(trims) == 1 else None
        if count is not None:
            members = list(self._members)
            for journal in self._journals:
                journal.untrim()
            self.commit(self.certain)
            for cache in members:
                if count:
                    cache.trim(count)
            return True
        self._settled = True
        self.abort()
        return False

    @property
    def changed(self) -> bool:
        """Whether somebody else wrote to a cache, as far as its fields tell.

        Cost:
            A look at a few fields of each layer; nothing is read from a device.
        """
        if not self.active or self._settled:
            return False
        for journal in self._journals:  # noqa: SIM110  asked for each token of a block, and `any` is two calls more
            if journal.changed:
                return True
        return False

    def settled_onto(self, twins: Sequence[Any], originals: Sequence[Any]) -> None:
        """Bring copies of caches in this round to where `certain` tokens leave them. The caches are not touched."""
        counts = self._counts(self.certain)
        journals = {id(cache): journal for cache, journal in zip(self._members, self._journals, strict=True)}
        for original, twin in zip(originals, twins, strict=True):
            if id(original) in journals:
                journals[id(original)].plan(counts)
                settled = journals[id(original)].onto(twin)
                settled.plan(counts)()
                settled.close()

    def _restore(self) -> None:
        with ExitStack() as every_layer:
            for journal in self._journals:
                every_layer.callback(journal.restore)

    def _plan(self, counts: list[int]) -> list[Apply]:
        self._require_active("commit")
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
        if type(retained) is int and 0 <= retained <= self.width:
            return [retained]
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
        with _open_rounds_lock:
            for cache in members:
                entry = _open_rounds.get(id(cache))
                if (entry is not None and entry() is not None) or is_leaf(cache):
                    raise TransactionError(
                        f"{type(cache).__name__} is in an open transaction already. Commit or abort that one first; "
                        "two requests need two prompt caches."
                    )
            # Known as this round's before the first is entered, so that a half-made entry is taken back.
            self._members = members
            _open_rounds.update(dict.fromkeys(map(id, members), self._entry))

    def _part(self) -> None:
        """Give the caches back. What was interrupted here can be done again: `active` falls last."""
        for journal in self._journals:
            journal.part()
        self.caches, self._given = [], []
        self._discharge()
        self.active = False

    def _discharge(self) -> None:
        with _open_rounds_lock:
            for cache in self._members:
                if _open_rounds.get(id(cache)) is self._entry:
                    del _open_rounds[id(cache)]
        self._members = []


def _round_of(cache: Any) -> SpeculativeCacheTransaction | None:
    entry = _open_rounds.get(id(cache))
    return None if entry is None else entry()


def settled_cache(prompt_cache: Sequence[Any]) -> list[Any]:
    """A copy of a prompt cache that holds exactly the text handed out so far, taken while a run streams on it.

    Between two tokens of a run with a drafter the caller's cache may hold a block that is not decided yet. The copy is
    what mlx-lm's one-token loop would hold there: it can be kept, saved, trimmed, merged and continued, and the run
    goes on as if nobody had asked. Where no run is at work on the cache, it is a plain copy. What a run quantizes once
    its block is over is float in the copy, though the loop may have quantized it by that token.

    Args:
        prompt_cache: what was given to the run as `prompt_cache`. To be called between tokens, by the thread that
            asks the run for them.

    Raises:
        CacheChanged: somebody wrote to the cache while the block was open. Nothing was changed.

    Cost:
        A copy of what differs, and a wait for the device; the run's next write copies the buffers that both hold.
        Nothing where it is not called.

    Example:
        >>> from mlx_lm.models.cache import KVCache
        >>> settled_cache([KVCache()])[0].offset
        0
    """
    twins = copy.deepcopy(list(prompt_cache))
    originals = list(leaves(prompt_cache))
    for each in _rounds_of(originals):
        each.settled_onto(list(leaves(twins)), originals)
    mx.eval(cache_arrays(twins))
    return twins


def _rounds_of(members: Iterable[Any]) -> list[SpeculativeCacheTransaction]:
    with _open_rounds_lock:
        rounds = [_round_of(cache) for cache in members]
    return list({id(each): each for each in rounds if each is not None}.values())
