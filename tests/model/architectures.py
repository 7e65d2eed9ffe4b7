"""One tiny model per row of the anatomy table, with every matrix a multiple of 32 wide so that it can be quantized."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from tests.tiny import randomise

VOCAB = 101
HIDDEN = 64
LAYERS = 4


def _model(module: str, **config: Any) -> nn.Module:
    arch = importlib.import_module(f"mlx_lm.models.{module}")
    shape = {"hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "vocab_size": VOCAB, "rms_norm_eps": 1e-5}
    return arch.Model(arch.ModelArgs.from_dict({"model_type": module, **shape, **config}))


def _llama(tied: bool) -> nn.Module:
    heads = {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16}
    return _model("llama", intermediate_size=128, tie_word_embeddings=tied, **heads)


def _qwen3(tied: bool) -> nn.Module:
    heads = {"num_attention_heads": 10, "num_key_value_heads": 5, "head_dim": 16}
    limits = {"max_position_embeddings": 2048, "rope_theta": 1e4}
    return _model("qwen3", intermediate_size=96, tie_word_embeddings=tied, **heads, **limits)


def _gemma3_text() -> nn.Module:
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "query_pre_attn_scalar": 16}
    windows = {"sliding_window": 9, "sliding_window_pattern": 2}
    return _model("gemma3_text", intermediate_size=96, **heads, **windows)


def _qwen3_5(tied: bool) -> nn.Module:
    attention = {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16, "full_attention_interval": 2}
    linear = {
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 24,
        "linear_conv_kernel_dim": 4,
    }
    rope = {"rope_parameters": {"type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25}}
    return _model("qwen3_5", intermediate_size=128, tie_word_embeddings=tied, **attention, **linear, **rope)


def _deepseek_v3() -> nn.Module:
    experts = {
        "moe_intermediate_size": 32,
        "n_shared_experts": 1,
        "n_routed_experts": 6,
        "num_experts_per_tok": 2,
        "n_group": 3,
        "topk_group": 2,
        "first_k_dense_replace": 1,
    }
    attention = {
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "kv_lora_rank": 32,
        "q_lora_rank": 32,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 24,
        "v_head_dim": 40,
    }
    return _model("deepseek_v3", intermediate_size=96, **experts, **attention)


BUILDERS: dict[str, Callable[[], nn.Module]] = {
    "llama_untied": lambda: _llama(False),
    "llama_tied": lambda: _llama(True),
    "qwen3_untied": lambda: _qwen3(False),
    "qwen3_tied": lambda: _qwen3(True),
    "gemma3_text": _gemma3_text,
    "qwen3_5_untied": lambda: _qwen3_5(False),
    "qwen3_5_tied": lambda: _qwen3_5(True),
    "deepseek_v3": _deepseek_v3,
}

FORMS = ("float32", "bfloat16", "4bit")
"""mlx's CPU gather matmul takes float32 only, so experts have no bfloat16 form here."""

PARTS = [(name, form) for name in BUILDERS for form in FORMS if (name, form) != ("deepseek_v3", "bfloat16")]


def model(name: str, form: str = "float32") -> nn.Module:
    """A model of its own, so that taps attached in one test are not there in another."""
    built = randomise(BUILDERS[name], seed=3, dtype=mx.bfloat16 if form == "bfloat16" else mx.float32)
    if form == "4bit":
        nn.quantize(built, group_size=32, bits=4, class_predicate=_can_be_quantized)
        mx.eval(built.parameters())
    return built


@functools.cache
def shared_model(name: str, form: str = "float32") -> nn.Module:
    """For tests that leave the model as it is."""
    return model(name, form)


def _can_be_quantized(path: str, module: nn.Module) -> bool:
    return hasattr(module, "to_quantized") and module.weight.shape[-1] % 32 == 0


@contextmanager
def spying(layers: Sequence[Any]) -> Iterator[list[tuple[mx.array, mx.array]]]:
    """What went into each of these layers and what came out, over one forward. Knows nothing of the package."""
    seen: list[tuple[mx.array, mx.array]] = []
    classes = [type(layer) for layer in layers]

    def spy(base: type) -> type:
        def call(self: Any, x: mx.array, *args: Any, **kwargs: Any) -> Any:
            output = base.__call__(self, x, *args, **kwargs)
            seen.append((x, output))
            return output

        return type(base.__name__, (base,), {"__call__": call})

    for layer, own in zip(layers, classes, strict=True):
        layer.__class__ = spy(own)
    try:
        yield seen
    finally:
        for layer, own in zip(layers, classes, strict=True):
            layer.__class__ = own
