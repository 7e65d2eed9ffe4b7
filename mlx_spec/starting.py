"""The seconds of a command before it can answer for itself, in which Python reads modules."""

from __future__ import annotations

import os
import sys
from types import TracebackType

_INTERRUPTED = 130


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
