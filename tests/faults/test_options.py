"""An option that is not what it looks like is refused by its name before anything runs, whichever function takes it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlx_spec import (
    SpeculativeConfig,
    certify,
    commandline,
    generate,
    generate_step,
    load,
    load_drafter,
    speculative_generate_step,
    split_mtp,
    stream_generate,
)
from mlx_spec.drafters import CallableDrafter, NgramDrafter
from mlx_spec.drafters import __main__ as drafters_command
from mlx_spec.drafters.quantization import wanted_format
from mlx_spec.drafters.standalone import StandaloneDrafter
from mlx_spec.errors import InvalidRequest, MlxSpecError
from mlx_spec.split_mtp import split
from tests.checkpoints import ascii_tokenizer, tiny_model, write_target
from tests.commandlines import run
from tests.drafters import eagle3_files
from tests.oracle import rng_key
from tests.tiny import MIXES, PROMPT

pytestmark = pytest.mark.faults

MODEL = tiny_model(num_hidden_layers=2)

STEP_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "generate_step": lambda **keywords: list(generate_step(mx.array(PROMPT), MODEL, **keywords)),
    "speculative_generate_step": lambda **keywords: list(
        speculative_generate_step(mx.array(PROMPT), MODEL, keywords.pop("draft_model", NgramDrafter()), **keywords)
    ),
    "stream_generate": lambda **keywords: list(stream_generate(MODEL, ascii_tokenizer(), "sea", **keywords)),
    "generate": lambda **keywords: generate(MODEL, ascii_tokenizer(), "sea", **keywords),
}

NO_NUMBERS = (2.5, 3.0, True, "3", [3], float("nan"))
WHOLE = ("max_tokens", "max_kv_size", "prefill_step_size", "kv_bits", "kv_group_size", "quantized_kv_start")
WIDTHS = ("draft_block_size", "num_draft_tokens")


def refusal(call: Callable[..., Any], **keywords: Any) -> str:
    """The one line that a call is refused with; neither the random state nor anything else was touched."""
    before = rng_key()
    with pytest.raises(MlxSpecError) as caught:
        call(**keywords)
    assert rng_key() == before
    assert "\n" not in str(caught.value)
    assert "_Options" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("function", STEP_FUNCTIONS)
@pytest.mark.parametrize("name", [*WHOLE, *WIDTHS])
def test_a_number_of_tokens_is_a_whole_number_and_nothing_that_passes_for_one(name: str, function: str) -> None:
    for value in NO_NUMBERS:
        said = refusal(STEP_FUNCTIONS[function], draft_model=NgramDrafter(), **{name: value})
        assert name in said
        assert f"got {value!r}" in said


@pytest.mark.parametrize(
    ("name", "low"),
    [("max_tokens", -2), ("max_kv_size", 0), ("prefill_step_size", 0), ("kv_bits", 1), ("quantized_kv_start", -1)],
)
def test_a_number_out_of_range_is_refused_with_what_was_wanted(name: str, low: int) -> None:
    said = refusal(STEP_FUNCTIONS["generate_step"], **{name: low})
    assert name in said
    assert f"got {low}" in said


@pytest.mark.parametrize("name", ["max_tokens", "prefill_step_size", "kv_group_size", "quantized_kv_start", "verify"])
def test_none_is_refused_where_mlx_lm_has_a_number(name: str) -> None:
    assert "got None" in refusal(STEP_FUNCTIONS["generate_step"], **{name: None})


@pytest.mark.parametrize(
    "name",
    [
        "sampler logits_processors max_kv_size prompt_cache kv_bits prompt_progress_callback input_embeddings",
        "draft_model draft_kind draft_block_size num_draft_tokens speculative statistics",
    ],
    ids=["mlx_lm", "ours"],
)
def test_none_means_left_out_where_mlx_lm_takes_it(name: str) -> None:
    keywords = dict.fromkeys(name.split())
    assert len(list(generate_step(mx.array(PROMPT), MODEL, max_tokens=2, **keywords))) == 2


def test_numpys_whole_numbers_are_whole_numbers() -> None:
    tokens = generate_step(mx.array(PROMPT), MODEL, max_tokens=np.int64(3), prefill_step_size=np.int32(2))
    assert len(list(tokens)) == 3


WRONG_THINGS: dict[str, Any] = {
    "sampler": "greedy",
    "logits_processors": [3],
    "prompt_cache": "cache",
    "prompt_progress_callback": 3,
    "draft_kind": 3,
    "verify": True,
    "speculative": {"speculative_method": "eagle"},
    "statistics": {},
    "stream": "gpu",
    "eos_token_ids": "2",
}


@pytest.mark.parametrize("name", WRONG_THINGS)
def test_a_thing_of_another_kind_is_refused_by_the_options_name(name: str) -> None:
    said = refusal(STEP_FUNCTIONS["generate_step"], **{name: WRONG_THINGS[name]})
    assert said.startswith(f"{name} ")
    assert "got " in said


@pytest.mark.parametrize("given", [[2.5], [True], ["2"], [None], 2, None, [-1]], ids=str)
@pytest.mark.parametrize("function", ["generate_step", "stream_generate"])
def test_ids_that_end_the_text_are_whole_numbers(function: str, given: Any) -> None:
    assert refusal(STEP_FUNCTIONS[function], eos_token_ids=given).startswith("eos_token_ids ")


@pytest.mark.parametrize("given", [None, 3, ["a", 3], [None], "", ["a", ""], b"END", [b"END"]], ids=repr)
@pytest.mark.parametrize("function", ["stream_generate", "generate"])
def test_what_is_no_stop_string_is_refused(function: str, given: Any) -> None:
    assert refusal(STEP_FUNCTIONS[function], stop=given).startswith("stop ")


def test_one_stop_string_may_stand_by_itself() -> None:
    whole = generate(MODEL, ascii_tokenizer(), "sea", max_tokens=20)
    stop = whole[7:9]
    want = generate(MODEL, ascii_tokenizer(), "sea", max_tokens=20, stop=[stop])
    assert want != whole
    for given in (stop, (stop,), iter([stop])):
        assert generate(MODEL, ascii_tokenizer(), "sea", max_tokens=20, stop=given) == want


MISTYPED = {
    "max_token": "max_tokens",
    "draft_block": "draft_block_size",
    "promt_cache": "prompt_cache",
    "eos_tokens_ids": "eos_token_ids",
    "num_drafts_tokens": "num_draft_tokens",
}


@pytest.mark.parametrize("wrong", MISTYPED)
@pytest.mark.parametrize("function", STEP_FUNCTIONS)
def test_a_mistyped_keyword_names_the_nearest_right_one(function: str, wrong: str) -> None:
    said = refusal(STEP_FUNCTIONS[function], **{wrong: 3})
    assert f"{function}() has no keyword {wrong!r}" in said
    assert repr(MISTYPED[wrong]) in said
    with pytest.raises(TypeError):
        STEP_FUNCTIONS[function](**{wrong: 3})


def test_a_keyword_like_no_other_lists_those_there_are() -> None:
    said = refusal(STEP_FUNCTIONS["generate_step"], temperature_of_the_sea=3)
    assert "'temperature_of_the_sea'" in said
    assert "prompt_cache" in said


@pytest.mark.parametrize(("mix", "size"), [("dense", "10"), ("mla_moe", "24"), ("hybrid", "16")])
def test_groups_that_do_not_divide_the_head_size_are_refused_before_any_step(mix: str, size: str) -> None:
    model, cache = MIXES[mix].model(), MIXES[mix].new_cache()
    for keywords in ({"prompt_cache": cache}, {"prompt_cache": cache, "draft_model": "ngram"}, {}):
        said = refusal(lambda **more: generate_step(mx.array(PROMPT), model, kv_bits=8, **more), **keywords)
        assert "kv_group_size=64" in said
        assert size in said
    assert all(leaf.empty() for leaf in cache)


def test_groups_that_divide_the_head_size_are_not_refused() -> None:
    mix = MIXES["quantized_from_0"]
    kept = list(generate_step(mx.array(PROMPT), mix.model(), max_tokens=5, **mix.kv))
    assert [token for token, _ in kept] == list(mix.oracle().ids[:5])


# What loads, and what proposes

FLAT = eagle3_files.FLAT
LOADS: dict[str, Callable[..., Any]] = {
    "load": lambda **given: load(given.pop("path_or_id", FLAT), **given),
    "load_drafter": lambda **given: load_drafter(given.pop("path_or_id", FLAT), given.pop("target", MODEL), **given),
    "split": lambda **given: split(given.pop("source", FLAT), given.pop("out", "/no/such/place"), **given),
    "NgramDrafter": NgramDrafter,
    "CallableDrafter": lambda **given: CallableDrafter(given.pop("fn", lambda ids, count: []), **given),
    "StandaloneDrafter": lambda **given: StandaloneDrafter(**given),
    "from_yaml": lambda **given: SpeculativeConfig.from_yaml(**given),
}
OF_ANOTHER_KIND: list[tuple[str, str, Any]] = [
    ("load", "path_or_id", 3),
    ("load", "path_or_id", None),
    ("load", "tokenizer_config", "x"),
    ("load", "model_config", [1]),
    ("load", "adapter_path", 3),
    ("load", "revision", 3),
    ("load", "lazy", "no"),
    ("load", "check_weights", 1),
    ("load", "progress", "bar"),
    ("load_drafter", "path_or_id", None),
    ("load_drafter", "target", (MODEL, None)),
    ("load_drafter", "target", "path"),
    ("load_drafter", "kind", 3),
    ("load_drafter", "taps", 3),
    ("load_drafter", "taps", "1,2"),
    ("load_drafter", "taps", [1.5, 2, 3]),
    ("load_drafter", "taps", [True, 2, 3]),
    ("load_drafter", "quantize", 2.5),
    ("load_drafter", "quantize", True),
    ("load_drafter", "quantize", [4, 32]),
    ("load_drafter", "quantize", "mxfp5"),
    ("load_drafter", "quantize", "4,32,1"),
    ("load_drafter", "quantize", {"bit": 4}),
    ("load_drafter", "quantize", {"bits": True, "group_size": 32}),
    ("load_drafter", "quantize", 7),
    ("split", "out", 3),
    ("split", "quantize", 2.5),
    ("NgramDrafter", "max_ngram", "4"),
    ("NgramDrafter", "min_ngram", 1.5),
    ("NgramDrafter", "search_tokens", None),
    ("NgramDrafter", "default_width", True),
    ("CallableDrafter", "fn", 3),
    ("CallableDrafter", "default_width", 2.5),
    ("CallableDrafter", "default_width", 1),
    ("CallableDrafter", "name", 3),
    ("StandaloneDrafter", "model", (MODEL, None)),
    ("from_yaml", "path", 3),
]


@pytest.mark.every_case
@pytest.mark.parametrize(("function", "name", "value"), OF_ANOTHER_KIND)
def test_an_argument_of_another_kind_is_refused_by_its_name(function: str, name: str, value: Any) -> None:
    said = refusal(LOADS[function], **{name: value})
    assert said.startswith((f"{name} is ", f"{name}: "))
    assert "got " in said or " Give " in said


@pytest.mark.every_case
@pytest.mark.parametrize("short", ["mxfp4", "4,32", "4", 4, np.int32(4)], ids=repr)
def test_a_drafter_is_quantized_as_short_as_at_the_command_line(short: Any) -> None:
    group, mode = (32, "mxfp4") if short == "mxfp4" else (32 if short == "4,32" else 64, "affine")
    assert wanted_format(short) == {"group_size": group, "bits": 4, "mode": mode}


def test_the_short_form_reaches_the_drafters_matrices() -> None:
    with pytest.warns(UserWarning, match="not quantized, their rows are no whole groups"):
        drafter = load_drafter(FLAT, target=eagle3_files.target(), quantize="4,32")
    kept = dict(tree_flatten(drafter.network.modules.parameters()))  # type: ignore[attr-defined]
    assert any(name.endswith(".scales") for name in kept)


# Flags

FLAGS = [
    ("--temp", "-1"),
    ("--temp", "nan"),
    ("--top-p", "2"),
    ("--top-p", "-0.1"),
    ("--min-p", "1.5"),
    ("--top-k", "-3"),
    ("--xtc-probability", "1.5"),
    ("--xtc-threshold", "0.7"),
    ("--min-tokens-to-keep", "0"),
    ("--max-tokens", "-7"),
    ("--max-tokens", "0"),
    ("--kv-bits", "7"),
    ("--kv-group-size", "48"),
    ("--prefill-step-size", "0"),
    ("--draft-block-size", "0"),
    ("--verify", "quick"),
    ("--stop", ""),
    ("--seed", "-1"),
    ("--seed", str(2**64)),
    ("--seed", "x"),
    ("--top-k", "2.5"),
    ("--max-tokens", "2.5"),
    ("--temp", "warm"),
]


@pytest.mark.parametrize(("flag", "value"), FLAGS, ids=[f"{flag}={value}" for flag, value in FLAGS])
def test_a_flag_out_of_range_is_one_line_and_nothing_is_loaded(
    flag: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    outcome = run(capsys, "--model", "/no/such/folder", "--draft-model", "ngram", flag, value)
    assert outcome.code == 2
    assert len(outcome.lines) == 1
    assert flag.removeprefix("--").replace("-", "_") in outcome.err.replace("-", "_")
    assert "/no/such/folder" not in outcome.err
    assert "incompatible" not in outcome.err, "the words of a binding"


UNREADABLE = [
    (commandline.main, ["--top-k", "2.5"], "argument --top-k: wanted a whole number, got '2.5'"),
    (commandline.main, ["--temp", "a\nb"], "argument --temp: wanted a number, got 'a\\nb'"),
    (commandline.main, ["--no-such-flag"], "unrecognized arguments: --no-such-flag"),
    (certify.main, ["--widths", "x"], "argument --widths: wanted a whole number, got 'x'"),
    (certify.main, ["--widths", "1"], "a block has at least 2 tokens, got widths [1]"),
    (split_mtp.main, ["a", "b", "--bits", "4.5"], "argument --bits: wanted a whole number, got '4.5'"),
    (split_mtp.main, ["a", "b", "--mode", "int4"], "argument --mode: invalid choice: 'int4'"),
    (split_mtp.main, ["a"], "the following arguments are required: OUT"),
    (drafters_command.main, ["all"], "unrecognized arguments: all"),
]


@pytest.mark.every_case
@pytest.mark.parametrize(("command", "words", "wanted"), UNREADABLE)
def test_a_flag_that_cannot_be_read_is_one_line_in_every_command(
    command: Callable[[list[str]], int], words: list[str], wanted: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        command(words)
    assert ended.value.code == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.startswith(f"error: {wanted}")
    assert told.err.endswith("--help.\n")
    assert told.err.count("\n") == 1


@pytest.mark.slow
def test_groups_that_do_not_divide_are_one_line_at_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    outcome = run(capsys, "--model", write_target(tmp_path), "--kv-bits", "8", "--prompt", "sea")
    assert (outcome.code, len(outcome.lines)) == (2, 1)
    assert "kv_group_size=64" in outcome.err


def test_an_unknown_keyword_is_an_invalid_request_too() -> None:
    with pytest.raises(InvalidRequest):
        generate_step(mx.array(PROMPT), MODEL, max_token=3)
