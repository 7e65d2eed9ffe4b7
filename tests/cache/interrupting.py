"""Raise at the k-th point of what a transaction executes: every line and every mlx call of the cache code.

A call of a Python function is a point through its first line, a call of `copy.copy` through its entry, a call of an
mlx function through a stand-in. What a line assigns to plain attributes cannot be split: nothing can be raised there.
"""

from __future__ import annotations

import copy
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from linecache import getline
from pathlib import Path
from types import FrameType
from typing import Any

import mlx.core as mx
from mlx_lm.models import cache as stock

import mlx_spec.cache
from mlx_spec.verify import mixers

OWN = [str(path) for path in sorted(Path(mlx_spec.cache.__path__[0]).glob("*.py"))]
BY_LINE = frozenset([*OWN, mixers.__file__, stock.__file__])
BY_CALL = frozenset([copy.__file__])


class Fault(Exception):
    """What a method inside a round raises."""


class Interrupt(BaseException):
    """What comes from outside, as Ctrl-C does."""


class Interrupter:
    """Counts points, and raises at one of them. It raises once; what runs afterwards is left alone.

    Attributes:
        passed: points met so far.
        raised_at: file:line (function) of the fault, once it was raised.
    """

    current: Interrupter | None = None

    def __init__(self, at: int | None = None, fault: BaseException | None = None) -> None:
        self.passed = 0
        self.raised_at: str | None = None
        self._at = at
        self._fault = fault

    @contextmanager
    def watching(self) -> Iterator[Interrupter]:
        """Watch what this thread calls from here on."""
        before = sys.gettrace()
        self.start()
        try:
            yield self
        finally:
            Interrupter.current = None
            sys.settrace(before)

    def start(self) -> None:
        """Watch until the fault or until another trace function is set."""
        Interrupter.current = self
        sys.settrace(self._called)

    def pass_point(self, frame: FrameType) -> None:
        """One more point; perhaps the one to raise at."""
        self.passed += 1
        if self.passed - 1 == self._at and self._fault is not None:
            Interrupter.current = None
            code = frame.f_code
            self.raised_at = f"{Path(code.co_filename).name}:{frame.f_lineno} ({code.co_name})"
            sys.settrace(None)
            raise self._fault

    def _called(self, frame: FrameType, event: str, arg: Any) -> Callable[..., Any] | None:
        code = frame.f_code
        if Interrupter.current is not self:
            return None
        if code.co_filename in BY_CALL:
            self.pass_point(frame)
        return self._line if code.co_filename in BY_LINE else None

    def _line(self, frame: FrameType, event: str, arg: Any) -> Callable[..., Any]:
        if event == "line" and Interrupter.current is self and not _enters_or_leaves(frame):
            self.pass_point(frame)
        return self._line


def _enters_or_leaves(frame: FrameType) -> bool:
    """Whether it is at a `with` or a `try`: Python never raises between a block and its exit, only a tracer could."""
    return getline(frame.f_code.co_filename, frame.f_lineno).lstrip().startswith(("with ", "try:"))


def stand_in(function: Callable[..., Any]) -> Callable[..., Any]:
    """An mlx function whose call from watched code is a point."""

    def called(*args: Any, **keywords: Any) -> Any:
        current, frame = Interrupter.current, sys._getframe(1)
        if current is not None and frame.f_code.co_filename in BY_LINE:
            current.pass_point(frame)
        return function(*args, **keywords)

    return called


def mlx_functions() -> list[str]:
    """Names of the mlx functions that watched code calls."""
    sources = [Path(name).read_text() for name in BY_LINE]
    names = sorted({name for source in sources for name in re.findall(r"\bmx\.(\w+)\(", source)})
    return [name for name in names if not isinstance(getattr(mx, name), type)]
