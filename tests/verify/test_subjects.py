"""The ops of a model are found as the model calls them, each with the axis its positions lie on."""

from __future__ import annotations

from collections import Counter
from typing import Any

import mlx.core as mx
import pytest

from mlx_spec.ops.base import ROWS, STOCK
from mlx_spec.ops.choose import choose, distinct
from mlx_spec.verify import mixers, routes
from mlx_spec.verify.subjects import find_subjects
from tests.bits import assert_same_bits
from tests.tiny import MIXES
from tests.zoo.menagerie import whole_zoo

ZOO = {specimen.name: specimen for specimen in whole_zoo()}
FOUND = {
    "llama": {"linear": 22},
    "qwen3_moe": {"linear": 18, "experts": 2},
    "gpt_oss": {"linear": 21, "experts": 4},
    "deepseek_v3": {"linear": 22, "experts": 2, "module": 5},
    "mamba2": {"linear": 7},
}
"""Ops by kind. A tied head counts as a linear."""


def built(name: str) -> Any:
    return ZOO[name].build("float32")


@pytest.mark.parametrize("name", FOUND)
def test_every_linear_head_and_block_of_experts_is_found(name: str) -> None:
    subjects = find_subjects(built(name))
    assert dict(Counter(subject.op.kind for subject in subjects.values())) == FOUND[name]


@pytest.mark.parametrize("name", FOUND)
def test_finding_leaves_the_model_as_it_was(name: str) -> None:
    model = built(name)
    classes = [type(module) for module in model.modules()]
    find_subjects(model)
    assert [type(module) for module in model.modules()] == classes


def test_what_is_attached_hides_no_op() -> None:
    model = built("gemma3")
    before = find_subjects(model)
    mixers.attach(model)
    routes.attach(model, routes.plan_of(before, {subject.key: ROWS for subject in before.values()}, 3))
    after = find_subjects(model)
    assert {key: subject.key for key, subject in after.items()} == {key: each.key for key, each in before.items()}


def test_ops_of_one_make_share_a_key() -> None:
    subjects = list(find_subjects(built("llama")).values())
    keys = distinct(subjects)
    assert len(keys) < len(subjects) / 2
    assert [subject.key for subject in keys.values()] == list(keys)


def test_experts_and_gates_are_tried_with_arguments_the_model_could_give() -> None:
    for subject in distinct(list(find_subjects(built("deepseek_v3")).values())).values():
        assert choose(subject, 5) == STOCK


def test_a_model_that_reads_single_tokens_only_has_its_ops_found_too() -> None:
    subjects = find_subjects(built("olmo"))
    assert {subject.op.kind for subject in subjects.values()} == {"linear"}
    assert all(subject.axis == 1 for subject in subjects.values())


def test_a_lookup_is_no_op_and_a_tied_head_is_one() -> None:
    model = MIXES["dense"].model()
    subjects = find_subjects(model)
    tied = [subject for subject in subjects.values() if "Embedding" in subject.op.label]
    head = getattr(model, "lm_head", None)
    assert len(tied) == (head is None)


def test_rows_of_every_op_by_any_route_are_those_of_the_model() -> None:
    model = built("qwen3_moe")
    for subject in distinct(list(find_subjects(model).values())).values():
        rows = subject.rows(4, lambda shape, dtype: mx.random.normal(shape).astype(dtype))
        for route in subject.op.routes:
            assert_same_bits(subject.op.run(route, rows), rows.call(*rows.args), route)
