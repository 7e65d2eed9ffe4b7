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
        log_probabilities: given V, columns of the target's logits, makes [B, n, V] float32, normalized: what each id
            was the likeliest of; -inf where the drafter has no such token. None where the drafter knows none. Built
            when it is called, not before: a rule that does not ask pays nothing.
    """

    ids: mx.array
    log_probabilities: Callable[[int], mx.array] | None = None

    @property
    def count(self) -> int:
        """n."""
        return self.ids.shape[1]
