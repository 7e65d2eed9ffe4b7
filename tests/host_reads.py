"""Counting reads of device values by Python: one read per round is a promise, so tests count them."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx

READERS = ("item", "tolist", "__bool__", "__int__", "__float__", "__index__", "__format__", "__repr__")
"""Methods of `mx.array` through which Python learns a value; each waits for the device.

`if array`, `range(array)`, `x in array`, `math.floor(array)` and f-strings arrive at one of these. numpy and
memoryview read through the C buffer slot, which cannot be replaced: they are not counted, and neither is
`mx.eval`, which waits without reading. The harness itself reads through numpy and so does not disturb the count.
"""


class HostReads(Counter[str]):
    """How often each reader was called since the context began."""

    @property
    def count(self) -> int:
        """All reads together."""
        return self.total()


@contextlib.contextmanager
def count_host_reads() -> Iterator[HostReads]:
    """Count the reads made inside the `with` block, by every thread; the methods are put back however it ends."""
    reads = HostReads()
    originals = {name: getattr(mx.array, name) for name in READERS}
    try:
        for name, original in originals.items():
            setattr(mx.array, name, _counting(reads, name, original))
        yield reads
    finally:
        for name, original in originals.items():
            setattr(mx.array, name, original)


def _counting(reads: HostReads, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    def counted(self: mx.array, *args: Any) -> Any:
        reads[name] += 1
        return original(self, *args)

    return counted
