"""Acceptance is the longest prefix of proposals that the target chose itself, and its next own choice after that."""

from __future__ import annotations

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_spec.accept import walk
from mlx_spec.errors import InvalidRequest
from tests.host_reads import count_host_reads

FEW_IDS = st.integers(0, 2)
"""So few that long and short agreements are both common."""


def plain_walk(proposals: list[int], choices: list[int]) -> tuple[int, int]:
    accepted = 0
    while accepted < len(proposals) and proposals[accepted] == choices[accepted]:
        accepted += 1
    return accepted, choices[accepted]


def walked(proposals: list[list[int]], choices: list[list[int]]) -> list[tuple[int, int]]:
    rows, count = len(proposals), len(proposals[0])
    given_ids = mx.array(proposals, dtype=mx.int32).reshape(rows, count)
    accepted, bonus = walk(given_ids, mx.array(choices, dtype=mx.uint32))
    assert (accepted.shape, bonus.shape) == ((rows,), (rows,))
    assert (accepted.dtype, bonus.dtype) == (mx.int32, mx.int32)
    return list(zip(accepted.tolist(), bonus.tolist(), strict=True))


@st.composite
def blocks(draw: st.DrawFn) -> tuple[list[list[int]], list[list[int]]]:
    """[B, W-1] proposals and [B, W] choices, B and W from 1."""
    rows, count = draw(st.integers(1, 5)), draw(st.integers(0, 7))
    proposals = [draw(st.lists(FEW_IDS, min_size=count, max_size=count)) for _ in range(rows)]
    choices = [draw(st.lists(FEW_IDS, min_size=count + 1, max_size=count + 1)) for _ in range(rows)]
    return proposals, choices


@given(blocks())
def test_every_row_is_walked_as_a_plain_loop_would(block: tuple[list[list[int]], list[list[int]]]) -> None:
    proposals, choices = block
    want = [plain_walk(mine, theirs) for mine, theirs in zip(proposals, choices, strict=True)]
    assert walked(proposals, choices) == want


@given(st.lists(FEW_IDS, min_size=1, max_size=7), st.integers(0, 7))
def test_exactly_the_leading_agreements_count(choices: list[int], wrong_at: int) -> None:
    proposals = choices[:-1]
    want = min(wrong_at, len(proposals))
    if wrong_at < len(proposals):
        proposals[wrong_at] += 3
    assert walked([proposals], [choices]) == [(want, choices[want])]


def test_what_follows_the_first_miss_does_not_count_though_it_agrees() -> None:
    assert walked([[5, 6, 7, 8]], [[5, 9, 7, 8, 1]]) == [(1, 9)]


def test_without_proposals_the_targets_choice_is_the_bonus() -> None:
    assert walked([[], []], [[7], [8]]) == [(0, 7), (0, 8)]


def test_rows_end_where_each_of_them_misses() -> None:
    proposals = [[1, 2, 3], [1, 2, 3], [9, 2, 3], [1, 2, 9]]
    choices = [[1, 2, 3, 4], [1, 9, 3, 4], [1, 2, 3, 4], [1, 2, 3, 4]]
    assert walked(proposals, choices) == [(3, 4), (1, 9), (0, 1), (2, 3)]


@pytest.mark.parametrize("absent", [-1, 97, 2**31 - 1, -(2**31)])
@pytest.mark.parametrize("dtype", [mx.uint32, mx.int32, mx.int64])
def test_an_id_outside_the_vocabulary_never_matches(absent: int, dtype: mx.Dtype) -> None:
    proposals = mx.array([[absent, absent]], dtype=mx.int32)
    accepted, bonus = walk(proposals, mx.array([[96, 0, 5]], dtype=dtype))
    assert (accepted.tolist(), bonus.tolist()) == ([0], [96])


@pytest.mark.parametrize(
    ("proposals", "choices"), [((2, 3), (2, 3)), ((2, 3), (2, 5)), ((2, 3), (1, 4)), ((1, 0), (1, 2))]
)
def test_shapes_that_do_not_fit_are_refused_with_both_of_them(
    proposals: tuple[int, int], choices: tuple[int, int]
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        walk(mx.zeros(proposals, mx.int32), mx.zeros(choices, mx.uint32))
    assert str(proposals) in str(caught.value)
    assert str(choices) in str(caught.value)


def test_walking_reads_nothing_on_the_host() -> None:
    proposals, choices = mx.array([[5, 7, 9]]), mx.array([[5, 8, 9, 1]])
    with count_host_reads() as reads:
        walk(proposals, choices)
    assert reads.count == 0
