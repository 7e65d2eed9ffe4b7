"""The end of a thread that has used mlx."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import mlx.core as mx

_depth = threading.local()


@contextmanager
def worker_thread() -> Iterator[None]:
    """Give back what mlx keeps for this thread, when the block ends, in whatever way.

    Without it mlx on the CPU may abort the whole process at exit. Everything a thread other than the main one does with
    mlx belongs inside; caches, models and drafters it leaves can be used in any other thread. Of blocks inside each
    other the outermost counts, and in the main thread, which ends with the process, nothing is done.

    Example:
        >>> def work() -> None:
        ...     with worker_thread():
        ...         print(mx.array([1, 2]).sum().item())
        >>> thread = threading.Thread(target=work)
        >>> thread.start(); thread.join()
        3
    """
    depth = getattr(_depth, "count", 0)
    _depth.count = depth + 1
    try:
        yield
    finally:
        _depth.count = depth
        if depth == 0 and threading.current_thread() is not threading.main_thread():
            try:
                mx.synchronize()
            finally:
                mx.clear_streams()
