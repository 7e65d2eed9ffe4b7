"""Our Metal kernels against MLX's own text for one row, in the simulator: one line for each kernel.

    .venv/bin/python scripts/metal_sim.py [--jobs N] [--quick] [KERNEL ...]

Exits 1 where a bit differs, or fewer outputs were compared than promised. Needs clang++; see tests/msl/README.md.
"""

from __future__ import annotations

import argparse
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.msl.compiler import CompileError, compiler
from tests.msl.trials import TRIALS, Tally, run

PROMISED_OUTPUTS = {"row_exact_gemv": 500_000, "row_exact_qmv": 500_000}
"""Outputs of every dtype, or of every packing."""

PROMISED_CASES = {"greedy_walk": 5_000}


def tried(name: str, full: bool) -> tuple[str, Tally, float]:
    """A kernel's trial, and the seconds it took."""
    started = time.perf_counter()
    tally = run(TRIALS[name](full))
    return name, tally, time.perf_counter() - started


def shortfall(name: str, tally: Tally) -> str:
    """What was promised and not compared; empty where all was."""
    outputs, cases = min(tally.outputs.values()), sum(tally.cases.values())
    if outputs < PROMISED_OUTPUTS.get(name, 0):
        return f"{outputs} outputs of a family, promised {PROMISED_OUTPUTS[name]}"
    if cases < PROMISED_CASES.get(name, 0):
        return f"{cases} cases, promised {PROMISED_CASES[name]}"
    return ""


def main() -> int:
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("kernels", nargs="*", choices=[[], *TRIALS], help="which; all by default")
    flags.add_argument("--jobs", type=int, default=2, help="processes")
    flags.add_argument("--quick", action="store_true", help="the part that `make test` runs")
    options = flags.parse_args()
    try:
        print(f"compiled by {compiler()}")
    except CompileError as error:
        print(f"metal_sim: {error}", file=sys.stderr)
        return 2
    started, bad = time.perf_counter(), 0
    with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
        pending = [pool.submit(tried, name, not options.quick) for name in options.kernels or TRIALS]
        for done in as_completed(pending):
            name, tally, seconds = done.result()
            missing = "" if options.quick else shortfall(name, tally)
            bad += bool(tally.differing or missing)
            print(f"{tally.line(name)}; {seconds:.0f} s{'; TOO FEW: ' + missing if missing else ''}", flush=True)
    print(f"{len(pending) - bad} of {len(pending)} kernels bit-equal, {time.perf_counter() - started:.0f} s")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
