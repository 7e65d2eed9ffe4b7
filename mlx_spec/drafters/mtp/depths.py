"""Prediction layers of which each drafts one token.

Layer k's pair of position i is (a hidden state of that position, the token at i + 1 + k), and it predicts the token
after that one. Layer 0 reads the target's state. The others read what the layer before gave at the same position, if
they are chained, or else the target's state like the first. Past the last layer, the last goes on by reading its own
output.

Source: DeepSeek-V3 technical report 2024, arXiv:2412.19437, section 2.2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from mlx_spec.cache.adopt import cache_arrays
from mlx_spec.cache.transaction import SpeculativeCacheTransaction
from mlx_spec.drafters.base import DrafterState, Rows
from mlx_spec.drafters.chain import PENDING_LIMIT, ChainNetwork
from mlx_spec.model.target import Target


class _Layer:
    """One layer's share of a request.

    Attributes:
        depth: its number, k.
        done: pairs in its caches, those of positions 0 to done - 1.
        rows: the states it reads, at positions from `done` on, as far as these hang on committed tokens alone.
    """

    def __init__(self, depth: int, network: ChainNetwork) -> None:
        self.depth = depth
        self.network = network
        self.caches = network.new_caches()
        self.done = 0
        self.rows: list[mx.array] = []

    @property
    def pending(self) -> int:
        return sum(rows.shape[1] for rows in self.rows)


@dataclass(frozen=True)
class _Draft:
    """What a proposal left open.

    Attributes:
        bonus: the tokens it was made on.
        rounds: one per layer that was run.
        read: what each of these read, from its `done` on.
        given: what the last of them gave at the same positions as it read.
    """

    bonus: list[int]
    rounds: list[SpeculativeCacheTransaction]
    read: list[mx.array]
    given: mx.array


class DepthsState(DrafterState):
    """One request's caches of pairs, layer by layer, and the rows that are not yet in them.

    Between calls caches and rows hold what follows from committed tokens; what a proposal ran past them is open.

    Args:
        networks: one per depth.
        target: lends its embedding and its final norm.
        start: absolute position of the first token it will be shown.
        chained: each layer after the first reads what the one before it gave.
    """

    def __init__(self, networks: Sequence[ChainNetwork], target: Target, start: int, *, chained: bool = True) -> None:
        self._layers = [_Layer(depth, network) for depth, network in enumerate(networks)]
        self._target = target
        self._start = start
        self._chained = chained
        # Tokens shown, of which those from `_first` on are kept.
        self._count = 0
        self._first = 0
        self._ids: list[list[int]] = []
        self._draft: _Draft | None = None

    @property
    def pending(self) -> int:
        """Rows kept for a layer, at most PENDING_LIMIT and a few."""
        return max(layer.pending for layer in self._layers)

    def read_prompt(self, ids: Rows, hidden: mx.array | None) -> None:
        """Run every complete pair of the chunk, in every layer, and keep the last row of each.

        Args:
            ids: [B][T] token ids of the chunk.
            hidden: [B, T, H] their tapped states.

        Cost:
            Lazy. Evaluate `arrays()` before the next chunk, or the chunk's states stay in memory.
        """
        self.abort()
        self._append(ids, hidden)
        self._run_committed()

    def catch_up(self, ids: Rows, hidden: mx.array | None) -> None:
        """Keep the rows for the next proposal, and of the last one the pairs whose tokens are committed.

        Args:
            ids: [B][n] the committed verify inputs, n >= 1.
            hidden: [B, n, H] their tapped states.
        """
        draft, self._draft = self._draft, None
        if draft is not None and draft.bonus == [row[0] for row in ids]:
            self._keep(draft)
        elif draft is not None:
            _abort(draft.rounds)
        self._append(ids, hidden)
        self._forget_ids()
        if self.pending > PENDING_LIMIT:
            self._run_committed()

    def propose(self, bonus: Sequence[int], count: int) -> mx.array:
        """Draft one token per layer, and further ones by the last layer. Repeating the call gives the same proposals.

        Args:
            bonus: [B] newest emitted token of each row.
            count: proposals wanted, >= 1.

        Returns:
            [B, count] int32 ids in the target's vocabulary, greedy, lazy.

        Raises:
            ValueError: nothing was read before, so there is no hidden state to start from.

        Cost:
            One forward of each layer over what is committed and new to it, count heads, no host read.
        """
        if not self._count:
            raise ValueError("this drafter continues the target's hidden states: read the prompt first")
        self.abort()
        tokens = [mx.array(list(bonus), dtype=mx.int32)[:, None]]
        rounds: list[SpeculativeCacheTransaction] = []
        reads: list[mx.array] = []
        given: list[mx.array] = []
        try:
            for layer in self._layers[:count]:
                read = mx.concatenate([*layer.rows, *(given if self._chained else ())], axis=1)
                further = max(0, count - len(self._layers)) if layer is self._layers[-1] else 0
                tx = SpeculativeCacheTransaction(layer.caches, read.shape[1] + further)
                rounds.append(tx)
                reads.append(read)
                states = self._run(layer, self._tokens(layer, tokens), read, tx.caches)
                tx.mark(read.shape[1])
                given = [layer.network.carry(states)]
                tokens.append(layer.network.choose(states[:, -1:], self._target))
                for _ in range(further):
                    hidden = layer.network.carry(states[:, -1:])
                    states = layer.network.run(tokens[-1], hidden, tx.caches, self._start, self._target)
                    tx.mark(1)
                    tokens.append(layer.network.choose(states, self._target))
        except BaseException:
            _abort(rounds)
            raise
        self._draft = _Draft(list(bonus), rounds, reads, given[0])
        return mx.concatenate(tokens[1:], axis=1)

    def abort(self) -> None:
        """Forget what `propose` ran; see `DrafterState.abort`."""
        draft, self._draft = self._draft, None
        if draft is not None:
            _abort(draft.rounds)

    def arrays(self) -> list[mx.array]:
        """The caches' buffers and the pending rows."""
        return [array for layer in self._layers for array in (*cache_arrays(layer.caches), *layer.rows)]

    def _append(self, ids: Rows, hidden: mx.array | None) -> None:
        tokens = [list(row) for row in ids]
        size = self._layers[0].network.tapped_size
        if hidden is None or any(hidden.shape != (len(tokens), len(row), size) for row in tokens):
            raise ValueError(
                f"got hidden states of shape {None if hidden is None else hidden.shape} for rows of "
                f"{[len(row) for row in tokens]} tokens, expected [B, T, {size}]"
            )
        self._ids = [[*old, *new] for old, new in zip(self._ids or [[]] * len(tokens), tokens, strict=True)]
        self._count += len(tokens[0])
        for layer in self._layers[:1] if self._chained else self._layers:
            layer.rows.append(hidden)

    def _run_committed(self) -> None:
        """Run the pairs whose token is committed, without heads."""
        for layer in self._layers:
            ready = self._count - 1 - layer.depth - layer.done
            if ready < 1:
                continue
            read = mx.concatenate(layer.rows, axis=1)
            begin = layer.done + 1 + layer.depth - self._first
            tokens = mx.array([row[begin : begin + ready] for row in self._ids], dtype=mx.int32)
            states = self._run(layer, tokens, read[:, :ready], layer.caches)
            self._hand_on(layer, layer.network.carry(states))
            # A slice would keep the whole chunk alive.
            layer.rows = [mx.contiguous(read[:, ready:])]
            layer.done += ready
        self._forget_ids()

    def _keep(self, draft: _Draft) -> None:
        """Keep the pairs whose token is committed now that the bonus is: the deeper a layer, the fewer."""
        end = self._count  # of the rows that hang on committed tokens alone
        for layer, tx, read in zip(self._layers, draft.rounds, draft.read, strict=False):
            kept, begin = max(0, self._count - layer.depth - layer.done), layer.done
            tx.commit(kept)
            layer.done += kept
            layer.rows = [mx.contiguous(read[:, kept : end - begin])] if end > layer.done else []
            end = layer.done if self._chained else end
        self._hand_on(layer, mx.contiguous(draft.given[:, :kept]))

    def _hand_on(self, layer: _Layer, given: mx.array) -> None:
        if self._chained and layer is not self._layers[-1]:
            self._layers[layer.depth + 1].rows.append(given)

    def _forget_ids(self) -> None:
        first = min(layer.done + layer.depth for layer in self._layers) + 1
        self._ids = [row[first - self._first :] for row in self._ids]
        self._first = first

    def _tokens(self, layer: _Layer, drafted: Sequence[mx.array]) -> mx.array:
        """[B, pairs] the tokens of a layer's open pairs: committed ones, the bonus, and what earlier layers drafted."""
        begin = layer.done + 1 + layer.depth
        known = self._count - begin
        if known <= 0:
            return mx.concatenate(list(drafted[-known:]), axis=1)
        ids = mx.array([row[begin - self._first :] for row in self._ids], dtype=mx.int32)
        return mx.concatenate([ids, *drafted], axis=1)

    def _run(self, layer: _Layer, tokens: mx.array, rows: mx.array, caches: Sequence[Any]) -> mx.array:
        hidden = rows if layer.depth and self._chained else layer.network.fuse(rows, self._target)
        return layer.network.run(tokens, hidden, caches, self._start, self._target)


def _abort(rounds: Sequence[SpeculativeCacheTransaction]) -> None:
    for tx in rounds:
        tx.abort()
