"""Test files near what differs from the main branch, one a line: of the packages changed, and of whoever imports them.

    .venv/bin/python scripts/near.py [--base COMMIT]

A changed file of `mlx_spec/<package>/` brings `tests/<package>/` and every test file that imports the module; a changed
test brings itself; a shared part of the tests brings the test files that import it. What is not committed counts.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

BRANCHES = ("origin/main", "main")

ALWAYS = ("tests/test_house_rules.py",)

BESIDES = {
    "metal": ("tests/msl", "tests/test_wheel.py"),
    "mlx_spec/ops": ("tests/msl",),
    "mlx_spec/verify": ("tests/double", "tests/test_certify.py"),
    "mlx_spec/cache": ("tests/hazards/test_rollback.py",),
    "docs": ("tests/hazards/test_page.py", "tests/test_add_a_drafter.py"),
}
"""Folder -> tests that import none of its modules, or few, and hold it all the same."""


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--base", help=f"compare with this commit; by default with where {' or '.join(BRANCHES)} was left"
    )
    options = parser.parse_args()
    base = options.base or where_main_was_left()
    print("\n".join(sorted(near(changed_since(base)))))
    return 0


def where_main_was_left() -> str:
    """The commit that this branch and the main branch have in common."""
    known = git("branch", "--all", "--format=%(refname:short)").split()
    branch = next((name for name in BRANCHES if name in known), None)
    if branch is None:
        sys.exit(f"near: there is no branch {' or '.join(BRANCHES)} to compare with; give --base COMMIT")
    return git("merge-base", "HEAD", branch).strip()


def changed_since(base: str) -> list[str]:
    """Files that differ from a commit, those git does not know yet included."""
    return git("diff", "--name-only", base).split() + git("ls-files", "--others", "--exclude-standard").split()


def git(*arguments: str) -> str:
    return subprocess.run(("git", *arguments), cwd=ROOT, check=True, capture_output=True, text=True).stdout


def near(changed: Iterable[str]) -> set[str]:
    """The test files and folders that changed files bring."""
    tests = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in test_files()}
    found = set(ALWAYS)
    for name in changed:
        found.update(each for folder, others in BESIDES.items() if name.startswith(f"{folder}/") for each in others)
        found.update(_own_folder(name))
        if name in tests:
            found.add(name)
        elif name.endswith(".py"):
            imported = _imports(name)
            found.update(test for test, text in tests.items() if imported.search(text))
    inside = {each for each in found for folder in found if each.startswith(f"{folder}/")}
    return found - inside


def test_files() -> Iterator[Path]:
    yield from (ROOT / "tests").rglob("test_*.py")


def _own_folder(name: str) -> list[str]:
    """The folder of tests that mirrors a package."""
    parts = Path(name).parts
    folder = f"tests/{parts[1]}" if parts[0] == "mlx_spec" and len(parts) > 2 else ""
    return [folder] if folder and (ROOT / folder).is_dir() else []


def _imports(name: str) -> re.Pattern[str]:
    """What an import of a module looks like in a test."""
    *package, module = Path(name).with_suffix("").parts
    if module == "__init__":
        *package, module = package
    owner = re.escape(".".join(package))
    return re.compile(
        rf"^(from {owner}\.{module} import|import {owner}\.{module}\b|from {owner} import .*\b{module}\b)", re.M
    )


if __name__ == "__main__":
    sys.exit(main())
