"""The drafter's side of a round: who proposes, and what it is shown."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from mlx_spec.drafters.base import Rows


class RoundLoop(abc.ABC):
    """The drafter's side of one request.

    Attributes:
        name: what the statistics call it.
        taps: 0-based target layers whose outputs it wants, ascending.
        pipelined: the next round needs no host knowledge of this one, so it is dispatched before this one is read.
    """

    name: str
    taps: tuple[int, ...] = ()
    pipelined: bool = False

    def look_at(self, caches: Sequence[Any]) -> None:
        """See `DrafterState.look_at`."""
        del caches

    @abc.abstractmethod
    def read_prompt(self, ids: Rows, hidden: mx.array | None) -> None:
        """See `DrafterState.read_prompt`."""

    @abc.abstractmethod
    def propose(self, bonus: int, count: int) -> mx.array | None:
        """[1, n] int32 proposals, 1 <= n <= count, or None for a plain step."""

    @abc.abstractmethod
    def catch_up(self, ids: Rows, hidden: mx.array | None) -> bool:
        """Show the drafter what was kept. Returns whether it can go on proposing."""

    @abc.abstractmethod
    def arrays(self) -> list[mx.array]:
        """The drafter's arrays, for evaluation."""
