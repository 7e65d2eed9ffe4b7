"""Drafters that read the target's hidden states: EAGLE-3 and prediction layers."""

from __future__ import annotations

import mlx.core as mx

from mlx_spec.drafters.base import Drafter, DrafterState
from mlx_spec.rounds.base import DraftedLoop
from mlx_spec.stats import Statistics


class HiddenLoop(DraftedLoop):
    """The drafter sees every kept token with its tapped states. Named after the drafter's kind."""

    def __init__(self, drafter: Drafter, state: DrafterState, statistics: Statistics) -> None:
        super().__init__(drafter, state, statistics)
        self.name = drafter.kind

    def shown(self, hidden: mx.array | None) -> mx.array | None:
        return hidden
