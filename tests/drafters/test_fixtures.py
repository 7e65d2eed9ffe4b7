"""Every fixture gives the reference's numbers: those of the repository, or those below each `--fixtures DIR`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import pytest

from tests.drafters import parity_blocks, parity_eagle3, parity_gemma4_assistant, parity_mtp
from tests.drafters.parity import Comparison, Fixture, find

LAYOUTS = (parity_gemma4_assistant.LAYOUT, parity_eagle3.LAYOUT, parity_mtp.LAYOUT, *parity_blocks.LAYOUTS)
"""How to compare, by what the golden file holds."""

OWN = Path(__file__).parent.parent / "fixtures"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test per fixture."""
    if "fixture" not in metafunc.fixturenames:
        return
    found = []
    for folder in metafunc.config.getoption("--fixtures") or [OWN]:
        below = find(Path(folder).resolve())
        if not below:
            raise pytest.UsageError(f"--fixtures {folder}: no *golden*.safetensors with a checkpoint below it")
        found += below
    metafunc.parametrize("fixture", found, ids=lambda fixture: fixture.name)


@pytest.mark.filterwarnings("ignore:.*which serves in its place")  # the copies in fixtures are random
def test_a_fixture_gives_the_numbers_of_its_reference(fixture: Fixture, tell_always: Callable[[str], None]) -> None:
    layouts = [layout for layout in LAYOUTS if layout.fits(list(fixture.expected))]
    if not layouts:
        known = ", ".join(layout.kind for layout in LAYOUTS)
        tell_always(f"{fixture.name}: not compared, its golden file is of none of the known layouts ({known})")
        pytest.skip(f"{fixture.golden} is of none of the known layouts: {known}")
    (layout,) = layouts
    comparison = Comparison()
    layout.compare(fixture, comparison)
    tell_always(f"{layout.kind} {fixture.name}: {comparison.summary()}")
    assert comparison.counts
    assert comparison.faults == []


# What the comparison itself is worth


def test_a_comparison_sees_a_difference_a_wrong_shape_and_nan() -> None:
    want = mx.array([[1.0, -200.0]])
    for got, words in (
        (want + mx.array([[0.0, 3e-3]]), "differs by 0.003"),
        (want[0], "has shape (2,)"),
        (want * mx.array([[float("nan"), 1.0]]), "differs by nan"),
    ):
        comparison = Comparison()
        comparison.arrays("x", want + 1e-6, want)
        assert comparison.faults == []
        comparison.arrays("x", got, want)
        assert len(comparison.faults) == 1
        assert words in comparison.faults[0]
        assert comparison.counts == {"x": 2}
    comparison = Comparison()
    comparison.ids("ids", mx.array([1, 2]), mx.array([1, 3]))
    assert comparison.faults == ["ids are [1, 2], want [1, 3]"]


def test_the_fixtures_of_the_repository_are_found_with_their_targets() -> None:
    found = {fixture.name: fixture for fixture in find(OWN)}
    assert "fixtures/eagle3/llama" in found
    twin = found["fixtures/eagle3/safeailab=llama"]
    assert (twin.golden.parent.name, twin.checkpoint.name, twin.target.name) == ("llama", "safeailab", "target")


def test_a_golden_file_may_lie_beside_the_folder_it_is_named_after(tmp_path: Path) -> None:
    for name in ("drafter", "other", "target"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
        mx.save_safetensors(str(tmp_path / name / "model.safetensors"), {name: mx.ones((len(name),))})
    mx.save_safetensors(str(tmp_path / "drafter_golden.safetensors"), {"a": mx.ones((1,))})
    assert [(fixture.checkpoint.name, fixture.target.name) for fixture in find(tmp_path)] == [("drafter", "target")]
    (tmp_path / "drafter_golden.safetensors").rename(tmp_path / "golden.safetensors")
    assert [fixture.checkpoint.name for fixture in find(tmp_path)] == ["drafter", "other"]
