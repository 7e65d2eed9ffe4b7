"""What the linear maps inside a token mixer gave for a block, so that a part of it can be run again without weights.

A row of a linear map hangs on that row's input alone. Where a mixer runs its first inputs again for its state, its maps
are called in the same order on the same rows, and have the answer already.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import mlx.core as mx

RUNS_AGAIN = "__runs_again__"
"""Set in the class of mixers of which a part of a block is kept by running them again."""


class _Part(NamedTuple):
    """Rows of one call: positions `start` to `stop` along axis 1."""

    start: int
    stop: int
    rows: mx.array


class _Pass(NamedTuple):
    """One run of the mixer, over these positions."""

    recall: Recall
    start: int
    stop: int
    again: bool
    calls: Counter[int]


class Recall:
    """The outputs of one mixer's linear maps in one forward, whether it took the block whole or by position.

    A map that is not called again as it was called first, or whose output is not [B, positions, features], is computed
    again.

    Args:
        batch: B, rows of the mixer's input.
    """

    def __init__(self, batch: int) -> None:
        self._batch = batch
        self._parts: dict[tuple[int, int], list[_Part]] = {}

    @property
    def nbytes(self) -> int:
        """Bytes it keeps alive."""
        return sum(part.rows.nbytes for parts in self._parts.values() for part in parts)

    @contextmanager
    def running(self, start: int, stop: int, *, again: bool) -> Iterator[None]:
        """Let the mixer run positions `start` to `stop`: for the first time, to be remembered, or again."""
        token = _pass.set(_Pass(self, start, stop, again, Counter()))
        try:
            yield
        finally:
            _pass.reset(token)

    def known(self, call: tuple[int, int], start: int, stop: int) -> mx.array | None:
        """[B, stop - start, features] what a call gave for these positions; None where it did not."""
        parts = [part for part in self._parts.get(call, ()) if part.start < stop and part.stop > start]
        cut = [part.rows[:, max(start - part.start, 0) : stop - part.start] for part in parts]
        if sum(rows.shape[1] for rows in cut) != stop - start:
            return None
        return cut[0] if len(cut) == 1 else mx.concatenate(cut, axis=1)

    def keep(self, call: tuple[int, int], start: int, stop: int, given: Any) -> None:
        """Remember what a call gave for these positions."""
        if isinstance(given, mx.array) and given.ndim == 3 and given.shape[:2] == (self._batch, stop - start):
            self._parts.setdefault(call, []).append(_Part(start, stop, given))


_pass: ContextVar[_Pass | None] = ContextVar("mlx_spec_recall", default=None)
"""The run of a mixer that is being built in this context, where it is remembered."""


remembering = _pass.get
"""The run that is being built here; None where nothing is remembered."""


def recalled(module: Any, compute: Callable[[], Any]) -> Any:
    """What a linear map gives in the run that is being built here: remembered, or computed and remembered."""
    run = _pass.get()
    if run is None:
        return compute()
    call = (id(module), run.calls[id(module)])
    run.calls[id(module)] += 1
    if run.again:
        known = run.recall.known(call, run.start, run.stop)
        return compute() if known is None else known
    given = compute()
    run.recall.keep(call, run.start, run.stop, given)
    return given
