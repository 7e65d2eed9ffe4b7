"""The command `python -m mlx_spec.certify`: by which routes a model's blocks are verified on this machine."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence

from mlx import nn

from mlx_spec.cache.adopt import Likeness, new_caches
from mlx_spec.demo import demo_target_path
from mlx_spec.model.target import Target
from mlx_spec.ops.attention import KeyStretch
from mlx_spec.ops.choose import Subject, distinct, relative_cost
from mlx_spec.pairing import load_without_tokenizer
from mlx_spec.stats import Statistics
from mlx_spec.terminal import Flags, checked, ending_well, leave
from mlx_spec.verify.certified_routes import CertifiedRoutes
from mlx_spec.verify.record import record_of
from mlx_spec.verify.trial import Situation

WIDTHS = (2, 3, 5, 6, 8, 16)
"""What is tried before anybody asks; any other width is tried when it is first needed."""

_LAST_EDGE = 4096
"""Keys up to which attention is tried before anybody asks."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Certify a model on this machine and print what was found.

    Returns:
        0; 1 where every width is left to step-through; 2 where the model cannot be loaded; 130 after Ctrl-C.
    """
    flags = Flags(
        prog="python -m mlx_spec.certify",
        description="Find out by which routes a block of tokens gives the bits of one-token decode on this machine.",
    )
    flags.add_argument("--model", help="path or hub id of the target; without it the embedded demo's")
    flags.add_argument("--widths", nargs="+", type=int, default=WIDTHS, metavar="W", help="tokens per verify call")
    options = flags.parse_args(checked(arguments))
    if min(options.widths) < 2:
        flags.error(f"a block has at least 2 tokens, got widths {options.widths}")
    return ending_well(lambda: _certify(options), _interrupted, speaker="certify")


def _interrupted() -> None:
    print("interrupted; what was found is kept, as far as findings are", file=sys.stderr)


def _certify(options: argparse.Namespace) -> int:
    started = time.perf_counter()
    model = load_without_tokenizer(options.model or demo_target_path())
    report = Report(model, options.widths)
    verdicts = report.verdicts
    try:
        report.print_ops()
        report.print_attention()
        stepped = report.print_blocks()
    finally:
        verdicts.save()
    where = "not kept" if verdicts.path is None else f"kept in {verdicts.path}"
    seconds = time.perf_counter() - started
    print(f"{verdicts.kept} findings were known before, all are {where}; {seconds:.1f} s with loading the model")
    return 1 if stepped == len(options.widths) else 0


class Report:
    """What is found out about one model, printed as it is found."""

    def __init__(self, model: nn.Module, widths: Sequence[int]) -> None:
        self._model = model
        self._widths = widths
        self._situation = Situation(Likeness(new_caches(model)))
        self._record = record_of(model)
        self._certificate = self._record.certificate(self._situation)
        self._ops = self._record.ops
        self.verdicts = self._ops.verdicts

    def print_ops(self) -> None:
        """Every distinct op: its route at each width, and what that costs in one-row calls."""
        subjects = list(self._ops.subjects(self._model).values())
        counts = Counter(subject.key for subject in subjects)
        print("| op | input | uses | " + " | ".join(f"W={width}" for width in self._widths) + " |")
        print("|---" * (3 + len(self._widths)) + "|")
        for key, subject in distinct(subjects).items():
            cells = [f"{subject.op.kind}: {subject.op.label}", subject.input, str(counts[key])]
            cells += [self._cell(subject, width) for width in self._widths]
            print(f"| {' | '.join(cells)} |", flush=True)

    def print_attention(self) -> None:
        """Every kind of attention the model takes a block by, over key counts that a probe of a short text has not."""
        self._record.bindings.attach(self._model)
        calls = {width: self._certificate.attention(width) for width in self._widths}
        for stretch in self._stretches():
            for place, first in enumerate(calls[self._widths[0]]):
                over = [calls[width][place : place + 1] for width in self._widths]
                cells = [f"attention: {first.label}", f"{stretch.edge} keys and more", "-"]
                cells += [" ".join(self._ops.attention_route(call, stretch) for call in found) for found in over]
                print(f"| {' | '.join(cells)} |", flush=True)

    def _stretches(self) -> Iterator[KeyStretch]:
        stretch = KeyStretch.first()
        while stretch.edge <= _LAST_EDGE:
            yield stretch
            stretch = KeyStretch(2 * stretch.edge, False)

    def _cell(self, subject: Subject, width: int) -> str:
        route = self._ops.route(subject, width)
        cost = self.verdicts.cost(subject.key, width)
        if cost is None:
            cost = relative_cost(subject, route, width)
            self.verdicts.add_cost(subject.key, width, cost)
        return f"{route} {cost:.1f}"

    def print_blocks(self) -> int:
        """The route of whole blocks at each width. Returns how many are left to step-through."""
        print(f"\nBlocks on {self._situation.caches}:")
        statistics = Statistics()
        chosen = CertifiedRoutes(Target(self._model), "exact", statistics)
        routes_found = {width: chosen.route(width, new_caches(self._model)) for width in self._widths}
        for width, route in routes_found.items():
            print(f"W={width}: {route.name}")
        for note in statistics.notes:
            print(note)
        return sum(route.stepped for route in routes_found.values())


if __name__ == "__main__":
    leave(main())
