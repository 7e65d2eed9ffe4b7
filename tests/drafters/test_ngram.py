"""Prompt lookup against a search of the whole text, and its cost."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_spec.drafters.ngram import NgramDrafter, NgramState
from mlx_spec.errors import InvalidRequest
from tests.host_reads import count_host_reads
from tests.reachable import longest

TARGET: Any = SimpleNamespace(name="any")


def opened(text: list[int], **settings: int) -> NgramState:
    state = NgramDrafter(**settings).open(TARGET)
    state.read_prompt([text], None)
    return state


def looked_up(text: list[int], bonus: int, count: int, drafter: NgramDrafter) -> list[int]:
    """The same by searching the whole text: longest suffix, newest occurrence, repetition past the end."""
    known = [*text, bonus]
    for size in range(drafter.max_ngram, drafter.min_ngram - 1, -1):
        if len(known) < size:
            continue
        suffix = known[-size:]
        oldest = max(size, len(known) - 1 - drafter.search_tokens)
        for source in range(len(known) - 1, oldest - 1, -1):
            if known[source - size : source] == suffix:
                proposed: list[int] = []
                while len(proposed) < count:
                    proposed.append((known + proposed)[source + len(proposed)])
                return proposed
    return []


@given(
    st.lists(st.integers(0, 3), max_size=60),
    st.lists(st.integers(1, 9), max_size=8),
    st.integers(0, 3),
    st.integers(1, 6),
    st.tuples(st.integers(1, 3), st.integers(0, 2), st.integers(1, 20)),
)
def test_it_proposes_what_a_search_of_the_whole_text_finds(
    text: list[int], cuts: list[int], bonus: int, count: int, limits: tuple[int, int, int]
) -> None:
    minimum, more, window = limits
    drafter = NgramDrafter(min_ngram=minimum, max_ngram=minimum + more, search_tokens=minimum + more + window)
    state, rest = drafter.open(TARGET), list(text)
    for cut in cuts:
        state.catch_up([rest[:cut]], None)
        rest = rest[cut:]
    state.read_prompt([rest], None)
    expected = looked_up(text, bonus, count, drafter)
    assert state.propose([bonus], count).ids.tolist() == [expected]
    assert state.propose([bonus], count).ids.tolist() == [expected]


def test_the_longest_suffix_wins_over_a_newer_shorter_one() -> None:
    text = [1, 2, 3, 50, 9, 2, 3, 60, 1, 2]
    assert opened(text).propose([3], 1).ids.tolist() == [[50]]


def test_among_equally_long_suffixes_the_newest_wins() -> None:
    assert opened([7, 8, 50, 7, 8, 60, 7]).propose([8], 1).ids.tolist() == [[60]]


def test_a_repeated_pattern_is_continued_past_the_end_of_the_text() -> None:
    assert opened([5, 6, 7, 5, 6, 7, 5, 6]).propose([7], 7).ids.tolist() == [[5, 6, 7, 5, 6, 7, 5]]
    assert opened([4, 4, 4]).propose([4], 3).ids.tolist() == [[4, 4, 4]]


@pytest.mark.parametrize("text", [[], [1], [1, 2, 3, 4, 5]])
def test_nothing_known_is_no_proposal(text: list[int]) -> None:
    proposals = opened(text).propose([9], 4).ids
    assert proposals.shape == (1, 0)
    assert proposals.dtype == mx.int32


def test_an_occurrence_outside_the_window_is_not_found() -> None:
    text = [1, 2, 77, *range(100, 130), 1]
    assert opened(text, search_tokens=40).propose([2], 1).ids.tolist() == [[77]]
    assert opened(text, search_tokens=20).propose([2], 1).ids.shape == (1, 0)


def test_a_long_text_keeps_a_bounded_index() -> None:
    state = opened([], search_tokens=50, min_ngram=2, max_ngram=4)
    for token in range(2000):
        state.catch_up([[token, token % 7]], None)
    # Its text, and where each n-gram of three sizes was continued.
    assert 50 <= longest(state, list) <= 2 * (50 + 4) + 2
    assert 50 <= longest(state, dict) <= 3 * (50 + 4)


class Token(int):
    """An id that counts how often any of its kind is compared or looked up."""

    touched = 0

    def __eq__(self, other: object) -> bool:
        Token.touched += 1
        return int(self) == other

    def __hash__(self) -> int:
        Token.touched += 1
        return int.__hash__(self)


def test_a_round_touches_only_its_own_tokens() -> None:
    state = opened([Token(index * index % 1009) for index in range(10_000)])
    Token.touched = 0
    state.propose([Token(5)], 4)
    state.catch_up([[Token(5), Token(6), Token(7)]], None)
    assert 0 < Token.touched < 100


def test_rows_with_fewer_proposals_are_filled_with_what_matches_no_token() -> None:
    state = NgramDrafter().open(TARGET)
    state.read_prompt([[1, 2, 3, 1], [4, 5, 6, 7]], None)
    assert state.propose([2, 8], 2).ids.tolist() == [[3, 1], [-1, -1]]


def test_it_reads_nothing_from_the_device() -> None:
    with count_host_reads() as reads:
        state = opened([1, 2, 3, 1])
        state.propose([2], 2)
        state.abort()
        state.catch_up([[2]], None)
    assert reads.count == 0
    assert state.arrays() == []


def test_it_declares_what_it_is_and_fits_any_target() -> None:
    drafter = NgramDrafter(default_width=5)
    drafter.check(TARGET)
    assert (drafter.kind, drafter.name, drafter.default_width, drafter.taps) == ("ngram", "ngram", 5, ())
    assert drafter.may_propose_fewer


@pytest.mark.parametrize(
    "settings",
    [{"min_ngram": 0}, {"min_ngram": 5}, {"max_ngram": 1}, {"search_tokens": 4}, {"default_width": 1}],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, int]) -> None:
    with pytest.raises(InvalidRequest, match="got "):
        NgramDrafter(**settings)
