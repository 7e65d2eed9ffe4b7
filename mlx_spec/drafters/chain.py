"""A chain of drafted tokens: pairs of a hidden state and a token after it, run through a drafter's own networks.

EAGLE-3 and multi-token prediction draft this way. What differs between them are the networks: mostly one, which goes on
by reading its own output, or one for each of the first tokens drafted.

Source: DeepSeek-V3 technical report 2024, arXiv:2412.19437, section 2.2, for several networks.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from mlx_spec.accept.proposal import Proposal
from mlx_spec.cache.adopt import buffers
from mlx_spec.cache.base import Drive
from mlx_spec.cache.transaction import SpeculativeCacheTransaction
from mlx_spec.drafters.base import DrafterState, Rows
from mlx_spec.drafters.likelihood import spread
from mlx_spec.model.target import Target

PENDING_LIMIT = 64
"""Tapped rows kept unread while nothing is proposed."""


class ChainNetwork(abc.ABC):
    """The equations of a family. Holds weights only; requests share it.

    A pair is the hidden state at position t and the token at t + 1, or for the network of depth k that at t + 1 + k.

    Attributes:
        tapped_size: K*H_t, entries per row of tapped states.
        target_ids: [draft_vocab] int32, the target's id of each id it can propose; None when they are the same.
    """

    tapped_size: int
    target_ids: mx.array | None = None

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


class _Depth:
    """One network's share of a request.

    Attributes:
        number: 0 for the network that drafts the first token, and so on.
        done: pairs in its caches, those of positions 0 to done - 1.
        rows: the states it reads, at positions from `done` on, as far as these hang on committed tokens alone.
    """

    def __init__(self, number: int, network: ChainNetwork) -> None:
        self.number = number
        self.network = network
        self.caches = network.new_caches()
        self.done = 0
        self.rows: list[mx.array] = []

    @property
    def pending(self) -> int:
        return sum(rows.shape[1] for rows in self.rows)


@dataclass
class _Draft:
    """What a proposal left open.

    Attributes:
        bonus: the tokens it was made on; empty until all is run, and from when it is being undone.
        rounds: one per depth that was run.
        read: what each of these read, from its `done` on.
        given: what the last of them gave the next depth, at the same positions as it read; empty if it gives nothing.
    """

    bonus: list[int] = field(default_factory=list)
    rounds: list[SpeculativeCacheTransaction] = field(default_factory=list)
    read: list[mx.array] = field(default_factory=list)
    given: list[mx.array] = field(default_factory=list)


class ChainState(DrafterState):
    """One request's caches of pairs, depth by depth, and the rows that are not yet in them.

    Depth k's pair of position t is a hidden state of that position and the token at t + 1 + k, and it predicts the
    token after that one. Depth 0 reads the target's state. The others read what the depth before gave at the same
    position, if they are chained, or else the target's state too. Past the last depth, the last goes on by reading its
    own output.

    Between calls caches and rows hold what follows from committed tokens; what a proposal ran past them is open.

    Three depths, chained. The prompt was a to f, then two of three proposals on the bonus g were accepted, h and i, and
    K is the next bonus. Under each position stands the token that completes its pair:

        position   0  1  2  3  4  5  6  7  8  9
        token      a  b  c  d  e  f  g  h  i  K
        depth 0   [b  c  d  e  f  g] h  i  K           done 6, pending 3, drafts L
        depth 1   [c  d  e  f  g] h (i  K  L)          done 5, pending 1, drafts M
        depth 2   [d  e  f  g] h (i  K  L  M)          done 4, pending 1, drafts N

    Pairs in brackets are in the caches, the rows right of them wait, and those in parentheses come from the depth above
    while `propose` runs; not chained, they are the target's and wait as well. The proposal on g had run depth 1 up to
    h's pair and depth 2 up to i's, but kept is what no drafted token completes.

    Args:
        networks: one per depth.
        target: lends its embedding, its head and its final norm.
        start: absolute position of the first token it will be shown.
        chained: each depth after the first reads what the one before it gave.
    """

    def __init__(self, networks: Sequence[ChainNetwork], target: Target, start: int, *, chained: bool = True) -> None:
        self._depths = [_Depth(number, network) for number, network in enumerate(networks)]
        self._target = target
        self._start = start
        self._chained = chained
        # Tokens shown, of which those from `_first` on are kept: no open pair is completed by an earlier one.
        self._count = 0
        self._first = 0
        self._ids: list[list[int]] = []
        self._draft: _Draft | None = None

    @property
    def pending(self) -> int:
        """Rows kept for a depth, the most of any, at most PENDING_LIMIT."""
        return max(depth.pending for depth in self._depths)

    def read_prompt(self, ids: Rows, hidden: mx.array | None) -> None:
        """Run every complete pair of the chunk, at every depth, without heads, and keep the rows left over.

        Args:
            ids: [B][T] token ids of the chunk.
            hidden: [B, T, K*H_t] their tapped states.

        Raises:
            ValueError: the shapes do not fit. Nothing was changed.

        Cost:
            Lazy. Evaluate `arrays()` before the next chunk, or the chunk's states stay in memory.
        """
        rows = self._tapped(ids, hidden)
        self.abort()
        self._append(ids, rows)
        self._run_committed()

    def catch_up(self, ids: Rows, hidden: mx.array | None) -> None:
        """Keep the rows for the next proposal. Pairs that `propose` ran on true states and tokens are not run again.

        Args:
            ids: [B][n] the committed verify inputs, n >= 1.
            hidden: [B, n, K*H_t] their tapped states.

        Raises:
            ValueError: the shapes do not fit. Nothing was changed.
        """
        rows = self._tapped(ids, hidden)
        if self._draft is not None and self._draft.bonus == [row[0] for row in ids]:
            self._keep(self._draft)
        self.abort()
        self._append(ids, rows)
        self._forget_ids()
        if self.pending > PENDING_LIMIT:
            self._run_committed()

    def propose(self, bonus: Sequence[int], count: int) -> Proposal:
        """Run the pending pairs and draft one token per depth, then feed the last depth its output and that token.

        Repeating the call gives the same proposals.

        Args:
            bonus: [B] newest emitted token of each row.
            count: proposals wanted, >= 1.

        Returns:
            [B, count] int32 ids in the target's vocabulary, greedy, lazy.

        Raises:
            ValueError: nothing was read before, so there is no hidden state to start from.

        Cost:
            One forward of each depth over what is committed and new to it, and one of the last depth over one token
            for each further proposal, count heads, no host read. Within one lazy graph an in-place write copies its
            buffer, so the last depth's caches are copied once for each further proposal.
        """
        if not self._count:
            raise ValueError("this drafter continues the target's hidden states: read the prompt first")
        self.abort()
        text = [[*row, token] for row, token in zip(self._ids, bonus, strict=True)]
        drafted: list[mx.array] = []
        chosen_from: list[tuple[ChainNetwork, mx.array]] = []
        self._draft = draft = _Draft()
        try:
            for depth in self._depths[:count]:
                further = count - len(self._depths) if depth is self._depths[-1] else 0
                chosen_from += self._run_depth(depth, draft, text, drafted, further)
        except BaseException:
            self.abort()
            raise
        draft.bonus = list(bonus)
        return Proposal(mx.concatenate(drafted, axis=1), lambda columns: self._log_probabilities(chosen_from, columns))

    def abort(self) -> None:
        """Forget what `propose` ran; see `DrafterState.abort`. If it is interrupted, calling it again completes it."""
        if self._draft is not None:
            self._draft.bonus = []
            for tx in self._draft.rounds:
                tx.abort()
            self._draft = None

    def arrays(self) -> list[mx.array]:
        """The caches' buffers and the pending rows."""
        return [array for depth in self._depths for array in (*buffers(depth.caches), *depth.rows)]

    def cache_tree(self, target_caches: Sequence[Any]) -> dict[str, list[Any]]:
        """The caches of both sides of one request, for whoever counts or keeps them.

        Returns:
            {"target": the caches given, "draft": this state's, depth by depth}. They advance together: with what is
            pending run, the draft's are one row behind, since a pair holds a token and the hidden state before it, and
            one row more at each further depth.
        """
        return {"target": list(target_caches), "draft": [cache for depth in self._depths for cache in depth.caches]}

    def _tapped(self, ids: Rows, hidden: mx.array | None) -> mx.array:
        size = self._depths[0].network.tapped_size
        if hidden is None or any(hidden.shape != (len(ids), len(row), size) for row in ids):
            raise ValueError(
                f"got hidden states of shape {None if hidden is None else hidden.shape} for rows of "
                f"{[len(row) for row in ids]} tokens, expected [B, T, {size}]"
            )
        return hidden

    def _append(self, ids: Rows, rows: mx.array) -> None:
        self._ids = [[*old, *new] for old, new in zip(self._ids or [[]] * len(ids), ids, strict=True)]
        self._count += len(ids[0])
        for depth in self._depths[:1] if self._chained else self._depths:
            depth.rows.append(rows)

    def _run_committed(self) -> None:
        """Run the pairs whose token is committed, without heads."""
        for depth in self._depths:
            if not depth.rows:
                continue
            read = _joined(depth.rows)
            ready = max(0, self._count - 1 - depth.number - depth.done)
            if ready:
                begin = depth.done + 1 + depth.number - self._first
                tokens = mx.array([row[begin : begin + ready] for row in self._ids], dtype=mx.int32)
                states = self._run(depth, tokens, read[:, :ready], depth.caches)
                self._hand_on(depth, self._given(depth, states))
            # A slice would keep the whole chunk alive.
            depth.rows = [mx.contiguous(read[:, ready:])]
            depth.done += ready
        self._forget_ids()

    def _run_depth(
        self, depth: _Depth, draft: _Draft, text: list[list[int]], drafted: list[mx.array], further: int
    ) -> list[tuple[ChainNetwork, mx.array]]:
        """Run a depth's open pairs and append what it drafts to `drafted`: a token, and so many further ones.

        Returns:
            For each of them the network and the [B, 1, H] states it was chosen from.
        """
        network, read = depth.network, _joined([*depth.rows, *draft.given])
        if not draft.given:
            depth.rows = [read]
        tx = SpeculativeCacheTransaction(depth.caches, read.shape[1] + further, drive=Drive.ALONE)
        draft.rounds.append(tx)
        draft.read.append(read)
        states = self._run(depth, self._completing(depth, text, drafted), read, tx.caches)
        tx.mark(read.shape[1])
        draft.given = self._given(depth, states)
        last = states[:, -1:]
        drafted.append(network.choose(last, self._target))
        chosen_from = [(network, last)]
        for _ in range(further):
            last = network.run(drafted[-1], network.carry(last), tx.caches, self._start, self._target)
            tx.mark(1)
            drafted.append(network.choose(last, self._target))
            chosen_from.append((network, last))
        return chosen_from

    def _log_probabilities(self, chosen_from: Sequence[tuple[ChainNetwork, mx.array]], columns: int) -> mx.array:
        rows = [spread(each.logits(state, self._target), columns, each.target_ids) for each, state in chosen_from]
        return mx.concatenate(rows, axis=1)

    def _completing(self, depth: _Depth, text: list[list[int]], drafted: list[mx.array]) -> mx.array:
        """[B, pairs] the tokens that complete a depth's open pairs: of the text with its bonus, then drafted ones."""
        begin = depth.done + 1 + depth.number - self._first
        skipped = begin - len(text[0])
        if skipped >= 0:
            return mx.concatenate(drafted[skipped:], axis=1)
        known = mx.array([row[begin:] for row in text], dtype=mx.int32)
        return _joined([known, *drafted])

    def _keep(self, draft: _Draft) -> None:
        """Keep the pairs whose token is committed now that the bonus is: the deeper, the fewer."""
        end = self._count  # of the rows that hang on committed tokens alone
        for depth, tx, read in zip(self._depths, draft.rounds, draft.read, strict=False):
            kept, begin = max(0, self._count - depth.number - depth.done), depth.done
            tx.commit(kept)
            depth.done += kept
            depth.rows = [mx.contiguous(read[:, kept : end - begin])] if end > depth.done else []
            end = depth.done if self._chained else end
        self._hand_on(depth, [mx.contiguous(given[:, :kept]) for given in draft.given if kept])

    def _given(self, depth: _Depth, states: mx.array) -> list[mx.array]:
        """What the next depth reads of a depth's output, if it does."""
        handed_on = self._chained and depth is not self._depths[-1]
        return [depth.network.carry(states)] if handed_on else []

    def _hand_on(self, depth: _Depth, given: Sequence[mx.array]) -> None:
        if given:
            self._depths[depth.number + 1].rows.extend(given)

    def _forget_ids(self) -> None:
        first = min(depth.done + depth.number for depth in self._depths) + 1
        self._ids = [row[first - self._first :] for row in self._ids]
        self._first = first

    def _run(self, depth: _Depth, tokens: mx.array, rows: mx.array, caches: Sequence[Any]) -> mx.array:
        hidden = rows if depth.number and self._chained else depth.network.fuse(rows, self._target)
        return depth.network.run(tokens, hidden, caches, self._start, self._target)


def _joined(rows: Sequence[mx.array]) -> mx.array:
    return rows[0] if len(rows) == 1 else mx.concatenate(list(rows), axis=1)
