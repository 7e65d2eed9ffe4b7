"""Reads and writes small files so that nothing waits for ever, nothing has no end, and nobody sees half of one."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

PARTIAL = ".partial"
"""What the name of a file ends with while it is written."""

LOCK_PATIENCE_SECONDS = 10.0
"""For how long another writer of a folder is waited for. Its own writing takes milliseconds."""


def read_regular(path: Path, limit_bytes: int) -> bytes:
    """The content of a regular file of at most so many bytes.

    Raises:
        OSError: it cannot be opened, is no regular file, or is longer. A pipe or a device is not waited for.
    """
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(handle, "rb") as file:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise OSError(f"{path} is no regular file")
        content = file.read(limit_bytes + 1)
    if len(content) > limit_bytes:
        raise OSError(f"{path} has more than {limit_bytes} bytes")
    return content


class Replacement:
    """A file in the making beside the one it will replace, so that the place has always the old one or the new one.

    Made at once, so that a folder that cannot be written is told before the work begins. What `publish` does not put
    in place is to be removed with `discard`.

    A link is replaced itself: what it leads to may be anything, a device among it.

    Raises:
        OSError: from the first call on; the place is untouched then, and nothing stays beside it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._made = self.path.with_name(f".{secrets.token_hex(8)}{PARTIAL}")
        os.close(os.open(self._made, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666))

    def publish(self, content: bytes) -> None:
        """Put this content in the place."""
        try:
            self._made.write_bytes(content)
            self._made.replace(self.path)
        except BaseException:
            self.discard()
            raise

    def discard(self) -> None:
        """Leave the place as it is. May be called at any time, and again."""
        with contextlib.suppress(OSError):
            self._made.unlink(missing_ok=True)


def replace_file(path: Path, content: bytes) -> None:
    """Write a whole file. Whoever reads meanwhile, or after a failure, sees the old one.

    Raises:
        OSError: nothing was written, and nothing stays beside the file.
    """
    Replacement(path).publish(content)


@contextlib.contextmanager
def sole_writer(folder: Path) -> Iterator[None]:
    """Be the only one to write in a folder; what killed writers left half written there is removed.

    Where the file system has no locks, or another keeps its own for too long, the block runs all the same.
    """
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if _locked(handle):
            for left in folder.glob(f".*{PARTIAL}"):
                left.unlink(missing_ok=True)
        yield
    finally:
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_UN)
        os.close(handle)


def _locked(handle: int) -> bool:
    """Whether this process now has the folder's lock. Waits in line: asking now and then might never find it free."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        pass
    except OSError:
        return False
    got = threading.Event()

    def wait() -> None:
        with contextlib.suppress(OSError):
            fcntl.flock(waiting, fcntl.LOCK_EX)
            got.set()
        # The lock is the open file's, which the handle that was given has too.
        os.close(waiting)

    waiting = os.dup(handle)
    threading.Thread(target=wait, daemon=True).start()
    return got.wait(LOCK_PATIENCE_SECONDS)
