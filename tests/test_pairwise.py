"""The covering array covers, stays small, and obeys what forbids a row."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

from tests.pairwise import all_pairs, pairs_of, pairwise

AXES = {"a": (1, 2, 3, 4, 5, 6, 7), "b": ("x", "y", "z"), "c": (None, True), "d": (10, 20, 30, 40, 50)}


def covered(rows: list[dict[str, Any]]) -> set[Any]:
    return {pair for row in rows for pair in pairs_of(row)}


def test_every_pair_of_values_of_any_two_axes_is_in_some_row() -> None:
    rows = pairwise(AXES)
    assert set(all_pairs(AXES)) <= covered(rows)
    assert all(list(row) == list(AXES) for row in rows)


def test_there_are_few_rows_and_always_the_same() -> None:
    # No array can be smaller than the product of the two longest axes.
    assert 35 <= len(pairwise(AXES)) <= 42
    assert pairwise(AXES) == pairwise(AXES)


def test_forbidden_rows_are_left_out_and_every_pair_that_can_stand_is_in() -> None:
    def allows(row: Mapping[str, Any]) -> bool:
        return not (row.get("a") in (1, 2) and row.get("b") == "z") and not (row.get("c") and row.get("d", 0) > 30)

    rows = pairwise(AXES, allows)
    assert all(map(allows, rows))
    product = [dict(zip(AXES, values, strict=True)) for values in itertools.product(*AXES.values())]
    assert covered(rows) == covered([row for row in product if allows(row)])


def test_a_value_that_nothing_allows_with_another_axis_does_not_hang() -> None:
    rows = pairwise({"a": (1, 2), "b": (3, 4), "c": (5, 6)}, lambda row: row.get("a") != 1)
    assert {row["a"] for row in rows} == {2}
    assert len(rows) == 4
