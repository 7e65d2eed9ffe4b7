"""Tiny random targets, one per mix of caches. Within a model every axis has another size."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models.cache import make_prompt_cache

from tests.oracle import OracleRun, rng_key, run_stock, seed_from_key

VOCAB = 97
WINDOW = 11
CHUNK = 13

PROMPT = (5, 17, 42, 8, 61, 3, 29)
"""Short of every boundary, so that generation crosses it."""

LONG = 40
"""Tokens after which every mix has crossed its boundary: wrap, chunk edge, start of quantization."""

KEPT_IN_FLOAT32 = ("A_log", "e_score_correction_bias")
"""Parameters that mlx-lm keeps in float32 when a checkpoint is half precision."""


@dataclass(frozen=True)
class Mix:
    """One cache mix: how to build a model that has it, and how to ask mlx-lm's `generate_step` for it.

    Attributes:
        name: key in `MIXES`.
        build: makes the model with mlx-lm's own initial weights.
        caches: class names the prompt cache holds at the end of a run of `LONG` tokens.
        kv: keyword arguments of `generate_step` about the cache.
        seed: of the random weights; chosen so that 40 greedy tokens after `PROMPT` do not fall into a loop.
        half: whether it runs in half precision here: mlx's CPU gather matmul, hence every MoE, takes float32 only.
        weight_bits: bits of quantized weights, group size 32; 0 leaves them as they are.
    """

    name: str
    build: Callable[[], nn.Module]
    caches: frozenset[str]
    kv: Mapping[str, int] = field(default_factory=dict)
    seed: int = 0
    half: bool = True
    weight_bits: int = 0

    def model(self, dtype: mx.Dtype = mx.float32) -> nn.Module:
        """The model; the same object whenever the same dtype is asked for."""
        return _model(self.name, dtype)

    def new_cache(self, dtype: mx.Dtype = mx.float32) -> list[Any]:
        """An empty prompt cache as stock `generate_step` would make it."""
        return make_prompt_cache(self.model(dtype), max_kv_size=self.kv.get("max_kv_size"))

    @property
    def warm_kv(self) -> dict[str, int]:
        """`kv` for a call that is given a prompt cache: its size is settled already."""
        return {name: value for name, value in self.kv.items() if name != "max_kv_size"}

    def oracle(self, emitted: int = LONG, dtype: mx.Dtype = mx.float32) -> OracleRun:
        """The greedy stock run after `PROMPT`, computed once."""
        return _oracle(self.name, emitted, dtype)


@functools.cache
def _model(name: str, dtype: mx.Dtype) -> nn.Module:
    mix = MIXES[name]
    model = randomise(mix.build, mix.seed, dtype)
    if mix.weight_bits:
        nn.quantize(model, group_size=32, bits=mix.weight_bits)
        mx.eval(model.parameters())
    return model


@functools.cache
def _oracle(name: str, emitted: int, dtype: mx.Dtype) -> OracleRun:
    mix = MIXES[name]
    return run_stock(mix.model(dtype), PROMPT, emitted, **mix.kv)


HEAD_GAIN = 3.0


def randomise(build: Callable[[], nn.Module], seed: int, dtype: mx.Dtype = mx.float32) -> nn.Module:
    """Build a model and give it weights that depend on `seed` alone. The caller's RNG stays where it is.

    Matrices are normal with variance 1 / fan-in, so that signals neither vanish nor explode; the output head is
    `HEAD_GAIN` times that, so that logits are not flat; vectors stay near what mlx-lm initialises them to.
    """
    key = rng_key()
    mx.random.seed(seed)
    model = build()
    rng = np.random.default_rng(seed)
    weights = []
    for name, initial in sorted(tree_flatten(model.parameters())):
        noise = mx.array(rng.standard_normal(initial.shape, dtype=np.float32))
        if initial.ndim == 1:
            weight = initial + 0.1 * noise
        elif "embed" in name and name.endswith(("embed_tokens.weight", "embeddings.weight")):
            weight = noise
        elif "conv1d" in name:
            weight = noise / initial.shape[1] ** 0.5
        else:
            weight = noise * (HEAD_GAIN if "lm_head" in name else 1.0) / initial.shape[-1] ** 0.5
        weights.append((name, weight.astype(mx.float32 if name.endswith(KEPT_IN_FLOAT32) else dtype)))
    model.update(tree_unflatten(weights))
    model.eval()
    mx.eval(model.parameters())
    seed_from_key(key)
    return model


def from_mlx_lm(module: str, **config: Any) -> nn.Module:
    arch = importlib.import_module(f"mlx_lm.models.{module}")
    return arch.Model(arch.ModelArgs.from_dict({"model_type": module, "vocab_size": VOCAB, **config}))


def _llama(**config: Any) -> nn.Module:
    dense = {
        "hidden_size": 44,
        "num_hidden_layers": 3,
        "intermediate_size": 76,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 10,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
    }
    return from_mlx_lm("llama", **{**dense, **config})


def _wide_llama() -> nn.Module:
    """Head dimension 64: a multiple of both group sizes of quantized K/V used here."""
    return _llama(head_dim=64, hidden_size=52)


def _aligned_llama() -> nn.Module:
    """Every matrix has a multiple of 32 columns, so that its weights can be quantized."""
    return _llama(head_dim=16, hidden_size=64, intermediate_size=128, num_attention_heads=10)


def _qwen3() -> nn.Module:
    return from_mlx_lm(
        "qwen3",
        hidden_size=52,
        num_hidden_layers=2,
        intermediate_size=84,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=2048,
        head_dim=14,
        rms_norm_eps=1e-6,
        rope_theta=1e4,
        tie_word_embeddings=False,
    )


def gemma3(layers: int = 5, pattern: int = 3) -> nn.Module:
    return from_mlx_lm(
        "gemma3_text",
        hidden_size=40,
        num_hidden_layers=layers,
        intermediate_size=72,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=12,
        query_pre_attn_scalar=12,
        sliding_window=WINDOW,
        sliding_window_pattern=pattern,
    )


_ROPE = {"type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25}


def _qwen3_5() -> nn.Module:
    text = {
        "model_type": "qwen3_5",
        "vocab_size": VOCAB,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 5,
        "full_attention_interval": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "linear_num_value_heads": 6,
        "linear_num_key_heads": 3,
        "linear_key_head_dim": 12,
        "linear_value_head_dim": 20,
        "linear_conv_kernel_dim": 4,
        "rope_parameters": dict(_ROPE),
    }
    arch = importlib.import_module("mlx_lm.models.qwen3_5")
    return arch.Model(arch.ModelArgs.from_dict(text))


def qwen3_next(layers: int = 4) -> nn.Module:
    return from_mlx_lm(
        "qwen3_next",
        hidden_size=48,
        num_hidden_layers=layers,
        intermediate_size=80,
        full_attention_interval=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        linear_num_value_heads=6,
        linear_num_key_heads=3,
        linear_key_head_dim=12,
        linear_value_head_dim=20,
        linear_conv_kernel_dim=4,
        num_experts=7,
        num_experts_per_tok=2,
        decoder_sparse_step=1,
        shared_expert_intermediate_size=36,
        mlp_only_layers=[],
        moe_intermediate_size=28,
        norm_topk_prob=True,
        rms_norm_eps=1e-6,
        rope_theta=1e4,
        partial_rotary_factor=0.25,
        max_position_embeddings=2048,
    )


def _deepseek_v3() -> nn.Module:
    return from_mlx_lm(
        "deepseek_v3",
        hidden_size=48,
        intermediate_size=80,
        moe_intermediate_size=28,
        num_hidden_layers=3,
        num_attention_heads=5,
        num_key_value_heads=5,
        n_shared_experts=1,
        n_routed_experts=8,
        num_experts_per_tok=3,
        n_group=4,
        topk_group=2,
        first_k_dense_replace=1,
        kv_lora_rank=24,
        q_lora_rank=30,
        qk_rope_head_dim=6,
        qk_nope_head_dim=14,
        v_head_dim=18,
    )


def _mamba() -> nn.Module:
    return from_mlx_lm(
        "mamba",
        hidden_size=40,
        intermediate_size=72,
        state_size=14,
        num_hidden_layers=3,
        conv_kernel=4,
        use_bias=False,
        use_conv_bias=True,
        time_step_rank=5,
        tie_word_embeddings=False,
    )


def mamba2(layers: int = 3) -> nn.Module:
    return from_mlx_lm(
        "mamba2",
        num_heads=6,
        head_dim=12,
        hidden_size=40,
        intermediate_size=72,
        state_size=14,
        num_hidden_layers=layers,
        layer_norm_epsilon=1e-5,
        conv_kernel=4,
        n_groups=2,
        use_bias=False,
        use_conv_bias=True,
        tie_word_embeddings=False,
        time_step_limit=(0.0, float("inf")),
        time_step_rank=5,
    )


def falcon_h1(layers: int = 3) -> nn.Module:
    return from_mlx_lm(
        "falcon_h1",
        hidden_size=44,
        num_hidden_layers=layers,
        intermediate_size=76,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=10,
        mamba_d_conv=4,
        mamba_d_head=12,
        mamba_d_ssm=60,
        mamba_d_state=14,
        mamba_n_groups=1,
        mamba_n_heads=5,
        rope_theta=1e4,
        tie_word_embeddings=False,
    )


def llama4(layers: int = 4) -> nn.Module:
    text = {
        "model_type": "llama4_text",
        "vocab_size": VOCAB,
        "attention_bias": False,
        "attention_chunk_size": CHUNK,
        "head_dim": 10,
        "hidden_size": 44,
        "interleave_moe_layer_step": 2,
        "intermediate_size": 36,
        "intermediate_size_mlp": 76,
        "max_position_embeddings": 2048,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "num_experts_per_tok": 1,
        "num_hidden_layers": layers,
        "num_local_experts": 3,
        "rms_norm_eps": 1e-5,
        "rope_scaling": None,
        "rope_theta": 1e4,
        "use_qk_norm": True,
    }
    arch = importlib.import_module("mlx_lm.models.llama4")
    return arch.Model(arch.ModelArgs.from_dict({"model_type": "llama4", "text_config": text}))


_ALL = (
    Mix("dense", _llama, frozenset({"KVCache"})),
    Mix("dense_qk_norm", _qwen3, frozenset({"KVCache"}), seed=8),
    Mix("dense_4bit_weights", _aligned_llama, frozenset({"KVCache"}), weight_bits=4),
    Mix("sliding", gemma3, frozenset({"KVCache", "RotatingKVCache"})),
    Mix("ring_with_keep", _qwen3, frozenset({"RotatingKVCache"}), {"max_kv_size": 15}),
    Mix("hybrid", _qwen3_5, frozenset({"KVCache", "ArraysCache"})),
    Mix("hybrid_moe", qwen3_next, frozenset({"KVCache", "ArraysCache"}), half=False),
    Mix("mla_moe", _deepseek_v3, frozenset({"KVCache"}), seed=8, half=False),
    Mix("mamba", _mamba, frozenset({"ArraysCache"})),
    Mix("mamba2", mamba2, frozenset({"ArraysCache"})),
    Mix("cache_list", falcon_h1, frozenset({"CacheList"})),
    Mix("chunked", llama4, frozenset({"KVCache", "ChunkedKVCache"}), half=False),
    Mix(
        "quantized_from_0",
        _wide_llama,
        frozenset({"QuantizedKVCache"}),
        {"kv_bits": 8, "kv_group_size": 64, "quantized_kv_start": 0},
        seed=8,
    ),
    Mix(
        "quantized_from_20",
        _wide_llama,
        frozenset({"QuantizedKVCache"}),
        {"kv_bits": 4, "kv_group_size": 32, "quantized_kv_start": 20},
        seed=7,
    ),
)

MIXES: Mapping[str, Mix] = {mix.name: mix for mix in _ALL}

REQUIRED = ("dense", "sliding", "hybrid", "quantized_from_0", "quantized_from_20")
"""The mixes every end-to-end property is tried on; the others where the kind of cache matters."""
