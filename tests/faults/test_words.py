"""What is in force, borrowed, ignored or left undone is said, and what is said is so."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import mlx.core as mx
import pytest
from transformers import PreTrainedTokenizerFast

import mlx_spec
from mlx_spec import RejectionSamplingStrategy, SpeculativeConfig, Statistics, generate_step
from mlx_spec.errors import CheckpointError, IncompatiblePair, InvalidRequest
from mlx_spec.pairing import load, load_drafter
from mlx_spec.verify.routes import STEP_THROUGH
from tests.checkpoints import ascii_tokenizer, tiny_model, write_target
from tests.commandlines import run
from tests.drafters import block_files, eagle3_files
from tests.drafters.eagle3_made import made_target, write_made
from tests.oracle import run_stock
from tests.scripted import CyclingDrafter
from tests.tiny import MIXES, PROMPT, VOCAB

pytestmark = pytest.mark.faults

DENSE = MIXES["dense"]


def ran(model: Any = None, prompt: Any = PROMPT, **keywords: Any) -> Statistics:
    """The statistics of a short run, which looks for no route unless it is told to."""
    statistics = Statistics()
    keywords.setdefault("verify", "fast")
    model = DENSE.model() if model is None else model
    list(generate_step(mx.array(prompt), model, max_tokens=keywords.pop("count", 6), statistics=statistics, **keywords))
    return statistics


# SpeculativeConfig


@pytest.mark.parametrize("strategy", get_args(RejectionSamplingStrategy))
def test_a_rejection_strategy_is_said_to_have_no_effect(strategy: Any) -> None:
    config = SpeculativeConfig(speculative_method="eagle", rejection_sampling_strategy=strategy)
    statistics = ran(eagle3_files.target().model, draft_model=eagle3_files.drafter(), speculative=config)
    assert any(strategy in note and "no effect" in note for note in statistics.notes)
    plain = ran(speculative=SpeculativeConfig(rejection_sampling_strategy=strategy))
    assert any("no effect" in note for note in plain.notes)


@pytest.mark.parametrize("count", [0, -3])
@pytest.mark.parametrize("method", [None, "eagle", "mtp", "dflash", "dflash2"])
def test_fewer_than_one_proposal_is_refused_with_and_without_a_method(method: Any, count: int) -> None:
    with pytest.raises(ValueError, match="num_speculative_tokens must be at least 1"):
        SpeculativeConfig(speculative_method=method, num_speculative_tokens=count)


@pytest.mark.parametrize(
    ("name", "wrong", "right"),
    [("dflash", "dflash2", "dflash"), ("dflash2", "dflash", "dflash2"), ("dspark", "dflash2", "dflash")],
)
def test_the_method_is_the_checkpoints(name: str, wrong: Any, right: Any) -> None:
    model, drafter = block_files.target().model, block_files.drafter(name)
    config = SpeculativeConfig(speculative_method=wrong)
    with pytest.raises(InvalidRequest, match=f"speculative_method='{wrong}'.*'{right}'"):
        generate_step(mx.array([1, 2, 3]), model, draft_model=drafter, speculative=config)
    config = SpeculativeConfig(speculative_method=right)
    assert ran(model, [1, 2, 3], draft_model=drafter, speculative=config, count=3).loop == "dflash"


# Routes and rules


def test_a_plain_block_is_not_called_token_exact() -> None:
    for verify, exact in (("fast", False), ("exact", True)):
        rule = ran(draft_model="ngram", draft_block_size=3, verify=verify).acceptance_rule
        assert ("not token-exact" not in rule) == exact
    assert "(token-exact)" in ran(verify="fast").acceptance_rule


@pytest.mark.parametrize("count", [1, 2, 12])
def test_a_run_that_steps_through_never_says_block(count: int) -> None:
    model = DENSE.model()
    cache = DENSE.new_cache()
    for place, each in enumerate(cache):
        each.__class__ = type("Kept", (type(each),), {})
        cache[place] = each
    statistics = Statistics()
    right = run_stock(model, PROMPT, 16).ids
    steps = generate_step(
        mx.array(PROMPT),
        model,
        draft_model=CyclingDrafter(right, VOCAB, (2,)),
        draft_block_size=3,
        max_tokens=count,
        prompt_cache=cache,
        statistics=statistics,
    )
    said = {statistics.verify_route}
    for _ in steps:
        said.add(statistics.verify_route)
    assert said == {STEP_THROUGH.name}


# What a drafter borrows, or brings and nobody expects


def test_an_eagle3_file_without_embedding_or_head_says_whose_it_takes(tmp_path: Path) -> None:
    def without(name: str) -> Callable[[dict[str, mx.array]], object]:
        return lambda content: content.pop(name, None)

    drafter = eagle3_files.load(eagle3_files.write(tmp_path / "a", edit_tensors=without("embed_tokens.weight")))
    statistics = ran(eagle3_files.target().model, draft_model=drafter)
    borrowed = [note for note in statistics.notes if "takes the target's" in note]
    assert len(borrowed) == 1
    assert "embedding" in borrowed[0]
    table = mx.load(str(eagle3_files.FOLDER / "llama" / "model.safetensors"))["embed_tokens.weight"]
    whole = eagle3_files.load(
        eagle3_files.write(tmp_path / "b", edit_tensors=lambda content: content.update({"embed_tokens.weight": table}))
    )
    notes = ran(eagle3_files.target().model, draft_model=whole).notes
    assert not any("takes the target's embedding" in note for note in notes)


def test_a_latent_draft_that_lists_no_layers_is_refused(tmp_path: Path) -> None:
    target = made_target(True, 8)
    folder = write_made(tmp_path, "latent", lambda content: content.pop("eagle_config"))
    with pytest.raises(CheckpointError, match="does not list the target layers"):
        load_drafter(folder, target)
    assert load_drafter(folder, target, taps=(1, 3, 4)).taps == (1, 3, 4)


def test_a_deepseek_draft_with_a_table_of_its_own_says_so(tmp_path: Path) -> None:
    target = made_target(True, 8)
    rows = target.raw_embed(mx.arange(VOCAB)[None])[0]

    def with_table(content: dict[str, mx.array]) -> None:
        content["embed_tokens.weight"] = rows * 1.5

    folder = write_made(tmp_path / "own", "heads_for_deepseek", lambda content: None, with_table)
    drafter = load_drafter(folder, target)
    assert any("embedding of its own" in sentence for sentence in drafter.remarks)
    statistics = ran(target.model, draft_model=drafter, draft_block_size=2)
    assert any("embedding of its own" in note for note in statistics.notes)
    shared = load_drafter(write_made(tmp_path / "shared", "heads_for_deepseek", lambda content: None), target)
    assert not any("of its own" in sentence for sentence in shared.remarks)


def test_a_block_file_that_names_no_block_wants_a_width_and_guesses_none() -> None:
    with pytest.warns(UserWarning, match="so every run must name a width"):
        drafter = block_files.edited("dflash", lambda content: content.pop("block_size"))
    named = block_files.edited("dflash", lambda content: content.update(runtime_block_size=3, block_size=None))
    for more in ({}, {"speculative": SpeculativeConfig(speculative_method="dflash")}):
        with pytest.raises(InvalidRequest, match="names no block_size.*--draft-block-size.*num_speculative_tokens"):
            generate_step(mx.array([1, 2, 3]), block_files.target().model, draft_model=drafter, **more)
    assert named.default_width == 3


@pytest.mark.slow
@pytest.mark.part(1)
@pytest.mark.parametrize("width", [7, 2, 16, 20])
def test_a_block_file_that_names_no_block_honours_the_width_that_is_named(width: int) -> None:
    with pytest.warns(UserWarning, match="lacks block_size"):
        drafter = block_files.edited("dflash", lambda content: content.pop("block_size"))
    model = block_files.target().model
    for asked in ({"draft_block_size": width}, {"num_draft_tokens": width - 1}):
        statistics = ran(model, [1, 2, 3], draft_model=drafter, count=width + 2, verify="fast", **asked)
        assert statistics.width_policy.startswith(f"fixed {width} ")
        assert len(statistics.proposed_by_depth) == width - 1
    config = SpeculativeConfig(speculative_method="dflash", num_speculative_tokens=width - 1)
    assert ran(model, [1, 2, 3], draft_model=drafter, speculative=config, verify="fast").width_policy.startswith(
        f"fixed {width} "
    )


# Folders and flags


@pytest.mark.parametrize("kind", ["eagle3", "dflash", "dflash2", "gemma4_dspark", "muse_glimmer_assistant"])
def test_loading_a_drafter_as_target_says_that_it_is_a_drafter(kind: str) -> None:
    folder = eagle3_files.FLAT if kind == "eagle3" else block_files.FIXTURES / block_files.FOLDERS[kind]
    with pytest.raises(CheckpointError, match="is a drafter") as caught:
        mlx_spec.load(folder)
    assert "load_drafter" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_matrices_that_are_not_quantized_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target, small = write_target(tmp_path / "target"), write_target(tmp_path / "small", num_hidden_layers=1)
    model, _ = load(target)
    with pytest.warns(UserWarning, match="not quantized, their rows are no whole groups: .*q_proj"):
        load_drafter(small, target=model, quantize={"group_size": 64, "bits": 4})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_drafter(small, target=model, quantize={"group_size": 32, "bits": 4})
    words = ("--model", target, "--draft-model", small, "--draft-quantize", "4,64", "--prompt", "sea", "-m", "2")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        assert "not quantized" in run(capsys, *words).err


@pytest.mark.slow
def test_the_default_template_is_used_where_the_tokenizer_has_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    bare = ascii_tokenizer()
    template, bare.chat_template = bare.chat_template, None
    folder = write_target(tmp_path / "bare", bare)
    words = ("--model", folder, "--prompt", "sea", "--max-tokens", "3", "--verbose", "False")
    refused = run(capsys, *words, "--use-default-chat-template")
    assert (refused.code, len(refused.lines)) == (2, 1)
    assert "--use-default-chat-template" in refused.err
    monkeypatch.setattr(PreTrainedTokenizerFast, "default_chat_template", template, raising=False)
    with_default = run(capsys, *words, "--use-default-chat-template")
    own = run(capsys, "--model", write_target(tmp_path / "own"), *words[2:])
    assert with_default.out == own.out != run(capsys, *words).out
    told = run(capsys, "--model", tmp_path / "own", *words[2:], "--use-default-chat-template")
    assert told.out == own.out
    assert "no effect" in told.err


def test_a_drafter_for_another_target_is_still_refused_first() -> None:
    with pytest.raises(IncompatiblePair):
        generate_step(mx.array([1, 2]), tiny_model(num_hidden_layers=2), draft_model=block_files.drafter("dflash"))
