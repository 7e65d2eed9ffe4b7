"""Every mlx-lm architecture with the double on, against mlx-lm's own one-token loop under the same: one line each.

    .venv/bin/python scripts/double.py [--quick] [--only NAME ...] [--representatives] [--patterns NAME ...]
        [--widths N ...] [--jobs N]

The double makes calls of several rows round differently from calls of one row, as a GPU does. `fast` may leave the
loop then, and should, or the double proves nothing; `exact` must not. Ends with status 1 when it does.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.environ["MLX_SPEC_CERTIFICATES"] = "off"

# A script finds the package `tests` beside its own folder.
from tests.zoo.choice import ONE_OF_EACH_KIND  # noqa: E402
from tests.zoo.doubled import QUICK, DoubledOutcome, DoublePlan, diverging, examine_doubled  # noqa: E402
from tests.zoo.keeper import findings  # noqa: E402
from tests.zoo.menagerie import whole_zoo  # noqa: E402
from tests.zoo.page import differences, reason  # noqa: E402
from tests.zoo.trial import DTYPES, Finding  # noqa: E402


def main() -> int:
    options = arguments().parse_args()
    names = options.only or (ONE_OF_EACH_KIND if options.representatives else None)
    zoo = [specimen for specimen in whole_zoo() if names is None or specimen.name in names]
    if not zoo:
        print("double: nothing to run: no config has one of these names", file=sys.stderr)
        return 2
    started = time.perf_counter()
    found = []
    for finding in findings(zoo, plan(options), options.jobs, examine_doubled):
        found.append(finding)
        print("\n".join([line(finding), *differences(finding)]), flush=True)
    running = [finding for finding in found if finding.runs]
    wrong = [finding.name for finding in running if not finding.exact]
    for chip in options.patterns:
        count = sum(any(name.startswith(f"{chip} ") for name in diverging(finding)) for finding in running)
        print(f"{chip}: fast diverged on {count} of {len(running)}")
    print(f"{len(zoo) - len(running)} of {len(zoo)} not runnable here, {time.perf_counter() - started:.0f} s")
    if wrong:
        print(f"exact diverged: {', '.join(wrong)}")
    print(f"fast diverged on {sum(map(bool, map(diverging, running)))}, exact diverged on {len(wrong)}")
    return 1 if wrong else 0


def plan(options: argparse.Namespace) -> DoublePlan:
    """What each architecture is put through."""
    chosen = replace(QUICK if options.quick else DoublePlan(), chips=options.patterns)
    if options.widths is not None:
        chosen = replace(chosen, widths=options.widths)
    if options.dtypes is not None:
        chosen = replace(chosen, dtypes=options.dtypes)
    return chosen


def line(finding: Finding) -> str:
    """One architecture, for a terminal."""
    if not finding.runs:
        return f"{finding.name}: not runnable here: {reason(finding)}"
    ran = [name for name, outcome in finding.outcomes.items() if outcome.reason is None]
    same = [name for name in ran if name not in diverging(finding)]
    routes = {
        way
        for outcome in finding.outcomes.values()
        for route in outcome.routes.values()
        for way in route.split(" and ")
    }
    cells = (
        finding.name,
        "; ".join(
            [f"fast diverged in {len(ran) - len(same)} of {len(ran)}", *(_not_in(finding, name) for name in same)]
        ),
        ", ".join(sorted(routes)) or "no route seen",
        f"{finding.seconds:.0f} s",
        "exact" if finding.exact else "NOT EXACT",
    )
    return " | ".join(cells)


def _not_in(finding: Finding, name: str) -> str:
    outcome = finding.outcomes[name]
    error = outcome.fast_error if isinstance(outcome, DoubledOutcome) else None
    return f"not in {name}" if error is None else f"failed in {name}, {error}"


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="five widths, fewer tokens, float32")
    parser.add_argument("--representatives", action="store_true", help="one architecture of each kind, as CI does")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="names of configs")
    names = list(DoublePlan().chips)
    parser.add_argument("--patterns", nargs="+", choices=names, default=names, metavar="NAME", help=f"of {names}")
    parser.add_argument("--widths", nargs="+", type=int, metavar="N", help="tokens per verify call")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, metavar="NAME", help=f"of {list(DTYPES)}")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="processes at a time (default 1)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
