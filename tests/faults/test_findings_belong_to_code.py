"""A file of findings is believed by the code that it was found with: versions, and sources of the model's classes."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models import llama, switch_layers

from mlx_spec.environment import CERTIFICATES
from mlx_spec.verify import verdicts
from mlx_spec.verify.sources import sources_of
from mlx_spec.verify.verdicts import facts_of, make_of
from tests.faults.edits import assert_exact, built
from tests.tiny import MIXES, randomise

pytestmark = pytest.mark.faults

NAME = "edited_llama"

PRODUCT = "return self.down_proj(swiglu(self.gate_proj(x), self.up_proj(x)))"
EDITIONS = {
    "a method": (PRODUCT, f"{PRODUCT} * (1.0 + 1e-3 * (x.shape[1] > 1))"),
    "a function beside the classes": ("class MLP(", "def beside():\n    return 3\n\n\nclass MLP("),
    "a comment": ("class MLP(", "# as it was\nclass MLP("),
}
"""What is replaced, by what."""


@pytest.fixture
def source(tmp_path: Path) -> Iterator[Path]:
    """mlx-lm's llama as a file of its own, which can be edited."""
    text = Path(llama.__file__).read_text().replace("from .", "from mlx_lm.models.")
    (tmp_path / f"{NAME}.py").write_text(text)
    yield tmp_path / f"{NAME}.py"
    sys.modules.pop(NAME, None)


def imported(source: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(NAME, source)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[NAME] = module
    spec.loader.exec_module(module)
    return module


def model_of(source: Path) -> Any:
    stock = MIXES["dense"].build()
    module = imported(source)
    return randomise(lambda: module.Model(module.ModelArgs(**vars(stock.args))), 0)


@pytest.mark.parametrize("edition", EDITIONS)
def test_another_edition_of_a_models_source_is_another_fact(edition: str, source: Path) -> None:
    before = model_of(source)
    facts = facts_of(before)
    assert facts_of(model_of(source)) == facts
    source.write_text(source.read_text().replace(*EDITIONS[edition]))
    after = facts_of(model_of(source))
    assert {name for name in facts if facts[name] != after[name]} == {"sources"}


def test_an_edited_method_is_not_run_by_what_was_found_before(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CERTIFICATES, str(tmp_path / "kept"))
    assert assert_exact(model_of(source)).verify_route == "block"
    source.write_text(source.read_text().replace(*EDITIONS["a method"]))
    assert assert_exact(model_of(source)).verify_route == "step-through"


def test_a_file_edited_after_its_import_does_not_vouch_for_what_is_running(source: Path) -> None:
    running = model_of(source)
    source.write_text(source.read_text().replace(*EDITIONS["a method"]))
    found = sources_of(running)
    assert sources_of(model_of(source)) != found


@pytest.mark.parametrize("module", ["mlx_lm.models.base", "mlx_lm.models.rope_utils", "mlx.nn.layers.linear"])
def test_what_a_models_file_takes_from_others_counts(
    module: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model = built("dense")
    before = sources_of(model)
    edited = tmp_path / "edited.py"
    edited.write_text("# another edition")
    monkeypatch.setattr(sys.modules[module], "__file__", str(edited))
    assert sources_of(model) != before


def test_what_a_model_does_not_use_does_not_count(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model = built("dense")
    before = sources_of(model)
    (tmp_path / "edited.py").write_text("# another edition")
    monkeypatch.setattr(switch_layers, "__file__", str(tmp_path / "edited.py"))
    assert sources_of(model) == before
    assert sources_of(built("hybrid_moe")) != before


@pytest.mark.parametrize("named", ["mlx", "mlx-lm"])
def test_an_upgrade_is_another_fact(named: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = built("dense")
    before, stock = facts_of(model), verdicts.version
    monkeypatch.setattr(verdicts, "version", lambda name: "99" if name == named else stock(name))
    assert {name for name, fact in facts_of(model).items() if fact != before[name]} == {named}


def test_an_upgrade_of_this_package_is_another_fact_and_its_file_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CERTIFICATES, str(tmp_path))
    assert_exact(built("dense"))
    (path,) = tmp_path.glob("*.json")
    monkeypatch.setattr(verdicts, "own_edition", lambda: "99")
    assert_exact(built("dense"))
    assert len(list(tmp_path.glob("*.json"))) == 2
    # Under the name of the new facts, the old ones are not believed either.
    facts = json.loads(path.read_text())["facts"]
    assert facts["mlx_spec"] != "99"


def test_training_and_evaluation_are_two_makes() -> None:
    model = built("dense")
    before = make_of(model)
    model.train()
    assert make_of(model) != before
    model.set_dtype(mx.float16)
    assert make_of(model.eval()) != before
