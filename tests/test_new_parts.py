"""docs/add_a_policy_or_a_rule.md, followed in a copy of the package: one new file and one row of a table each.

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

PAGE = ROOT / "docs" / "add_a_policy_or_a_rule.md"

USE = """
import json
import mlx.core as mx
import mlx_spec
from mlx_spec.accept.table import rule_named
from mlx_spec.schedule.table import make_policy
from tests.engine.rows import make_row, pull
from tests.rounds.runs import stock
from tests.scripted import CyclingDrafter, WrongDrafter
from tests.tiny import PROMPT, VOCAB

right = stock("dense", "greedy").ids
policy = make_policy("sulking", 4, "test")
row = make_row("dense", PROMPT, CyclingDrafter(right, VOCAB, (2, 0)), policy, 20)
sulked = [token for token, _ in pull("dense", row)]
trusting = make_row("dense", PROMPT, WrongDrafter(right, VOCAB), make_policy("fixed", 4, "test"), 12,
                    rule=rule_named("trusting"))
trusted = [token for token, _ in pull("dense", trusting)]
print(json.dumps({
    "file": mlx_spec.__file__, "policy": str(policy), "sulked": sulked, "rounds": row.statistics.rounds,
    "rule": str(trusting.rule), "trusted": trusted, "accepted": trusting.statistics.accepted_tokens,
    "proposed": trusting.statistics.proposed_tokens,
}))
"""


def blocks() -> dict[str, str]:
    """The code on the page: the file each block says it belongs in -> its text."""
    return dict(re.findall(r"^```python\n# (\S+)\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.M | re.S))


def add(root: Path, file: str) -> None:
    """One new file, and its class in one row of the table beside it."""
    table = (root / file).parent / "table.py"
    row = blocks()[str(table.relative_to(root))]
    (root / file).write_text(blocks()[file])
    class_name = row.split()[-1].rstrip(",").removesuffix("()")
    module = file.removesuffix(".py").replace("/", ".")
    text = table.read_text().replace(
        "from mlx_spec.errors", f"from {module} import {class_name}\nfrom mlx_spec.errors", 1
    )
    table.write_text(text.replace("}\n", f"{row}}}\n", 1))


@pytest.mark.parametrize("name", blocks())
def test_the_code_on_the_page_keeps_the_rules_of_the_house(name: str) -> None:
    text = blocks()[name]
    if not name.endswith("table.py"):
        ast.parse(text)
        assert [found for rule in (*EVERYWHERE_RULES, *PACKAGE_RULES) for found in rule(text, name)] == []
    assert [line for line in text.splitlines() if len(line) > 120] == []


@pytest.mark.slow
def test_a_policy_and_a_rule_are_a_file_and_a_row_each(tmp_path: Path) -> None:
    package = tmp_path / "mlx_spec"
    shutil.copytree(ROOT / "mlx_spec", package, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "tests").symlink_to(ROOT / "tests")
    (tmp_path / "metal").symlink_to(ROOT / "metal")
    for file in blocks():
        if not file.endswith("table.py"):
            add(tmp_path, file)
    ran = subprocess.run(
        [sys.executable, "-c", USE], cwd=tmp_path, env={"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
    told = json.loads(ran.stdout)
    assert Path(told["file"]).is_relative_to(tmp_path)
    right = list(stock("dense", "greedy").ids)
    assert (told["policy"], told["sulked"]) == ("sulking 4 (test)", right[:20])
    # Prompt, then 2 accepted, none, three plain rounds, and so on.
    assert 9 <= told["rounds"] < 20
    assert told["rule"] == "everything proposed (not token-exact)"
    assert told["accepted"] == told["proposed"] > 0
    # The first token is the target's, and so is every fourth after the three proposed: all of these are wrong.
    assert told["trusted"][0] == right[0]
    assert told["trusted"][1] != right[1]
    assert len(told["trusted"]) == 12
