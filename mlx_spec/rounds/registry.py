"""Which loop serves which kind of drafter."""

from __future__ import annotations

from mlx_spec.drafters.base import Drafter
from mlx_spec.errors import UnknownDrafter
from mlx_spec.model.target import Target
from mlx_spec.rounds.base import DraftedLoop, RoundLoop
from mlx_spec.rounds.hidden import HiddenLoop
from mlx_spec.rounds.ngram import NgramLoop
from mlx_spec.rounds.plain import PlainLoop
from mlx_spec.rounds.standalone import StandaloneLoop
from mlx_spec.stats import Statistics

ROUND_LOOPS: dict[str, type[DraftedLoop]] = {
    "dflash": HiddenLoop,
    "eagle3": HiddenLoop,
    "mtp": HiddenLoop,
    "ngram": NgramLoop,
    "callable": NgramLoop,
    "standalone": StandaloneLoop,
}
"""Drafter kind -> loop. A request without a drafter runs the plain loop."""


def open_loop(drafter: Drafter | None, target: Target, start: int, statistics: Statistics) -> RoundLoop:
    """Make the drafter's side of one request.

    Args:
        drafter: who proposes; None for plain decoding.
        target: the model it proposes to.
        start: tokens already in the target's caches, which the drafter has not seen.
        statistics: where failures are told.

    Raises:
        UnknownDrafter: no loop serves the drafter's kind. Lists those that are served.
        IncompatiblePair: the drafter cannot serve this target.
    """
    if drafter is None:
        return PlainLoop()
    if drafter.kind not in ROUND_LOOPS:
        raise UnknownDrafter(
            f"no round loop serves drafters of kind {drafter.kind!r}; known kinds: {', '.join(sorted(ROUND_LOOPS))}."
        )
    drafter.check(target)
    target.attach_taps(drafter.taps)
    return ROUND_LOOPS[drafter.kind](drafter, drafter.open(target, start), statistics)
