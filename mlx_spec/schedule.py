"""How wide the next round is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

MAX_WIDTH = 32
"""Widest verify call supported, in tokens."""


def _every(width: int) -> bool:
    del width
    return True


@dataclass(frozen=True)
class FixedWidth:
    """Every round as wide as the limits allow, and where they narrow it, of a width that is known.

    Finding out about a width costs more than the few rounds that a limit narrows could win.

    Attributes:
        width: tokens per verify call, 1..MAX_WIDTH; 1 is plain decoding.
        origin: where the number comes from, for the statistics.
    """

    width: int
    origin: str

    def next(self, budget: int | None, room: int | None, known: Callable[[int], bool] = _every) -> int:
        """Width of the next round.

        Args:
            budget: tokens that may still be handed out after the bonus; None for no limit.
            room: tokens until a cache must be converted; None for no limit.
            known: whether blocks of a width can be verified without finding out first how.

        Example:
            >>> FixedWidth(5, "given").next(budget=3, room=None)
            3
            >>> FixedWidth(5, "given").next(budget=0, room=9)
            1
            >>> FixedWidth(5, "given").next(budget=4, room=None, known=lambda width: width in (2, 3, 5))
            3
        """
        limits = [limit for limit in (self.width, budget, room) if limit is not None]
        widest = max(1, min(limits))
        if widest == self.width:
            return widest
        return next((width for width in range(widest, 1, -1) if known(width)), 1)

    def __str__(self) -> str:
        return f"fixed {self.width} ({self.origin})"
