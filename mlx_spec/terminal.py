"""How a command ends, and how it shows what it does: one line for what goes wrong, no traceback, no half a file."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn, TextIO

from rich.console import Console
from rich.progress import Progress as Bar
from rich.progress import TaskID

from mlx_spec.environment import expanded
from mlx_spec.errors import InvalidRequest, MlxSpecError
from mlx_spec.files import Replacement
from mlx_spec.progress import Step

REFUSED, INTERRUPTED, PIPE_CLOSED = 2, 130, 141
"""Exit statuses; the last two are what a shell makes of SIGINT and SIGPIPE."""

PATIENCE_SECONDS = 1.0
"""From Ctrl-C on, for the evaluation that is under way to end."""


def ending_well(work: Callable[[], int], interrupted: Callable[[], None] | None = None, speaker: str = "error") -> int:
    """Run a command's work; tell in one line what goes wrong.

    Args:
        work: gives the exit status.
        interrupted: called at Ctrl-C and at a closed pipe, once, to leave what there is so far. From another thread if
            the main one is inside an evaluation.
        speaker: what the line begins with.

    Returns:
        The exit status: `REFUSED` with one line on stderr, `INTERRUPTED`, or `PIPE_CLOSED` without a word.
    """
    last_words = _Once(interrupted)
    try:
        with _answering_interrupts(last_words):
            try:
                return work()
            except KeyboardInterrupt:
                with _deaf():
                    last_words()
                return INTERRUPTED
    except BrokenPipeError:
        # Whoever read has read enough; what is still buffered would be told as an error at exit.
        silence(sys.stdout)
        silence(sys.stderr)
        with contextlib.suppress(OSError, MlxSpecError):
            last_words()
        return PIPE_CLOSED
    except (MlxSpecError, OSError) as error:
        tell_error(error, speaker)
        return REFUSED


class Flags(argparse.ArgumentParser):
    """The flags of a command. What is wrong with one is told in one line, without the list of all of them."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        # What argparse calls these kinds of value by in its refusals.
        self.register("type", int, _whole)
        self.register("type", float, _number)

    def error(self, message: str) -> NoReturn:
        """Say it and end the process with `REFUSED`."""
        tell_error(InvalidRequest(f"{message.rstrip('.')}. See {self.prog} --help."))
        raise SystemExit(REFUSED)


def _whole(word: str) -> int:
    try:
        return int(word)
    except ValueError:
        raise argparse.ArgumentTypeError(f"wanted a whole number, got {word!r}") from None


def _number(word: str) -> float:
    try:
        return float(word)
    except ValueError:
        raise argparse.ArgumentTypeError(f"wanted a number, got {word!r}") from None


def checked(arguments: Sequence[str] | None) -> list[str]:
    """A command's arguments, those of the process where none are given.

    Raises:
        SystemExit: one is not UTF-8, which has been told.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        require_text(given)
    except MlxSpecError as error:
        tell_error(error)
        raise SystemExit(REFUSED) from None
    return given


def leave(status: int) -> NoReturn:
    """End the process. Where nobody waits any more, neither is waited for what mlx still computes."""
    if status in (INTERRUPTED, PIPE_CLOSED):
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError, AttributeError):
                stream.flush()
        os._exit(status)
    sys.exit(status)


def tell_error(error: BaseException, speaker: str = "error") -> None:
    """One line on stderr, if there is one."""
    try:
        print(f"{speaker}: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
    except (OSError, ValueError):
        silence(sys.stderr)


def silence(stream: TextIO | None) -> None:
    """What is still to be written there goes nowhere."""
    with contextlib.suppress(OSError, ValueError, AttributeError, io.UnsupportedOperation):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())  # type: ignore[union-attr]
        os.close(null)


class _Once:
    """A call that is made once, by whoever comes first."""

    def __init__(self, call: Callable[[], None] | None) -> None:
        self._call = call
        self._lock = threading.Lock()

    def __call__(self) -> None:
        with self._lock:
            call, self._call = self._call, None
            if call is not None:
                call()


@contextlib.contextmanager
def _deaf() -> Iterator[None]:
    """A second Ctrl-C does not cut off what is said at the first."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def _answering_interrupts(last_words: Callable[[], None]) -> Iterator[None]:
    """End the process at Ctrl-C if the main thread does not get to it: Python runs no handler inside an evaluation.

    The system notes the signal in a pipe at once, and a thread of its own reads that.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    ended = threading.Event()

    def watch() -> None:
        while noted := os.read(reading, 1):
            if noted[0] == signal.SIGINT and not ended.wait(PATIENCE_SECONDS):
                with contextlib.suppress(OSError, ValueError):
                    last_words()
                leave(INTERRUPTED)

    before = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    watcher = threading.Thread(target=watch, name="mlx_spec interrupts", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        signal.set_wakeup_fd(before)
        os.close(writing)
        watcher.join()
        os.close(reading)


# Text in and out


def require_text(arguments: Sequence[str]) -> None:
    """Refuse arguments that are not UTF-8.

    Raises:
        InvalidRequest: shows it, its bytes that are no text as `\\udcXX`.
    """
    for place, word in enumerate(arguments, start=1):
        if not _is_text(word):
            raise InvalidRequest(f"argument {place} is not UTF-8 text: {ascii(word)[:80]}. Give it in UTF-8.")


def read_stdin() -> str:
    """All of it.

    Raises:
        InvalidRequest: it is closed, or not UTF-8.
    """
    if sys.stdin is None or sys.stdin.closed:
        raise InvalidRequest("the prompt is to be read from stdin, which is closed.")
    try:
        text = sys.stdin.read()
    except (UnicodeDecodeError, OSError) as error:
        raise InvalidRequest(f"stdin cannot be read as text: {error}. Give the prompt in UTF-8.") from None
    if not _is_text(text):
        raise InvalidRequest("stdin is not UTF-8 text. Give the prompt in UTF-8.")
    return text


def write_text(text: str) -> None:
    """To stdout, at once.

    Raises:
        InvalidRequest: it cannot be written there.
        BrokenPipeError: nobody reads any more.
    """
    try:
        print(text, end="", flush=True)
    except BrokenPipeError:
        raise
    except OSError as error:
        silence(sys.stdout)
        raise InvalidRequest(f"the text cannot be written to stdout: {error}.") from None
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"stdout cannot take the text: {error}. Set PYTHONIOENCODING=utf-8.") from None


def _is_text(word: str) -> bool:
    try:
        word.encode()
    except UnicodeEncodeError:
        return False
    return True


class Report:
    """A file that is written whole, or not at all.

    Args:
        file: None where none is wanted. A pipe or device is written to; anything else is replaced.
        flag: what asked for it, for messages.

    Raises:
        InvalidRequest: there is no writing there. Told before the work begins.
    """

    def __init__(self, file: str | None, flag: str) -> None:
        self._path = None if file is None else expanded(file)
        self._name = f"{flag} {file}"
        self._made: Replacement | None = None
        if self._path is None:
            return
        with self._told():
            if self._is_special(self._path):
                return
            if self._path.is_dir():
                raise OSError("is a folder")
            self._made = Replacement(self._path.resolve())

    @staticmethod
    def _is_special(path: Path) -> bool:
        return path.exists() and not path.is_file() and not path.is_dir()

    def publish(self, content: str) -> None:
        """Write it, once."""
        path, self._path = self._path, None
        if path is None:
            return
        with self._told():
            if self._made is None:
                path.write_text(content, encoding="utf-8")
            else:
                self._made.publish(content.encode())

    def discard(self) -> None:
        """Leave the place as it was, unless it has been written."""
        if self._made is not None:
            self._made.discard()

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError, RuntimeError) as error:
            raise InvalidRequest(f"{self._name}: {error}") from None


# How far it is


class Shown:
    """Shows steps on stderr: a bar on a terminal, a line for what takes long elsewhere. Gone once the text begins.

    Args:
        wanted: whether to show anything.
    """

    def __init__(self, wanted: bool) -> None:
        self._wanted = wanted
        self._console = Console(stderr=True)
        self._said: set[str] = set()
        self._latest = ""
        self._bar: Bar | None = None
        self._task: TaskID | None = None

    def __call__(self, step: Step) -> None:
        """See `mlx_spec.progress.Progress`."""
        if not self._wanted:
            return
        if not self._console.is_terminal:
            if step.stage == "certify" and step.what not in self._said:
                self._said.add(step.what)
                print(f"{step.what} ...", file=sys.stderr, flush=True)
            return
        if self._bar is None:
            self._bar = Bar(console=self._console, transient=True)
            self._task = self._bar.add_task(step.what, total=step.total)
            self._bar.start()
        assert self._task is not None
        # A bar shows itself now and then; what is waited for next may hold up the thread that would.
        new, self._latest = step.what != self._latest, step.what
        self._bar.update(self._task, description=step.what, completed=step.done, total=step.total, refresh=new)
        if step.stage == "prompt" and step.done == step.total:
            self.close()

    def close(self) -> None:
        """Nothing is shown any more; what comes next begins anew."""
        bar, self._bar = self._bar, None
        if bar is not None:
            bar.stop()
