"""A function as drafter: what it is shown, and what it may answer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest

from mlx_spec.drafters.callable import CallableDrafter

TARGET: Any = SimpleNamespace(name="any")


def answering(answer: Any) -> Any:
    return CallableDrafter(lambda ids, count: answer).open(TARGET)


def test_it_sees_everything_committed_with_the_bonus_last() -> None:
    seen: list[tuple[list[int], int]] = []

    def draft(ids: list[int], count: int) -> list[int]:
        seen.append((list(ids), count))
        ids.clear()  # its own copy
        return [9] * count

    state = CallableDrafter(draft).open(TARGET)
    state.read_prompt([[1, 2]], None)
    state.read_prompt([[3]], None)
    assert state.propose([4], 2).ids.tolist() == [[9, 9]]
    state.abort()
    state.propose([4], 1)
    state.catch_up([[4, 9]], None)
    state.propose([5], 3)
    assert seen == [([1, 2, 3, 4], 2), ([1, 2, 3, 4], 1), ([1, 2, 3, 4, 9, 5], 3)]


def test_an_empty_list_means_no_proposal() -> None:
    proposals = answering([]).propose([4], 3).ids
    assert proposals.shape == (1, 0)
    assert proposals.dtype == mx.int32


@pytest.mark.parametrize("answer", [[1, 2], [1, 2, 3, 4]])
def test_another_number_of_ids_is_an_error_with_both_numbers(answer: list[int]) -> None:
    with pytest.raises(ValueError, match=f"returned {len(answer)} ids, expected exactly 3"):
        answering(answer).propose([4], 3)


@pytest.mark.parametrize("answer", [None, (1, 2, 3), "abc", 7, mx.array([1, 2, 3]), {1: 2}])
def test_anything_but_a_list_is_an_error_that_names_the_type(answer: object) -> None:
    with pytest.raises(ValueError, match=f"returned {type(answer).__name__}, expected a list of 3 ints"):
        answering(answer).propose([4], 3)


@pytest.mark.parametrize("item", [1.0, "1", None, True, mx.array(1), [1]])
def test_an_id_that_is_no_int_is_an_error_that_names_the_type(item: object) -> None:
    with pytest.raises(ValueError, match=f"of type {type(item).__name__} among its ids"):
        answering([1, item, 2]).propose([4], 3)


def test_ids_outside_int32_become_one_that_never_matches() -> None:
    answer = [2**31, 2**31 - 1, -(2**31) - 1, -(2**31), 10**30]
    assert answering(answer).propose([4], 5).ids.tolist() == [[-1, 2**31 - 1, -1, -(2**31), -1]]


def test_what_the_function_raises_is_passed_on() -> None:
    def broken(ids: list[int], count: int) -> list[int]:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        CallableDrafter(broken).open(TARGET).propose([4], 3)


def test_each_row_of_a_batch_is_asked_for_alone() -> None:
    drafter = CallableDrafter(lambda ids, count: [ids[0]] * count if ids[-1] else [])
    state = drafter.open(TARGET)
    state.read_prompt([[10], [20]], None)
    assert state.propose([1, 1], 2).ids.tolist() == [[10, 10], [20, 20]]
    assert state.propose([1, 0], 2).ids.tolist() == [[10, 10], [-1, -1]]
    assert state.propose([0, 0], 2).ids.shape == (2, 0)


def test_requests_do_not_share_ids() -> None:
    drafter = CallableDrafter(lambda ids, count: [len(ids)] * count)
    one, other = drafter.open(TARGET), drafter.open(TARGET, start=5)
    one.read_prompt([[1, 2, 3]], None)
    assert other.propose([4], 1).ids.tolist() == [[1]]
    assert one.propose([4], 1).ids.tolist() == [[4]]


def test_it_declares_what_it_is_and_fits_any_target() -> None:
    drafter = CallableDrafter(lambda ids, count: [], name="mine", default_width=7)
    drafter.check(TARGET)
    assert (drafter.kind, drafter.name, drafter.default_width, drafter.taps) == ("callable", "mine", 7, ())
    assert drafter.may_propose_fewer
