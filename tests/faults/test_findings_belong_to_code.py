"""A file of findings is believed by the code that it was found with: versions, and sources of the model's classes."""

from __future__ import annotations

import functools
import gc
import importlib.util
import json
import operator
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models import base, llama, switch_layers

from mlx_spec import generate_step
from mlx_spec.environment import CERTIFICATES
from mlx_spec.verify import look, verdicts
from mlx_spec.verify.look import Look
from mlx_spec.verify.record import detach, record_of
from mlx_spec.verify.sources import sources_of
from mlx_spec.verify.verdicts import Verdicts, facts_of, make_of
from tests.faults.edits import assert_exact, built, tiny
from tests.tiny import MIXES, PROMPT, randomise

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


# Code that no bytecode of a method shows


_swiglu, _attend, _mlp = llama.swiglu, llama.scaled_dot_product_attention, llama.MLP.__call__

FACTOR = 0.0
"""What a method reads; `monkeypatch` sets it."""


def bent(out: mx.array, rows: int, factor: float) -> mx.array:
    """Another result for several rows than for one, where the factor is not 0."""
    return out * (1.0 + factor * (rows > 1))


def by_global(self: Any, x: mx.array) -> mx.array:
    return bent(_mlp(self, x), x.shape[1], FACTOR)


def by_function_of_a_global(self: Any, x: mx.array) -> mx.array:
    return by_global(self, x)


class Private(llama.MLP):
    def bend_by(self, factor: float) -> None:
        self._factor = factor

    def __call__(self, x: mx.array) -> mx.array:
        return bent(super().__call__(x), x.shape[1], self._factor)


class Holder(llama.MLP):
    def __call__(self, x: mx.array) -> mx.array:
        return self.after(super().__call__(x))


class Caller:
    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __call__(self, gate: mx.array, x: mx.array) -> mx.array:
        return bent(_swiglu(gate, x), x.shape[1], self.factor)


Patch = pytest.MonkeyPatch
Change = Callable[[Any, Patch, float], None]


def function_of_the_module(model: Any, patch: Patch, factor: float) -> None:
    patch.setattr(llama, "swiglu", lambda gate, x: bent(_swiglu(gate, x), x.shape[1], factor))


def compiled_function(model: Any, patch: Patch, factor: float) -> None:
    patch.setattr(llama, "swiglu", mx.compile(lambda gate, x: bent(_swiglu(gate, x), x.shape[1], factor)))


def partial_function(model: Any, patch: Patch, factor: float) -> None:
    def call(gate: mx.array, x: mx.array, factor: float) -> mx.array:
        return bent(_swiglu(gate, x), x.shape[1], factor)

    patch.setattr(llama, "swiglu", functools.partial(call, factor=factor))


def attention(model: Any, patch: Patch, factor: float) -> None:
    def attend(queries: mx.array, *args: Any, **keywords: Any) -> mx.array:
        return bent(_attend(queries, *args, **keywords), queries.shape[2], factor)

    patch.setattr(llama, "scaled_dot_product_attention", attend)


def cell(model: Any, patch: Patch, factor: float) -> None:
    patch.setattr(llama.MLP, "__call__", lambda self, x: bent(_mlp(self, x), x.shape[1], factor))


def default(model: Any, patch: Patch, factor: float) -> None:
    patch.setattr(llama.MLP, "__call__", lambda self, x, by=factor: bent(_mlp(self, x), x.shape[1], by))


def keyword_default(model: Any, patch: Patch, factor: float) -> None:
    patch.setattr(llama.MLP, "__call__", lambda self, x, *, by=factor: bent(_mlp(self, x), x.shape[1], by))


def global_number(model: Any, patch: Patch, factor: float) -> None:
    patch.setattr(llama.MLP, "__call__", by_global)
    patch.setitem(globals(), "FACTOR", factor)


def global_behind_a_function(model: Any, patch: Patch, factor: float) -> None:
    patch.setattr(llama.MLP, "__call__", by_function_of_a_global)
    patch.setitem(globals(), "FACTOR", factor)


def callable_object(model: Any, patch: Patch, factor: float) -> None:
    patch.setattr(llama, "swiglu", Caller(factor))


def private_attribute(model: Any, patch: Patch, factor: float) -> None:
    for layer in model.layers:
        layer.mlp.__class__ = Private
        layer.mlp.bend_by(factor)


def function_that_a_module_holds(model: Any, patch: Patch, factor: float) -> None:
    for layer in model.layers:
        layer.mlp.__class__ = Holder
        layer.mlp.after = lambda out: bent(out, out.shape[1], factor)


CHANGES: dict[str, Change] = {
    change.__name__: change
    for change in (
        function_of_the_module,
        attention,
        cell,
        global_number,
        private_attribute,
        default,
        keyword_default,
        compiled_function,
        partial_function,
        global_behind_a_function,
        callable_object,
        function_that_a_module_holds,
    )
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(CERTIFICATES, str(tmp_path))
    return tmp_path


@pytest.mark.part(4)
@pytest.mark.parametrize("change", CHANGES)
def test_no_route_outlives_the_code_it_was_found_with(change: str, folder: Path, monkeypatch: Patch) -> None:
    model, other = tiny(), tiny()
    CHANGES[change](model, monkeypatch, 0.0)
    assert assert_exact(model).verify_route == "block"
    CHANGES[change](model, monkeypatch, 1e-3)
    assert assert_exact(model).verify_route != "block"
    CHANGES[change](other, monkeypatch, 1e-3)
    assert assert_exact(other).verify_route != "block"
    assert len(list(folder.iterdir())) == 2


@pytest.mark.every_case
@pytest.mark.parametrize("change", CHANGES)
def test_other_code_is_another_fact_and_the_same_code_the_same(change: str, monkeypatch: Patch) -> None:
    model, other = tiny(), tiny()
    CHANGES[change](model, monkeypatch, 0.0)
    first, before = Look(model), facts_of(model)
    assert Look(model).agrees(first)
    CHANGES[change](model, monkeypatch, 1e-3)
    assert not Look(model).agrees(first)
    after = facts_of(model)
    assert {name for name in before if before[name] != after[name]} <= {"sources", "model"}
    assert after != before
    CHANGES[change](other, monkeypatch, 1e-3)
    assert facts_of(other) == after
    CHANGES[change](model, monkeypatch, 0.0)
    assert facts_of(model) == before


def test_code_that_cannot_be_read_is_told_by_identity_and_nothing_found_with_it_is_kept(
    folder: Path, monkeypatch: Patch
) -> None:
    model = tiny()
    before = Look(model), facts_of(model)
    seen = [before]
    for _ in range(2):
        # Compiled code of another package, as far as anybody can tell.
        monkeypatch.setattr(llama, "swiglu", operator.methodcaller("__mul__"))
        now = Look(model), facts_of(model)
        assert Look(model).agrees(now[0])
        for look_before, facts in seen:
            assert not now[0].agrees(look_before)
            assert now[1] != facts
        seen.append(now)
        found = Verdicts(now[1], folder)
        found.add_block("a situation", 5, "block", True)
        found.save()
    assert list(folder.iterdir()) == []


def test_binding_what_models_call_and_taking_it_off_changes_nothing(folder: Path, monkeypatch: Patch) -> None:
    model = tiny()
    assert_exact(model)
    # Other models of this process may have it bound.
    monkeypatch.setattr(llama, "scaled_dot_product_attention", base.scaled_dot_product_attention)
    record = record_of(model)
    first, facts, known = Look(model), facts_of(model), record.now()
    assert record.bindings.attach(model).names
    record.attach()
    assert llama.scaled_dot_product_attention is not base.scaled_dot_product_attention
    assert Look(model).agrees(first)
    assert facts_of(model) == facts_of(tiny()) == facts
    assert record.now() is known
    detach(model)
    assert Look(model).agrees(first)
    assert record.now() is known
    assert len(list(folder.iterdir())) == 1


def test_a_plain_run_looks_at_nothing(monkeypatch: Patch) -> None:
    def refused(roots: Any) -> None:
        raise AssertionError("looked at")

    monkeypatch.setattr(look, "reach_of", refused)
    assert len(list(generate_step(mx.array(PROMPT), tiny(), max_tokens=3))) == 3


def test_a_replaced_function_and_what_it_closes_over_are_not_kept_alive(monkeypatch: Patch) -> None:
    model = tiny()

    def over(held: Any) -> Callable[..., mx.array]:
        return lambda self, x: _mlp(held.layers[0].mlp, x)

    with monkeypatch.context() as patch:
        patch.setattr(llama.MLP, "__call__", over(model))
        record_of(model).now()
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
