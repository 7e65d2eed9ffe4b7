"""Statistics add up, are JSON, and tell every fallback once."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_spec.records import STAGES, RoundRecord
from mlx_spec.stats import Statistics


def record(width: int, accepted: int, route: str = "block", **stage_ms: float) -> RoundRecord:
    return RoundRecord(width, width - 1, accepted, route, stage_ms)


def counted(*records: RoundRecord) -> Statistics:
    statistics = Statistics()
    for each in records:
        statistics.count_round(each)
    return statistics


ROUNDS = st.lists(st.integers(1, 9).flatmap(lambda width: st.tuples(st.just(width), st.integers(0, width - 1))))


@given(ROUNDS)
def test_sums_over_depths_are_the_sums_over_rounds(rounds: list[tuple[int, int]]) -> None:
    statistics = counted(*(record(width, accepted) for width, accepted in rounds))
    assert statistics.rounds == len(rounds)
    assert statistics.proposed_tokens == sum(statistics.proposed_by_depth) == sum(width - 1 for width, _ in rounds)
    assert statistics.accepted_tokens == sum(statistics.accepted_by_depth) == sum(accepted for _, accepted in rounds)
    depths = max((width - 1 for width, _ in rounds), default=0)
    assert len(statistics.proposed_by_depth) == len(statistics.accepted_by_depth) == depths
    for depth in range(depths):
        assert statistics.proposed_by_depth[depth] == sum(width - 1 > depth for width, _ in rounds)
        assert statistics.accepted_by_depth[depth] == sum(accepted > depth for _, accepted in rounds)


def test_stage_times_add_up_into_three_sums() -> None:
    spent = {stage: 2.0**index for index, stage in enumerate(STAGES)}
    statistics = counted(record(3, 1, **spent), record(3, 2, **spent))
    assert statistics.stage_ms == {stage: 2 * ms for stage, ms in spent.items()}
    parts = (statistics.draft_ms, statistics.verify_ms, statistics.commit_ms)
    assert sum(parts) == 2 * sum(spent.values())
    assert statistics.draft_ms == 2 * (spent["shift"] + spent["propose"])
    assert statistics.commit_ms == 2 * spent["pack"]


def test_an_unknown_stage_is_an_error_and_no_new_row() -> None:
    with pytest.raises(KeyError):
        counted(record(3, 1, thinking=1.0))


def test_every_verify_route_in_force_is_named_in_order_of_use() -> None:
    statistics = Statistics()
    assert statistics.verify_route == "block"
    for width, route in ((4, "step-through"), (1, "block"), (4, "step-through")):
        statistics.count_round(record(width, 0, route))
    assert statistics.verify_route == "step-through"
    statistics.count_round(record(3, 0, "block"))
    assert statistics.verify_route == "step-through and block"


def test_rates_of_a_run_that_has_not_begun_are_0() -> None:
    statistics = Statistics()
    assert (statistics.tokens_per_round, statistics.tokens_per_second, statistics.decode_ms) == (0.0, 0.0, 0.0)
    statistics.time_token()
    statistics.emitted_tokens += 1
    assert (statistics.tokens_per_second, statistics.decode_ms) == (0.0, 0.0)


def test_speed_is_measured_from_the_first_token_and_the_prompt_up_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 10.0, 13.0, 14.0, 15.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    statistics = Statistics()
    statistics.start(prompt_tokens=7)
    for _ in range(3):
        statistics.time_token()
        statistics.emitted_tokens += 1
    statistics.count_round(record(3, 2))
    assert (statistics.prompt_tokens, statistics.prompt_ms) == (7, 3000.0)
    assert (statistics.decode_ms, statistics.tokens_per_second) == (2000.0, 1.0)
    assert (statistics.emitted_tokens, statistics.tokens_per_round) == (3, 3.0)


def test_a_note_is_told_once_however_often_it_is_given() -> None:
    statistics = Statistics()
    for sentence in ("a ring", "a draft", "a ring"):
        statistics.note(sentence)
    assert statistics.notes == ["a ring", "a draft"]


def test_a_drafters_failures_are_counted_and_the_first_is_told_in_full() -> None:
    statistics = Statistics()
    statistics.drafter_failed(ValueError("no such id"), "its round went on without proposals")
    statistics.drafter_failed(KeyError("something else"), "its round went on without proposals")
    assert statistics.drafter_failures == 2
    assert statistics.notes == ["the drafter failed (ValueError: no such id); its round went on without proposals."]


def test_the_line_is_one_line_whatever_a_drafter_said() -> None:
    statistics = Statistics()
    statistics.drafter_failed(ValueError("shapes differ:\n  (1, 2)\n  (2, 1)\n"), "its round went on without proposals")
    assert "\n" not in str(statistics)
    assert "(1, 2)" in str(statistics)


def test_the_dictionary_is_json_and_holds_what_the_line_says() -> None:
    statistics = counted(record(4, 3, "step-through", pack=1.0), record(4, 0, "step-through"))
    statistics.drafter, statistics.loop, statistics.width_policy = "ngram", "ngram", "fixed 4 (given)"
    statistics.note("a sentence")
    for _ in range(5):
        statistics.time_token()
        statistics.emitted_tokens += 1
    facts: dict[str, Any] = json.loads(json.dumps(statistics.as_dict()))
    assert facts["stage_ms"].keys() == set(STAGES)
    assert (facts["rounds"], facts["proposed_tokens"], facts["accepted_tokens"]) == (2, 6, 3)
    assert (facts["accepted_by_depth"], facts["proposed_by_depth"]) == ([1, 1, 1], [2, 2, 2])
    assert facts["notes"] == ["a sentence"]
    line = str(statistics)
    assert "\n" not in line
    parts = line.split(" | ")
    assert parts[:4] == ["drafter ngram", "loop ngram", "verify step-through", "width fixed 4 (given)"]
    assert parts[4:8] == ["rounds 2", "proposed 6", "accepted 3", "2.50 tokens/round"]
    assert parts[-1] == "a sentence"
    for word in ("draft ", "verify ", "commit ", "tokens/s"):
        assert any(part.startswith(word) or part.endswith(word) for part in parts[8:])


def test_two_runs_share_nothing() -> None:
    first, second = Statistics(), Statistics()
    first.count_round(record(3, 2, pack=4.0))
    first.note("only here")
    assert (second.rounds, second.accepted_by_depth, second.notes, second.commit_ms) == (0, [], [], 0.0)


def test_the_latest_round_can_be_looked_at() -> None:
    statistics = Statistics()
    assert statistics.last_round is None
    latest = record(4, 2)
    statistics.count_round(latest)
    assert statistics.last_round is latest


def test_time_in_which_routes_were_found_is_told_apart_from_decoding() -> None:
    statistics = Statistics()
    statistics.start(3)
    statistics.time_certifying(700.0)
    statistics.time_token()
    assert (statistics.certify_ms, statistics.decode_certify_ms) == (700, 0)
    statistics.emitted_tokens, statistics.decode_ms = 13, 2000.0
    assert statistics.beside_plain(3.0) == "speed: 6.00 tokens/s against 4.00 plainly, 1.50 times as fast"
    statistics.time_certifying(500.0)
    assert (statistics.certify_ms, statistics.decode_certify_ms) == (1200, 500)
    told = statistics.beside_plain(3.0)
    assert told.startswith("speed: 6.00 tokens/s against 4.00 plainly, 1.50 times as fast; 8.00 tokens/s, 2.00 times")
    assert "500 ms" in told
