"""Fixed-size states (gated delta, Mamba, RWKV, short convolution): a prefix is kept by running its inputs again."""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_not
from typing import Any

import mlx.core as mx

from mlx_spec.cache.base import Apply, Journal, Method, Tape, kept_whole
from mlx_spec.cache.stepwise import StepwiseJournal


def _set_slot(self: Any, slot: int, value: Any) -> None:
    if not self.journal.driven:
        self.journal.admit()
    super(type(self), self).__setitem__(slot, value)


_METHODS: tuple[tuple[str, Method], ...] = (("__setitem__", _set_slot),)


class RecurrentJournal(StepwiseJournal):
    """The state before the round, by handle, and what the token mixer was fed.

    A recurrence has no length to cut. Keeping n < W tokens puts the old state back and runs the mixer's
    state update over its first n inputs; its output is never evaluated. Keeping all of them needs nothing.
    """

    methods = _METHODS
    wants_positions = False
    runs_again = True
    needs_mixer = True

    def __init__(self, cache: Any, width: int) -> None:
        super().__init__(cache, width)
        if width == 1:
            # There is no part of one token.
            self.methods = ()
        self._tapes: list[tuple[int, Tape]] = []

    def admit(self) -> None:
        """Refuse, before it is written, what a forward over several tokens leaves, where no mixer leaves a tape."""
        self.require_open()
        if self.forward.tokens > 1:
            self.require_mixer()

    def tape(self, tape: Tape) -> None:
        """Remember a mixer's inputs over one forward. Mixers that share a cache are replayed in order."""
        self._tapes.append((self.begun, tape))

    def before_position(self, position: int) -> None:
        if not self._tapes:
            super().before_position(position)

    def plan(self, retained: Sequence[int]) -> Apply:
        counts = set(retained)
        for count in counts:
            if not (self._tapes and 0 < count < self.appended):
                super().plan([count])
        self.require_untouched()
        if len(counts) > 1:
            whole = list(self._cache.cache)
            return lambda: self._keep_ragged(list(retained), whole)
        return kept_whole if retained[0] and counts == {self.appended} else lambda: self._go_to(retained[0])

    @property
    def changed(self) -> bool:
        return bool(self._standing) and not self._fed and any(map(is_not, self._now(), self._standing))

    def _now(self) -> list[Any]:
        # The few fields there are, without a walk: asked of every layer for each token of a block.
        cache = self._cache
        return [len(cache.cache), cache.left_padding, cache.lengths, *cache.cache]

    def onto(self, twin: Any) -> Journal:
        journal = super().onto(twin)
        leaf = journal.make_leaf()
        tapes = [(begun, tape.onto(self.leaf, leaf)) for begun, tape in self._tapes]
        vars(journal).update(_tapes=tapes, _held=leaf)
        return journal

    def close(self) -> None:
        super().close()
        self._tapes = []

    @property
    def nbytes(self) -> int:
        return super().nbytes + sum(tape.nbytes for _, tape in self._tapes)

    def _go_to(self, count: int) -> None:
        """The state after `count` tokens: that of the last known step, and the rest of its forward run again."""
        start = max(step for step in self._steps if step <= count)
        self._steps[start].restore()
        for begun, tape in self._tapes:
            if begun == start < count:
                tape.replay(count - start)

    def _keep_ragged(self, counts: list[int], whole: list[Any]) -> None:
        """Take each row from the state after its own count; `whole` is the state after all of the round."""
        cache = self._cache
        states = {self.appended: whole}
        for count in set(counts) - set(states):
            self._go_to(count)
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
