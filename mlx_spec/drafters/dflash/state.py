"""One request's side of a block drafter: keys of what the target read, and one forward over a block of masks.

Only true hidden states of committed tokens ever get into the cache. A block's own keys live for one forward, so there
is nothing to roll back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import mlx.core as mx

from mlx_spec.accept.proposal import Proposal
from mlx_spec.drafters.base import DrafterState, Rows
from mlx_spec.model.target import Target

if TYPE_CHECKING:
    from mlx_spec.drafters.dflash.model import BlockDrafter

PENDING_LIMIT = 64
"""Tapped rows kept unread while nothing is proposed."""

GROWTH = 256
"""Rows by which the buffers of a layer that sees everything grow."""


@dataclass(frozen=True)
class Sight:
    """Which keys a layer's block rows see.

    Attributes:
        reach: distance to the farthest position seen, on either side; None for all.
        causal: whether positions to the right are hidden.
    """

    reach: int | None = None
    causal: bool = False

    def mask(self, queries: mx.array, keys: mx.array) -> mx.array | None:
        """[Q] and [T] int32 positions -> [Q, T] bool, true where seen; None where everything is."""
        if self.reach is None and not self.causal:
            return None
        distance = queries[:, None] - keys[None]
        seen = mx.ones(distance.shape, mx.bool_)
        if self.causal:
            seen = seen & (distance >= 0)
        if self.reach is not None:
            seen = seen & (mx.abs(distance) <= self.reach)
        return seen


class Context(NamedTuple):
    """What a layer holds of the committed text.

    Attributes:
        keys: [B, heads, T, D] rotated.
        values: [B, heads, T, D].
        positions: [T] int32, the absolute position of each row. Masks come from these, never from the rows' order.
    """

    keys: mx.array
    values: mx.array
    positions: mx.array


class ContextRows:
    """One layer's context: every row, or where the layer has a window those that the next block can see.

    Args:
        reach: of the layer's sight.
    """

    def __init__(self, reach: int | None) -> None:
        self._reach = reach
        self._buffers: list[mx.array] = []
        self._count = 0

    def append(self, new: Context) -> None:
        """Add rows, in any order of positions; a window then drops what no later block can see.

        Cost:
            Lazy. New rows alone are written, but for one copy every `GROWTH` rows; a window is copied whole.
        """
        rows = [new.keys, new.values, new.positions[:, None]]
        if self._reach is None:
            self._buffers = [self._grown(index, row) for index, row in enumerate(rows)]
            self._count += rows[0].shape[-2]
            return
        if self._buffers:
            rows = [mx.concatenate([old, row], axis=-2) for old, row in zip(self._buffers, rows, strict=True)]
        kept = min(self._reach, rows[0].shape[-2])
        first = rows[0].shape[-2] - kept
        # A slice would keep what was dropped alive.
        self._buffers = [mx.contiguous(row[..., first:, :]) for row in rows]
        self._count = kept

    def held(self) -> Context | None:
        """The rows; None before the first."""
        if not self._count:
            return None
        keys, values, positions = (buffer[..., : self._count, :] for buffer in self._buffers)
        return Context(keys, values, positions[:, 0])

    def arrays(self) -> list[mx.array]:
        """The buffers."""
        return self._buffers

    def _grown(self, index: int, new: mx.array) -> mx.array:
        needed = self._count + new.shape[-2]
        buffer = self._buffers[index] if self._buffers else None
        if buffer is None or needed > buffer.shape[-2]:
            room = mx.zeros((*new.shape[:-2], -(-needed // GROWTH) * GROWTH, new.shape[-1]), new.dtype)
            if buffer is not None:
                room[..., : self._count, :] = buffer[..., : self._count, :]
            buffer = room
        buffer[..., self._count : needed, :] = new
        return buffer


class BlockState(DrafterState):
    """One request's context, and the committed rows that are not in it yet.

    Attributes:
        position: of the first token that is not in the context: of the bonus token, once nothing is pending.

    Args:
        drafter: network, heads and settings.
        target: lends its embedding and its head.
        start: absolute position of the first token it will be shown.
    """

    def __init__(self, drafter: BlockDrafter, target: Target, start: int) -> None:
        self._drafter = drafter
        self._target = target
        self.position = start
        self._layers = [ContextRows(layer.sight.reach) for layer in drafter.network.layers]
        self._rows: list[mx.array] = []

    @property
    def pending(self) -> int:
        """Tapped rows kept, at most PENDING_LIMIT."""
        return sum(rows.shape[1] for rows in self._rows)

    @property
    def contexts(self) -> list[Context | None]:
        """What each layer holds."""
        return [rows.held() for rows in self._layers]

    def read_prompt(self, ids: Rows, hidden: mx.array | None) -> None:
        """Put a chunk into the context.

        Args:
            ids: [B][T] token ids of the chunk.
            hidden: [B, T, K*H_t] their tapped states.

        Cost:
            Lazy: one projection of the states and a pair of projections per layer, over no more rows than a layer can
            still see. Evaluate `arrays()` before the next chunk, or the chunk's states stay in memory.
        """
        self._rows.append(self._tapped(ids, hidden))
        self.flush()

    def catch_up(self, ids: Rows, hidden: mx.array | None) -> None:
        """Keep the rows for the next proposal.

        Args:
            ids: [B][n] the committed verify inputs, n >= 1.
            hidden: [B, n, K*H_t] their tapped states.
        """
        self._rows.append(self._tapped(ids, hidden))
        if self.pending > PENDING_LIMIT:
            self.flush()

    def propose(self, bonus: Sequence[int], count: int) -> Proposal:
        """Draft a block. Repeating the call gives the same proposals.

        Args:
            bonus: [B] newest emitted token of each row.
            count: proposals wanted, 1 <= count <= the drafter's `proposals`.

        Returns:
            [B, count] int32 ids in the target's vocabulary, greedy, lazy; fewer where a confidence threshold cuts.

        Raises:
            ValueError: more proposals than a block has.

        Cost:
            One forward of the layers over the block and one head, no host read; a confidence threshold costs one.
        """
        drafter = self._drafter
        if count > drafter.proposals:
            raise ValueError(f"{count} proposals wanted, but a block of {drafter.name!r} gives {drafter.proposals}")
        self.flush()
        states = drafter.run(bonus, count, self.contexts, self.position, self._target)
        anchor = mx.array(list(bonus), mx.int32)
        chosen = self._cut(states[:, :count], bonus, drafter.heads.choose(states, anchor, self._target)[:, :count])
        if not drafter.heads.weighs_all_tokens:
            return Proposal(chosen)
        kept = states[:, : chosen.shape[1]]
        return Proposal(chosen, lambda columns: drafter.heads.log_probabilities(kept, anchor, self._target, columns))

    def abort(self) -> None:
        """Nothing to drop: a proposal leaves nothing behind."""

    def arrays(self) -> list[mx.array]:
        """The context's buffers and the pending rows."""
        return [*(array for rows in self._layers for array in rows.arrays()), *self._rows]

    def flush(self) -> None:
        """Put the pending rows into the context."""
        if not self._rows:
            return
        rows = self._rows[0] if len(self._rows) == 1 else mx.concatenate(self._rows, axis=1)
        network = self._drafter.network
        reaches = [layer.sight.reach for layer in network.layers]
        end = self.position + rows.shape[1]
        seen = max(rows.shape[1] if reach is None else min(reach, rows.shape[1]) for reach in reaches)
        fused = network.fuse(rows[:, rows.shape[1] - seen :])
        new = []
        for layer, reach in zip(network.layers, reaches, strict=True):
            kept = seen if reach is None else min(reach, seen)
            new.append(layer.context(fused[:, seen - kept :], end - kept))
        for held, context in zip(self._layers, new, strict=True):
            held.append(context)
        self._rows, self.position = [], end

    def _tapped(self, ids: Rows, hidden: mx.array | None) -> mx.array:
        network = self._drafter.network
        lengths = {len(row) for row in ids}
        wanted = network.tapped_size - network.embedded_size
        got = None if hidden is None else hidden.shape
        fits = hidden is None if wanted == 0 else got == (len(ids), *lengths, wanted)
        if len(lengths) != 1 or not fits:
            raise ValueError(
                f"got hidden states of shape {got} for rows of {[len(row) for row in ids]} tokens, "
                f"expected [B, T, {wanted}]"
            )
        if not network.embedded_size:
            assert hidden is not None
            return hidden
        embedded = self._target.embed(mx.array([list(row) for row in ids], mx.int32))
        return embedded if hidden is None else mx.concatenate([embedded, hidden.astype(embedded.dtype)], axis=-1)

    def _cut(self, states: mx.array, bonus: Sequence[int], chosen: mx.array) -> mx.array:
        """Drop what follows the first proposal that is too unlikely to be accepted, in any row."""
        threshold = self._drafter.confidence_threshold
        if not threshold:
            return chosen
        unsure = self._drafter.confidence(states, mx.array(list(bonus), mx.int32), chosen) < threshold
        kept = mx.min(mx.cumsum(unsure.astype(mx.int32), axis=1) == 0, axis=0).sum().item()
        assert isinstance(kept, int)
        return chosen[:, :kept]
