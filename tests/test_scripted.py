"""Scripted drafters do what they say, called the way an engine calls them."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest

from mlx_spec.drafters.base import Drafter
from tests.scripted import (
    AlternatingDrafter,
    CyclingDrafter,
    DrafterFault,
    FewerDrafter,
    OutOfRangeDrafter,
    RaisingDrafter,
    RandomDrafter,
    RecordingDrafter,
    RightDrafter,
    Stage,
    TappingDrafter,
    WrongCountDrafter,
    WrongDrafter,
)

VOCAB = 11
PROMPT = [4, 4, 9]
NO_TARGET: Any = None
ORACLE = [(7 * i + i * i // 3) % VOCAB for i in range(60)]


def _leading(proposals: list[int], right: list[int]) -> int:
    """How many leading proposals are right."""
    return next(
        (i for i, (mine, theirs) in enumerate(zip(proposals, right, strict=True)) if mine != theirs), len(right)
    )


def _drive(drafter: Drafter, rounds: int, count: int = 4, hidden: int = 0) -> tuple[list[int], list[list[int]]]:
    """A round engine without a model: accepted counts and proposals of every round."""
    drafter.check(NO_TARGET)
    state = drafter.open(NO_TARGET)

    def tapped(ids: list[int]) -> mx.array | None:
        return mx.zeros((1, len(ids), hidden)) if hidden else None

    state.read_prompt([PROMPT[:2]], tapped(PROMPT[:2]))
    state.read_prompt([PROMPT[2:]], tapped(PROMPT[2:]))
    at, accepted, proposed = 0, [], []
    for _ in range(rounds):
        proposals = state.propose([ORACLE[at]], count).ids
        assert proposals.dtype == mx.int32
        (ids,) = proposals.tolist()
        proposed.append(ids)
        accepted.append(_leading(ids, ORACLE[at + 1 : at + 1 + len(ids)]))
        kept = ORACLE[at : at + 1 + accepted[-1]]
        state.catch_up([kept], tapped(kept))
        at += len(kept)
    state.abort()
    state.abort()
    return accepted, proposed


@pytest.mark.parametrize(
    ("drafter", "accepted"),
    [
        (RightDrafter(ORACLE, VOCAB), [4, 4, 4, 4, 4]),
        (WrongDrafter(ORACLE, VOCAB), [0, 0, 0, 0, 0]),
        (AlternatingDrafter(ORACLE, VOCAB), [4, 0, 4, 0, 4]),
        (CyclingDrafter(ORACLE, VOCAB, [0, 2, 9]), [0, 2, 4, 0, 2]),
        (CyclingDrafter(ORACLE, VOCAB, [3]), [3, 3, 3, 3, 3]),
        (FewerDrafter(ORACLE, VOCAB), [0, 1, 2, 3, 4]),
    ],
    ids=lambda value: value.name if isinstance(value, Drafter) else "",
)
def test_acceptance_is_as_scripted(drafter: Drafter, accepted: list[int]) -> None:
    for _ in range(2):
        assert _drive(drafter, 5)[0] == accepted, "a second request on the same drafter must start afresh"


def test_wrong_proposals_are_wrong_everywhere() -> None:
    _, proposed = _drive(WrongDrafter(ORACLE, VOCAB), 6)
    for at, ids in enumerate(proposed):
        assert all(mine != theirs for mine, theirs in zip(ids, ORACLE[at + 1 :], strict=False))
        assert all(0 <= token < VOCAB for token in ids)


def test_cycling_is_right_again_after_the_miss() -> None:
    _, (ids,) = _drive(CyclingDrafter(ORACLE, VOCAB, [1]), 1)
    assert ids[0] == ORACLE[1]
    assert ids[1] != ORACLE[2]
    assert ids[2:] == ORACLE[3:5]


def test_random_depends_on_its_seed_alone_and_draws_nothing_from_mlx() -> None:
    key = mx.random.state[0].tolist()
    first = _drive(RandomDrafter(ORACLE, VOCAB, seed=1), 8)
    assert _drive(RandomDrafter(ORACLE, VOCAB, seed=1), 8) == first
    assert _drive(RandomDrafter(ORACLE, VOCAB, seed=2), 8) != first
    assert len(set(first[0])) > 1
    assert mx.random.state[0].tolist() == key


@pytest.mark.parametrize(("stage", "completed"), [("open", 0), ("read_prompt", 0), ("propose", 0), ("catch_up", 1)])
def test_raising_always(stage: Stage, completed: int) -> None:
    recorder = RecordingDrafter(RaisingDrafter(ORACLE, VOCAB, stage))
    with pytest.raises(DrafterFault, match=f"{stage}, call 0"):
        _drive(recorder, 3)
    assert sum(len(log.of("propose")) for log in recorder.logs) == completed + (stage == "propose")


def test_raising_at_one_call_only() -> None:
    drafter = RaisingDrafter(ORACLE, VOCAB, "propose", at=2)
    assert _drive(drafter, 2)[0] == [4, 4]
    state = drafter.open(NO_TARGET)
    state.propose([ORACLE[0]], 2)
    state.propose([ORACLE[0]], 2)
    with pytest.raises(DrafterFault, match="propose, call 2"):
        state.propose([ORACLE[0]], 2)
    assert state.propose([ORACLE[0]], 2).ids.tolist() == [ORACLE[1:3]]


def test_out_of_range_ids_and_right_ones_take_turns() -> None:
    accepted, proposed = _drive(OutOfRangeDrafter(ORACLE, VOCAB), 8)
    assert accepted == [0, 1, 0, 1, 0, 1, 0, 1]
    absent = {token for ids in proposed for token in ids if not 0 <= token < VOCAB}
    assert absent == {-1, VOCAB, VOCAB + 5, 2**31 - 1, -(2**31)}
    assert all(0 <= ids[i] < VOCAB for r, ids in enumerate(proposed) for i in range(1 - r % 2, 4, 2))


@pytest.mark.parametrize(("surplus", "length"), [(1, 5), (3, 7), (-1, 3), (-9, 0)])
def test_wrong_count(surplus: int, length: int) -> None:
    drafter = WrongCountDrafter(ORACLE, VOCAB, surplus)
    state = drafter.open(NO_TARGET)
    proposals = state.propose([ORACLE[0]], 4).ids
    assert proposals.shape == (1, length)
    assert proposals.tolist() == [ORACLE[1 : 1 + length]]
    assert not drafter.may_propose_fewer


def test_beyond_the_oracle_zero_counts_as_right() -> None:
    state = RightDrafter([3, 5], VOCAB).open(NO_TARGET)
    assert state.propose([3], 3).ids.tolist() == [[5, 0, 0]]


def test_rows_of_a_batch_are_scripted_apart() -> None:
    other = [(3 * i + 1) % VOCAB for i in range(20)]
    state = RightDrafter([ORACLE, other], VOCAB).open(NO_TARGET)
    state.read_prompt([PROMPT, PROMPT], None)
    state.catch_up([ORACLE[:3], other[:1]], None)
    assert state.propose([ORACLE[3], other[1]], 2).ids.tolist() == [ORACLE[4:6], other[2:4]]


def test_recording_sees_every_call_and_accepts_an_exact_feed() -> None:
    recorder = RecordingDrafter(CyclingDrafter(ORACLE, VOCAB, [2, 0, 4]))
    accepted, _ = _drive(recorder, 3)
    assert accepted == [2, 0, 4]
    log = recorder.log
    assert [stage for stage, _ in log.calls] == [
        *["read_prompt"] * 2,
        *["propose", "catch_up"] * 3,
        *["abort"] * 2,
    ]
    assert log.of("propose") == [([ORACLE[0]], 4), ([ORACLE[3]], 4), ([ORACLE[4]], 4)]
    assert log.rows("read_prompt", "catch_up") == [PROMPT + ORACLE[:9]]
    assert log.hidden_shapes == [None] * 5
    log.assert_fed_exactly(PROMPT, ORACLE)


@pytest.mark.parametrize(
    ("call", "value", "complaint"),
    [
        (1, [[8]], "read_prompt gave"),
        (2, ([ORACLE[1]], 4), "bonus"),
        (2, ([ORACLE[0]], 0), "asked for 0"),
        (3, [ORACLE[0:2]], "bonus"),
        (3, [[]], "no ids"),
        (3, [ORACLE[1:4]], "catch_up gave"),
    ],
)
def test_recording_notices_a_wrong_feed(call: int, value: Any, complaint: str) -> None:
    recorder = RecordingDrafter(RightDrafter(ORACLE, VOCAB))
    _drive(recorder, 2)
    log = recorder.log
    log.calls[call] = (log.calls[call][0], value)
    with pytest.raises(AssertionError, match=complaint):
        log.assert_fed_exactly(PROMPT, ORACLE)


def test_recording_notices_a_missing_prompt_and_a_late_one() -> None:
    recorder = RecordingDrafter(RightDrafter(ORACLE, VOCAB))
    _drive(recorder, 2)
    log = recorder.log
    late = [*log.calls[:1], *log.calls[2:], log.calls[1]]
    log.calls = log.calls[2:]
    with pytest.raises(AssertionError, match="never called"):
        log.assert_fed_exactly(PROMPT, ORACLE)
    log.calls = late
    with pytest.raises(AssertionError, match="after catch_up"):
        log.assert_fed_exactly(PROMPT, ORACLE)


def test_tapping_keeps_ids_with_their_rows() -> None:
    drafter = TappingDrafter(ORACLE, VOCAB, taps=(0, 2))
    assert drafter.taps == (0, 2)
    assert _drive(drafter, 2, hidden=14)[0] == [4, 4]
    (state,) = drafter.states
    assert state.ids == [PROMPT + ORACLE[:10]]
    assert state.shapes == [(1, 2, 14), (1, 1, 14), (1, 5, 14), (1, 5, 14)]
    assert state.hidden.shape == (1, 13, 14)
    assert len(state.arrays()) == 4


def test_tapping_refuses_missing_or_misshapen_rows() -> None:
    state = TappingDrafter(ORACLE, VOCAB, taps=(1,)).open(NO_TARGET)
    with pytest.raises(AssertionError, match="no hidden states"):
        state.read_prompt([PROMPT], None)
    with pytest.raises(AssertionError, match=r"\(1, 2, 8\) for ids \[3\]"):
        state.read_prompt([PROMPT], mx.zeros((1, 2, 8)))
