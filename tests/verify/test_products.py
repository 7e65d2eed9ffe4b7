"""Products that a model makes itself take a route inside a verify call, and are the model's own anywhere else."""

from __future__ import annotations

import gc
import re
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm.models
import pytest
from mlx_lm.models.cache import make_prompt_cache

from mlx_spec.model.swap import swap_of
from mlx_spec.ops.base import ROWS, STOCK, Rows
from mlx_spec.ops.choose import choose
from mlx_spec.ops.linear import BATCH_AXIS, HeldMatrix
from mlx_spec.verify import routes
from mlx_spec.verify.products import PRODUCTS, Product
from mlx_spec.verify.record import detach
from mlx_spec.verify.routes import Plan, plan_of, verifying
from mlx_spec.verify.subjects import find_subjects
from tests.bits import assert_same_bits, bit_difference
from tests.double import PATTERNS, double
from tests.zoo.menagerie import Specimen, whole_zoo

ZOO = {specimen.name: specimen for specimen in whole_zoo()}
TIED = {name: Specimen(name, {**ZOO[name].config, "tie_word_embeddings": True}) for name in PRODUCTS}
WIDTH = 4
IDS = mx.array([[11, 2, 7, 30]])


def built(name: str) -> Any:
    model = TIED[name].build("float32")
    mx.eval(model.parameters())
    return model


def forward(model: Any, ids: mx.array = IDS) -> mx.array:
    out: mx.array = model(ids, cache=make_prompt_cache(model))
    mx.eval(out)
    return out


def routed(model: Any, route: str) -> Plan:
    """A plan that sends the product one way and leaves everything else stock."""
    subjects = find_subjects(model)
    holder = id(PRODUCTS[model.model_type].holder(model))
    plan = plan_of({holder: subjects[holder]}, {subjects[holder].key: route}, WIDTH)
    routes.attach(model, plan)
    return plan


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Routes of the products that were routed."""
    seen: list[str] = []
    run = HeldMatrix.run

    def noted(self: HeldMatrix, route: str, rows: Rows) -> Any:
        seen.append(route)
        return run(self, route, rows)

    with monkeypatch.context() as patched:
        patched.setattr(HeldMatrix, "run", noted)
        yield seen


def test_every_head_that_mlx_lm_multiplies_by_itself_is_declared() -> None:
    (folder,) = mlx_lm.models.__path__
    by_hand = re.compile(r"@ self\.(model\.\w+\.weight|lm_head)\.T")
    found = {file.stem for file in Path(folder).glob("*.py") if by_hand.search(file.read_text(encoding="utf-8"))}
    assert found == set(PRODUCTS)


@pytest.mark.parametrize("name", PRODUCTS)
def test_the_product_is_found_where_it_is_declared(name: str) -> None:
    model = built(name)
    classes = [type(module) for module in model.modules()]
    subject = find_subjects(model)[id(PRODUCTS[name].holder(model))]
    assert isinstance(subject.op, HeldMatrix)
    assert (subject.op.kind, subject.axis) == ("linear", 1)
    assert [type(module) for module in model.modules()] == classes
    assert choose(subject, 5) == STOCK
    with double(PATTERNS["gen15"]):
        assert choose(subject, 5) == BATCH_AXIS


@pytest.mark.parametrize("name", ["minicpm", "seed_oss", "llama4_text"])
def test_an_untied_head_is_a_module_as_any_other(name: str) -> None:
    subjects = find_subjects(ZOO[name].build("float32"))
    assert not any(isinstance(subject.op, HeldMatrix) for subject in subjects.values())


@pytest.mark.parametrize("route", [ROWS, BATCH_AXIS])
@pytest.mark.parametrize("name", PRODUCTS)
def test_the_product_is_routed_inside_and_the_models_own_outside(name: str, route: str, taken: list[str]) -> None:
    model = built(name)
    want = forward(model)
    plan = routed(model, route)
    product = PRODUCTS[name]
    assert getattr(product.holder(model), product.matrix) is product.holder(model)[product.matrix]
    assert_same_bits(forward(model), want)
    with verifying(plan):
        forward(model, IDS[:, :3])
        assert taken == []
        assert_same_bits(forward(model), want)
    assert taken == [route]
    detach(model)
    assert swap_of(product.holder(model), "route") is None
    assert_same_bits(forward(model), want)


def test_a_wrong_route_shows_in_the_output(monkeypatch: pytest.MonkeyPatch) -> None:
    model = built("minicpm")
    want, plan = forward(model), routed(model, ROWS)
    monkeypatch.setattr(Rows, "by_chunks", lambda self, chunk: self.call(*self.args) * 2)
    with verifying(plan):
        assert bit_difference(forward(model), want) is not None


@pytest.mark.parametrize("route", [ROWS, BATCH_AXIS])
def test_a_matrix_that_was_replaced_is_the_one_multiplied_by(route: str) -> None:
    model = built("seed_oss")
    plan = routed(model, route)
    model.model.embed_tokens.weight = model.model.embed_tokens.weight * 3
    want = forward(model)
    with verifying(plan):
        assert_same_bits(forward(model), want)


def test_any_other_use_of_what_stands_for_a_matrix_fails() -> None:
    model = built("minicpm")
    plan = routed(model, ROWS)
    with verifying(plan):
        matrix = model.model.embed_tokens.weight
        assert_same_bits(matrix[IDS], model.model.embed_tokens["weight"][IDS])
        rows = mx.zeros((1, WIDTH, matrix[IDS].shape[-1]))
        for use in (lambda: mx.matmul(rows, matrix.T), lambda: rows @ matrix, lambda: matrix.shape[0]):
            with pytest.raises((ValueError, IndexError)):
                use()


def test_what_is_known_of_a_product_keeps_no_model_alive() -> None:
    model = built("talkie")
    subjects, alive = find_subjects(model), weakref.ref(model)
    del model
    gc.collect()
    assert alive() is None
    assert subjects


def test_a_path_leads_from_the_model_to_the_holder() -> None:
    model = built("minicpm")
    assert Product("", "lm_head").holder(model) is model
    assert Product("model.layers", "0").holder(model) is model.model.layers
