"""Families of drafters that other packages bring, through entry points."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import mlx.core as mx
import pytest

from mlx_spec import generate_step, load_drafter
from mlx_spec.drafters import CallableDrafter, Family, resolve_drafter_kind
from mlx_spec.drafters.__main__ import table as printed_table
from mlx_spec.drafters.families import FAMILIES
from mlx_spec.drafters.registry import open_family, resolve_family
from mlx_spec.drafters.table import GROUP, Table, known_families
from mlx_spec.errors import FamilyClash, UnknownDrafter
from mlx_spec.stats import Statistics
from tests.oracle import assert_same_output
from tests.tiny import MIXES

ROW = """
from mlx_spec.drafters import Family

ROW = Family(
    name="oracle_bones",
    kind="bones",
    module="bones_reading",
    architectures=("OracleBones",),
    model_types=("bones",),
    layouts=("flat",),
)
"""

READING = """
from mlx_spec.drafters import CallableDrafter

class Bones(CallableDrafter):
    kind = "bones"

def load(folder, target, taps=None, quantize=None):
    return Bones(lambda ids, count: [ids[-1]] * count)
"""

Installs = Callable[..., None]
"""(text of its module `bones_row`, what the entry point names) -> installed, for this test."""


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Installs]:
    def put(text: str = ROW, value: str = "bones_row:ROW", package: str = "bones") -> None:
        (tmp_path / "bones_row.py").write_text(text)
        (tmp_path / "bones_reading.py").write_text(READING)
        info = tmp_path / f"{package}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[{GROUP}]\n{package} = {value}\n")
        known_families.cache_clear()

    monkeypatch.syspath_prepend(tmp_path)
    yield put
    for name in ("bones_row", "bones_reading"):
        sys.modules.pop(name, None)
    monkeypatch.undo()
    known_families.cache_clear()


def test_without_other_packages_the_table_holds_our_rows() -> None:
    assert known_families().rows == FAMILIES


def test_a_row_of_another_package_is_found_printed_and_listed_in_errors(install: Installs) -> None:
    with pytest.raises(UnknownDrafter):
        resolve_family({"architectures": ["OracleBones"]})
    install()
    assert resolve_family({"architectures": ["OracleBones"]}).name == "oracle_bones"
    assert resolve_drafter_kind({"model_type": "bones"}) == "bones"
    assert resolve_drafter_kind({}, "bones") == "bones"
    assert printed_table().splitlines()[-1].split() == ["oracle_bones", "bones", "any", "flat", "yes"]
    with pytest.raises(UnknownDrafter, match="OracleBones.*bones"):
        resolve_family({"architectures": ["Novel"]})


def test_its_module_is_imported_when_one_of_its_drafters_is_wanted(install: Installs) -> None:
    install()
    family = resolve_family({"model_type": "bones"})
    assert "bones_reading" not in sys.modules
    open_family(family)
    assert "bones_reading" in sys.modules


def test_a_drafter_of_a_kind_of_its_own_drafts_and_is_reported_as_that(install: Installs, tmp_path: Path) -> None:
    install()
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "bones"}')
    mx.save_safetensors(str(folder / "model.safetensors"), {"bones": mx.zeros((3,))})
    mix, statistics = MIXES["dense"], Statistics()
    run = mix.oracle(20)
    drafter = load_drafter(folder, target=mix.model())
    got = list(
        generate_step(mx.array(run.prompt), mix.model(), draft_model=drafter, max_tokens=20, statistics=statistics)
    )
    assert_same_output([pair[:2] for pair in got], run, 20)
    assert statistics.loop == "bones"
    assert statistics.proposed_tokens > 0


@pytest.mark.parametrize(
    ("said", "taken"),
    [
        ("name", {"name": "eagle3"}),
        ("architecture", {"architectures": ("DFlashDraftModel",)}),
        ("model_type", {"model_types": ("eagle3",)}),
        ("native", {"natives": ("deepseek_v3",)}),
    ],
)
def test_a_name_that_is_taken_is_refused_with_both_owners(said: str, taken: dict[str, object]) -> None:
    row = Family(**{"name": "bones", "kind": "bones", **taken})  # type: ignore[arg-type]
    with pytest.raises(FamilyClash, match=f"{said} .* of mlx_spec and .* of bones both"):
        Table([*(("mlx_spec", family) for family in FAMILIES), ("bones", row)])


@pytest.mark.parametrize(
    ("text", "value", "told"),
    [
        ("ROW = 3", "bones_row:ROW", "got 3"),
        ("ROW = ()", "bones_row:ROW", r"got \(\)"),
        ("raise OSError('no bones')", "bones_row:ROW", "OSError: no bones"),
        (ROW, "bones_row:LOST", "LOST"),
    ],
    ids=["no family", "no row", "does not import", "lost"],
)
def test_a_row_that_cannot_be_read_names_its_package(install: Installs, text: str, value: str, told: str) -> None:
    install(text, value)
    with pytest.raises(FamilyClash, match=f"bones brings drafters .*{told}.*ninstall"):
        resolve_family({"model_type": "eagle3"})


def test_a_drafter_made_by_a_caller_may_be_of_any_kind() -> None:
    class Own(CallableDrafter):
        kind = "my own"

    mix, statistics = MIXES["sliding"], Statistics()
    run = mix.oracle(20)
    drafter = Own(lambda ids, count: [7] * count)
    got = list(
        generate_step(mx.array(run.prompt), mix.model(), draft_model=drafter, max_tokens=20, statistics=statistics)
    )
    assert_same_output([pair[:2] for pair in got], run, 20)
    assert statistics.loop == "my own"
