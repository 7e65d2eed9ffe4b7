"""What a width policy is."""

from __future__ import annotations

import abc
from typing import NamedTuple

from mlx_spec.records import RoundRecord

MAX_WIDTH = 32
"""Widest verify call supported, in tokens."""


class Limits(NamedTuple):
    """What a round may not exceed.

    Attributes:
        budget: tokens that may still be handed out after its bonus; None for no limit.
        room: tokens until a cache must be converted; None for no limit.
    """

    budget: int | None
    room: int | None

    def cut(self, width: int) -> int:
        """A width within the limits, at least 1."""
        for limit in self:
            if limit is not None and limit < width:
                width = limit
        return max(1, width)


class WidthPolicy(abc.ABC):
    """Decides how wide the rounds of one request are. Whatever it decides, the text is the same.

    Width 1 is a plain step: the policy is parked for as long as it answers that, nobody is asked for proposals, and the
    next step is dispatched before this one is read, as in plain decoding. It may answer a wider one at any time.

    Attributes:
        name: what a user calls it.
    """

    name: str

    @abc.abstractmethod
    def next(self, limits: Limits) -> int:
        """Width of the next round, 1..MAX_WIDTH, within the limits. Asked once for each round."""

    def observe(self, record: RoundRecord) -> None:
        """A round is over. Told once for each round, in order; the next round's width may have been asked for already.

        Default: what was is of no interest.
        """
        del record

    @abc.abstractmethod
    def __str__(self) -> str:
        """The policy and what decides its widths, for the statistics."""
