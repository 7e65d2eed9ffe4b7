"""Drafters that are language models of their own."""

from __future__ import annotations

import mlx.core as mx

from mlx_spec.rounds.base import DraftedLoop


class StandaloneLoop(DraftedLoop):
    """The drafter reads ids and keeps caches of its own; the target is not tapped."""

    name = "standalone"
    remembers = True

    def shown(self, hidden: mx.array | None) -> mx.array | None:
        del hidden
        return None
