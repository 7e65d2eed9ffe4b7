"""The rule in force by default: a proposal stands where the target chose the same token itself."""

from __future__ import annotations

import mlx.core as mx

from mlx_spec.accept.proposal import Proposal
from mlx_spec.accept.rule import AcceptanceRule, Scored
from mlx_spec.ops.walk import ChosenBlock, GreedyBlock, kernel_holds


class Exact(AcceptanceRule):
    """Every token handed out is the target's own choice; a drafter decides only how many a round yields.

    Source:
        Leviathan et al. 2023, arXiv:2211.17192, algorithm 1, with the target's choice taken as given.

    Example:
        >>> import mlx.core as mx
        >>> scored = Scored(mx.array([[5, 8, 9, 1]]), mx.zeros((1, 4, 10)), mx.zeros((1, 4)))
        >>> Exact().walk(Proposal(mx.array([[5, 7, 9]])), scored).tolist()
        [[1, 0, 0, 0, 0, 5, 8, 9, 1]]
    """

    name = "target's own choice"
    token_exact = True

    def walk(self, proposal: Proposal, scored: Scored) -> mx.array:
        """See `AcceptanceRule.walk`."""
        return ChosenBlock(scored.choices, proposal.ids, scored.faults).walk()

    def walk_logits(self, proposal: Proposal, logits: mx.array, lse: mx.array) -> mx.array | None:
        """See `AcceptanceRule.walk_logits`: by the kernel, which reads the logits once, where it was found equal."""
        block = GreedyBlock(logits, proposal.ids, lse)
        return block.by_kernel() if block.kernel_takes() and kernel_holds(logits.dtype) else None
