"""A round is as wide as was asked, unless the text or a cache ends before that."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_spec.errors import UnsupportedOption
from mlx_spec.schedule.fixed import FixedWidth
from mlx_spec.schedule.policy import MAX_WIDTH, Limits
from mlx_spec.schedule.table import POLICIES, make_policy

LIMITS = st.none() | st.integers(-1, 2 * MAX_WIDTH)


@given(st.integers(1, MAX_WIDTH), LIMITS, LIMITS)
def test_the_width_is_the_smallest_limit_and_at_least_1(width: int, budget: int | None, room: int | None) -> None:
    got = FixedWidth(width, "given").next(Limits(budget, room))
    assert 1 <= got <= width
    for limit in (budget, room):
        assert limit is None or got <= max(1, limit)
    assert got in (1, width, budget, room)
    if all(limit is None or limit >= width for limit in (budget, room)):
        assert got == width


def test_nothing_limits_a_run_without_end() -> None:
    assert FixedWidth(MAX_WIDTH, "given").next(Limits(None, None)) == MAX_WIDTH


@pytest.mark.parametrize(("budget", "room", "want"), [(3, None, 3), (None, 3, 3), (4, 2, 2), (2, 4, 2), (5, 5, 5)])
def test_budget_and_room_both_limit(budget: int | None, room: int | None, want: int) -> None:
    assert FixedWidth(5, "given").next(Limits(budget, room)) == want


def test_a_round_has_one_token_at_least_though_nothing_is_left() -> None:
    assert FixedWidth(5, "given").next(Limits(0, 0)) == 1


def test_the_policy_is_told_with_where_it_comes_from() -> None:
    assert str(FixedWidth(5, "draft_block_size")) == "fixed 5 (draft_block_size)"


def test_policies_are_known_by_name() -> None:
    assert make_policy("fixed", 5, "given") == FixedWidth(5, "given")
    with pytest.raises(UnsupportedOption, match=f"'lucky'.*{', '.join(sorted(POLICIES))}"):
        make_policy("lucky", 5, "given")
