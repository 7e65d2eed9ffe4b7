"""A plan routes a model's ops inside a verify call of its width, and nothing anywhere else."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm.generate import generate_step as stock_generate_step

from mlx_spec.cache.base import Drive
from mlx_spec.ops.attention import BY_POSITION
from mlx_spec.ops.base import ROWS, STOCK, Rows
from mlx_spec.ops.choose import Subject
from mlx_spec.ops.linear import BATCH_AXIS
from mlx_spec.verify import routes
from mlx_spec.verify.record import detach
from mlx_spec.verify.routes import BLOCK, POSITIONS, STEP_THROUGH, Plan, Route, plan_in_force, plan_of, verifying
from mlx_spec.verify.subjects import find_subjects
from tests.bits import assert_same_bits, bit_difference
from tests.oracle import assert_same_output
from tests.tiny import MIXES, PROMPT

WIDTH = 4
IDS = mx.array([[11, 2, 7, 30]])


@pytest.fixture
def model() -> Any:
    made = MIXES["dense"].build()
    mx.eval(made.parameters())
    return made


def routed(model: Any, route: str, width: int = WIDTH) -> Plan:
    """A plan that sends every op one way, with its modules attached."""
    subjects = find_subjects(model)
    plan = plan_of(subjects, {subject.key: route for subject in subjects.values()}, width)
    routes.attach(model, plan)
    return plan


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """(route, rows) of every op that was routed."""
    seen: list[tuple[str, int]] = []
    for kind in {type(subject.op) for subject in find_subjects(MIXES["dense"].model()).values()}:
        run: Callable[..., Any] = kind.run

        def noted(self: Any, route: str, rows: Rows, run: Callable[..., Any] = run) -> Any:
            seen.append((route, rows.width))
            return run(self, route, rows)

        monkeypatch.setattr(kind, "run", noted)
    return seen


def forward(model: Any, ids: mx.array = IDS) -> mx.array:
    return model(ids, cache=MIXES["dense"].new_cache())


def test_ops_are_routed_inside_and_stock_outside(model: Any, taken: list[tuple[str, int]]) -> None:
    want = forward(model)
    plan = routed(model, BATCH_AXIS)
    assert_same_bits(forward(model), want)
    assert taken == []
    with verifying(plan):
        assert plan_in_force() is plan
        assert_same_bits(forward(model), want)
    assert set(taken) == {(BATCH_AXIS, WIDTH)}
    assert len(taken) == len(plan.routed)
    assert plan_in_force() is None


@pytest.mark.parametrize("width", [1, 3, 5])
def test_a_call_of_another_width_is_stock(model: Any, taken: list[tuple[str, int]], width: int) -> None:
    plan = routed(model, ROWS)
    with verifying(plan):
        forward(model, mx.zeros((1, width), mx.int32))
    assert taken == []


def test_attaching_changes_no_parameter_and_detaching_puts_the_classes_back(model: Any) -> None:
    before = {path: id(value) for path, value in tree_flatten(model.parameters())}
    classes = [type(module) for module in model.modules()]
    for _ in range(2):
        routed(model, ROWS)
        assert [type(module) for module in model.modules()] != classes
        assert {path: id(value) for path, value in tree_flatten(model.parameters())} == before
        detach(model)
        assert [type(module) for module in model.modules()] == classes


def test_plain_decoding_of_a_routed_model_is_stock(model: Any) -> None:
    mix = MIXES["dense"]
    attached, run = mix.model(), mix.oracle(20)
    try:
        routed(attached, ROWS)
        assert_same_output(list(stock_generate_step(mx.array(PROMPT), attached, max_tokens=20)), run, 20)
    finally:
        detach(attached)


def test_what_takes_the_stock_route_is_not_touched(model: Any) -> None:
    classes = [type(module) for module in model.modules()]
    plan = routed(model, STOCK)
    assert plan.routed == {}
    assert [type(module) for module in model.modules()] == classes
    with verifying(plan):
        assert plan_in_force() is None


def test_a_plan_is_in_force_in_its_own_thread_alone(model: Any) -> None:
    plan, seen = routed(model, ROWS), []
    with verifying(plan):
        other = threading.Thread(target=lambda: seen.append(plan_in_force()))
        other.start()
        other.join()
    assert seen == [None]


def test_a_plan_falls_when_the_forward_raises(model: Any) -> None:
    plan = routed(model, ROWS)
    with pytest.raises(KeyError), verifying(plan):
        raise KeyError
    assert plan_in_force() is None


def test_a_wrong_route_shows_in_the_output(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is compared here depends on the routes at all."""
    want = forward(model)
    plan = routed(model, ROWS)
    monkeypatch.setattr(Rows, "by_chunks", lambda self, chunk: self.call(*self.args) * 2)
    with verifying(plan):
        assert bit_difference(forward(model), want) is not None


def test_names_say_how_the_mixers_and_the_ops_go(model: Any) -> None:
    plan = routed(model, BATCH_AXIS)
    assert (BLOCK.name, POSITIONS.name, STEP_THROUGH.name) == ("block", "block, mixers by position", "step-through")
    assert Route(Drive.BLOCK, plan).name == "block, linear batch axis"
    assert Route(Drive.POSITIONS, plan).name == "block, mixers by position, linear batch axis"


@pytest.mark.parametrize(
    ("kinds", "ways", "name"),
    [
        (("attention",), (BY_POSITION,), "block, attention by position"),
        (("attention",), ("in chunks of 4",), "block, attention in chunks of 4"),
        (("attention",), (STOCK,), "block, attention stock"),
        (("attention",), (STOCK, BY_POSITION), "block, attention stock or by position"),
        (("attention", "state updates"), (), "block, attention and state updates by position"),
        (("attention", "state updates"), (STOCK,), "block, state updates by position"),
        (("attention", "state updates"), ("own kernel",), "block, attention own kernel, state updates by position"),
        (("state updates",), (), "block, state updates by position"),
    ],
)
def test_names_say_by_which_ways_attention_goes(kinds: tuple[str, ...], ways: tuple[str, ...], name: str) -> None:
    assert Route(Drive.QUERIES, Plan(WIDTH, by_position=kinds, ways=ways)).name == name


def test_every_subject_of_a_model_is_in_its_plan(model: Any) -> None:
    subjects: dict[int, Subject] = find_subjects(model)
    assert set(routed(model, ROWS).routed) == set(subjects)
