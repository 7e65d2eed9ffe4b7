"""Few rows that together hold every pair of values of any two axes: most faults need two settings to meet."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Row = dict[str, Any]
Pair = tuple[tuple[str, Any], tuple[str, Any]]


def _anything(row: Mapping[str, Any]) -> bool:
    del row
    return True


def pairwise(axes: Mapping[str, Sequence[Any]], allows: Callable[[Mapping[str, Any]], bool] = _anything) -> list[Row]:
    """Build the rows greedily; the same axes always give the same rows.

    Args:
        axes: name -> its values, hashable, each once.
        allows: whether a row may stand. Also asked about rows that lack some axes, and must say yes
            as long as nothing they hold forbids it.

    Returns:
        Rows with every axis. A pair that no allowed row can hold is left out.

    Example:
        >>> rows = pairwise({"a": (1, 2), "b": (3, 4), "c": (5, 6)})
        >>> len(rows), rows[0]
        (4, {'a': 1, 'b': 3, 'c': 5})
    """
    missing = dict.fromkeys(all_pairs(axes))
    rows = []
    while missing:
        seed = next(iter(missing))
        row = _completed(dict(seed), axes, missing, allows) if allows(dict(seed)) else None
        if row is None:
            del missing[seed]
            continue
        row = {name: row[name] for name in axes}
        rows.append(row)
        for pair in pairs_of(row):
            missing.pop(pair, None)
    return rows


def all_pairs(axes: Mapping[str, Sequence[Any]]) -> list[Pair]:
    """Every value of an axis with every value of every later axis."""
    return [
        ((one, first), (other, second))
        for one, other in itertools.combinations(axes, 2)
        for first in axes[one]
        for second in axes[other]
    ]


def pairs_of(row: Mapping[str, Any]) -> list[Pair]:
    """The pairs one row holds."""
    return list(itertools.combinations(row.items(), 2))


def _completed(
    row: Row,
    axes: Mapping[str, Sequence[Any]],
    missing: Mapping[Pair, None],
    allows: Callable[[Mapping[str, Any]], bool],
) -> Row | None:
    """The row with all axes, by the values that bring most missing pairs; None if nothing allowed is left."""
    open_axes = [name for name in axes if name not in row]
    if not open_axes:
        return row

    def gain(choice: tuple[str, Any]) -> int:
        order = list(axes)
        pairs = (sorted((choice, held), key=lambda item: order.index(item[0])) for held in row.items())
        return sum(tuple(pair) in missing for pair in pairs)

    choices = [(name, value) for name in open_axes for value in axes[name] if allows({**row, name: value})]
    best_axis = max(choices, key=gain, default=(None, None))[0]
    for name, value in sorted((c for c in choices if c[0] == best_axis), key=gain, reverse=True):
        row_or_none = _completed({**row, name: value}, axes, missing, allows)
        if row_or_none is not None:
            return row_or_none
    return None
