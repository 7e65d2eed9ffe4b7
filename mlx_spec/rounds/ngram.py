"""Drafters that read token ids alone: prompt lookup, and a caller's own function."""

from __future__ import annotations

import mlx.core as mx

from mlx_spec.rounds.base import DraftedLoop


class NgramLoop(DraftedLoop):
    """The drafter sees ids; the target is not tapped."""

    name = "ngram"

    def shown(self, hidden: mx.array | None) -> mx.array | None:
        del hidden
        return None
