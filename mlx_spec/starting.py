"""The seconds of a command before it can answer for itself, in which Python reads modules."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from types import TracebackType

_INTERRUPTED = 130


def is_command(arguments: Sequence[str]) -> bool:
    """Whether Python was started as one of our commands, and not by a program that imports the package.

    Example:
        >>> is_command(["python", "-m", "mlx_spec.generate"]), is_command(["python", "-m", "an_app"])
        (True, False)
        >>> is_command(["python", "/usr/bin/mlx_spec.certify", "--model", "m"]), is_command([])
        (True, False)
    """
    for place, argument in enumerate(arguments[1:], 2):
        if argument == "-m":
            return arguments[place : place + 1] != [] and arguments[place].partition(".")[0] == "mlx_spec"
        if not argument.startswith("-"):
            return os.path.basename(argument).startswith("mlx_spec.")
    return False


def answer_interrupts() -> None:
    """Until the process ends, a Ctrl-C that nothing else answers is one line and exit status 130, no traceback."""
    told_before = sys.excepthook

    def tell(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not issubclass(kind, KeyboardInterrupt):
            told_before(kind, error, trace)
            return
        sys.stderr.write("interrupted\n")
        sys.stderr.flush()
        os._exit(_INTERRUPTED)

    sys.excepthook = tell
