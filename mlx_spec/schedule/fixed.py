"""Every round as wide as the limits allow."""

from __future__ import annotations

from dataclasses import dataclass

from mlx_spec.schedule.policy import Limits, WidthPolicy


@dataclass(frozen=True)
class FixedWidth(WidthPolicy):
    """One width.

    Attributes:
        width: tokens per verify call, 1..MAX_WIDTH; 1 is plain decoding.
        origin: where the number comes from, for the statistics.
    """

    width: int
    origin: str
    name = "fixed"

    def next(self, limits: Limits) -> int:
        """Width of the next round.

        Example:
            >>> FixedWidth(5, "given").next(Limits(budget=3, room=None))
            3
            >>> FixedWidth(5, "given").next(Limits(budget=0, room=9))
            1
        """
        return 1 if self.width == 1 else limits.cut(self.width)

    def __str__(self) -> str:
        return f"fixed {self.width} ({self.origin})"
