"""Real runs of the command: one process reads the modules, and each run is a child of it with streams of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

_DRIVER = """
import json, os, signal, sys
import mlx.core as mx
mx.set_default_device(mx.cpu)
import mlx_spec.commandline as commandline

def long_evaluation(*args, **keywords):
    commandline.write_text("x")
    product = mx.random.normal((1800, 1800))
    for _ in range(400):
        product = product @ product * 0.02
    mx.eval(product)
    yield None

for line in sys.stdin:
    job = json.loads(line)
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for number, place in enumerate(job["streams"]):
            how = os.O_RDONLY if number == 0 else os.O_WRONLY | os.O_CREAT
            handle = os.open(place, how)
            os.dup2(handle, number)
            os.close(handle)
        sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w")
        if job["closed"]:
            sys.stdin.close()
        sys.argv = ["mlx_spec.generate", *map(os.fsdecode, map(bytes.fromhex, job["words"]))]
        if job["long"]:
            commandline.stream_generate = long_evaluation
        commandline.command()
    print(child, flush=True)
    status = os.waitpid(child, 0)[1]
    print(os.waitstatus_to_exitcode(status), flush=True)
"""


@dataclass(frozen=True)
class Ended:
    """What a run left behind, and how long it went on after it was disturbed."""

    code: int
    out: str
    err: str
    seconds: float


class Commands:
    """Runs the command, one run at a time."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __enter__(self) -> Commands:
        self._driver = subprocess.Popen(
            [sys.executable, "-c", _DRIVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._driver.communicate()

    def run(
        self,
        *words: Any,
        stdin: bytes | None = b"",
        stdout: str | None = None,
        disturb: Callable[[int, int], None] | None = None,
        long: bool = False,
    ) -> Ended:
        """Run it.

        Args:
            words: its arguments; bytes as they are.
            stdin: None for a closed one.
            stdout: a place in the stead of a file.
            disturb: called with the run's process and a handle to read its text, as soon as there is some.
            long: the run is one evaluation of many seconds, after a letter of text.
        """
        given, out, err = self._folder / "stdin", self._folder / "stdout", self._folder / "stderr"
        for path in (out, err):
            path.unlink(missing_ok=True)
        given.write_bytes(stdin or b"")
        if disturb is not None:
            os.mkfifo(out)
        err.write_text("")
        job = {
            "words": [os.fsencode(word if isinstance(word, bytes) else str(word)).hex() for word in words],
            "streams": [str(given), stdout or str(out), str(err)],
            "closed": stdin is None,
            "long": long,
        }
        assert self._driver.stdin is not None
        assert self._driver.stdout is not None
        self._driver.stdin.write(json.dumps(job) + "\n")
        self._driver.stdin.flush()
        process, text = int(self._driver.stdout.readline()), ""
        started = time.monotonic()
        if disturb is not None:
            reading = os.open(out, os.O_RDONLY)
            text = os.read(reading, 1).decode()
            started = time.monotonic()
            disturb(process, reading)
        code = int(self._driver.stdout.readline())
        seconds = time.monotonic() - started
        if disturb is None and stdout is None:
            text = out.read_text()
        return Ended(code, text, err.read_text(), seconds)


def interrupt(process: int, reading: int) -> None:
    """Ctrl-C, while the text goes on to be read."""
    os.kill(process, signal.SIGINT)
    while os.read(reading, 4096):
        pass
    os.close(reading)


def interrupt_in_the_middle(process: int, reading: int) -> None:
    """Ctrl-C, once what comes after the first letter has begun."""
    time.sleep(0.3)
    interrupt(process, reading)


def hang_up(process: int, reading: int) -> None:
    """Nobody reads any more."""
    del process
    os.close(reading)
