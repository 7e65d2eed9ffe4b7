"""A chain of drafted tokens: pairs of a hidden state and the token after it, run through a drafter's own layers.

EAGLE-3 and multi-token prediction draft this way. What differs between them is the network.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from mlx_spec.cache.adopt import cache_arrays
from mlx_spec.cache.transaction import SpeculativeCacheTransaction
from mlx_spec.drafters.base import DrafterState, Rows
from mlx_spec.model.target import Target

PENDING_LIMIT = 64
"""Tapped rows kept unread while nothing is proposed."""


class ChainNetwork(abc.ABC):
    """The equations of a family. Holds weights only; requests share it.

    A pair is the hidden state at position t and the token at t + 1.

    Attributes:
        tapped_size: K*H_t, entries per row of tapped states.
    """

    tapped_size: int

    @abc.abstractmethod
    def new_caches(self) -> list[Any]:
        """Empty caches for one request, as mlx-lm makes them."""

    @abc.abstractmethod
    def fuse(self, tapped: mx.array, target: Target) -> mx.array:
        """[B, T, K*H_t] tapped states of the target -> [B, T, H], the hidden states that pairs are made of."""

    @abc.abstractmethod
    def run(self, tokens: mx.array, hidden: mx.array, caches: Sequence[Any], start: int, target: Target) -> mx.array:
        """Run pairs and append them to the caches.

        Args:
            tokens: [B, T] int32 ids in the target's vocabulary.
            hidden: [B, T, H] from `fuse`, or from `carry` for drafted positions.
            caches: one request's.
            start: absolute position of the first pair in the caches.
            target: lends its embedding where the drafter has none.

        Returns:
            [B, T, H] the last layer's output.
        """

    @abc.abstractmethod
    def carry(self, states: mx.array) -> mx.array:
        """[B, T, H] what `run` returned -> [B, T, H], the hidden state of the pair that comes next."""

    @abc.abstractmethod
    def logits(self, states: mx.array, target: Target) -> mx.array:
        """[B, T, H] what `run` returned -> [B, T, draft_vocab]."""

    @abc.abstractmethod
    def choose(self, states: mx.array, target: Target) -> mx.array:
        """[B, 1, H] what `run` returned -> [B, 1] int32, the likeliest token in the target's vocabulary."""


class ChainState(DrafterState):
    """One request's caches of pairs, and the committed rows not yet in them.

    Between calls the caches hold pairs of committed tokens; what a proposal ran past them is in an open transaction.

    Args:
        network: what runs the pairs.
        target: lends its embedding, its head and its final norm.
        start: absolute position of the first token it will be shown.
    """

    def __init__(self, network: ChainNetwork, target: Target, start: int) -> None:
        self._network = network
        self._target = target
        self._start = start
        self._caches = network.new_caches()
        # Tapped states that wait for their pair to be run, and the tokens that complete those pairs. There is one
        # token fewer: the last row is completed by the next bonus.
        self._rows: list[mx.array] = []
        self._ids: list[list[int]] = []
        # (round, bonus, pairs): a proposal ran this many pairs that are valid, should this bonus be committed.
        self._scratch: tuple[SpeculativeCacheTransaction, list[int], int] | None = None

    @property
    def pending(self) -> int:
        """Tapped rows kept, at most PENDING_LIMIT."""
        return sum(rows.shape[1] for rows in self._rows)

    def read_prompt(self, ids: Rows, hidden: mx.array | None) -> None:
        """Run every complete pair of the chunk without the head, and keep the last row.

        Args:
            ids: [B][T] token ids of the chunk.
            hidden: [B, T, K*H_t] their tapped states.

        Cost:
            Lazy. Evaluate `arrays()` before the next chunk, or the chunk's states stay in memory.
        """
        self.abort()
        self._append(ids, hidden)
        self._run_pending()

    def catch_up(self, ids: Rows, hidden: mx.array | None) -> None:
        """Keep the rows for the next proposal. Pairs that `propose` ran on true states and tokens are not run again.

        Args:
            ids: [B][n] the committed verify inputs, n >= 1.
            hidden: [B, n, K*H_t] their tapped states.
        """
        scratch, self._scratch = self._scratch, None
        if scratch is not None:
            tx, bonus, pairs = scratch
            if bonus == [row[0] for row in ids]:
                tx.commit(pairs)
                self._rows, self._ids = [], []
            else:
                tx.abort()
        self._append(ids, hidden)
        if self.pending > PENDING_LIMIT:
            self._run_pending()

    def propose(self, bonus: Sequence[int], count: int) -> mx.array:
        """Run the pending pairs, then draft a chain by feeding back each output with the token it gave.

        Repeating the call gives the same proposals.

        Args:
            bonus: [B] newest emitted token of each row.
            count: proposals wanted, >= 1.

        Returns:
            [B, count] int32 ids in the target's vocabulary, greedy, lazy.

        Raises:
            ValueError: nothing was read before, so there is no hidden state to start from.

        Cost:
            One forward of the layers over the pending pairs and count - 1 of one token, count heads, no host read.
            Within one lazy graph an in-place write copies its buffer, so the caches are copied count - 1 times.
        """
        if not self._rows:
            raise ValueError("this drafter continues the target's hidden states: read the prompt first")
        self.abort()
        pairs = self.pending
        tx = SpeculativeCacheTransaction(self._caches, pairs + count - 1)
        try:
            tokens = [[*row, token] for row, token in zip(self._ids, bonus, strict=True)]
            states = self._run(tokens, tx.caches)[:, -1:]
            tx.mark(pairs)
            chosen = [self._network.choose(states, self._target)]
            for _ in range(count - 1):
                states = self._pairs(chosen[-1], self._network.carry(states), tx.caches)
                tx.mark(1)
                chosen.append(self._network.choose(states, self._target))
        except BaseException:
            tx.abort()
            raise
        self._scratch = (tx, list(bonus), pairs)
        return mx.concatenate(chosen, axis=1)

    def abort(self) -> None:
        """Forget the pairs that `propose` ran; see `DrafterState.abort`."""
        scratch, self._scratch = self._scratch, None
        if scratch is not None:
            scratch[0].abort()

    def arrays(self) -> list[mx.array]:
        """The caches' buffers and the pending rows."""
        return [*cache_arrays(self._caches), *self._rows]

    def cache_tree(self, target_caches: Sequence[Any]) -> dict[str, list[Any]]:
        """The caches of both sides of one request, for whoever counts or keeps them.

        Returns:
            {"target": the caches given, "draft": this state's}. They advance together: with what is pending run, the
            draft's are one row behind, since a pair holds a token and the hidden state before it.
        """
        return {"target": list(target_caches), "draft": list(self._caches)}

    def _append(self, ids: Rows, hidden: mx.array | None) -> None:
        tokens = [list(row) for row in ids]
        size = self._network.tapped_size
        if hidden is None or any(hidden.shape != (len(tokens), len(row), size) for row in tokens):
            raise ValueError(
                f"got hidden states of shape {None if hidden is None else hidden.shape} for rows of "
                f"{[len(row) for row in tokens]} tokens, expected [B, T, {size}]"
            )
        if self._rows:
            self._ids = [[*old, *new] for old, new in zip(self._ids, tokens, strict=True)]
        else:
            self._ids = [row[1:] for row in tokens]
        self._rows.append(hidden)

    def _run_pending(self) -> None:
        """Run the pairs whose token is committed, without the head."""
        last = self._rows[-1][:, -1:]
        if self.pending > 1:
            self._run(self._ids, self._caches)
        # A slice would keep the whole chunk alive.
        self._rows = [mx.contiguous(last)]
        self._ids = [[] for _ in self._ids]

    def _run(self, ids: Rows, caches: Sequence[Any]) -> mx.array:
        """Run the first pending pairs, one per token; [B, T] ids -> [B, T, H]."""
        rows = self._rows[0] if len(self._rows) == 1 else mx.concatenate(self._rows, axis=1)
        tokens = mx.array([list(row) for row in ids], dtype=mx.int32)
        return self._pairs(tokens, self._network.fuse(rows[:, : tokens.shape[1]], self._target), caches)

    def _pairs(self, tokens: mx.array, hidden: mx.array, caches: Sequence[Any]) -> mx.array:
        return self._network.run(tokens, hidden, caches, self._start, self._target)
