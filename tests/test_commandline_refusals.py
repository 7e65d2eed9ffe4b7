"""What cannot be served is one clear line on stderr and exit code 2: no traceback, and nothing on stdout."""

from __future__ import annotations

import io
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache, save_prompt_cache

from tests.checkpoints import WIDE, ascii_tokenizer, byte_tokenizer, tiny_model, write_target
from tests.commandlines import Outcome, mlx_lm_text, run
from tests.drafters.eagle3_files import FLAT, write

PROMPT = ("--prompt", "hello", "-m", "8")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds `narrow`, which the EAGLE-3 fixture fits, and `wide`, whose cache may rotate or be quantized."""
    folder = tmp_path_factory.mktemp("targets")
    write_target(folder / "narrow")
    write_target(folder / "wide", **WIDE)
    return folder


@pytest.fixture
def target(folder: Path) -> Path:
    return folder / "narrow"


def refuse(capsys: pytest.CaptureFixture[str], *argv: Any) -> str:
    """The line that explains the refusal."""
    outcome = run(capsys, *argv)
    assert outcome.code == 2, outcome
    assert outcome.out == ""
    assert len(outcome.lines) == 1, outcome.err
    assert outcome.lines[0].startswith("error: ")
    return outcome.lines[0]


def damaged(target: Path, copy: Path, damage: Callable[[Path], None]) -> Path:
    shutil.copytree(target, copy)
    damage(copy)
    return copy


def without_key(key: str) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        del config[key]
        (folder / "config.json").write_text(json.dumps(config))

    return damage


def without_tensor(name: str) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        tensors = mx.load(str(folder / "model.safetensors"))
        del tensors[name]
        mx.eval(list(tensors.values()))
        mx.save_safetensors(str(folder / "model.safetensors"), tensors)

    return damage


def with_file(name: str, content: str) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        (folder / name).write_text(content)

    return damage


# Targets

MISSING_MODELS = ["/no/such/folder", "no-such-folder", "./no/such/folder", "a/b/c"]


@pytest.mark.parametrize("path", MISSING_MODELS)
def test_an_unknown_model_path_is_named(capsys: pytest.CaptureFixture[str], path: str) -> None:
    assert repr(path) in refuse(capsys, "--model", path, *PROMPT)


def test_a_file_and_an_empty_folder_are_no_models(
    capsys: pytest.CaptureFixture[str], target: Path, tmp_path: Path
) -> None:
    assert "is a file" in refuse(capsys, "--model", target / "config.json", *PROMPT)
    assert "holds no config.json" in refuse(capsys, "--model", tmp_path, *PROMPT)


DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "no hidden size": (without_key("hidden_size"), "hidden_size"),
    "no model type": (without_key("model_type"), "model_type"),
    "no vocabulary": (without_key("vocab_size"), "vocab_size"),
    "config is no JSON": (with_file("config.json", "{"), "double quotes"),
    "unknown architecture": (with_file("config.json", '{"model_type": "nonesuch"}'), "nonesuch"),
    "missing tensor": (without_tensor("model.norm.weight"), "model.norm.weight"),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "safetensors"),
    "cut weights": (with_file("model.safetensors", "cut"), "complete safetensors"),
    "no tokenizer": (lambda folder: (folder / "tokenizer.json").unlink(), "tokenizer"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_target_is_refused_with_what_is_wrong(
    capsys: pytest.CaptureFixture[str], target: Path, tmp_path: Path, name: str
) -> None:
    damage, word = DAMAGE[name]
    line = refuse(capsys, "--model", damaged(target, tmp_path / "damaged", damage), *PROMPT)
    assert str(tmp_path / "damaged") in line
    assert word in line.replace(str(tmp_path), "")


# Drafters


@pytest.mark.parametrize(
    ("given", "draft", "words"),
    [
        ("four", FLAT, "got 'four', expected bits per weight"),
        ("4,32,8", FLAT, "got '4,32,8'"),
        ("4,", FLAT, "got '4,'"),
        ("-4", FLAT, "got '-4'"),
        ("", FLAT, "got ''"),
        ("7", FLAT, "'bits': 7"),
        ("0", FLAT, "greater than 0"),
        ("4,48", FLAT, "'group_size': 48"),
        ("4,128", FLAT, "rows that are a multiple of 128"),
        ("4", "ngram", "an n-gram drafter is text alone"),
    ],
)
def test_a_format_that_the_drafter_cannot_have_is_refused(
    capsys: pytest.CaptureFixture[str], target: Path, given: str, draft: str | Path, words: str
) -> None:
    line = refuse(capsys, "--model", target, *PROMPT, "--draft-model", draft, f"--draft-quantize={given}")
    assert words in line


def test_a_format_without_a_drafter_is_refused(capsys: pytest.CaptureFixture[str], target: Path) -> None:
    line = refuse(capsys, "--model", target, *PROMPT, "--draft-quantize", "4")
    assert "--draft-quantize 4 quantizes a drafter: give one with --draft-model" in line


@pytest.mark.parametrize("path", MISSING_MODELS)
def test_an_unknown_drafter_path_is_named(capsys: pytest.CaptureFixture[str], target: Path, path: str) -> None:
    assert repr(path) in refuse(capsys, "--model", target, *PROMPT, "--draft-model", path)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_size": 40}, ("hidden size 32", "has 40")),
        ({"vocab_size": 96 + 1100}, ("vocabulary of 96", f"has {96 + 1100}")),
        ({"num_hidden_layers": 4}, ("layer 4", "layers 0..3")),
    ],
    ids=["hidden_size", "vocabulary", "layers"],
)
def test_a_drafter_for_another_target_is_refused_with_both_values(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, changes: dict[str, int], words: tuple[str, str]
) -> None:
    other = write_target(tmp_path / "other", **changes)
    line = refuse(capsys, "--model", other, *PROMPT, "--draft-model", FLAT)
    for word in words:
        assert word in line


def test_a_drafter_for_a_larger_vocabulary_is_refused(
    capsys: pytest.CaptureFixture[str], target: Path, tmp_path: Path
) -> None:
    table = mx.zeros((2000, 32))
    larger = write(tmp_path / "larger", lambda config: config.update(vocab_size=2000), lambda t: _grow(t, table))
    line = refuse(capsys, "--model", target, *PROMPT, "--draft-model", larger)
    assert "vocabulary of 2000" in line
    assert "has 96" in line


def _grow(tensors: dict[str, mx.array], table: mx.array) -> None:
    for name in ("embed_tokens.weight", "t2d"):
        if name in tensors:
            tensors[name] = table if tensors[name].ndim == 2 else mx.zeros((len(table),), tensors[name].dtype)


def test_a_drafter_with_a_missing_tensor_or_key_is_refused_with_its_name(
    capsys: pytest.CaptureFixture[str], target: Path, tmp_path: Path
) -> None:
    common = ("--model", target, *PROMPT, "--draft-model")
    tensor = write(tmp_path / "tensor", edit_tensors=lambda tensors: tensors.pop("midlayer.hidden_norm.weight"))
    assert "midlayer.hidden_norm.weight" in refuse(capsys, *common, tensor)
    key = write(tmp_path / "key", edit_config=lambda config: config.pop("rms_norm_eps"))
    assert "rms_norm_eps" in refuse(capsys, *common, key)


def test_a_language_model_with_other_tokens_is_refused(
    capsys: pytest.CaptureFixture[str], target: Path, tmp_path: Path
) -> None:
    drafter = write_target(tmp_path, byte_tokenizer(), vocab_size=96)
    line = refuse(capsys, "--model", target, *PROMPT, "--draft-model", drafter)
    assert "split text into different tokens" in line


@pytest.mark.parametrize("drafter", [(), ("--draft-model", "ngram"), ("--draft-model", FLAT)], ids=str)
def test_an_unknown_kind_is_refused_with_the_known_ones(
    capsys: pytest.CaptureFixture[str], target: Path, drafter: tuple[Any, ...]
) -> None:
    line = refuse(capsys, "--model", target, *PROMPT, *drafter, "--draft-kind", "medusa")
    assert "'medusa'" in line
    for kind in ("dflash", "mtp", "eagle3", "ngram"):
        assert kind in line


@pytest.mark.parametrize("kind", ["eagle3", "dflash", "mtp"])
def test_a_kind_that_needs_a_checkpoint_asks_for_one(
    capsys: pytest.CaptureFixture[str], target: Path, kind: str
) -> None:
    line = refuse(capsys, "--model", target, *PROMPT, "--draft-kind", kind)
    assert "draft-model" in line or "draft_model" in line


# Widths and flags that exclude each other

NGRAM = ("--draft-model", "ngram")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ((*NGRAM, "--draft-block-size", "0"), ("width of 0", "1 (plain) to 32")),
        ((*NGRAM, "--draft-block-size", "-1"), ("width of -1",)),
        ((*NGRAM, "--draft-block-size", "33"), ("width of 33", "to 32")),
        ((*NGRAM, "--num-draft-tokens", "-1"), ("width of 0",)),
        ((*NGRAM, "--num-draft-tokens", "32"), ("width of 33",)),
        (("--draft-block-size", "0"), ("width of 0",)),
        ((*NGRAM, "--num-draft-tokens", "3", "--draft-block-size", "4"), ("num_draft_tokens", "draft_block_size")),
        (("--draft-block-size", "4"), ("no drafter",)),
        (("--num-draft-tokens", "3"), ("no drafter",)),
    ],
    ids=str,
)
def test_widths_out_of_range_or_in_conflict_are_refused(
    capsys: pytest.CaptureFixture[str], target: Path, flags: tuple[str, ...], words: tuple[str, ...]
) -> None:
    line = refuse(capsys, "--model", target, *PROMPT, *flags)
    for word in words:
        assert word in line


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        (("--trust-remote-code",), "--trust-remote-code"),
        (("--image", "a.png", "b.png"), "--image"),
        (("--quantize-activations",), "--quantize-activations"),
        (("-qa",), "--quantize-activations"),
    ],
    ids=str,
)
def test_flags_that_are_refused_are_named_before_anything_is_loaded(
    capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], word: str
) -> None:
    assert f"{word} is refused" in refuse(capsys, "--model", "/no/such/folder", *PROMPT, *flags)


def test_a_ring_cannot_be_quantized(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    flags = ("--max-kv-size", "16", "--kv-bits", "8", "--kv-group-size", "32")
    line = refuse(capsys, "--model", folder / "wide", *PROMPT, *flags)
    assert "kv_bits=8" in line
    assert "RotatingKVCache" in line


# Prompts


def test_an_empty_prompt_is_refused(
    capsys: pytest.CaptureFixture[str], target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "the prompt is empty" in refuse(capsys, "--model", target, "--prompt", "")
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    assert "the prompt is empty" in refuse(capsys, "--model", target, "--prompt", "-")


def test_a_prompt_without_a_single_token_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    tokenizer = ascii_tokenizer()
    tokenizer.backend_tokenizer.post_processor = None
    target = write_target(tmp_path / "target", tokenizer)
    assert "the prompt is empty" in refuse(capsys, "--model", target, "--ignore-chat-template", "--prompt", "é")


@pytest.mark.parametrize("template", [(), ("--ignore-chat-template",)], ids=["template", "ignored"])
def test_a_template_config_that_is_no_json_is_refused(
    capsys: pytest.CaptureFixture[str], target: Path, template: tuple[str, ...]
) -> None:
    line = refuse(capsys, "--model", target, *PROMPT, *template, "--chat-template-config", "{extra: 1}")
    assert "--chat-template-config wants a JSON object" in line


@pytest.mark.parametrize("content", ["[1]", "3", '"brief"', "null", "true"])
def test_a_template_config_that_is_no_object_is_refused(
    capsys: pytest.CaptureFixture[str], target: Path, content: str
) -> None:
    line = refuse(capsys, "--model", target, *PROMPT, "--chat-template-config", content)
    assert "--chat-template-config wants a JSON object" in line


def test_a_template_that_refuses_the_messages_is_quoted(
    capsys: pytest.CaptureFixture[str], target: Path, tmp_path: Path
) -> None:
    refusal = with_file("chat_template.jinja", "{{ raise_exception('no system role here') }}")
    line = refuse(capsys, "--model", damaged(target, tmp_path / "strict", refusal), *PROMPT, "--system-prompt", "x")
    assert "no system role here" in line


# Files


@pytest.mark.parametrize("name", ["missing.safetensors", "narrow/config.json", "narrow", "narrow/model.safetensors"])
def test_a_file_that_holds_no_prompt_cache_is_named(
    capsys: pytest.CaptureFixture[str], folder: Path, name: str
) -> None:
    line = refuse(capsys, "--model", folder / "narrow", *PROMPT, "--prompt-cache-file", folder / name)
    assert f"--prompt-cache-file {folder / name}" in line
    assert "mlx_lm cache_prompt" in line


FOREIGN: dict[str, tuple[dict[str, mx.array], dict[str, str]]] = {
    "no metadata": ({"0.0": mx.ones(3)}, {}),
    "metadata of another make": ({"0.0": mx.ones(3)}, {"format": "mlx"}),
    "no list of classes": ({"0.0": mx.ones(3)}, {"0.note": "none"}),
    "an unknown class": ({"0.0": mx.ones(3), "0.1": mx.ones(3)}, {"0.model": "m", "1.0": "NoSuchCache", "2.0": ""}),
    "a class and no state": ({"unrelated": mx.ones(3)}, {"0.model": "tiny", "1.0": "KVCache", "2.0": ""}),
    "metadata that are a list": ({"0.0": mx.ones(3), "0.1": mx.ones(3)}, {"0.0": "m", "1.0": "KVCache", "2.0": ""}),
}


@pytest.mark.parametrize("content", FOREIGN)
def test_a_file_of_tensors_that_is_no_prompt_cache_is_told_apart(
    capsys: pytest.CaptureFixture[str], target: Path, tmp_path: Path, content: str
) -> None:
    file = tmp_path / "cache.safetensors"
    arrays, metadata = FOREIGN[content]
    mx.save_safetensors(str(file), arrays, metadata)
    line = refuse(capsys, "--model", target, *PROMPT, "--prompt-cache-file", file)
    assert f"{file} holds no prompt cache that this mlx-lm can read" in line
    assert "mlx_lm cache_prompt" in line


def test_a_prompt_cache_that_was_cut_short_is_named(
    capsys: pytest.CaptureFixture[str], target: Path, tmp_path: Path
) -> None:
    file = saved_cache(tmp_path / "cache.safetensors", None)
    file.write_bytes(file.read_bytes()[:300])
    assert str(file) in refuse(capsys, "--model", target, *PROMPT, "--prompt-cache-file", file)


@pytest.mark.parametrize("content", ["{oops", "[1]", "", "null"])
def test_a_prompt_cache_with_a_tokenizer_config_that_is_no_object_is_refused(
    capsys: pytest.CaptureFixture[str], target: Path, tmp_path: Path, content: str
) -> None:
    file = saved_cache(tmp_path / "cache.safetensors", target, tokenizer_config=content)
    line = refuse(capsys, "--model", target, *PROMPT, "--prompt-cache-file", file)
    assert f"the tokenizer_config in --prompt-cache-file {file} wants a JSON object" in line
    assert "mlx_lm cache_prompt" in line


def saved_cache(file: Path, model: Path | None, tokenizer_config: str = "{}", **changes: Any) -> Path:
    """A prompt cache as mlx-lm's command saves it, filled by a model with these changes."""
    other = tiny_model(**changes)
    cache = make_prompt_cache(other)
    mx.eval(other(mx.array([[1, 5, 9]]), cache=cache))
    metadata = {} if model is None else {"model": str(model), "tokenizer_config": tokenizer_config}
    save_prompt_cache(str(file), cache, metadata)
    return file


def test_a_prompt_cache_of_another_model_is_refused_by_its_name(
    capsys: pytest.CaptureFixture[str], folder: Path, tmp_path: Path
) -> None:
    file = saved_cache(tmp_path / "cache.safetensors", folder / "wide")
    line = refuse(capsys, "--model", folder / "narrow", *PROMPT, "--prompt-cache-file", file)
    assert str(folder / "narrow") in line
    assert str(folder / "wide") in line


@pytest.mark.parametrize("changes", [{"num_hidden_layers": 3}, {"head_dim": 16}], ids=["layers", "heads"])
def test_a_prompt_cache_of_another_shape_is_refused(
    capsys: pytest.CaptureFixture[str], target: Path, tmp_path: Path, changes: dict[str, int]
) -> None:
    file = saved_cache(tmp_path / "cache.safetensors", None, **changes)
    line = refuse(capsys, "--model", target, *PROMPT, "--prompt-cache-file", file)
    assert "cache" in line or "shape" in line


def test_a_prompt_cache_of_other_bits_is_refused_as_mlx_lm_does(
    capsys: pytest.CaptureFixture[str], folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "cache.safetensors"
    quantized = ("--kv-bits", "8", "--kv-group-size", "32", "--quantized-kv-start", "0")
    flags = ("--model", folder / "wide", "--prompt", "hello", "--prompt-cache-file", file)
    mlx_lm_text(capsys, monkeypatch, *flags, *quantized, command="cache_prompt")
    line = refuse(capsys, *flags, "--kv-bits", "4", "--kv-group-size", "32")
    assert "--kv-bits" in line or "kv_bits" in line


@pytest.mark.parametrize("name", ["missing/stats.json", "", "narrow/config.json/stats.json"])
def test_a_statistics_file_that_cannot_be_written_is_refused_before_the_text(
    capsys: pytest.CaptureFixture[str], folder: Path, name: str
) -> None:
    line = refuse(capsys, "--model", folder / "narrow", *PROMPT, "--stats-json", folder / name)
    assert str(folder / name) in line


# Values


def test_sampling_without_a_seed_cannot_be_checked(capsys: pytest.CaptureFixture[str], target: Path) -> None:
    assert "--seed" in refuse(capsys, "--model", target, *PROMPT, "--check", "--temp", "0.7")


def test_an_unknown_way_to_verify_is_refused(capsys: pytest.CaptureFixture[str], target: Path) -> None:
    line = refuse(capsys, "--model", target, *PROMPT, "--verify", "quickly")
    assert "'quickly'" in line
    assert '"exact" or "fast"' in line


VALUES: dict[tuple[str, ...], str] = {
    ("--max-tokens", "0"): "max_tokens",
    ("--max-tokens", "-2"): "max_tokens",
    ("--prefill-step-size", "0"): "prefill_step_size",
    ("--kv-bits", "7"): "kv_bits",
    ("--kv-bits", "8", "--kv-group-size", "48"): "kv_group_size",
    ("--kv-bits", "8", "--kv-group-size", "64", "--quantized-kv-start", "0"): "64",
    ("--max-kv-size", "0"): "max_kv_size",
    ("--max-kv-size", "-4"): "max_kv_size",
    ("--stop", ""): "stop",
    ("--extra-eos-token", "no-such-token"): "no-such-token",
    ("--adapter-path", "/no/such/adapter"): "/no/such/adapter",
    ("--seed", "-1"): "seed",
    ("--seed", str(2**70)): "seed",
    ("--temp", "1", "--min-p", "3"): "min_p",
    ("--temp", "1", "--min-p", "0.1", "--min-tokens-to-keep", "0"): "min_tokens_to_keep",
    ("--temp", "1", "--top-k", "5000"): "top_k",
    ("--temp", "1", "--xtc-probability", "3"): "probability",
    ("--temp", "1", "--xtc-probability", "0.1", "--xtc-threshold", "3"): "threshold",
}


@pytest.mark.parametrize("flags", VALUES, ids=" ".join)
def test_a_value_out_of_range_is_refused_by_name(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, folder: Path, flags: tuple[str, ...]
) -> None:
    """Where mlx-lm itself would end in a traceback too."""
    tokenizer = ascii_tokenizer()
    tokenizer.unk_token = None
    target = write_target(tmp_path / "target", tokenizer, **WIDE)
    line = refuse(capsys, "--model", target, "--prompt", "hello", "--max-tokens", "8", *flags)
    assert VALUES[flags].replace("_", "-") in line.replace("_", "-")


# argparse


@pytest.mark.parametrize(
    "argv",
    [
        ("--no-such-flag",),
        ("--max-tokens", "many"),
        ("--draft-block-size", "2.5"),
        ("--temp", "warm"),
        ("--model",),
        ("--stop",),
        ("stray",),
    ],
    ids=" ".join,
)
def test_arguments_that_cannot_be_parsed_are_refused_in_one_line(
    capsys: pytest.CaptureFixture[str], argv: tuple[str, ...]
) -> None:
    outcome: Outcome = run(capsys, *argv)
    assert (outcome.code, outcome.out, len(outcome.lines)) == (2, "", 1)
    assert outcome.err.startswith("error: ")
    assert outcome.err.endswith("See python -m mlx_spec.generate --help.\n")


def test_help_is_given_on_stdout_with_code_0(capsys: pytest.CaptureFixture[str]) -> None:
    outcome = run(capsys, "--help")
    assert (outcome.code, outcome.err) == (0, "")
    assert "--draft-block-size" in outcome.out
