"""Every mlx-lm architecture under speculation, against mlx-lm's own one-token loop: one line each.

    .venv/bin/python scripts/zoo.py [--configs FILE] [--only NAME ...] [--representatives] [--quick] [--jobs N]
        [--markdown FILE]

Ends with status 1 when one that runs is not exact, or when an architecture of the installed mlx-lm has no config.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.environ["MLX_SPEC_CERTIFICATES"] = "off"

# A script finds the package `tests` beside its own folder.
from tests.zoo.choice import ONE_OF_EACH_KIND  # noqa: E402
from tests.zoo.keeper import findings  # noqa: E402
from tests.zoo.menagerie import Specimen, missing_architectures, read_configs, whole_zoo  # noqa: E402
from tests.zoo.page import Report, differences, line, markdown  # noqa: E402
from tests.zoo.trial import Plan  # noqa: E402

COMMAND = "scripts/zoo.py --markdown docs/compatibility.md"
QUICK = Plan(widths=(3, 8), patterns=("partial", "cycling", "random"))
"""A third of the whole plan: both sides of every boundary, every kind of acceptance but the two extremes."""


def main() -> int:
    options = arguments().parse_args()
    try:
        zoo = chosen(options)
    except (OSError, ValueError) as error:
        print(f"zoo: {error}", file=sys.stderr)
        return 2
    started = time.perf_counter()
    found = []
    plan = QUICK if options.quick else Plan()
    command = f"{COMMAND} --quick" if options.quick else COMMAND
    for finding in findings(zoo, plan, options.jobs):
        found.append(finding)
        print("\n".join([line(finding), *differences(finding)]), flush=True)
    whole = options.configs is None and not options.only and not options.representatives
    missing = missing_architectures(zoo) if whole else []
    report = Report(found, missing, f"mlx-lm {version('mlx-lm')} and mlx {version('mlx')}", plan)
    for module in missing:
        print(f"missing: mlx-lm has {module}, tests/zoo/configs/ has no config for it")
    if options.markdown is not None:
        options.markdown.write_text(markdown(report, command), encoding="utf-8")
    modules = {finding.module for finding in found} - {"?"}
    print(f"{len(modules)} architectures in {len(found)} configs, {time.perf_counter() - started:.0f} s")
    print(report.summary())
    return 0 if report.clean else 1


def chosen(options: argparse.Namespace) -> list[Specimen]:
    """What to run."""
    zoo = whole_zoo() if options.configs is None else read_configs(options.configs)
    if options.representatives:
        zoo = [specimen for specimen in zoo if specimen.name in ONE_OF_EACH_KIND]
    if options.only:
        zoo = [specimen for specimen in zoo if {specimen.name, specimen.config["model_type"]} & set(options.only)]
    if not zoo:
        raise ValueError("nothing to run: no config has one of these names")
    return zoo


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--configs", type=Path, metavar="FILE", help="a JSON list of config objects to run instead")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="names or model types")
    parser.add_argument("--representatives", action="store_true", help="one architecture of each kind, as CI does")
    parser.add_argument("--quick", action="store_true", help="fewer widths and patterns, about a third of the time")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="processes at a time (default 1)")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the table there")
    return parser


if __name__ == "__main__":
    sys.exit(main())
