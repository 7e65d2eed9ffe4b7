"""`make near` finds the tests of what changed."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("near", ROOT / "scripts" / "near.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("changed", "wanted"),
    [
        ("mlx_spec/verify/mix.py", {"tests/verify", "tests/double", "tests/test_certify.py"}),
        ("mlx_spec/sampling.py", {"tests/test_sampling.py"}),
        ("mlx_spec/stats.py", {"tests/test_stats.py", "tests/drafters/test_table.py"}),
        ("mlx_spec/drafters/eagle3/keys.py", {"tests/drafters"}),
        ("tests/tiny_eagle.py", {"tests/drafters/test_eagle3_regressions.py"}),
        ("tests/ops/test_routes.py", {"tests/ops/test_routes.py"}),
        ("metal/greedy_walk.metal", {"tests/msl", "tests/test_wheel.py"}),
        ("docs/hazards.md", {"tests/hazards/test_page.py"}),
    ],
)
def test_a_change_brings_the_tests_of_its_package_and_of_whoever_imports_it(
    script: ModuleType, changed: str, wanted: set[str]
) -> None:
    found = script.near([changed])
    held = {test for test in wanted if any(test == each or test.startswith(f"{each}/") for each in found)}
    assert held == wanted
    assert all((ROOT / each).exists() for each in found)


def test_no_change_brings_the_rules_of_the_house_alone(script: ModuleType) -> None:
    assert script.near([]) == {"tests/test_house_rules.py"}


def test_a_change_does_not_bring_everything(script: ModuleType) -> None:
    assert len(script.near(["mlx_spec/accept.py"])) < 20
