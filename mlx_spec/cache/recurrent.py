"""Fixed-size states (gated delta, Mamba, RWKV, short convolution): a prefix is kept by running its inputs again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mlx_spec.cache.base import Apply, uniform
from mlx_spec.cache.stepwise import StepwiseJournal

Replay = Callable[[int], None]
"""Run a token mixer again over the first n of its inputs, for its state alone."""


class RecurrentJournal(StepwiseJournal):
    """The state before the round, by handle, and what the token mixer was fed.

    A recurrence has no length to cut. Keeping n < W tokens puts the old state back and runs the mixer's
    state update over its first n inputs; its output is never evaluated. Keeping all of them needs nothing.
    """

    def __init__(self, cache: Any, width: int) -> None:
        super().__init__(cache, width)
        self._tapes: list[Replay] = []
        self._taped_bytes = 0

    def tape(self, replay: Replay, nbytes: int) -> None:
        """Remember a mixer's inputs over the whole round. Mixers that share a cache are replayed in order."""
        self._tapes.append(replay)
        self._taped_bytes += nbytes

    def plan(self, retained: Sequence[int]) -> Apply:
        count = uniform(retained, f"{type(self._cache).__name__} inside a transaction")
        if self._tapes and 0 < count < self.width:
            return lambda: self._replay(count)
        return super().plan(retained)

    @property
    def nbytes(self) -> int:
        return super().nbytes + self._taped_bytes

    def _replay(self, count: int) -> None:
        self.restore()
        for replay in self._tapes:
            replay(count)
