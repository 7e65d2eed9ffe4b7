"""docs/add_a_drafter.md, followed: the family it describes is added from the page's own code, and its own tests run."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import mlx_spec.drafters
from mlx_spec.drafters import __main__ as command
from mlx_spec.drafters import registry, table
from mlx_spec.drafters.families import FAMILIES, Family
from mlx_spec.errors import UnknownDrafter
from tests.test_house_rules import EVERYWHERE_RULES, PACKAGE_RULES

PAGE = Path(__file__).parent.parent / "docs" / "add_a_drafter.md"

PACKAGE = "mlx_spec/drafters/successor"
TABLE = "mlx_spec/drafters/families.py"
TESTS = "tests/drafters/test_successor.py"


def blocks() -> dict[str, str]:
    """The code on the page: the file each block says it belongs in -> its text."""
    found = re.findall(r"^```python\n# (\S+)\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.M | re.S)
    return dict(found)


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The family's folder, found where the package looks for its own."""
    for name, text in blocks().items():
        if name.startswith(PACKAGE):
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
    monkeypatch.setattr(
        mlx_spec.drafters, "__path__", [*mlx_spec.drafters.__path__, str(tmp_path / "mlx_spec/drafters")]
    )
    yield "mlx_spec.drafters.successor"
    for name in [name for name in sys.modules if name.startswith("mlx_spec.drafters.successor")]:
        del sys.modules[name]


@pytest.fixture
def row(package: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Family]:
    """The family's row, in the table."""
    made: Family = eval(blocks()[TABLE], {"Family": Family})
    assert made.module == package
    monkeypatch.setattr(table, "FAMILIES", (*FAMILIES, made))
    table.known_families.cache_clear()
    yield made
    monkeypatch.undo()
    table.known_families.cache_clear()


def test_the_page_has_six_steps_and_a_file_for_each() -> None:
    headings = re.findall(r"^## (\d)\. ", PAGE.read_text(encoding="utf-8"), re.M)
    assert headings == list("123456")
    names = ("config", "weights", "model", "__init__")
    assert list(blocks()) == [TABLE, *(f"{PACKAGE}/{name}.py" for name in names), TESTS]


@pytest.mark.parametrize("name", blocks())
def test_the_code_on_the_page_keeps_the_rules_of_the_house(name: str) -> None:
    text = blocks()[name]
    ast.parse(text)
    assert [line for line in text.splitlines() if len(line) > 120] == []
    rules = [*EVERYWHERE_RULES, *(PACKAGE_RULES if name.startswith(PACKAGE) else [])]
    assert [found for rule in rules for found in rule(text, name)] == []


def test_the_family_is_unknown_before_it_is_added() -> None:
    with pytest.raises(UnknownDrafter, match="SuccessorDraftModel"):
        registry.resolve_family({"architectures": ["SuccessorDraftModel"]})


def test_its_row_is_printed_as_built(row: Family) -> None:
    last = command.table().splitlines()[-1]
    assert last.split() == ["successor", "ngram", "any", "flat", "yes"]


@pytest.mark.slow
def test_the_tests_on_the_page_run_and_pass(row: Family, tmp_path: Path) -> None:
    ran = run_tests_of_the_page(tmp_path)
    assert ran.failed == []
    assert ran.passed == 9


@pytest.mark.slow
@pytest.mark.parametrize(
    ("step", "right", "wrong"),
    [
        ("model", "self._table[chain[-1]]", "self._table[chain[0]]"),
        ("weights", "table.dtype != mx.int32", "False"),
        ("config", "or value < 1", ""),
    ],
)
def test_the_tests_on_the_page_bite(row: Family, tmp_path: Path, step: str, right: str, wrong: str) -> None:
    path = tmp_path / f"{PACKAGE}/{step}.py"
    assert right in path.read_text()
    path.write_text(path.read_text().replace(right, wrong))
    assert run_tests_of_the_page(tmp_path).failed


def run_tests_of_the_page(folder: Path) -> _Ran:
    """Run them on the family as it stands."""
    path, ran = folder / "test_successor.py", _Ran()
    path.write_text(blocks()[TESTS])
    pytest.main(["-q", "-p", "no:cacheprovider", "--import-mode=importlib", str(path)], plugins=[ran])
    return ran


class _Ran:
    """Counts what a run of pytest did."""

    def __init__(self) -> None:
        self.passed = 0
        self.failed: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed.append(str(report.longrepr))
        elif report.when == "call":
            self.passed += 1
