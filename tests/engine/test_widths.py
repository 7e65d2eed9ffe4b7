"""Whatever widths a policy answers, in whatever order, text, cache and random state are those of the one-token loop."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_spec.engine.open_round import OpenRound
from mlx_spec.engine.round import Engine, Start
from mlx_spec.engine.row import Row
from mlx_spec.model.target import Target
from mlx_spec.records import STAGES
from mlx_spec.schedule.policy import MAX_WIDTH
from tests.engine.rows import Widths, engine_of, make_row, pull
from tests.oracle import assert_same_output, rng_key
from tests.rounds.runs import CHOICES, DRAFTERS, SEED, SPARE, record_stock, stock
from tests.same_cache import assert_same_cache
from tests.scripted import RecordingDrafter, RightDrafter
from tests.tiny import LONG, MIXES, PROMPT, VOCAB

WIDTHS = st.lists(st.sampled_from([1, 1, 1, 2, 3, 5, 8]), min_size=1, max_size=9)


def check(mix: str, choice: str, drafter: str, widths: list[int], emitted: int = LONG) -> Widths:
    run, policy = stock(mix, choice), Widths(widths)
    made = DRAFTERS[drafter](mix, run.ids, mx.float32)
    mx.random.seed(SEED)
    row = make_row(mix, PROMPT, made, policy, emitted, CHOICES[choice]())
    assert_same_output(pull(mix, row), run, emitted)
    if emitted == LONG:
        assert_same_cache(row.caches, run.cache_after(emitted))
    assert rng_key() == run.rng[emitted]
    assert row.statistics.emitted_tokens == emitted
    # Every round was asked for once and told once, in order. The last one is not followed by another.
    assert len(policy.told) <= len(policy.asked) + 1 <= len(policy.told) + 2
    assert [record.width for record in policy.told[1:]] == [
        min(asked, 1 + record.proposed) for asked, record in zip(policy.asked, policy.told[1:], strict=False)
    ]
    return policy


@pytest.mark.part(4)
@pytest.mark.parametrize("mix", ["dense", "sliding", "hybrid", "mamba2"])
@pytest.mark.parametrize("choice", ["greedy", "top_p", "penalties"])
@pytest.mark.parametrize("drafter", ["cycling", "eagle3", "standalone", "ngram"])
def test_widths_that_come_and_go(mix: str, choice: str, drafter: str) -> None:
    check(mix, choice, drafter, [1, 1, 4, 1, 8, 2, 1, 1, 1, 3])


@given(WIDTHS, st.sampled_from(["cycling", "alternating", "eagle3"]), st.sampled_from(["greedy", "top_p"]))
def test_any_widths(widths: list[int], drafter: str, choice: str) -> None:
    check("dense", choice, drafter, widths, emitted=17)


def test_a_policy_that_asks_for_the_widest_is_cut_by_the_budget() -> None:
    policy = check("dense", "greedy", "right", [MAX_WIDTH], emitted=5)
    assert policy.asked == [4]


class Watched(Engine):
    """Writes down in which order rounds are dispatched and read."""

    def __init__(self, inner: Engine, target: Any) -> None:
        super().__init__(target, inner.stream)
        self.calls: list[str] = []

    def dispatch(self, starts: Any) -> list[OpenRound]:
        opened = super().dispatch(starts)
        self.calls.append(f"dispatch {opened[0].width}")
        return opened

    def take(self, row: Row, current: OpenRound) -> Any:
        if len(current.ids) == 1:
            self.calls.append(f"read {current.width}")
        return super().take(row, current)

    def advance(self, *args: Any) -> Start | None:
        self.calls.append("advance")
        return super().advance(*args)


def test_parked_it_is_pipelined_as_plain_decoding_is_and_can_be_left_again() -> None:
    run = stock("dense", "greedy")
    row = make_row("dense", PROMPT, RightDrafter(run.ids, VOCAB), Widths([1, 1, 3, 1, 1, 1]), 9)
    engine = Watched(engine_of("dense"), Target(MIXES["dense"].model()))
    assert_same_output(pull("dense", row, engine), run, 9)
    assert engine.calls[:15] == [
        "dispatch 1",  # the prompt
        *("dispatch 1", "read 1"),  # parked: dispatched before what came before is read
        *("dispatch 1", "read 1"),
        *("read 1", "advance", "dispatch 3"),  # a proposal needs the token
        *("read 3", "advance", "dispatch 1"),
        *("dispatch 1", "read 1"),
        *("dispatch 1", "read 1"),
    ]


@pytest.mark.parametrize("parked", [3, 64, 150])
def test_a_drafter_that_was_parked_has_seen_every_token_once_it_is_asked(parked: int) -> None:
    """At most 64 are kept from it, and it reads them in one call."""
    emitted = parked + 12
    run = record_long(emitted + SPARE)
    log_drafter = RecordingDrafter(RightDrafter(run.ids, VOCAB))
    row = make_row("dense", PROMPT, log_drafter, Widths([1] * parked + [4] * 4), emitted)
    assert_same_output(pull("dense", row), run, emitted)
    log = log_drafter.log
    log.assert_fed_exactly(PROMPT, run.ids)
    shown = [len(rows[0]) for rows in log.of("catch_up")]
    assert max(shown) <= 64 + 4
    assert len(shown) <= 5 + parked // 64


def record_long(emitted: int) -> Any:
    return record_stock(MIXES["dense"], emitted, {emitted})


def test_a_record_has_every_stage_in_the_order_of_the_source_documents() -> None:
    policy = check("dense", "greedy", "cycling", [4], emitted=12)
    for record in policy.told:
        assert tuple(record.stage_ms) == STAGES == ("merge", "verify", "mask", "accept", "shift", "propose", "pack")
        assert all(spent_ms >= 0 for spent_ms in record.stage_ms.values())
    drafted = [record for record in policy.told[1:-1] if record.proposed]
    assert all(record.stage_ms[stage] > 0 for record in drafted for stage in STAGES)
