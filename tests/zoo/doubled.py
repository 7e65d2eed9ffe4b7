"""One architecture with the double on: a stock block verify should diverge, an exact one must not."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tests.double import PATTERNS as CHIPS
from tests.double import double
from tests.zoo.menagerie import Specimen
from tests.zoo.trial import PATTERNS, PROMPTS, Finding, Outcome, Plan, Subject, compare, first_line, pattern_named

ALL_WIDTHS = tuple(range(2, 17))


@dataclass
class DoubledOutcome(Outcome):
    """What one architecture did in one dtype under one pattern of the double. `differences` are those of exact.

    Attributes:
        fast: where a stock block verify first left the stock one-token loop, None if it never did.
        fast_error: what it raised.
    """

    fast: str | None = None
    fast_error: str | None = None


@dataclass(frozen=True)
class DoublePlan(Plan):
    """How much of an architecture is tried, under each pattern of the double.

    Attributes:
        chips: names of patterns of the double. Each is tried in the first dtype; the others are tried under the first
            chip only: what a dtype changes, it changes under every pattern.
    """

    widths: Sequence[int] = ALL_WIDTHS
    tokens: int = 32
    chips: Sequence[str] = ("gen15", *(chip for chip in CHIPS if chip != "gen15"))

    def settings(self) -> Iterator[tuple[str, str]]:
        """(chip, dtype) of every outcome."""
        first, *others = self.dtypes
        yield from ((chip, first) for chip in self.chips)
        yield from ((self.chips[0], dtype) for dtype in others)

    def trials(self) -> Iterator[tuple[int, str, int, int]]:
        """(width, pattern, prompt, tokens to take): each width once, the acceptance patterns and prompts in turn."""
        for i, width in enumerate(self.widths):
            turn = i % len(self.patterns)
            yield width, self.patterns[turn], (i + turn) % len(PROMPTS), self.tokens


QUICK = DoublePlan(widths=(2, 3, 5, 8, 16), dtypes=("float32",), patterns=PATTERNS[1:], tokens=24)


def examine_doubled(specimen: Specimen, plan: DoublePlan) -> Finding:
    """Try one architecture under each pattern. The outcomes are named "chip dtype"."""
    started = time.perf_counter()
    finding = Finding(specimen.name)
    for chip, dtype in plan.settings():
        finding.outcomes[f"{chip} {dtype}"] = _outcome(finding, specimen, dtype, plan, chip)
    finding.seconds = time.perf_counter() - started
    return finding


def diverging(finding: Finding) -> list[str]:
    """Names of the outcomes in which a stock block verify left the stock one-token loop."""
    return [name for name, each in finding.outcomes.items() if isinstance(each, DoubledOutcome) and each.fast]


def _outcome(finding: Finding, specimen: Specimen, dtype: str, plan: DoublePlan, chip: str) -> DoubledOutcome:
    outcome = DoubledOutcome()
    with double(CHIPS[chip]):
        try:
            finding.module = specimen.module
            subject = Subject(specimen, dtype, plan.tokens)
        except (Exception, SystemExit) as error:  # noqa: BLE001  a config nobody has seen may fail in any way
            outcome.reason = first_line(error)
            return outcome
        compare(outcome, subject, plan)
        _try_fast(outcome, subject, plan)
    return outcome


def _try_fast(outcome: DoubledOutcome, subject: Subject, plan: DoublePlan) -> None:
    """Every proposal is right, so blocks are kept whole: what differs, differs by rounding."""
    for width in plan.widths:
        for prompt in range(len(PROMPTS)):
            try:
                _, outcome.fast = subject.speculate(prompt, width, pattern_named("full"), subject.tokens, verify="fast")
            except Exception as error:  # noqa: BLE001  the stock loop ran, so what failed here is told
                outcome.fast_error = f"width {width}: {type(error).__name__}: {first_line(error)}"
            if outcome.fast is not None:
                outcome.fast = f"width {width}, prompt of {len(PROMPTS[prompt])}: {outcome.fast}"
                return
