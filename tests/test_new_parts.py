"""docs/one_file_and_one_row.md, followed in a copy of the package: one new file and one row of a table each.

A drafter family is `tests/test_add_a_drafter.py`.
"""

from __future__ import annotations

import ast
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.rounds.runs import stock
from tests.test_house_rules import EVERYWHERE_RULES, PACKAGE_RULES

ROOT = Path(__file__).parent.parent

PAGE = ROOT / "docs" / "one_file_and_one_row.md"


def blocks() -> dict[str, str]:
    """The code on the page: the file each block says it belongs in -> its text."""
    return dict(re.findall(r"^```python\n# (\S+)\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.M | re.S))


TABLES = {"mlx_spec/schedule": "table.py", "mlx_spec/accept": "table.py", "mlx_spec/drafters": "families.py"}
"""Folder -> the table beside its files."""


def is_table(file: str) -> bool:
    return Path(file).name == TABLES[str(Path(file).parent)]


def add(root: Path, file: str) -> None:
    """One new file, and one row in the table beside it, with the import that the row needs."""
    table = Path(file).parent / TABLES[str(Path(file).parent)]
    (root / file).write_text(blocks()[file])
    text, row, families = (root / table).read_text(), blocks()[str(table)], "FAMILIES: tuple[Family, ...] = (\n"
    if table.name == "families.py":
        (root / table).write_text(text.replace(families, families + row))
        return
    class_name = row.split()[-1].rstrip(",").removesuffix("()")
    module, imports = file.removesuffix(".py").replace("/", "."), "from mlx_spec.errors"
    text = text.replace(imports, f"from {module} import {class_name}\n{imports}", 1)
    (root / table).write_text(text.replace("}\n", f"{row}}}\n", 1))


@pytest.mark.parametrize("name", blocks())
def test_the_code_on_the_page_keeps_the_rules_of_the_house(name: str) -> None:
    text = blocks()[name]
    if not is_table(name):
        ast.parse(text)
        assert [found for rule in (*EVERYWHERE_RULES, *PACKAGE_RULES) for found in rule(text, name)] == []
    assert [line for line in text.splitlines() if len(line) > 120] == []


@pytest.mark.slow
def test_a_policy_a_rule_and_a_relabelled_family_are_a_file_and_a_row_each(tmp_path: Path) -> None:
    ignored = shutil.ignore_patterns("__pycache__", "demo")
    shutil.copytree(ROOT / "mlx_spec", tmp_path / "mlx_spec", ignore=ignored)
    (tmp_path / "mlx_spec/demo").symlink_to(ROOT / "mlx_spec/demo")
    (tmp_path / "tests").symlink_to(ROOT / "tests")
    (tmp_path / "metal").symlink_to(ROOT / "metal")
    for file in blocks():
        if not is_table(file):
            add(tmp_path, file)
    command = [sys.executable, "-m", "tests.engine.new_parts"]
    ran = subprocess.run(command, cwd=tmp_path, env={"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    told = json.loads(ran.stdout)
    assert Path(told["file"]).is_relative_to(tmp_path)
    right, policy, rule, family = list(stock("dense", "greedy").ids), told["policy"], told["rule"], told["family"]
    assert (policy["named"], policy["ids"]) == ("sulking 4 (test)", right[:20])
    # The prompt, then two accepted, none, three plain steps, and so on; the last token has no budget for a block.
    assert policy["rounds"] == 14
    assert rule["named"] == "everything proposed (not token-exact)"
    assert rule["accepted"] == rule["proposed"] > 0
    # The first token is the target's; what the drafter says after it is wrong, and handed out all the same.
    assert rule["ids"][0] == right[0]
    assert rule["ids"][1] != right[1]
    assert len(rule["ids"]) == 12
    assert family["own"] == family["other"]
    assert family["own"]["kind"] == "eagle3"
    assert family["own"]["ids"] == right[:12]
    assert family["own"]["proposed"]
