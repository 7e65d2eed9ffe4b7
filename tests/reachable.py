"""What hangs on an object, whatever it calls it: for promises that something stays small."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from types import FunctionType, ModuleType
from typing import Any

SHARED = (type, FunctionType, ModuleType)
"""Through these everything can be reached."""


def longest(owner: object, kind: type, besides: Iterable[object] = ()) -> int:
    """Entries of the longest container of a kind that is reached from `owner`, and not from `besides`; 0 for none."""
    known = {id(each) for shared in besides for each in reached(shared, set())}
    return max((len(each) for each in reached(owner, known) if isinstance(each, kind)), default=0)


def reached(owner: object, known: set[int]) -> Iterator[Any]:
    """Everything that the garbage collector finds from `owner` on, each once; `known` ids are passed over and added."""
    ahead = [owner]
    while ahead:
        each = ahead.pop()
        if id(each) not in known and not isinstance(each, SHARED):
            known.add(id(each))
            yield each
            ahead.extend(gc.get_referents(each))
