"""Where the seconds of a run go, folder by folder, beside what each folder may take."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

import pytest

BUDGETS_SECONDS: Mapping[str, int] = {
    "tests": 120,
    "tests/cache": 50,
    "tests/double": 40,
    "tests/drafters": 105,
    "tests/engine": 15,
    "tests/faults": 70,
    "tests/hazards": 80,
    "tests/model": 10,
    "tests/msl": 30,
    "tests/ops": 10,
    "tests/rounds": 115,
    "tests/verify": 40,
    "tests/zoo": 50,
}
"""Of `make test`, summed over its two processes, on two idle cores. A new test replaces or shortens an old one."""


def lines(reports: Iterable[pytest.TestReport]) -> list[str]:
    """A table: folder, tests, seconds, budget."""
    seconds: Counter[str] = Counter()
    tests: Counter[str] = Counter()
    for report in reports:
        folder = report.nodeid.partition("::")[0].rpartition("/")[0]
        seconds[folder] += report.duration
        tests[folder] += report.when == "call"
    rows = [
        f"{folder:24} {tests[folder]:5} tests {spent:7.1f} s{_of_budget(folder, spent)}"
        for folder, spent in sorted(seconds.items())
    ]
    in_all = f"{'together':24} {tests.total():5} tests {seconds.total():7.1f} s of {sum(BUDGETS_SECONDS.values())}"
    return [*rows, in_all]


def _of_budget(folder: str, spent: float) -> str:
    budget = BUDGETS_SECONDS.get(folder)
    if budget is None:
        return ""
    return f" of {budget}" + (" OVER" if spent > budget else "")
