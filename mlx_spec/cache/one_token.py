"""A round of one token by the model's own forward, on the caller's own caches: what a plain step is."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from mlx_spec.cache.adopt import holds_states, leaves
from mlx_spec.cache.append import even_out
from mlx_spec.cache.base import Drive
from mlx_spec.cache.transaction import SpeculativeCacheTransaction
from mlx_spec.errors import TransactionError


class OneToken(SpeculativeCacheTransaction):
    """Lets a model read one token and then keeps it or not. Nothing stands between the model and its caches.

    There is no part of one token, so nothing needs to be known of how it is written: before the forward it is noted
    what undoes it, a length where caches are cut by one and handles of the old states where they hold those. Only for
    caches of such kinds (`steps_alone`).

    Cost:
        A look at one field of each cache.
    """

    def __init__(self, caches: Sequence[Any]) -> None:
        """See `SpeculativeCacheTransaction`; it is left to `open` to open it."""
        super().__init__(caches, 1, drive=Drive.BLOCK, opened=False)
        self._noted: list[tuple[Any, Any]] = []

    def open(self) -> None:
        """See `SpeculativeCacheTransaction.open`."""
        if not self._unopened:
            raise TransactionError("this round was opened before. Make a new transaction.")
        try:
            members = list(leaves(self._given))
            self._enroll(members)
            self._noted = [(cache, _states(cache) if holds_states(cache) else cache.offset) for cache in members]
            self.caches = self._given  # type: ignore[assignment]
            self._unopened, self.active = False, True
        except BaseException:
            self._discharge()
            raise

    @property
    def nbytes(self) -> int:
        """Bytes held only because the round is open: old states."""
        held = [state for _, noted in self._noted if isinstance(noted, list) for state in noted]
        return sum(state.nbytes for state in held if isinstance(state, mx.array))

    def mark(self, tokens: int) -> None:
        """The forward over the token is complete."""
        self._require_active("mark a step of")
        self.position += tokens

    def commit(self, retained: int | Sequence[int] | mx.array, *, revocable: bool = False) -> None:
        """Keep the token and close the round.

        Raises:
            TransactionError: closed, or another count than 1. The round is still open.
        """
        self._require_active("commit")
        if retained != 1 or self.position != 1:
            raise TransactionError(f"a plain step of {self.position} tokens keeps its one token, not {retained}.")
        self._revocable = revocable
        self._settled = self.committed = True
        try:
            self._part()
        except BaseException:
            self._part()
            raise
        if not revocable:
            self.release()

    def release(self) -> None:
        """See `SpeculativeCacheTransaction.release`."""
        self._noted = []

    def settled_onto(self, twins: Sequence[Any], originals: Sequence[Any]) -> None:
        """See `SpeculativeCacheTransaction.settled_onto`: none of it is certain before it is kept."""
        noted = {id(cache): state for cache, state in self._noted}
        for original, twin in zip(originals, twins, strict=True):
            if id(original) in noted:
                _put_back(twin, noted[id(original)])

    def _restore(self) -> None:
        for cache, noted in self._noted:
            _put_back(cache, noted)


def _states(cache: Any) -> list[Any]:
    return [*map(copy.copy, cache.cache), copy.copy(cache.left_padding), copy.copy(cache.lengths)]


def _put_back(cache: Any, noted: Any) -> None:
    if isinstance(noted, list):
        *cache.cache[:], cache.left_padding, cache.lengths = map(copy.copy, noted)
    else:
        cache.offset = noted
        even_out(cache)
