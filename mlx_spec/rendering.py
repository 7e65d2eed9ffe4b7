"""Bounds for a chat template, which is a program that comes with a checkpoint."""

from __future__ import annotations

import contextlib
import resource
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from jinja2 import Environment

PATIENCE_SECONDS = 4.0
"""For how long a template may render. Real ones take milliseconds."""

ROOM_BYTES = 300 * 2**20
"""Memory a template may take besides what the process has."""

_STATM = Path("/proc/self/statm")


def require_bounded_operators(template: str) -> None:
    """Refuse a template with an operator that may run for ever inside one instruction, where no bound reaches it.

    Raises:
        ValueError: it takes powers.
        TemplateSyntaxError: it is no template.
    """
    for line, kind, word in Environment(autoescape=True).lex(template):
        if kind == "operator" and word == "**":
            raise ValueError(f"line {line} takes a power, which no template needs and which may run for ever")


@contextlib.contextmanager
def bounded() -> Iterator[None]:
    """Time and memory for what runs inside, in the main thread; elsewhere the system knows no bound.

    Raises:
        TimeoutError: it ran for longer than `PATIENCE_SECONDS`.
        MemoryError: it wanted more than `ROOM_BYTES`, where the system can count that.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def late(number: int, frame: FrameType | None) -> None:
        del number, frame
        raise TimeoutError(f"it was still running after {PATIENCE_SECONDS:g} s")

    limits = resource.getrlimit(resource.RLIMIT_AS)
    before = signal.signal(signal.SIGALRM, late)
    try:
        _limit_memory(limits)
        # Again and again: what is raised where nobody can catch it is dropped.
        signal.setitimer(signal.ITIMER_REAL, PATIENCE_SECONDS, 0.5)
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        resource.setrlimit(resource.RLIMIT_AS, limits)


def _limit_memory(limits: tuple[int, int]) -> None:
    try:
        held = int(_STATM.read_text().split()[0]) * resource.getpagesize()
    except OSError:
        return
    most = held + ROOM_BYTES
    if limits[0] == resource.RLIM_INFINITY or limits[0] > most:
        resource.setrlimit(resource.RLIMIT_AS, (most, limits[1]))
