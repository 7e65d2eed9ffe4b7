"""Which cases of a test a plan runs: one of each for `make quick`, every value of every parameter for `make test`, all
of them for `make deep`.

A test with several parameters is a product:

    mix     dense  dense  hybrid hybrid ring   ring          `make test` runs three of the six: each mix is among them,
    width   2      5      2      5      2      5             and each width. `make quick` runs the first of the three.
            x                    x      x

A mark says where that is not what a test needs:

    @pytest.mark.every_case          the product itself is what is tested: `make test` runs it whole
    @pytest.mark.part(4)             its cases are rows of a list and cost seconds: `make test` runs four, far apart
    @pytest.mark.slow                seconds for one case: not in `make quick`
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence

import pytest

PLANS = ("quick", "test", "deep")

Case = Mapping[str, Hashable]
"""Name of a parameter -> its value."""


def covering(cases: Sequence[Case]) -> list[int]:
    """Places of few cases that together hold every value of every parameter, built greedily.

    Of cases that bring as many new values, the one whose values were taken least is taken, so that long axes are spread
    over short ones.

    Example:
        >>> covering([{"mix": mix, "width": width} for mix in "abc" for width in (2, 5)])
        [0, 3, 4]
    """
    missing = {item for case in cases for item in case.items()}
    used: Counter[tuple[str, Hashable]] = Counter()
    left, taken = list(range(len(cases))), []
    while missing:
        best = min(
            left,
            key=lambda place: (
                -len(missing & cases[place].items()),
                sum(used[item] for item in cases[place].items()),
                place,
            ),
        )
        left.remove(best)
        taken.append(best)
        used.update(cases[best].items())
        missing -= cases[best].items()
    return taken


def spread(count: int, places: Sequence[int]) -> list[int]:
    """So many of the places, far apart, the first and the last among them.

    Example:
        >>> spread(3, range(9)), spread(3, range(2))
        ([0, 4, 8], [0, 1])
    """
    if count >= len(places):
        return list(places)
    if count == 1:
        return [places[0]]
    return [places[round(step * (len(places) - 1) / (count - 1))] for step in range(count)]


def case_of(item: pytest.Item) -> Case:
    """A test's parameters; a value that is no plain one is told by which object it is."""
    called = getattr(item, "callspec", None)
    if called is None:
        return {}
    plain = str | int | float | bool | None
    return {name: value if isinstance(value, plain) else f"object {id(value)}" for name, value in called.params.items()}


def chosen(items: Sequence[pytest.Item], plan: str) -> list[pytest.Item]:
    """The items a plan runs, in their order."""
    if plan == "deep":
        return list(items)
    functions: dict[str, list[pytest.Item]] = {}
    for item in items:
        functions.setdefault(item.nodeid.partition("[")[0], []).append(item)
    kept = {id(item) for cases in functions.values() for item in _of_function(cases, plan)}
    if plan == "quick":
        kept |= _one_of_each_file(items, kept)
    return [item for item in items if id(item) in kept]


def _of_function(cases: Sequence[pytest.Item], plan: str) -> list[pytest.Item]:
    """Of the cases of one test function, those a plan runs."""
    first = cases[0]
    if plan == "quick":
        return [] if first.get_closest_marker("slow") else [first]
    if first.get_closest_marker("every_case"):
        return list(cases)
    places = sorted(covering([case_of(case) for case in cases])) or [0]
    part = first.get_closest_marker("part")
    return [cases[place] for place in (places if part is None else spread(part.args[0], places))]


def _one_of_each_file(items: Sequence[pytest.Item], kept: set[int]) -> set[int]:
    """Where nothing of a file is kept, its first test is."""
    files = {item.path for item in items if id(item) in kept}
    firsts = {item.path: id(item) for item in reversed(items) if item.path not in files}
    return set(firsts.values())
