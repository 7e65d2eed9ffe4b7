"""What an acceptance rule is."""

from __future__ import annotations

import abc
from typing import NamedTuple

import mlx.core as mx

from mlx_spec.accept.proposal import Proposal


class Scored(NamedTuple):
    """What the target makes of a block, lazily.

    Attributes:
        choices: [B, W] uint32, its own choice after each verify input.
        logprobs: [B, W, V] what it chose from: processed, normalized, in the dtype of the logits.
        faults: [B, W], NaN where no token can be chosen.
    """

    choices: mx.array
    logprobs: mx.array
    faults: mx.array


class AcceptanceRule(abc.ABC):
    """How many of a round's proposals stand, and which tokens it hands out. Holds settings only.

    Attributes:
        name: what the statistics call it.
        token_exact: whatever is proposed, the text is the one-token loop's.
    """

    name: str
    token_exact: bool = False

    @abc.abstractmethod
    def walk(self, proposal: Proposal, scored: Scored) -> mx.array:
        """Judge a block.

        Args:
            proposal: [B, W-1] ids, W >= 1.
            scored: the target's side.

        Returns:
            [B, 1 + 2 W] int32, lazy: how many leading proposals stand; then for each position not 0 where no token can
            be chosen; then the token handed out there, once every proposal before it stands. `packed` puts it together.
        """

    def walk_logits(self, proposal: Proposal, logits: mx.array, lse: mx.array) -> mx.array | None:
        """The same where the target's choice is the likeliest token, without making the choices first.

        Args:
            proposal: as above.
            logits: [B, W, V] raw.
            lse: [B, W] their log-sum-exp.

        Returns:
            None where this rule has no such way, or not on this machine. Default.
        """
        del proposal, logits, lse
        return None

    def __str__(self) -> str:
        return f"{self.name} ({'token-exact' if self.token_exact else 'not token-exact'})"


def packed(stands: mx.array, scored: Scored, tokens: mx.array) -> mx.array:
    """What `walk` returns, by ops.

    Args:
        stands: [B, W-1] bool, each proposal's verdict by itself.
        scored: the target's side.
        tokens: [B, W] what is handed out where every proposal before stands.
    """
    accepted = mx.cumprod(stands.astype(mx.int32), axis=1).sum(axis=1, keepdims=True)
    faults = mx.isnan(scored.faults).astype(mx.int32)
    return mx.concatenate([accepted, faults, tokens.astype(mx.int32)], axis=1)
