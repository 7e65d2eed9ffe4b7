"""A newcomer's walk, in a copy of the package: a width policy and an acceptance rule are one new file and one row of a
table each. (A drafter family is `tests/test_add_a_drafter.py`.)"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.rounds.runs import stock

ROOT = Path(__file__).parent.parent

POLICY = '''"""Wide rounds while proposals stand, plain ones for a while after one that did not."""

from __future__ import annotations

from mlx_spec.records import RoundRecord
from mlx_spec.schedule.policy import Limits, WidthPolicy


class Sulking(WidthPolicy):
    """Parked for three rounds after a round of which nothing was accepted."""

    name = "sulking"

    def __init__(self, width: int, origin: str) -> None:
        self._width, self._origin, self._parked = width, origin, 0

    def next(self, limits: Limits) -> int:
        self._parked -= 1
        return limits.cut(1 if self._parked >= 0 else self._width)

    def observe(self, record: RoundRecord) -> None:
        if record.proposed and not record.accepted:
            self._parked = 3

    def __str__(self) -> str:
        return f"sulking {self._width} ({self._origin})"
'''
POLICY_ROW = '    "sulking": Sulking,\n'

RULE = '''"""Every proposal stands."""

from __future__ import annotations

import mlx.core as mx

from mlx_spec.accept.proposal import Proposal
from mlx_spec.accept.rule import AcceptanceRule, Scored, packed


class Trusting(AcceptanceRule):
    """Hands out what the drafter says, and the target's choice after it."""

    name = "everything proposed"

    def walk(self, proposal: Proposal, scored: Scored) -> mx.array:
        tokens = mx.concatenate([proposal.ids, scored.choices[:, -1:].astype(mx.int32)], axis=1)
        return packed(mx.ones(proposal.ids.shape, mx.bool_), scored, tokens)
'''
RULE_ROW = '    "trusting": Trusting(),\n'

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


def add(package: Path, folder: str, file: str, text: str, row: str) -> None:
    """One new file, and its name in one row of the table."""
    (package / folder / file).write_text(text)
    table = package / folder / "table.py"
    class_name = row.split()[-1].rstrip(",").removesuffix("()")
    lines = table.read_text()
    place = lines.index("from mlx_spec.errors")
    lines = f"{lines[:place]}from mlx_spec.{folder}.{file.removesuffix('.py')} import {class_name}\n{lines[place:]}"
    end = lines.index("}\n")
    table.write_text(f"{lines[:end]}{row}{lines[end:]}")


@pytest.mark.slow
def test_a_policy_and_a_rule_are_a_file_and_a_row_each(tmp_path: Path) -> None:
    package = tmp_path / "mlx_spec"
    shutil.copytree(ROOT / "mlx_spec", package, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "tests").symlink_to(ROOT / "tests")
    (tmp_path / "metal").symlink_to(ROOT / "metal")
    add(package, "schedule", "sulking.py", POLICY, POLICY_ROW)
    add(package, "accept", "trusting.py", RULE, RULE_ROW)
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
