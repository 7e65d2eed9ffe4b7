"""`python -m mlx_spec.drafters`: the families of drafters, and whether each can be loaded now."""

from __future__ import annotations

from collections.abc import Sequence

from mlx_spec.drafters.table import known_families
from mlx_spec.terminal import Flags, checked, ending_well, leave, write_text

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
    flags = Flags(prog="python -m mlx_spec.drafters", description="Print the families of drafters.")
    flags.parse_args(checked(arguments))

    def work() -> int:
        write_text(table() + "\n")
        return 0

    return ending_well(work)


if __name__ == "__main__":
    leave(main())
