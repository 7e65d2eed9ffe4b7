"""One token per round, dispatched one ahead: the loop every other loop is compared with."""

from __future__ import annotations

import mlx.core as mx

from mlx_spec.drafters.base import Rows
from mlx_spec.rounds.base import RoundLoop


class PlainLoop(RoundLoop):
    """Nobody proposes."""

    name = "plain"
    pipelined = True

    def read_prompt(self, ids: Rows, hidden: mx.array | None) -> None:
        del ids, hidden

    def propose(self, bonus: int, count: int) -> mx.array | None:
        del bonus, count
        return None

    def catch_up(self, ids: Rows, hidden: mx.array | None) -> bool:
        del ids, hidden
        return True

    def arrays(self) -> list[mx.array]:
        return []
