"""SpeculativeConfig: every check accepts what it should and refuses what it should, with the value in the message."""

from __future__ import annotations

import itertools
import typing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from mlx_spec.config import (
    MAGIC_DRAFT_TOKEN_ID,
    RejectionSamplingStrategy,
    SpeculativeConfig,
    SpeculativeMethod,
    VerifyWidthRange,
    normalize_verify_widths,
)
from mlx_spec.errors import InvalidRequest

METHODS = typing.get_args(SpeculativeMethod)
STRATEGIES = typing.get_args(RejectionSamplingStrategy)


def width_range(start: int, end: int, count: int) -> dict[str, int]:
    return {"batch_start": start, "batch_end": end, "num_tokens": count}


def refusal(**fields: Any) -> str:
    """The message of the error that these fields must cause."""
    with pytest.raises(ValidationError) as caught:
        SpeculativeConfig(**fields)
    return str(caught.value)


def test_the_public_words_are_the_documented_ones() -> None:
    assert METHODS == ("eagle", "mtp", "dflash", "dflash2")
    assert STRATEGIES == ("greedy", "residual", "typical-acceptance", "logit-comparison")
    assert MAGIC_DRAFT_TOKEN_ID == 42


def test_speculation_is_off_by_default() -> None:
    config = SpeculativeConfig()
    assert config.model_dump() == {
        "speculative_method": None,
        "num_speculative_tokens": None,
        "num_speculative_tokens_per_batch_size": None,
        "num_speculative_tokens_mixed_batch": None,
        "rejection_sampling_strategy": None,
        "synthetic_acceptance_rate": None,
        "use_relaxed_acceptance_for_thinking": False,
        "relaxed_topk": 10,
        "relaxed_delta": 0.6,
        "use_greedy_acceptance": False,
        "draft_proposal": "argmax",
    }


@pytest.mark.parametrize("method", METHODS)
def test_known_methods_are_accepted(method: str) -> None:
    assert SpeculativeConfig(speculative_method=method).speculative_method == method


@pytest.mark.parametrize("method", ["standalone", "EAGLE", "", 1])
def test_unknown_methods_are_refused_with_the_known_ones_named(method: Any) -> None:
    message = refusal(speculative_method=method)
    assert all(known in message for known in METHODS)


def test_unknown_fields_are_refused_by_name() -> None:
    assert "num_draft_tokens" in refusal(num_draft_tokens=3)


@pytest.mark.parametrize("method", ["eagle", "mtp"])
def test_sequential_methods_default_to_two_proposals(method: str) -> None:
    assert SpeculativeConfig(speculative_method=method).num_speculative_tokens == 2
    assert SpeculativeConfig(speculative_method=method, num_speculative_tokens=None).num_speculative_tokens == 2
    assert SpeculativeConfig(speculative_method=method, num_speculative_tokens=5).num_speculative_tokens == 5


@pytest.mark.parametrize("method", [None, "dflash", "dflash2"])
def test_other_methods_leave_the_count_unresolved(method: str | None) -> None:
    assert SpeculativeConfig(speculative_method=method).num_speculative_tokens is None
    assert SpeculativeConfig(speculative_method=method, num_speculative_tokens=7).num_speculative_tokens == 7


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("count", [0, -1])
def test_a_method_needs_at_least_one_proposal(method: str, count: int) -> None:
    message = refusal(speculative_method=method, num_speculative_tokens=count)
    assert "num_speculative_tokens must be at least 1" in message
    assert f"got {count}" in message
    assert SpeculativeConfig(speculative_method=method, num_speculative_tokens=1).draft_width == 1


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_speculative_tokens", True),
        ("num_speculative_tokens", 2.0),
        ("num_speculative_tokens", "2"),
        ("num_speculative_tokens_mixed_batch", True),
        ("relaxed_topk", 1.0),
        ("relaxed_delta", "0.5"),
        ("synthetic_acceptance_rate", True),
        ("use_greedy_acceptance", 1),
        ("use_relaxed_acceptance_for_thinking", "yes"),
    ],
)
def test_values_of_a_merely_convertible_type_are_refused(field: str, value: Any) -> None:
    assert field in refusal(**{field: value})


@pytest.mark.parametrize("value", [0, 1, 9])
def test_mixed_batch_accepts_counts(value: int) -> None:
    assert SpeculativeConfig(num_speculative_tokens_mixed_batch=value).num_speculative_tokens_mixed_batch == value


def test_mixed_batch_refuses_a_negative_count() -> None:
    message = refusal(num_speculative_tokens_mixed_batch=-1)
    assert "num_speculative_tokens_mixed_batch" in message
    assert "got -1" in message


@pytest.mark.parametrize("field", ["synthetic_acceptance_rate", "relaxed_delta"])
@pytest.mark.parametrize("value", [0, 0.0, 0.25, 1.0, 1])
def test_shares_inside_the_unit_interval_are_accepted(field: str, value: float) -> None:
    assert getattr(SpeculativeConfig(**{field: value}), field) == value


@pytest.mark.parametrize("field", ["synthetic_acceptance_rate", "relaxed_delta"])
@pytest.mark.parametrize("value", [-0.01, 1.5, float("nan"), float("inf")])
def test_shares_outside_the_unit_interval_are_refused(field: str, value: float) -> None:
    message = refusal(**{field: value})
    assert f"{field} must lie between 0.0 and 1.0, got {value}" in message


def test_topk_is_at_least_one_even_when_relaxed_acceptance_is_off() -> None:
    assert SpeculativeConfig(relaxed_topk=1).relaxed_topk == 1
    assert "relaxed_topk must be at least 1, got 0" in refusal(relaxed_topk=0)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_strategy_is_stored_and_answers_to_its_name_alone(strategy: str) -> None:
    config = SpeculativeConfig(rejection_sampling_strategy=strategy)
    assert config.uses_greedy_rejection() == (strategy == "greedy")
    assert config.uses_typical_acceptance() == (strategy == "typical-acceptance")
    assert config.uses_logit_comparison() == (strategy == "logit-comparison")
    assert config.unbuilt_fields() == ()


def test_an_unknown_strategy_is_refused() -> None:
    assert "typical-acceptance" in refusal(rejection_sampling_strategy="typical")


RULES: dict[str, Any] = {
    "synthetic_acceptance_rate": 0.5,
    "use_relaxed_acceptance_for_thinking": True,
    "use_greedy_acceptance": True,
    "draft_proposal": "sampled",
}
COMPATIBLE = {"synthetic_acceptance_rate", "use_relaxed_acceptance_for_thinking"}


@pytest.mark.parametrize("field", list(RULES))
def test_each_acceptance_rule_is_accepted_alone(field: str) -> None:
    assert getattr(SpeculativeConfig(**{field: RULES[field]}), field) == RULES[field]


@pytest.mark.parametrize("pair", list(itertools.combinations(RULES, 2)))
def test_acceptance_rules_that_contradict_each_other_are_refused(pair: tuple[str, str]) -> None:
    fields = {name: RULES[name] for name in pair}
    if set(pair) == COMPATIBLE:
        assert SpeculativeConfig(**fields).synthetic_acceptance_rate == 0.5
    else:
        message = refusal(**fields)
        assert all(name in message for name in pair)


def test_an_unknown_proposal_rule_is_refused() -> None:
    assert "'argmax' or 'sampled'" in refusal(draft_proposal="greedy")


@pytest.mark.parametrize(
    ("schedule", "fragment"),
    [
        ([], "at least one batch-size range"),
        ([(1, 4)], "triple"),
        ([(1, 4, 3, 2)], "triple"),
        ([(0, 4, 3)], "must be positive"),
        ([(-2, -1, 3)], "must be positive"),
        ([(1, 0, 3)], "must be positive"),
        ([(5, 4, 3)], "must have start <= end"),
        ([(1, 4, -1)], "must be non-negative"),
        ([(1, 16, 3), (16, 64, 1)], "must not overlap"),
        ([(4, 9, 1), (1, 16, 3)], "must not overlap"),
        ([(2, 4, 3)], "must start at batch size 1"),
    ],
)
def test_malformed_schedules_are_refused(schedule: list[tuple[int, ...]], fragment: str) -> None:
    with pytest.raises(ValueError, match=fragment):
        normalize_verify_widths(schedule)


@pytest.mark.parametrize(
    ("ranges", "fragment"),
    [
        ([], "at least one batch-size range"),
        ([width_range(0, 4, 3)], "must be positive"),
        ([width_range(5, 4, 3)], "must have start <= end"),
        ([width_range(1, 4, -1)], "must be non-negative"),
        ([width_range(1, 16, 3), width_range(16, 64, 1)], "must not overlap"),
        ([width_range(2, 4, 3)], "must start at batch size 1"),
        ([{"batch_start": 1, "batch_end": 4}], "num_tokens"),
        ([{**width_range(1, 4, 3), "depth": 3}], "depth"),
        ([width_range(1, True, 3)], "batch_end"),
    ],
)
def test_a_config_refuses_a_malformed_schedule_when_it_is_made(ranges: list[dict[str, int]], fragment: str) -> None:
    assert fragment in refusal(num_speculative_tokens_per_batch_size=ranges)


def test_a_config_keeps_its_schedule_sorted() -> None:
    config = SpeculativeConfig(num_speculative_tokens_per_batch_size=[width_range(17, 64, 0), width_range(1, 9, 3)])
    assert config.num_speculative_tokens_per_batch_size == [
        VerifyWidthRange(batch_start=1, batch_end=9, num_tokens=3),
        VerifyWidthRange(batch_start=17, batch_end=64, num_tokens=0),
    ]
    assert config.verify_width_schedule == [(1, 9, 3), (17, 64, 0)]
    assert SpeculativeConfig().verify_width_schedule is None


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9), st.integers(0, 5)), min_size=1, max_size=6), st.data())
def test_any_order_of_disjoint_ranges_from_one_upwards_normalizes_to_the_same_schedule(
    steps: list[tuple[int, int, int]], data: st.DataObject
) -> None:
    schedule, start = [], 1
    for length, gap, count in steps:
        schedule.append((start, start + length - 1, count))
        start += length + gap
    assert normalize_verify_widths(data.draw(st.permutations(schedule))) == schedule


@pytest.mark.parametrize(
    ("method", "answers"),
    [
        (None, (False, False, False, False)),
        ("eagle", (True, False, False, False)),
        ("mtp", (False, True, False, False)),
        ("dflash", (False, False, True, False)),
        ("dflash2", (False, False, True, True)),
    ],
)
def test_method_questions(method: str | None, answers: tuple[bool, ...]) -> None:
    config = SpeculativeConfig(speculative_method=method)
    assert (config.is_eagle(), config.is_mtp(), config.is_dflash(), config.is_dflash2()) == answers


def test_draft_width_is_an_assertion_until_it_is_resolved() -> None:
    config = SpeculativeConfig(speculative_method="dflash")
    with pytest.raises(AssertionError, match="num_speculative_tokens is not resolved .*'dflash'"):
        _ = config.draft_width
    assert config.model_copy(update={"num_speculative_tokens": 7}).draft_width == 7


@pytest.mark.parametrize("field", list(SpeculativeConfig.model_fields))
def test_no_field_can_be_assigned(field: str) -> None:
    config = SpeculativeConfig(speculative_method="eagle")
    before = config.model_dump()
    with pytest.raises(ValidationError, match="frozen"):
        setattr(config, field, None)
    assert config.model_dump() == before


def test_a_range_of_the_schedule_cannot_be_assigned() -> None:
    entry = VerifyWidthRange(batch_start=1, batch_end=4, num_tokens=3)
    with pytest.raises(ValidationError, match="frozen"):
        entry.num_tokens = 1
    assert entry.as_triple() == (1, 4, 3)


def test_a_copy_leaves_the_original_as_it_was() -> None:
    config = SpeculativeConfig(speculative_method="dflash", relaxed_topk=4)
    copy = config.model_copy(update={"num_speculative_tokens": 7})
    assert (copy.num_speculative_tokens, copy.relaxed_topk) == (7, 4)
    assert config == SpeculativeConfig(speculative_method="dflash", relaxed_topk=4)


UNBUILT: dict[str, Any] = {
    "num_speculative_tokens_per_batch_size": [width_range(1, 4, 3)],
    "num_speculative_tokens_mixed_batch": 0,
    "synthetic_acceptance_rate": 0.0,
    "use_relaxed_acceptance_for_thinking": True,
    "relaxed_topk": 3,
    "relaxed_delta": 0.1,
    "use_greedy_acceptance": True,
    "draft_proposal": "sampled",
}
BUILT: dict[str, Any] = {
    "speculative_method": "dflash",
    "num_speculative_tokens": 3,
    "rejection_sampling_strategy": "residual",
}


def test_every_field_is_either_built_or_reported() -> None:
    assert {*UNBUILT, *BUILT} == set(SpeculativeConfig.model_fields)


@pytest.mark.parametrize("field", list(UNBUILT))
def test_a_set_field_that_is_not_built_is_reported(field: str) -> None:
    assert SpeculativeConfig(**BUILT, **{field: UNBUILT[field]}).unbuilt_fields() == (field,)


def test_defaults_written_out_are_not_reported() -> None:
    assert SpeculativeConfig(**SpeculativeConfig(**BUILT).model_dump()).unbuilt_fields() == ()


def test_unbuilt_fields_come_in_field_order() -> None:
    config = SpeculativeConfig(relaxed_delta=0.1, relaxed_topk=3, num_speculative_tokens_mixed_batch=1)
    assert config.unbuilt_fields() == ("num_speculative_tokens_mixed_batch", "relaxed_topk", "relaxed_delta")


DOCUMENT = """
draft_model: {model_path: some/drafter}
SECTION:
  speculative_method: eagle
  num_speculative_tokens: 3
  num_speculative_tokens_per_batch_size:
    - {batch_start: 17, batch_end: 64, num_tokens: 1}
    - {batch_start: 1, batch_end: 16, num_tokens: 3}
  num_speculative_tokens_mixed_batch: 1
  synthetic_acceptance_rate: null
"""


@pytest.mark.parametrize("section", ["speculative", "speculative_config"])
def test_yaml_reads_the_section_and_leaves_the_others_alone(tmp_path: Path, section: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(DOCUMENT.replace("SECTION", section), encoding="utf-8")
    assert SpeculativeConfig.from_yaml(str(path)) == SpeculativeConfig(
        speculative_method="eagle",
        num_speculative_tokens=3,
        num_speculative_tokens_per_batch_size=[width_range(1, 16, 3), width_range(17, 64, 1)],
        num_speculative_tokens_mixed_batch=1,
    )


@pytest.mark.parametrize(
    ("text", "fragment"),
    [
        ("speculative: {relaxed_topk: [1", "must be YAML"),
        ("- speculative", "got list"),
        ("", "got NoneType"),
        ("{}", "an empty mapping"),
        ("speculative_method: eagle", "got only 'speculative_method'"),
        ("speculative: {}\nspeculative_config: {}", "got both"),
        ("speculative:\nspeculative_method: eagle", "got None"),
        ("speculative: [eagle]", r"got \['eagle'\]"),
    ],
)
def test_yaml_without_one_readable_section_is_refused_with_the_file_named(
    tmp_path: Path, text: str, fragment: str
) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(InvalidRequest, match=fragment) as caught:
        SpeculativeConfig.from_yaml(path)
    assert "run.yaml" in str(caught.value)


def test_yaml_that_is_not_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_bytes(b"\xff\xfe\x00\x81")
    with pytest.raises(InvalidRequest, match="must be YAML in UTF-8"):
        SpeculativeConfig.from_yaml(path)


def test_yaml_runs_the_same_checks(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("speculative: {num_speculative_tokens: yes}", encoding="utf-8")
    with pytest.raises(ValidationError, match="num_speculative_tokens"):
        SpeculativeConfig.from_yaml(path)
    with pytest.raises(FileNotFoundError):
        SpeculativeConfig.from_yaml(tmp_path / "absent.yaml")


def test_an_empty_section_means_the_defaults() -> None:
    assert SpeculativeConfig.from_mapping({"speculative": {}}) == SpeculativeConfig()
