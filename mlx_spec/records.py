"""What one round was and how long its stages took."""

from __future__ import annotations

from typing import NamedTuple

STAGES = ("merge", "verify", "mask", "accept", "shift", "propose", "pack")
"""merge: bonus and proposals into one block; verify: building and dispatching the target's forward;
mask: processors and sampling; accept: waiting for the round's host read and walking it;
shift: the drafter reads what was kept; propose: the drafter's next block; pack: committing the caches."""


class RoundRecord(NamedTuple):
    """One finished round.

    Attributes:
        width: tokens in the verify call.
        proposed: proposals among them.
        accepted: leading proposals equal to the target's own choice.
        route: how the block was verified, "block" or "step-through".
        stage_ms: host milliseconds per stage, by the names in STAGES. Work is built lazily, dispatched and
            waited for once, so the device time of every stage shows up in "verify" and "accept".
    """

    width: int
    proposed: int
    accepted: int
    route: str
    stage_ms: dict[str, float]
