"""A core of its own for each of several processes."""

from __future__ import annotations

import os
import sys


def keep_to_a_core(place: int, processes: int) -> None:
    """Keep this process, one of so many, to one core, where there are enough of them.

    Tiny models are a ping-pong between Python's thread and mlx's: across cores every turn wakes the other one up.
    """
    if sys.platform == "linux":
        cores = sorted(os.sched_getaffinity(0))
        if 1 < processes <= len(cores):
            os.sched_setaffinity(0, {cores[place]})
