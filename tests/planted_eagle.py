"""Planted EAGLE-3 drafters in every variant: often right, because each layer adds a fitted step to the hidden state.

As in `tests.tiny_eagle`, attention looks at its own position alone, and its values are a linear function, fitted by
least squares to what the target does with random text. What is fitted depends on how the variant scales states.
"""

from __future__ import annotations

import functools
import json
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_spec.drafters.base import Drafter
from mlx_spec.model.target import Target
from mlx_spec.pairing import load_drafter
from tests.tiny import MIXES, VOCAB
from tests.tiny_eagle import EPS, FOCUS, normed, target_states

Config = dict[str, Any]
Tensors = dict[str, mx.array]

INNER = 32

YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


@dataclass(frozen=True)
class Planted:
    """A variant, and the target it is planted for.

    Attributes:
        mix: of the target, by its name in `tests.tiny.MIXES`.
        config: keys added to a flat config.json, or replaced.
        whole_vocabulary: whether embedding and head are the drafter's own.
        quantize: what `load_drafter` is given.
    """

    mix: str = "dense"
    config: Config = field(default_factory=dict)
    whole_vocabulary: bool = False
    quantize: Mapping[str, Any] | None = None


PLANTED: dict[str, Planted] = {
    "qwen3": Planted("dense_qk_norm", {"model_type": "qwen3"}),
    "two_layers": Planted(config={"num_hidden_layers": 2}),
    "norm_before_residual": Planted(config={"norm_before_residual": True}),
    "norm_before_fc": Planted(config={"norm_before_fc": True}),
    "eagle31": Planted(config={"fc_norm": True, "norm_output": True}),
    "five_taps": Planted(
        "hybrid",
        {"architectures": ["Qwen3Eagle3Model"], "model_type": "qwen3", "target_layer_ids": [0, 1, 2, 3, 4]},
        whole_vocabulary=True,
    ),
    "five_taps_two_layers": Planted(
        "sliding",
        {
            "architectures": ["Qwen3Eagle3Model"],
            "model_type": "qwen3",
            "num_hidden_layers": 2,
            "target_layer_ids": [0, 1, 2, 3, 4],
        },
        whole_vocabulary=True,
    ),
    "latent": Planted(
        "mla_moe",
        {
            "architectures": ["Eagle3DeepseekV2ForCausalLM"],
            "rope_scaling": YARN,
            "target_layer_ids": [0, 1, 2],
        },
    ),
    "heads_for_deepseek": Planted("mla_moe", {"target_layer_ids": [0, 2]}),
    "affine": Planted("dense_4bit_weights", quantize={"group_size": 32, "bits": 8}),
    "mxfp8": Planted("dense_4bit_weights", quantize={"group_size": 32, "bits": 8, "mode": "mxfp8"}),
}


@functools.cache
def planted_variant(name: str) -> Drafter:
    """The drafter, read back from files."""
    what = PLANTED[name]
    target = Target(MIXES[what.mix].model())
    config = _config(what, target)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        mx.save_safetensors(f"{folder}/model.safetensors", _tensors(what, config, target))
        return load_drafter(folder, target=target, quantize=what.quantize)


def _config(what: Planted, target: Target) -> Config:
    hidden = target.hidden_size
    latent = {
        "q_lora_rank": hidden,
        "kv_lora_rank": 2 * hidden,
        "qk_nope_head_dim": hidden,
        "qk_rope_head_dim": 2,
        "v_head_dim": hidden,
    }
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": INNER,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": hidden,
        "rms_norm_eps": EPS,
        "vocab_size": VOCAB,
        "tie_word_embeddings": False,
        "rope_theta": 1e4,
        "target_layer_ids": [0, target.layer_count - 1],
        **what.config,
        **(latent if "rope_scaling" in what.config else {}),
    }


def _tensors(what: Planted, config: Config, target: Target) -> Tensors:
    hidden, taps, ones = target.hidden_size, len(config["target_layer_ids"]), mx.ones(target.hidden_size)
    # A norm's effective weight is what it makes of ones, and a head's columns are what it makes of unit vectors.
    final = target.final_norm(ones[None, None].astype(target.dtype))[0, 0].astype(mx.float32)
    entering = mx.diag(final) if config.get("fc_norm") else mx.eye(hidden)
    tensors = {
        # Of the tapped states the last layer's is taken as it is.
        "fc.weight": mx.concatenate([mx.zeros((hidden, (taps - 1) * hidden)), entering], axis=1),
        "norm.weight": final,
        "lm_head.weight": target.head(mx.eye(hidden)[None].astype(target.dtype))[0].T,
    }
    if what.whole_vocabulary:
        tensors["embed_tokens.weight"] = target.raw_embed(mx.arange(VOCAB)[None])[0]
    if config.get("norm_before_fc"):
        tensors["input_norm.weight"] = mx.ones(taps * hidden)
    if config.get("fc_norm"):
        tensors |= {f"fc_norm.{index}.weight": ones for index in range(taps)}
    step = _fitted(target, config, np.array(final))
    for layer in range(config["num_hidden_layers"]):
        name, pairs = f"layers.{layer}.", layer == 0 or what.whole_vocabulary
        # A later layer adds nothing.
        values = step if layer == 0 else mx.zeros((hidden, 2 * hidden if pairs else hidden))
        attention = _latent(hidden, values) if "kv_lora_rank" in config else _heads(config, values)
        tensors |= {f"{name}self_attn.{part}.weight": array for part, array in attention.items()}
        norms = ("input_layernorm", "post_attention_layernorm", *(("hidden_norm",) if pairs else ()))
        tensors |= {f"{name}{norm}.weight": ones for norm in norms}
        tensors |= {f"{name}mlp.{part}_proj.weight": mx.zeros((INNER, hidden)) for part in ("gate", "up")}
        tensors[f"{name}mlp.down_proj.weight"] = mx.zeros((hidden, INNER))
    return {name: array.astype(mx.float32) for name, array in tensors.items()}


def _heads(config: Config, values: mx.array) -> Tensors:
    """One head that looks for its own embedding."""
    hidden, inputs = values.shape
    normed_queries = config["model_type"] == "qwen3"
    embedding = mx.concatenate([mx.eye(hidden), mx.zeros((hidden, inputs - hidden))], axis=1)
    queries = embedding if normed_queries else FOCUS * embedding
    tensors = {"q_proj": queries, "k_proj": queries, "v_proj": values, "o_proj": mx.eye(hidden)}
    if normed_queries:
        tensors |= {"q_norm": FOCUS * mx.ones(hidden), "k_norm": FOCUS * mx.ones(hidden)}
    return tensors


def _latent(hidden: int, values: mx.array) -> Tensors:
    """The same with latents that hold everything the layer reads."""
    embedding = mx.concatenate([mx.eye(hidden), mx.zeros((hidden, hidden))], axis=1)
    return {
        "q_a_proj": embedding,
        "q_a_layernorm": mx.ones(hidden),
        "q_b_proj": mx.concatenate([FOCUS * mx.eye(hidden), mx.zeros((2, hidden))]),
        "kv_a_proj_with_mqa": mx.concatenate([mx.eye(2 * hidden), mx.zeros((2, 2 * hidden))]),
        "kv_a_layernorm": mx.ones(2 * hidden),
        "kv_b_proj": mx.concatenate([FOCUS * embedding, values]),
        "o_proj": mx.eye(hidden),
    }


Scale = Callable[[np.ndarray], np.ndarray]


def _fitted(target: Target, config: Config, final: np.ndarray) -> mx.array:
    """[H, 2H] M such that the wanted output is near the residual + M @ [norm(embedding of t+1), norm(hidden)]."""
    states, embedded = target_states(target, np.random.default_rng(5), tuple(config["target_layer_ids"]))
    last = states[..., -target.hidden_size :]
    hidden, wanted = last, last
    if config.get("norm_before_fc"):
        hidden = wanted = normed(states)[..., -target.hidden_size :]
    if config.get("norm_before_residual"):
        wanted = normed(last)
    if config.get("fc_norm"):
        hidden, wanted = normed(last) * final, normed(last)
    residual = normed(hidden) if config.get("norm_before_residual") else hidden
    seen = np.concatenate([normed(embedded[:, 1:]), normed(hidden[:, :-1])], axis=-1)
    width = target.hidden_size
    rows, moved = seen.reshape(-1, 2 * width), (wanted[:, 1:] - residual[:, :-1]).reshape(-1, width)
    return mx.array(np.linalg.solve(rows.T @ rows + EPS * np.eye(2 * width), rows.T @ moved).T.astype(np.float32))
