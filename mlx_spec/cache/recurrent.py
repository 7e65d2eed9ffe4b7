"""Fixed-size states (gated delta, Mamba, RWKV, short convolution): a prefix is kept by running its inputs again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from mlx_spec.cache.base import Apply, uniform
from mlx_spec.cache.stepwise import StepwiseJournal

Replay = Callable[[int], None]
"""Run a token mixer again over the first n of its inputs, for its state alone."""


class RecurrentJournal(StepwiseJournal):
    """The state before the round, by handle, and what the token mixer was fed.

    A recurrence has no length to cut. Keeping n < W tokens puts the old state back and runs the mixer's
    state update over its first n inputs; its output is never evaluated. Keeping all of them needs nothing.
    """

    wants_positions = False

    def __init__(self, cache: Any, width: int) -> None:
        super().__init__(cache, width)
        self._tapes: list[Replay] = []
        self._taped_bytes = 0

    def tape(self, replay: Replay, nbytes: int) -> None:
        """Remember a mixer's inputs over the whole round. Mixers that share a cache are replayed in order."""
        self._tapes.append(replay)
        self._taped_bytes += nbytes

    def before_position(self, position: int) -> None:
        if not self._tapes:
            super().before_position(position)

    def plan(self, retained: Sequence[int]) -> Apply:
        if len(set(retained)) > 1:
            self._require_known(retained)
            return lambda: self._keep_ragged(list(retained))
        count = uniform(retained, type(self._cache).__name__)
        if self._tapes and 0 < count < self.width:
            self._require_untouched()
            return lambda: self._replay(count)
        return super().plan(retained)

    def close(self) -> None:
        super().close()
        self._tapes = []

    @property
    def nbytes(self) -> int:
        return super().nbytes + self._taped_bytes

    def _replay(self, count: int) -> None:
        self.restore()
        for replay in self._tapes:
            replay(count)

    def _require_known(self, retained: Sequence[int]) -> None:
        self._require_untouched()
        if not self._tapes:
            for count in set(retained):
                super().plan([count])

    def _keep_ragged(self, counts: list[int]) -> None:
        """Take each row from the state after its own count."""
        cache = self._cache
        states = {self.width: list(cache.cache)}
        for count in set(counts) - {self.width}:
            self._replay(count) if count and self._tapes else self._steps[count].restore()
            states[count] = list(cache.cache)
        self.restore()
        cache.cache[:] = [self._rows(counts, states, slot) for slot in range(len(cache.cache))]
        kept = mx.array(counts)
        if cache.lengths is not None:
            cache.lengths = cache.lengths - kept
        if cache.left_padding is not None:
            cache.left_padding = cache.left_padding - kept

    @staticmethod
    def _rows(counts: list[int], states: dict[int, list[Any]], slot: int) -> mx.array:
        like = next(state[slot] for state in states.values() if state[slot] is not None)
        # A slot that was empty before the round stands for zeros.
        arrays = {count: mx.zeros_like(like) if state[slot] is None else state[slot] for count, state in states.items()}
        return mx.concatenate([arrays[count][row : row + 1] for row, count in enumerate(counts)])
