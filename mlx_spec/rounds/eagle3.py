"""Drafters that read the target's hidden states at several layers."""

from __future__ import annotations

import mlx.core as mx

from mlx_spec.rounds.base import DraftedLoop


class Eagle3Loop(DraftedLoop):
    """The drafter sees every kept token with its tapped states."""

    name = "eagle3"

    def shown(self, hidden: mx.array | None) -> mx.array | None:
        return hidden
