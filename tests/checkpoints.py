"""Tiny targets on disk in mlx-lm's layout, with a real tokenizer: what `load` and the command line are given."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models import llama, qwen3
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from tests.tiny import randomise

UNKNOWN, BOS, EOS = "<unk>", "<s>", "</s>"
SPECIAL = (UNKNOWN, BOS, EOS)
BOS_ID, EOS_ID = 1, 2

MERGES = ("t h", "th e", "E N", "EN D", "o ,", "Ã ©", "â Ĥ")
"""Give tokens of several characters, one that holds a whole two-byte character, and one with two bytes of three."""

ASCII = [chr(code) for code in range(33, 127) if chr(code) not in "`~^"]

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "[{{ message.role }}] {{ message.content }}\n"
    "{% endfor %}{% if extra is defined %}({{ extra }}){% endif %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)

ASCII_VOCAB = 96
"""That of the EAGLE-3 fixture: the printable characters but three, space and newline, and three special tokens."""

GEOMETRY = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "num_hidden_layers": 8,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-6,
    "vocab_size": ASCII_VOCAB,
    "tie_word_embeddings": False,
    "bos_token_id": BOS_ID,
    "eos_token_id": EOS_ID,
}
"""The target that the EAGLE-3 fixture fits, but with weights that write varied text."""


def ascii_tokenizer() -> PreTrainedTokenizerFast:
    """One id per character."""
    return _wrapped([*SPECIAL, *ASCII, "Ġ", "Ċ"], ())


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One id per byte, so that most ids are no whole character, and a few longer ones."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    return _wrapped([*SPECIAL, *alphabet, *("".join(merge.split()) for merge in MERGES)], MERGES)


BYTE_VOCAB = len(SPECIAL) + 256 + len(MERGES)


def _wrapped(vocabulary: list[str], merges: tuple[str, ...]) -> PreTrainedTokenizerFast:
    ids = {token: index for index, token in enumerate(vocabulary)}
    pairs = [tuple(merge.split()) for merge in merges]
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=pairs))
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, BOS_ID)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token=UNKNOWN, bos_token=BOS, eos_token=EOS, chat_template=CHAT_TEMPLATE
    )


WIDE = {
    "model_type": "qwen3",
    "num_hidden_layers": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "rope_theta": 1e4,
}
"""Changes that make a target whose cache may rotate or be quantized."""


def tiny_model(seed: int = 5, **changes: Any) -> Any:
    """The model of GEOMETRY, changed."""
    config = {**GEOMETRY, **changes}
    arch = {"llama": llama, "qwen3": qwen3}[config["model_type"]]
    return randomise(lambda: arch.Model(arch.ModelArgs.from_dict(config)), seed)


def write_target(folder: Path, tokenizer: PreTrainedTokenizerFast | None = None, seed: int = 5, **changes: Any) -> Path:
    """A checkpoint that mlx-lm loads: config.json, model.safetensors, tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    model = tiny_model(seed, **changes)
    (folder / "config.json").write_text(json.dumps({**GEOMETRY, **changes}))
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())), {"format": "mlx"})
    (tokenizer or ascii_tokenizer()).save_pretrained(folder)
    return folder
