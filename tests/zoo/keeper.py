"""Tries architectures in processes of their own, so that one that takes its process down is a finding, not the end."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from queue import SimpleQueue
from typing import Any

import mlx.core as mx

from tests.cores import keep_to_a_core
from tests.zoo.menagerie import Specimen
from tests.zoo.trial import Finding, Outcome, Plan, examine

Examination = Callable[[Specimen, Any], Finding]


def findings(
    zoo: Sequence[Specimen], plan: Plan, jobs: int = 1, examination: Examination = examine
) -> Iterator[Finding]:
    """One finding per specimen, in order.

    Args:
        jobs: processes at a time.
        examination: what is done with a specimen and the plan; a function of a module.
    """
    keepers: SimpleQueue[Keeper] = SimpleQueue()
    hired = [Keeper(place, jobs) for place in range(jobs)]
    for keeper in hired:
        keepers.put(keeper)

    def look(specimen: Specimen) -> Finding:
        keeper = keepers.get()
        try:
            return keeper.examine(specimen, plan, examination)
        finally:
            keepers.put(keeper)

    try:
        with ThreadPoolExecutor(jobs) as pool:
            yield from pool.map(look, zoo)
    finally:
        for keeper in hired:
            keeper.dismiss()


class Keeper:
    """One worker process; started when first needed, and again after it died."""

    def __init__(self, place: int = 0, processes: int = 1) -> None:
        self._place, self._processes = place, processes
        self._process: BaseProcess | None = None
        self._line: Connection | None = None

    def examine(self, specimen: Specimen, plan: Plan, examination: Examination) -> Finding:
        """What the examination finds; a process that dies of the specimen is told as what was different."""
        if self._line is None:
            self._start()
        assert self._line is not None
        self._line.send((specimen, plan, examination))
        try:
            finding: Finding = self._line.recv()
        except EOFError:
            return self._died(specimen)
        return finding

    def dismiss(self) -> None:
        """Let the process end."""
        if self._line is not None:
            self._line.close()
        if self._process is not None:
            self._process.join()

    def _start(self) -> None:
        # mlx keeps threads, which a forked process would not have.
        context = multiprocessing.get_context("spawn")
        self._line, theirs = context.Pipe()
        self._process = context.Process(target=_work, args=(theirs, self._place, self._processes), daemon=True)
        self._process.start()
        theirs.close()

    def _died(self, specimen: Specimen) -> Finding:
        assert self._process is not None
        self._process.join()
        code = self._process.exitcode or 0
        end = signal.Signals(-code).name if code < 0 else f"status {code}"
        self._process = self._line = None
        finding = Finding(specimen.name)
        finding.outcomes["any"] = Outcome(differences=[f"the process ended with {end}"])
        return finding


def _work(line: Connection, place: int, processes: int) -> None:
    keep_to_a_core(place, processes)
    mx.set_default_device(mx.cpu)
    while True:
        try:
            specimen, plan, examination = line.recv()
        except EOFError:
            return
        line.send(examination(specimen, plan))
