"""Raise where CPython looks for signals: at the entry of a function, after a call, and at a jump backwards.

Nowhere else can a KeyboardInterrupt come, so nowhere else it is raised: an assignment with a `yield` right behind it is
not split.
"""

from __future__ import annotations

import dis
import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import mlx_spec

OWN = str(Path(mlx_spec.__file__).parent)


@functools.cache
def looks_for_signals(code: CodeType) -> frozenset[int]:
    """Offsets of the instructions right before which CPython may raise what a signal's handler raises."""
    found, looked = set(), False
    for instruction in dis.get_instructions(code):
        if looked:
            found.add(instruction.offset)
        name = instruction.opname
        # After `yield from` (argument 2) and `await` it does not look.
        looked = (
            (name.startswith("CALL") and name != "CALL_INTRINSIC_1")
            or (name == "RESUME" and (instruction.arg or 0) < 2)
            or name == "JUMP_BACKWARD"
        )
        if name == "JUMP_BACKWARD":
            looked = False
            found.add(instruction.offset)
    return frozenset(found)


@functools.cache
def is_ours(filename: str, folders: tuple[str, ...]) -> bool:
    return any(filename.startswith(f"{OWN}/{folder}") for folder in folders)


class Places:
    """Counts the places met, and raises at one of them, once.

    Attributes:
        passed: places met so far.
        raised_at: file:line (function) of the one it raised at.
    """

    def __init__(self, at: int | None = None, folders: tuple[str, ...] = ("",), by_line: bool = False) -> None:
        """
        Args:
            at: the place to raise at; None counts only.
            folders: of our package, in which to look.
            by_line: of each line only the first place that is met counts.
        """
        self._met: set[tuple[CodeType, int]] | None = set() if by_line else None
        self.passed = 0
        self.raised_at: str | None = None
        self._at = at
        self._folders = folders

    @contextmanager
    def watching(self) -> Iterator[Places]:
        """Watch what this thread does in our code until the `with` block ends or it has raised."""
        before = sys.gettrace()
        sys.settrace(self._called)
        try:
            yield self
        finally:
            sys.settrace(before)

    def _called(self, frame: FrameType, event: str, arg: Any) -> Callable[..., Any] | None:
        if self.raised_at is not None or not is_ours(frame.f_code.co_filename, self._folders):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._instruction

    def _instruction(self, frame: FrameType, event: str, arg: Any) -> Callable[..., Any]:
        if (
            event == "opcode"
            and self.raised_at is None
            and frame.f_lasti in looks_for_signals(frame.f_code)
            and self._counts((frame.f_code, frame.f_lineno))
        ):
            self.passed += 1
            if self.passed - 1 == self._at:
                self.raised_at = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} ({frame.f_code.co_name})"
                sys.settrace(None)
                raise KeyboardInterrupt
        return self._instruction

    def _counts(self, line: tuple[CodeType, int]) -> bool:
        if self._met is None:
            return True
        if line in self._met:
            return False
        self._met.add(line)
        return True
