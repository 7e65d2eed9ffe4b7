"""The page of hazards names tests that exist, and every test of a hazard."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent.parent
PAGE = (TESTS.parent / "docs" / "hazards.md").read_text(encoding="utf-8")
FACTS = ("test_mlx_facts.py", "test_page.py")
"""Files of this folder that are about upstream, and about the page."""


def written_in(file: Path) -> set[str]:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}


def named(page: str) -> set[tuple[str, str]]:
    """(file below tests/, test) pairs."""
    return set(re.findall(r"`([\w/]+\.py)::(\w+)`", page))


def missing(page: str) -> list[str]:
    """Tests that are named and do not exist."""
    return sorted(
        f"{file}::{test}"
        for file, test in named(page)
        if not (TESTS / file).is_file() or test not in written_in(TESTS / file)
    )


@pytest.mark.slow
def test_every_test_the_page_names_exists() -> None:
    assert missing(PAGE) == []
    assert len(named(PAGE)) > 50


def test_every_test_of_a_hazard_is_on_the_page() -> None:
    files = [file for file in sorted((TESTS / "hazards").glob("test_*.py")) if file.name not in FACTS]
    written = {(f"hazards/{file.name}", test) for file in files for test in written_in(file)}
    assert sorted(written - named(PAGE)) == []


def test_every_row_of_the_page_names_a_test() -> None:
    rows = [line for line in PAGE.splitlines() if line.startswith("|") and not line.startswith(("|---", "| kind of"))]
    assert rows
    assert [row for row in rows if not named(row)] == []


def test_a_name_that_does_not_exist_would_be_found() -> None:
    assert missing("| x | `hazards/test_page.py::test_nonesuch`, `nowhere/test_page.py::test_a` |") == [
        "hazards/test_page.py::test_nonesuch",
        "nowhere/test_page.py::test_a",
    ]
