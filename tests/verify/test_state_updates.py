"""State updates of a block have the bits of one-token decode where a verify call asks for it, and stock's elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models import mamba2, ssm

from mlx_spec.verify.bindings import STATE_UPDATE
from mlx_spec.verify.record import detach, record_of
from mlx_spec.verify.routes import Plan, verifying
from tests.bits import assert_same_bits, bit_difference
from tests.double import PATTERNS, double
from tests.tiny import MIXES
from tests.verify.test_bindings import release_all

BATCH, HEADS, SIZE, GROUPS, STATE = 2, 6, 8, 3, 16
LIMITS = (0.001, 50.0)


@pytest.fixture(autouse=True)
def bound() -> Iterator[None]:
    """`mamba2.ssm_update` is bound for the model of this test, and given back."""
    # Models of tests that ran before may still want it bound.
    release_all()
    model = MIXES["mamba2"].model()
    record_of(model).bindings.attach(model)
    yield
    detach(model)


def by_position(width: int) -> Plan:
    return Plan(width, by_position=("state updates",))


class Updates:
    """The arguments of a call over some positions."""

    def __init__(self, width: int, dtype: mx.Dtype, started: bool, masked: bool) -> None:
        def drawn(*shape: int) -> mx.array:
            return mx.random.normal(shape).astype(dtype)

        self.width = width
        self.rows = {
            "hidden_states": drawn(BATCH, width, HEADS, SIZE),
            "B": drawn(BATCH, width, GROUPS, STATE),
            "C": drawn(BATCH, width, GROUPS, STATE),
            "dt": drawn(BATCH, width, HEADS),
        }
        self.weights = {"A_log": drawn(HEADS), "D": drawn(HEADS), "dt_bias": drawn(HEADS)}
        self.state = mx.random.normal((BATCH, HEADS, SIZE, STATE)) if started else None
        self.mask = mx.random.uniform(shape=(BATCH, width)) > 0.3 if masked else None

    def alone(self) -> tuple[mx.array, mx.array]:
        """One token after the other, as a decode calls mlx-lm's function."""
        outputs, state = [], self.state
        for at in range(self.width):
            output, state = ssm.ssm_update(**self.arguments(at, at + 1), state=state)
            outputs.append(output)
        return mx.concatenate(outputs, axis=1), state

    def block(self, plan: Plan | None) -> tuple[mx.array, mx.array]:
        with verifying(plan):
            return mamba2.ssm_update(**self.arguments(0, self.width), state=self.state)

    def arguments(self, start: int, stop: int) -> dict[str, Any]:
        mask = None if self.mask is None else self.mask[:, start:stop]
        rows = {name: array[:, start:stop] for name, array in self.rows.items()}
        return {**rows, **self.weights, "time_step_limit": LIMITS, "mask": mask}


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("started", [False, True])
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
def test_every_position_has_the_bits_of_its_own_decode_where_a_block_has_not(
    dtype: mx.Dtype, started: bool, masked: bool
) -> None:
    differing = 0
    for width in (2, 3, 5, 8, 16):
        updates = Updates(width, dtype, started, masked)
        want = updates.alone()
        for got, expected in zip(updates.block(by_position(width)), want, strict=True):
            assert_same_bits(got, expected, f"W={width}")
        differing += any(bit_difference(*pair) is not None for pair in zip(updates.block(None), want, strict=True))
    assert differing >= 3, "stock blocks do not round differently: the comparison shows nothing"


@pytest.mark.parametrize("pattern", PATTERNS)
def test_the_step_that_only_metal_has_is_taken_for_each_position(pattern: str) -> None:
    with double(PATTERNS[pattern]):
        updates = Updates(5, mx.float32, started=True, masked=False)
        want = updates.alone()
        for got, expected in zip(updates.block(by_position(5)), want, strict=True):
            assert_same_bits(got, expected)
        assert bit_difference(updates.block(None)[0], want[0]) is not None


def test_only_the_plans_width_is_taken_by_position() -> None:
    updates = Updates(4, mx.float32, started=True, masked=False)
    stock = ssm.ssm_update(**updates.arguments(0, 4), state=updates.state)
    for plan in (None, Plan(4), by_position(3), by_position(5)):
        for got, expected in zip(updates.block(plan), stock, strict=True):
            assert_same_bits(got, expected)


def test_rows_that_end_inside_the_block_are_left_to_stock() -> None:
    updates = Updates(4, mx.float32, started=True, masked=False)
    given = {**updates.arguments(0, 4), "state": updates.state, "lengths": mx.array([2, 4])}
    with verifying(by_position(4)):
        got = mamba2.ssm_update(**given)
    for mine, theirs in zip(got, ssm.ssm_update(**given), strict=True):
        assert_same_bits(mine, theirs)


def test_detaching_gives_the_function_back() -> None:
    assert vars(mamba2)[STATE_UPDATE] is not ssm.ssm_update
    detach(MIXES["mamba2"].model())
    assert vars(mamba2)[STATE_UPDATE] is ssm.ssm_update
