"""What a drafter proposes for a round."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx


@dataclass(frozen=True)
class Proposal:
    """Ids, and how likely the drafter held every token in their places.

    Attributes:
        ids: [B, n] int32 token ids in the target's vocabulary, lazy. An id outside it never stands.
        log_probabilities: makes [B, n, V], in the target's vocabulary: each id's was drawn or chosen from; -inf where
            the drafter has no such token. None where the drafter has none. Built when it is called, not before.
    """

    ids: mx.array
    log_probabilities: Callable[[], mx.array] | None = None

    @property
    def count(self) -> int:
        """n."""
        return self.ids.shape[1]
