"""What the plans of tests leave out is what they say: cases, never a value of a parameter, never a file."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from tests.plans import chosen, covering, spread

FILE = """
import pytest

MIXES = ["dense", "hybrid", "ring"]

@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("width", [2, 5, 8])
def test_product(mix, width): pass

@pytest.mark.every_case
@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("width", [2, 5, 8])
def test_whole(mix, width): pass

@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("after", [(1,), (2, 3), (4,)])
def test_product_of_objects(mix, after): pass

@pytest.mark.part(3)
@pytest.mark.parametrize("row", [{"place": place} for place in range(9)])
def test_rows(row): pass

@pytest.mark.slow
def test_seconds(): pass

def test_alone(): pass
"""

SLOW_ALONE = """
import pytest

@pytest.mark.slow
def test_seconds(): pass

@pytest.mark.slow
def test_more_seconds(): pass
"""


class Collected:
    """Takes what pytest collected, and runs nothing."""

    items: list[pytest.Item]

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.items = list(session.items)


@pytest.fixture(scope="module")
def items(tmp_path_factory: pytest.TempPathFactory) -> list[pytest.Item]:
    folder = tmp_path_factory.mktemp("plans")
    for name, text in (("several", FILE), ("slow_alone", SLOW_ALONE)):
        (folder / f"test_{name}.py").write_text(text)
    (folder / "pytest.ini").write_text("[pytest]\nmarkers =\n  every_case\n  part(cases)\n  slow\n")
    collected = Collected()
    pytest.main(
        ["-q", "--collect-only", "-c", str(folder / "pytest.ini"), "-p", "no:cacheprovider", str(folder)], [collected]
    )
    assert len(collected.items) == 9 + 9 + 9 + 9 + 2 + 2
    return collected.items


def counts(items: list[pytest.Item], plan: str) -> dict[str, int]:
    named = (item.nodeid.partition("[")[0].partition("::")[2] for item in chosen(items, plan))
    return {name: len(list(same)) for name, same in itertools.groupby(named)}


def test_deep_runs_everything(items: list[pytest.Item]) -> None:
    assert chosen(items, "deep") == items


def test_the_usual_plan_runs_every_value_and_what_is_marked(items: list[pytest.Item]) -> None:
    assert counts(items, "test") == {
        "test_product": 3,
        "test_whole": 9,
        "test_product_of_objects": 3,
        "test_rows": 3,
        "test_seconds": 1,
        "test_alone": 1,
        "test_more_seconds": 1,
    }


def test_the_quick_plan_runs_one_case_of_each_that_is_not_slow_and_something_of_every_file(
    items: list[pytest.Item],
) -> None:
    kept = chosen(items, "quick")
    assert counts(items, "quick") == {
        "test_product": 1,
        "test_whole": 1,
        "test_product_of_objects": 1,
        "test_rows": 1,
        "test_alone": 1,
        "test_seconds": 1,
    }
    assert {item.path for item in kept} == {item.path for item in items}
    assert [Path(item.path).stem for item in kept if "seconds" in item.name] == ["test_slow_alone"]


def test_what_is_asked_for_alone_is_run(items: list[pytest.Item]) -> None:
    one = [item for item in items if "test_product" in item.nodeid][4:5]
    assert chosen(one, "test") == chosen(one, "quick") == one


@pytest.mark.parametrize("sizes", [(3, 2), (2, 40, 7), (5,), (1, 1, 1), (4, 4, 4, 4)], ids=str)
def test_few_cases_hold_every_value_and_long_axes_are_spread_over_short_ones(sizes: tuple[int, ...]) -> None:
    cases = [dict(enumerate(values)) for values in itertools.product(*map(range, sizes))]
    named = [{str(axis): value for axis, value in case.items()} for case in cases]
    taken = [named[place] for place in covering(named)]
    assert len(taken) == max(sizes)
    for axis, size in enumerate(sizes):
        used = [case[str(axis)] for case in taken]
        assert set(used) == set(range(size))
        assert max(map(used.count, range(size))) - min(map(used.count, range(size))) <= 1


def test_a_part_is_spread_from_the_first_to_the_last() -> None:
    assert spread(1, [4, 5, 6]) == [4]
    assert spread(2, [4, 5, 6]) == [4, 6]
    assert spread(9, [4, 5, 6]) == [4, 5, 6]
    for count, places in itertools.product(range(1, 9), range(1, 30)):
        assert len(set(spread(count, range(places)))) == min(count, places)
