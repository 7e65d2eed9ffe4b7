"""Kinds of fault in a target's folder: one that hangs, fills the memory, fails beside the point, or is loaded anyway.

Each is refused with one line, at once, wherever a target may be given.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlx_spec import load, load_drafter
from mlx_spec.drafters.checkpoint import JSON_LIMIT_BYTES, JSON_LIMIT_MARKS
from mlx_spec.errors import LONGEST_MESSAGE, CheckpointError, MlxSpecError
from mlx_spec.pairing import load_without_tokenizer, target_without_weights
from mlx_spec.soundness import check_arguments
from tests.checkpoints import ASCII_VOCAB, tiny_model, write_target
from tests.commandlines import run

pytestmark = pytest.mark.faults

Damage = Callable[[Path], object]


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("sound") / "target", num_hidden_layers=2)


@pytest.fixture
def target(sound: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    copy = tmp_path / "target"
    copy.mkdir()
    for path in sound.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    return copy


def refusal(call: Callable[[], object], seconds: float = 5) -> str:
    started = time.monotonic()
    with pytest.raises(MlxSpecError) as refused:
        call()
    assert time.monotonic() - started < seconds
    said = str(refused.value)
    assert "\n" not in said
    assert len(said) <= LONGEST_MESSAGE + 10
    return said


# Settings


def config(**changes: Any) -> Damage:
    def damage(folder: Path) -> None:
        content = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**content, **changes}))

    return damage


def tokenizer(**changes: Any) -> Damage:
    def damage(folder: Path) -> None:
        content = json.loads((folder / "tokenizer_config.json").read_text())
        (folder / "tokenizer_config.json").write_text(json.dumps({**content, **changes}))

    return damage


SETTINGS: dict[str, tuple[Damage, str]] = {
    "no heads": (config(num_attention_heads=0), "num_attention_heads is 0"),
    "no key heads": (config(num_key_value_heads=0, head_dim=None), "mlx-lm cannot load"),
    "heads in words": (config(num_attention_heads="four"), "num_attention_heads is 'four'"),
    "negative size": (config(hidden_size=-32), "hidden_size is -32"),
    "vocabulary beyond an axis": (config(vocab_size=10**12), "vocab_size is 1000000000000"),
    "vocabulary beyond its weights": (config(vocab_size=10**8), "vocab_size 100000000"),
    "vocabulary of one and a half": (config(vocab_size=96.5), "mlx-lm cannot load"),
    "size beyond an axis": (config(intermediate_size=10**15), "intermediate_size is 10"),
    "layers without end": (config(num_hidden_layers=10**5), "num_hidden_layers is 100000"),
    "more layers than tensors": (config(num_hidden_layers=900), "num_hidden_layers is 900"),
    "layers of another name": (config(model_type="gpt2", n_layer=10**6), "n_layer is 1000000"),
    "layers in a text config": (
        config(model_type="qwen3_5", text_config={"num_hidden_layers": 10**5}),
        "num_hidden_layers is 100000",
    ),
    "a pattern without end": (
        config(model_type="nemotron_h", hybrid_override_pattern="M*" * 10**5),
        "hybrid_override_pattern is '200000 entries long'",
    ),
    "kinds of layers without end": (config(layer_types=["full_attention"] * 10**5), "layer_types is"),
    "end in words": (config(eos_token_id="x"), "eos_token_id is 'x'"),
    "end that is an object": (config(eos_token_id={"a": 1}), "eos_token_id is {'a': 1}"),
    "ends of which one is none": (config(eos_token_id=[2, None]), "eos_token_id is [2, None]"),
    "end in words, for generation": (
        lambda folder: (folder / "generation_config.json").write_text('{"eos_token_id": "</s>"}'),
        "eos_token_id is '</s>'",
    ),
    "long model type": (config(model_type="x" * 10**6), "xxx"),
    "long architecture": (config(model_type="q", architectures=["y" * 10**6]), "mlx-lm cannot load"),
    "model type that is no text": (config(model_type=["llama"]), "model_type is ['llama']"),
    "base in words": (config(rope_theta="NaN"), "rope_theta is 'NaN', expected a number"),
    "base that is NaN": (config(rope_theta=float("nan")), "rope_theta is nan, expected a number"),
    "base without end": (config(rope_theta=float("inf")), "rope_theta is inf, expected a number"),
    "base that is null": (config(rope_theta=None), "rope_theta is None, expected a number"),
    "base that is a list": (config(rope_theta=[1]), "rope_theta is [1], expected a number"),
    "base in words, in a text config": (
        config(model_type="qwen3_5", text_config={"rope_parameters": {"rope_theta": "NaN"}}),
        "text_config.rope_parameters.rope_theta is 'NaN', expected a number",
    ),
    "epsilon in words": (config(rms_norm_eps="x"), "rms_norm_eps is 'x', expected a number"),
    "rope factor in words": (config(rope_scaling={"type": "linear", "factor": "x"}), "rope_scaling.factor is 'x'"),
    "rope factor that is NaN": (
        config(rope_scaling={"type": "linear", "factor": float("nan")}),
        "rope_scaling.factor is nan, expected a number",
    ),
    "rope factor of zero": (config(rope_scaling={"type": "linear", "factor": 0}), "rope_scaling.factor is 0, and"),
    "rope that is no object": (config(rope_scaling=[1]), "rope_scaling is [1], expected an object"),
    "window in words": (config(sliding_window="x"), "sliding_window is 'x', expected a number"),
    "window below zero": (config(sliding_window=-3), "sliding_window is -3, expected at least -1"),
    "head below zero": (config(head_dim=-8), "head_dim is -8, expected at least 0"),
    "head of nothing": (
        config(model_type="qwen3", head_dim=0, tie_word_embeddings=True, max_position_embeddings=64, rope_theta=1e4),
        "head_dim is 0, and mlx-lm cannot build it",
    ),
    "rope of no kind": (config(rope_scaling={"rope_type": {"a": []}}), "mlx-lm cannot load"),
    "quantized in words": (config(quantization_config="four bits"), "mlx-lm cannot load"),
    "tool parser of Python's": (tokenizer(tool_parser_type="os"), "tool_parser_type is 'os'"),
    "tool parser elsewhere": (tokenizer(tool_parser_type="..models.llama"), "tool_parser_type is '..models"),
    "tool parser that is a list": (tokenizer(tool_parser_type=["os"]), "tool_parser_type is ['os']"),
    "odd template type": (tokenizer(chat_template_type="sys"), "chat_template_type is 'sys'"),
    "template type that is no text": (tokenizer(chat_template_type={"a": 1}), "chat_template_type is {'a': 1}"),
}


@pytest.mark.every_case
@pytest.mark.parametrize("name", SETTINGS)
def test_a_target_whose_settings_cannot_be_is_refused_with_the_setting(target: Path, name: str) -> None:
    damage, words = SETTINGS[name]
    damage(target)
    assert words in refusal(lambda: load(target))


RUN_BY_MLX_LM: dict[str, Damage] = {
    "no window": config(sliding_window=-1),
    "no head size": config(head_dim=0),
    "what is not read": config(some_eps=None, adapter_scale="x", time_step_limit=[0.0, float("inf")]),
    "rope that is null": config(rope_scaling=None, sliding_window=None),
    "whole numbers as floats": config(rope_theta=10000, max_position_embeddings=64.0),
}


@pytest.mark.every_case
@pytest.mark.parametrize("name", RUN_BY_MLX_LM)
def test_a_setting_that_mlx_lm_runs_with_is_not_refused(target: Path, name: str) -> None:
    RUN_BY_MLX_LM[name](target)
    assert load_without_tokenizer(target)(mx.array([[1, 2]])).shape == (1, 2, ASCII_VOCAB)


def test_numbers_that_differ_from_layer_to_layer_are_numbers() -> None:
    @dataclass
    class Args:
        num_hidden_layers: int = 2
        rope_theta: float = 10000.0
        intermediate_size: int | None = None

    check_arguments(Args(rope_theta=[1e4, 2e4], intermediate_size=[8, 9]), Path())  # type: ignore[arg-type]
    for wrong in ({"rope_theta": [1e4]}, {"rope_theta": [1e4, "x"]}, {"intermediate_size": [8, -9]}):
        assert next(iter(wrong)) in refusal(lambda wrong=wrong: check_arguments(Args(**wrong), Path()))


def test_settings_given_in_the_call_are_looked_at_too(target: Path) -> None:
    assert "eos_token_id is 'x'" in refusal(lambda: load(target, model_config={"eos_token_id": "x"}))
    assert "num_hidden_layers is 100000" in refusal(lambda: load(target, model_config={"num_hidden_layers": 10**5}))


def test_a_model_type_of_a_million_characters_is_cut_wherever_it_is_told(target: Path) -> None:
    config(model_type="x" * 10**6)(target)
    for call in (load, load_without_tokenizer, target_without_weights, lambda path: load_drafter(path, tiny_model())):
        refusal(lambda call=call: call(target))


# Files


def pipe(path: Path) -> None:
    os.mkfifo(path)


def plug(path: Path) -> None:
    here = Path.cwd()
    os.chdir(path.parent)  # a socket's name has a hundred characters at most
    try:
        with socket.socket(socket.AF_UNIX) as plug:
            plug.bind(path.name)
    finally:
        os.chdir(here)


def endless(path: Path) -> None:
    path.symlink_to("/dev/zero")


READ = ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "hf_quant_config.json"]
READ += ["generation_config.json", "model-00002-of-00002.safetensors", "chat_template.jinja", "added_tokens.json"]
READ += ["model.safetensors.index.json", "special_tokens_map.json", "vocab.json", "merges.txt"]


@pytest.mark.parametrize("kind", [pipe, plug, endless, Path.mkdir], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("name", READ)
def test_what_is_no_regular_file_is_not_opened_under_any_name(target: Path, name: str, kind: Damage) -> None:
    (target / name).unlink(missing_ok=True)
    kind(target / name)
    for call in (load, load_without_tokenizer):
        said = refusal(lambda call=call: call(target), seconds=2)
        assert name in said or "holds no config.json" in said


def test_an_adapter_that_is_no_file_is_not_opened(target: Path, tmp_path: Path) -> None:
    for name in ("adapter_config.json", "adapters.safetensors"):
        adapter = tmp_path / name.partition(".")[0]
        adapter.mkdir()
        (adapter / "adapter_config.json").write_text("{}")
        (adapter / name).unlink(missing_ok=True)
        os.mkfifo(adapter / name)
        assert name in refusal(lambda adapter=adapter: load(target, adapter_path=str(adapter)))


SIZES: dict[str, Callable[[], bytes]] = {
    "more bytes than any has": lambda: b"{" + b" " * JSON_LIMIT_BYTES + b"}",
    "more values than any has": lambda: b'{"a":[' + b"0," * JSON_LIMIT_MARKS + b"0]}",
    "nested without end": lambda: b"[" * 100_000,
    "a number without end": lambda: b'{"a":' + b"9" * 100_000 + b"}",
}


@pytest.mark.part(4)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"])
def test_a_file_without_an_end_is_not_read_into_memory(target: Path, name: str, size: str) -> None:
    (target / name).write_bytes(SIZES[size]())
    before = mx.get_active_memory()
    refusal(lambda: load(target))
    assert mx.get_active_memory() - before < 2**20


# Weights


def rewritten(edit: Callable[[dict[str, Any], bytes], tuple[dict[str, Any], bytes]]) -> Damage:
    """model.safetensors with its header and data edited."""

    def damage(folder: Path) -> None:
        path = folder / "model.safetensors"
        content = path.read_bytes()
        (length,) = struct.unpack("<Q", content[:8])
        entries, data = edit(json.loads(content[8 : 8 + length]), content[8 + length :])
        text = json.dumps(entries).encode()
        path.write_bytes(struct.pack("<Q", len(text)) + text + data)

    return damage


def overlapping(entries: dict[str, Any], data: bytes) -> tuple[dict[str, Any], bytes]:
    first, second = "model.layers.0.input_layernorm.weight", "model.layers.1.input_layernorm.weight"
    entries[second]["data_offsets"] = entries[first]["data_offsets"]
    return entries, data


def integer_norms(entries: dict[str, Any], data: bytes) -> tuple[dict[str, Any], bytes]:
    for name, entry in entries.items():
        if "norm" in name:
            entry["dtype"] = "I32"
    return entries, data


def index_to(name: str) -> Damage:
    written = json.dumps({"weight_map": {"model.norm.weight": name}})
    return lambda folder: (folder / "model.safetensors.index.json").write_text(written)


WEIGHTS: dict[str, tuple[Damage, str]] = {
    "overlap": (rewritten(overlapping), "model.safetensors is not a complete safetensors file"),
    "trailing bytes": (rewritten(lambda entries, data: (entries, data + b"more")), "is not a complete"),
    "cut": (rewritten(lambda entries, data: (entries, data[:-4])), "is not a complete"),
    "half of it": (rewritten(lambda entries, data: (entries, data[: len(data) // 2])), "is not a complete"),
    "a header as long as the file": (
        lambda folder: (folder / "model.safetensors").write_bytes(struct.pack("<Q", 33 * 2**20) + b" " * 33 * 2**20),
        "its header has",
    ),
    "integer norms": (rewritten(integer_norms), "norm.weight has dtype int32, wanted floats"),
    "index upwards": (index_to("../model.safetensors"), "only safetensors files inside the folder"),
    "index to a root": (index_to("/model.safetensors"), "only safetensors files inside the folder"),
    "index to a pickle": (index_to("pytorch_model.bin"), "only safetensors files inside the folder"),
    "a second shard that is cut": (
        lambda folder: (folder / "model-00002-of-00002.safetensors").write_bytes(b"\x10\0\0"),
        "model-00002-of-00002.safetensors is not a complete",
    ),
}


@pytest.mark.every_case
@pytest.mark.parametrize("name", WEIGHTS)
def test_damaged_weights_are_refused_with_what_is_wrong(target: Path, name: str) -> None:
    damage, words = WEIGHTS[name]
    damage(target)
    assert words in refusal(lambda: load(target))
    assert words in refusal(lambda: load_without_tokenizer(target))
    refusal(lambda: load_drafter(target, tiny_model(num_hidden_layers=2)))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")], ids=str)
def test_weights_that_are_no_numbers_are_named_where_they_are_looked_for(target: Path, value: float) -> None:
    tensors = mx.load(str(target / "model.safetensors"))
    assert isinstance(tensors, dict)
    name = "model.layers.1.mlp.up_proj.weight"
    tensors[name][3, 5] = value
    mx.eval(tensors)
    mx.save_safetensors(str(target / "model.safetensors"), tensors, {"format": "mlx"})
    load(target)
    said = refusal(lambda: load(target, check_weights=True))
    assert f"{name} holds 1 {'NaN' if value != value else 'infinite'}" in said


def test_sound_weights_pass_the_look_at_them(target: Path) -> None:
    load(target, check_weights=True)


def test_the_command_looks_at_the_weights_when_asked(target: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tensors = mx.load(str(target / "model.safetensors"))
    assert isinstance(tensors, dict)
    tensors["model.norm.weight"][0] = float("nan")
    mx.eval(tensors)
    mx.save_safetensors(str(target / "model.safetensors"), tensors, {"format": "mlx"})
    ended = run(capsys, "--model", target, "--check-weights")
    assert (ended.code, ended.out, len(ended.lines)) == (2, "", 1)
    assert "model.norm.weight holds 1 NaN" in ended.err


# Templates


TEMPLATES = {
    "loops without end": "{% for a in range(99999) %}{% for b in range(99999) %}{{ a }}{% endfor %}{% endfor %}",
    "loops that give nothing": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "a range too long": "{% for a in range(10 ** 10) %}x{% endfor %}",
    "text without end": "{{ 'x' * (10 ** 11) }}",
    "text doubled": "{% set n = namespace(t='x') %}{% for a in range(60) %}{% set n.t = n.t ~ n.t %}{% endfor %}",
    "no template": "{% for %}",
    "a name of nothing": "{{ messages.nothing.at.all }}",
    "an attribute of a function": "{{ messages.__class__.__mro__ }}{{ (1).__add__(2)[3] }}",
}


@pytest.mark.part(4)
@pytest.mark.parametrize("name", TEMPLATES)
def test_a_hostile_chat_template_is_given_up(
    target: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr("mlx_spec.rendering.PATIENCE_SECONDS", 0.3)
    (target / "chat_template.jinja").unlink(missing_ok=True)
    tokenizer(chat_template=TEMPLATES[name])(target)
    started = time.monotonic()
    ended = run(capsys, "--model", target, "--prompt", "hello", "-m", "2")
    assert time.monotonic() - started < 5
    assert (ended.code, ended.out, len(ended.lines)) == (2, "", 1), ended
    assert ended.err.startswith("error: the chat template")


def test_a_target_refused_is_a_checkpoint_error_of_the_library(target: Path) -> None:
    config(vocab_size=10**12)(target)
    with pytest.raises(CheckpointError):
        load(target)
