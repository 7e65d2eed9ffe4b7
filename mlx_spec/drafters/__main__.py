"""`python -m mlx_spec.drafters`: the families of drafters, and whether each can be loaded now."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from mlx_spec.drafters.table import known_families

HEADINGS = ("family", "kind", "targets", "layouts", "loads")


def table() -> str:
    """All families as text, one line each under a line of headings, columns aligned."""
    families = known_families().rows
    rows = [HEADINGS] + [
        (row.name, row.kind, ", ".join(row.targets), ", ".join(row.layouts), row.standing) for row in families
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Returns its exit status."""
    flags = argparse.ArgumentParser(prog="python -m mlx_spec.drafters", description="Print the families of drafters.")
    flags.parse_args(arguments)
    sys.stdout.write(table() + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
