"""The width policies by name."""

from __future__ import annotations

from collections.abc import Callable

from mlx_spec.errors import UnsupportedOption
from mlx_spec.schedule.fixed import FixedWidth
from mlx_spec.schedule.policy import WidthPolicy

MakePolicy = Callable[[int, str], WidthPolicy]
"""(the widest a round may be, where that number comes from) -> the policy of one request."""

POLICIES: dict[str, MakePolicy] = {
    "fixed": FixedWidth,
}


def make_policy(name: str, width: int, origin: str) -> WidthPolicy:
    """The policy of that name for one request.

    Raises:
        UnsupportedOption: there is none; names those there are.
    """
    if name not in POLICIES:
        raise UnsupportedOption(f"there is no width policy {name!r}. There are: {', '.join(sorted(POLICIES))}.")
    return POLICIES[name](width, origin)
