"""Acceptance is the longest prefix of proposals that the target chose itself, and its next own choice after that."""

from __future__ import annotations

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_spec.accept.exact import Exact
from mlx_spec.accept.proposal import Proposal
from mlx_spec.accept.rule import Scored, packed
from mlx_spec.accept.table import RULES, rule_named
from mlx_spec.errors import UnsupportedOption
from tests.host_reads import count_host_reads

FEW_IDS = st.integers(0, 2)
"""So few that long and short agreements are both common."""


def plain_walk(proposals: list[int], choices: list[int]) -> tuple[int, int]:
    accepted = 0
    while accepted < len(proposals) and proposals[accepted] == choices[accepted]:
        accepted += 1
    return accepted, choices[accepted]


def judged(proposals: mx.array, choices: mx.array, faults: mx.array | None = None) -> list[list[int]]:
    rows, width = choices.shape
    clean = mx.zeros((rows, width)) if faults is None else faults
    walked = Exact().walk(Proposal(proposals), Scored(choices, mx.zeros((rows, width, 3)), clean))
    assert (walked.shape, walked.dtype) == ((rows, 1 + 2 * width), mx.int32)
    read: list[list[int]] = walked.tolist()  # type: ignore[assignment]
    return read


def walked(proposals: list[list[int]], choices: list[list[int]]) -> list[tuple[int, int]]:
    rows, count = len(proposals), len(proposals[0])
    given_ids = mx.array(proposals, dtype=mx.int32).reshape(rows, count)
    read = judged(given_ids, mx.array(choices, dtype=mx.uint32))
    # Every position's token is told, whether it is reached or not: the host may cut a round short.
    assert [row[2 + count :] for row in read] == choices
    return [(row[0], row[2 + count + row[0]]) for row in read]


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


@given(blocks())
def test_a_rule_put_together_from_verdicts_walks_alike(block: tuple[list[list[int]], list[list[int]]]) -> None:
    proposals, choices = block
    rows, count = len(proposals), len(proposals[0])
    ids = mx.array(proposals, dtype=mx.int32).reshape(rows, count)
    theirs = mx.array(choices, dtype=mx.uint32)
    scored = Scored(theirs, mx.zeros((rows, count + 1, 3)), mx.zeros((rows, count + 1)))
    assert packed(ids == theirs[:, :-1], scored, theirs).tolist() == judged(ids, theirs)


def test_what_follows_the_first_miss_does_not_count_though_it_agrees() -> None:
    assert walked([[5, 6, 7, 8]], [[5, 9, 7, 8, 1]]) == [(1, 9)]


def test_without_proposals_the_targets_choice_is_the_bonus() -> None:
    assert walked([[], []], [[7], [8]]) == [(0, 7), (0, 8)]


def test_rows_end_where_each_of_them_misses() -> None:
    proposals = [[1, 2, 3], [1, 2, 3], [9, 2, 3], [1, 2, 9]]
    choices = [[1, 2, 3, 4], [1, 9, 3, 4], [1, 2, 3, 4], [1, 2, 3, 4]]
    assert walked(proposals, choices) == [(3, 4), (1, 9), (0, 1), (2, 3)]


def test_positions_at_which_nothing_can_be_chosen_are_told_one_by_one() -> None:
    faults = mx.array([[0.0, mx.nan, 0.0], [mx.nan, 0.0, mx.inf]])
    read = judged(mx.array([[1, 2], [1, 2]]), mx.array([[1, 2, 3], [1, 2, 3]], mx.uint32), faults)
    assert [row[1:4] for row in read] == [[0, 1, 0], [1, 0, 0]]


@pytest.mark.parametrize("absent", [-1, 97, 2**31 - 1, -(2**31)])
@pytest.mark.parametrize("dtype", [mx.uint32, mx.int32, mx.int64])
def test_an_id_outside_the_vocabulary_never_matches(absent: int, dtype: mx.Dtype) -> None:
    read = judged(mx.array([[absent, absent]], dtype=mx.int32), mx.array([[96, 0, 5]], dtype=dtype))
    assert (read[0][0], read[0][4]) == (0, 96)


def test_walking_reads_nothing_on_the_host() -> None:
    scored = Scored(mx.array([[5, 8, 9, 1]], mx.uint32), mx.zeros((1, 4, 3)), mx.zeros((1, 4)))
    with count_host_reads() as reads:
        Exact().walk(Proposal(mx.array([[5, 7, 9]])), scored)
    assert reads.count == 0


def test_rules_are_known_by_name() -> None:
    assert rule_named("exact").token_exact
    assert str(rule_named("exact")) == "target's own choice (token-exact)"
    with pytest.raises(UnsupportedOption, match=f"'lenient'.*{', '.join(sorted(RULES))}"):
        rule_named("lenient")
