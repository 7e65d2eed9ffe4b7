"""How wide the next round is."""

from __future__ import annotations

from dataclasses import dataclass

MAX_WIDTH = 32
"""Widest verify call supported, in tokens."""


@dataclass(frozen=True)
class FixedWidth:
    """Every round as wide as the limits allow.

    Attributes:
        width: tokens per verify call, 1..MAX_WIDTH; 1 is plain decoding.
        origin: where the number comes from, for the statistics.
    """

    width: int
    origin: str

    def next(self, budget: int | None, room: int | None) -> int:
        """Width of the next round.

        Args:
            budget: tokens that may still be handed out after the bonus; None for no limit.
            room: tokens until a cache must be converted; None for no limit.

        Example:
            >>> FixedWidth(5, "given").next(budget=3, room=None)
            3
            >>> FixedWidth(5, "given").next(budget=0, room=9)
            1
        """
        limits = [limit for limit in (self.width, budget, room) if limit is not None]
        return max(1, min(limits))

    def __str__(self) -> str:
        return f"fixed {self.width} ({self.origin})"
