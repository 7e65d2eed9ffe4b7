"""Random EAGLE-3 checkpoints of every variant, as files: layouts for which there is no fixture included."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_spec.model.target import Target
from tests.tiny import VOCAB, from_mlx_lm, randomise

Config = dict[str, Any]
Tensors = dict[str, mx.array]

DRAFTED = 71
HIDDEN, INNER, HEADS, KEYS, SIZE = 32, 160, 12, 3, 8
"""Rows of every matrix are whole groups of 32, so that all can be quantized."""

YARN = {
    "type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 0.7,
}

LATENT = {
    "kv_lora_rank": 32,
    "q_lora_rank": 128,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}

_FLAT = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": HIDDEN,
    "target_hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": 1,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KEYS,
    "head_dim": SIZE,
    "rms_norm_eps": 1e-5,
    "vocab_size": VOCAB,
    "draft_vocab_size": DRAFTED,
    "tie_word_embeddings": False,
    "rope_theta": 1e4,
}


@dataclass(frozen=True)
class Variant:
    """What differs from one Llama layer in the flat layout.

    Attributes:
        config: keys added to a flat config.json, or replaced; None takes one away.
        taps: states that fc reads.
        norms: tensors of one axis -> entries.
        shared_embedding: whether the embedding is the target's.
        deepseek: whether the target is DeepSeek-V3.
    """

    config: Config
    taps: int = 3
    norms: dict[str, int] = field(default_factory=dict)
    shared_embedding: bool = True
    deepseek: bool = False

    @property
    def layers(self) -> int:
        """Layers of the drafter."""
        return int(self.config.get("num_hidden_layers", 1))

    def pairs(self, layer: int) -> bool:
        """Whether a layer reads the embedding beside the hidden state."""
        return layer == 0 or self.config.get("architectures") == ["Qwen3Eagle3Model"]


def _qk_norms(layers: int = 1) -> dict[str, int]:
    return {f"layers.{layer}.self_attn.{name}_norm.weight": SIZE for layer in range(layers) for name in "qk"}


_MLA = {"architectures": ["Eagle3DeepseekV2ForCausalLM"], "model_type": "kimi_k2", "head_dim": None, **LATENT}

VARIANTS: dict[str, Variant] = {
    "llama": Variant({"target_layer_ids": [1, 3, 4]}),
    "scaled_positions": Variant({"target_layer_ids": [1, 3, 4], "rope_scaling": YARN}),
    "qwen3": Variant({"target_layer_ids": [1, 3, 4], "model_type": "qwen3"}, norms=_qk_norms()),
    "two_layers": Variant({"target_layer_ids": [1, 3, 4], "num_hidden_layers": 2}, shared_embedding=False),
    "norm_before_residual": Variant({"target_layer_ids": [1, 3, 4], "norm_before_residual": True}),
    "norm_before_fc": Variant(
        {"target_layer_ids": [1, 3, 4], "norm_before_fc": True}, norms={"input_norm.weight": 3 * HIDDEN}
    ),
    "eagle31": Variant(
        {"target_layer_ids": [1, 3, 4], "fc_norm": True, "norm_output": True},
        norms={f"fc_norm.{i}.weight": HIDDEN for i in range(3)},
    ),
    "all_at_once": Variant(
        {
            "target_layer_ids": [1, 3, 4],
            "model_type": "qwen3",
            "num_hidden_layers": 3,
            "norm_before_residual": True,
            "fc_norm": True,
            "norm_output": True,
        },
        norms=_qk_norms(3) | {f"fc_norm.{i}.weight": HIDDEN for i in range(3)},
    ),
    "five_taps": Variant(
        {
            "architectures": ["Qwen3Eagle3Model"],
            "model_type": "qwen3",
            "target_layer_ids": [0, 2, 3, 5, 6],
            "num_target_layers": 8,
            "ttt_length": 7,
            "draft_vocab_size": None,
            "layer_types": ["full_attention"],
            "use_sliding_window": False,
        },
        taps=5,
        norms=_qk_norms(),
        shared_embedding=False,
    ),
    "five_taps_two_layers": Variant(
        {
            "architectures": ["Qwen3Eagle3Model"],
            "model_type": "qwen3",
            "target_layer_ids": [0, 2, 3, 5, 6],
            "num_hidden_layers": 2,
            "draft_vocab_size": None,
        },
        taps=5,
        norms=_qk_norms(2),
        shared_embedding=False,
    ),
    "latent": Variant(
        {
            **_MLA,
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 4, 5]},
            "draft_vocab_size": None,
            "rope_scaling": YARN,
        },
        deepseek=True,
    ),
    "latent_one_step_queries": Variant(
        {**_MLA, "q_lora_rank": None, "target_layer_ids": [1, 3, 4], "rope_scaling": YARN}, deepseek=True
    ),
    "heads_for_deepseek": Variant(
        {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 5]}, "rope_scaling": YARN}, taps=2, deepseek=True
    ),
}


def made_config(variant: str) -> Config:
    """A variant's config.json."""
    content = {**_FLAT, **VARIANTS[variant].config}
    return {key: value for key, value in content.items() if value is not None or key == "q_lora_rank"}


@functools.cache
def _made_tensors(variant: str) -> Tensors:
    what, config = VARIANTS[variant], made_config(variant)
    rng = np.random.default_rng(sorted(VARIANTS).index(variant))

    def matrix(rows: int, columns: int, gain: float = 1.0) -> mx.array:
        return mx.array(gain * rng.standard_normal((rows, columns), dtype=np.float32) / columns**0.5)

    def vector(size: int) -> mx.array:
        return mx.array(1 + 0.1 * rng.standard_normal(size, dtype=np.float32))

    drafted = config.get("draft_vocab_size", VOCAB)
    tensors = {"fc.weight": matrix(HIDDEN, what.taps * HIDDEN), "lm_head.weight": matrix(drafted, HIDDEN, 3.0)}
    for layer in range(what.layers):
        name, inputs = f"layers.{layer}.", HIDDEN * (2 if what.pairs(layer) else 1)
        shapes = _latent_shapes(config) if "kv_lora_rank" in config else _head_shapes(inputs)
        tensors |= {f"{name}self_attn.{part}.weight": matrix(*shape) for part, shape in shapes.items() if shape[1]}
        tensors |= {f"{name}self_attn.{part}.weight": vector(rows) for part, (rows, one) in shapes.items() if not one}
        tensors |= {f"{name}mlp.{part}_proj.weight": matrix(INNER, HIDDEN) for part in ("gate", "up")}
        tensors[f"{name}mlp.down_proj.weight"] = matrix(HIDDEN, INNER)
        norms = ("input_layernorm", "post_attention_layernorm", *(("hidden_norm",) if what.pairs(layer) else ()))
        tensors |= {f"{name}{norm}.weight": vector(HIDDEN) for norm in norms}
    tensors |= {name: vector(size) for name, size in {"norm.weight": HIDDEN, **what.norms}.items()}
    if not what.shared_embedding:
        tensors["embed_tokens.weight"] = matrix(VOCAB, HIDDEN, HIDDEN**0.5)
    if drafted != VOCAB:
        tensors["d2t"] = mx.array(np.sort(rng.permutation(VOCAB)[:drafted]) - np.arange(drafted), mx.int64)
    return tensors


def made_tensors(variant: str) -> Tensors:
    """A variant's tensors, under the names of the layout `layers.0.*`."""
    return dict(_made_tensors(variant))


def _head_shapes(inputs: int) -> dict[str, tuple[int, int]]:
    keys = {f"{name}_proj": (KEYS * SIZE, inputs) for name in "kv"}
    return {"q_proj": (HEADS * SIZE, inputs), **keys, "o_proj": (HIDDEN, HEADS * SIZE)}


def _latent_shapes(config: Config) -> dict[str, tuple[int, int]]:
    """Part -> rows and columns; no columns for a vector."""
    latent, size = LATENT["kv_lora_rank"], LATENT["qk_nope_head_dim"] + LATENT["qk_rope_head_dim"]
    low = config.get("q_lora_rank")
    queries = {"q_proj": (HEADS * size, 2 * HIDDEN)}
    if low:
        queries = {"q_a_proj": (low, 2 * HIDDEN), "q_b_proj": (HEADS * size, low), "q_a_layernorm": (low, 0)}
    return {
        **queries,
        "kv_a_proj_with_mqa": (latent + LATENT["qk_rope_head_dim"], 2 * HIDDEN),
        "kv_a_layernorm": (latent, 0),
        "kv_b_proj": (HEADS * (LATENT["qk_nope_head_dim"] + LATENT["v_head_dim"]), latent),
        "o_proj": (HIDDEN, HEADS * LATENT["v_head_dim"]),
    }


def write_made(
    folder: Path,
    variant: str,
    edit_config: Callable[[Config], object] = lambda content: None,
    edit_tensors: Callable[[Tensors], object] = lambda content: None,
) -> Path:
    """The checkpoint of a variant in `folder`, edited in place by the two functions."""
    folder.mkdir(exist_ok=True)
    config, tensors = json.loads(json.dumps(made_config(variant))), made_tensors(variant)
    edit_config(config)
    edit_tensors(tensors)
    (folder / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(folder / "model.safetensors"), tensors)
    return folder


@functools.cache
def made_target(for_deepseek: bool = False, layers: int = 8) -> Target:
    """A target that the variants fit."""
    return Target(randomise(lambda: deepseek(layers) if for_deepseek else _llama(layers), seed=6))


def target_of(variant: str) -> Target:
    """The target a variant is for."""
    return made_target(VARIANTS[variant].deepseek)


def _llama(layers: int) -> Any:
    return from_mlx_lm(
        "llama",
        hidden_size=HIDDEN,
        num_hidden_layers=layers,
        intermediate_size=48,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=10,
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
    )


def deepseek(layers: int = 8, **changes: Any) -> Any:
    """A DeepSeek-V3 that the variants with latent attention fit."""
    return from_mlx_lm("deepseek_v3", **{**_deepseek_config(layers), **changes})


def kimi(layers: int = 8) -> Any:
    """The same inside Kimi K2.5."""
    text = {"model_type": "kimi_k2", "vocab_size": VOCAB, **_deepseek_config(layers)}
    return from_mlx_lm("kimi_k25", text_config=text)


def _deepseek_config(layers: int) -> Config:
    return {
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "first_k_dense_replace": layers,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e4,
        **LATENT,
    }
