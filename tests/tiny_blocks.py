"""Tiny block drafters for tiny targets: files on disk in the layout of each family, read back as any other.

A random one borrows the target's embedding and output projection, and is nearly always wrong. A planted one knows a
text by pairs: it proposes what followed the token before. Its layer averages what it sees; what it sees of the context
and of masks is zero, so that the bonus token is what is left, and its tables map a token to the next. Families that
choose slot by slot know the first slot alone; with a Markov head every slot is known.
"""

from __future__ import annotations

import json
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_spec.drafters.dflash.config import BlockConfig
from mlx_spec.drafters.dflash.model import BlockDrafter
from mlx_spec.drafters.dflash.weights import wanted_shapes
from mlx_spec.model.target import Target
from mlx_spec.pairing import load_drafter

Config = dict[str, Any]
Tensors = dict[str, mx.array]

BLOCK = 5

FAMILIES: dict[str, Config] = {
    "dflash": {"architectures": ["DFlashDraftModel"], "model_type": "qwen3"},
    "dflash_causal": {"architectures": ["DFlashDraftModel"], "model_type": "qwen3", "is_causal": True},
    "dflash2": {
        "architectures": ["DFlash2DraftModel"],
        "model_type": "qwen3",
        "is_causal": False,
        "conv_kernel_size": 2,
        "conv_group_size": 2,
        "selector_rank": 3,
        "selector_top_k": 4,
    },
    "dspark": {
        "architectures": ["DSparkDraftModel"],
        "model_type": "qwen3",
        "projector_type": "dspark",
        "markov_head_type": "vanilla",
    },
    "dspark_gated": {
        "architectures": ["Qwen3DSparkModel"],
        "model_type": "qwen3",
        "markov_head_type": "gated",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    },
    "dspark_rnn": {
        "architectures": ["DSparkDraftModel"],
        "model_type": "qwen3",
        "projector_type": "dspark",
        "markov_head_type": "rnn",
        "sample_from_anchor": False,
    },
    "gemma4_dspark": {
        "architectures": ["Gemma4DSparkModel"],
        "model_type": "gemma4_text",
        "markov_head_type": "vanilla",
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
        "hidden_act": None,
        "hidden_activation": "gelu_pytorch_tanh",
        "final_logit_softcapping": 30.0,
    },
    "muse_glimmer_assistant": {"architectures": ["MuseGlimmerAssistantModel"], "model_type": "muse_glimmer_assistant"},
    "laguna_dflash": {
        "architectures": ["DFlashLagunaForCausalLM"],
        "model_type": "laguna",
        "gating": "per-head",
        "causal": True,
    },
}
"""What each says of itself beyond its sizes."""

WINDOWED = ("dflash_causal", "dflash2", "muse_glimmer_assistant", "laguna_dflash")


def random_drafter(family: str, target: Target, **edit: Any) -> BlockDrafter:
    """A drafter with random weights; with tables of its own only where its layout always ships them.

    Args:
        edit: keys of its config.json to replace.
    """
    config = {**_config(family, target, target.hidden_size, (4, 2, 6)), **edit}
    return _loaded(config, _random(config, target), target)


def planted_drafter(family: str, target: Target, text: Sequence[int]) -> BlockDrafter:
    """A drafter that proposes what followed a token in the text."""
    vocab = target.vocab_size
    size = vocab + vocab % 2
    config = _config(family, target, size, (1, 1, size))
    tensors = {name: mx.zeros_like(array) for name, array in _random(config, target).items()}
    for name, array in tensors.items():
        if "norm" in name or name.endswith("layer_scalar"):
            tensors[name] = mx.ones_like(array)
        if name.endswith("base_kernel"):
            tensors[name] = mx.concatenate([mx.ones((2, 1, size)), array[:, 1:]], axis=1)
    rows = np.eye(size, dtype=np.float32)
    following = np.zeros((vocab, size), np.float32)
    for before, after in zip(text[-2::-1], text[:0:-1], strict=True):  # the first occurrence is written last
        following[:, before] = 0
        following[after, before] = 1
    unmasked = rows.copy()
    unmasked[config["mask_token_id"]] = 0
    tensors["embed_tokens.weight"] = mx.array(rows[:vocab])
    tensors["lm_head.weight"] = mx.array(following)
    for layer in range(config["num_hidden_layers"]):
        attention = f"layers.{layer}.self_attn."
        tensors[f"{attention}k_proj.weight"] = mx.array(unmasked)
        if f"{attention}v_proj.weight" in tensors:
            tensors[f"{attention}v_proj.weight"] = mx.array(unmasked)
        tensors[f"{attention}o_proj.weight"] = mx.array(rows)
    if config.get("markov_rank"):
        tensors["lm_head.weight"] = mx.zeros((vocab, size))
        tensors["markov_head.markov_w1.weight"] = mx.array(rows[:vocab])
        tensors["markov_head.markov_w2.weight"] = mx.array(following)
    if "markov_head.joint_proj.weight" in tensors:
        # The output's share of the joint projection hands on what the token before looks up.
        joint = np.zeros((3 * size, 3 * size), np.float32)
        joint[2 * size :, size : 2 * size] = rows
        tensors["markov_head.joint_proj.weight"] = mx.array(joint)
    return _loaded(config, tensors, target)


def _config(family: str, target: Target, hidden: int, heads: tuple[int, int, int]) -> Config:
    """A config.json. `heads`: queries, keys, size."""
    last = target.layer_count - 1
    content = {
        "hidden_act": "silu",
        "vocab_size": target.vocab_size,
        "hidden_size": hidden,
        "target_hidden_size": target.hidden_size,
        "intermediate_size": 12,
        "num_hidden_layers": 2,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "head_dim": heads[2],
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e4,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "block_size": BLOCK,
        "mask_token_id": target.vocab_size - 1,
        "target_layer_ids": [0, last],
        "num_target_layers": last + 1,
        **FAMILIES[family],
    }
    if family in WINDOWED:
        content.update(layer_types=["sliding_attention"] * 2, sliding_window=9)
    if "markov_head_type" in content:
        # The planted head needs one dimension per token.
        content["markov_rank"] = hidden if heads[0] == 1 else 7
    if family == "gemma4_dspark":
        content["global_head_dim"] = heads[2]
    nested = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k", "projector_type", "causal")
    own = {key: content.pop(key) for key in nested if key in content}
    return {**content, "dflash_config": own} if own else content


def _random(config: Config, target: Target) -> Tensors:
    rng = np.random.default_rng(3)
    shapes, optional = wanted_shapes(BlockConfig.parse(config, Path(), target.vocab_size))
    tensors = {}
    for name, shape in shapes.items():
        if name in optional:
            continue
        noise = rng.standard_normal(shape, dtype=np.float32)
        is_norm = len(shape) == 1 and "bias" not in name
        tensors[name] = mx.array(1 + 0.1 * noise if is_norm else noise / shape[-1] ** 0.5)
    return tensors


def _loaded(config: Config, tensors: Tensors, target: Target) -> BlockDrafter:
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("error")
        (Path(folder) / "config.json").write_text(json.dumps(config))
        mx.save_safetensors(f"{folder}/model.safetensors", tensors)
        drafter = load_drafter(folder, target=target)
    assert isinstance(drafter, BlockDrafter)
    return drafter
