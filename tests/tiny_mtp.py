"""Tiny targets that carry a prediction layer, as checkpoints are published, for families without a fixture too.

The prediction layer is made as the last of a model with one layer more, by mlx-lm's own class, so that what it must
give can be computed without ours. A random one is nearly always wrong. A planted one is right about a quarter of the
time: its decoder layer changes nothing, and its projection is fitted by least squares to what the target does with
random text.
"""

from __future__ import annotations

import functools
import importlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx import nn
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

from mlx_spec.target.model import Target
from tests.drafters.native import FIXTURES, build_target
from tests.tiny import randomise

Config = dict[str, Any]
Tensors = dict[str, mx.array]

VOCAB = 64

LOUDNESS = 8
"""Times the fixtures' embeddings, which their layers drown: what comes next would depend on the whole text alone."""

_LATENT = {
    "hidden_size": 36,
    "intermediate_size": 52,
    "moe_intermediate_size": 20,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_shared_experts": 1,
    "n_routed_experts": 5,
    "num_experts_per_tok": 2,
    "kv_lora_rank": 14,
    "q_lora_rank": 18,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 10,
    "first_k_dense_replace": 2,
    "moe_layer_freq": 1,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
    "routed_scaling_factor": 1.5,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "n_group": 1,
    "topk_group": 1,
    "attention_bias": False,
    "vocab_size": VOCAB,
    "num_nextn_predict_layers": 1,
}
# Fewer keys than the text has tokens, so that attention is sparse.
_SPARSE = {**_LATENT, "index_head_dim": 16, "index_n_heads": 2, "index_topk": 5}

CONFIGS: Mapping[str, Config] = {
    "deepseek_v32": {"model_type": "deepseek_v32", **_SPARSE},
    "glm_moe_dsa": {
        "model_type": "glm_moe_dsa",
        **{key: value for key, value in _SPARSE.items() if key != "rope_theta"},
        "rope_parameters": {"rope_theta": 1e4, "rope_type": "default"},
    },
    "glm4_moe_lite": {"model_type": "glm4_moe_lite", **_LATENT},
    "kimi_k25": {"model_type": "kimi_k25", "text_config": {"model_type": "kimi_k2", **_LATENT}},
    "mimo": {
        "model_type": "mimo",
        "hidden_size": 40,
        "num_hidden_layers": 3,
        "intermediate_size": 52,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "vocab_size": VOCAB,
        "rope_theta": 1e4,
        "num_nextn_predict_layers": 1,
    },
}
"""config.json of families without a fixture."""

FROM_FIXTURES = ("deepseek_v3", "glm4_moe", "qwen35_dense_real", "qwen35_moe_real", "qwen3_next")

FAMILIES = (*FROM_FIXTURES, *CONFIGS)


@dataclass(frozen=True)
class Names:
    """What a family calls the parts of its prediction layer, after the place."""

    embedding_norm: str
    hidden_norm: str
    projection: str
    final_norm: str
    place: str


_NEXTN = Names("enorm", "hnorm", "eh_proj", "shared_head.norm", "model.layers.3.")
_QWEN = Names("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm", "mtp.")
_MIMO = Names("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm", "model.mtp_layers.0.")


def names_of(family: str) -> Names:
    """The parts' names in a family's checkpoint."""
    if family.startswith("qwen"):
        return _QWEN
    if family == "kimi_k25":
        return Names(
            *(_NEXTN.embedding_norm, _NEXTN.hidden_norm, _NEXTN.projection, _NEXTN.final_norm),
            "language_model.model.layers.3.",
        )
    return _MIMO if family == "mimo" else _NEXTN


@functools.cache
def checkpoint(family: str) -> tuple[Config, Mapping[str, mx.array]]:
    """config.json and tensors of a published checkpoint with a random prediction layer."""
    if family in CONFIGS:
        return CONFIGS[family], _published(family)
    folder = FIXTURES / family
    tensors = mx.load(str(folder / "model.safetensors"))
    assert isinstance(tensors, dict)
    for name in [name for name in tensors if name.endswith("embed_tokens.weight")]:
        tensors[name] = tensors[name] * LOUDNESS
    return json.loads((folder / "config.json").read_text()), tensors


@functools.cache
def target(family: str) -> Target:
    """The target of `checkpoint`."""
    return build_target(*checkpoint(family))


def write(
    folder: Path,
    family: str,
    edit_config: Callable[[Config], object] = lambda content: None,
    edit_tensors: Callable[[Tensors], object] = lambda content: None,
) -> Path:
    """The checkpoint in `folder`, edited in place by the two functions."""
    config, tensors = checkpoint(family)
    config, tensors = json.loads(json.dumps(config)), dict(tensors)
    edit_config(config)
    edit_tensors(tensors)
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(folder / "model.safetensors"), tensors, {"format": "pt"})
    return folder


def write_planted(folder: Path, family: str) -> Path:
    """The checkpoint in `folder`, with a prediction layer that is often right."""
    return write(folder, family, edit_tensors=lambda tensors: _plant(tensors, family))


# The reference for families without a fixture


@functools.cache
def deeper(family: str) -> nn.Module:
    """The family's mlx-lm model with one layer more: its last is the prediction layer's."""
    config = json.loads(json.dumps(CONFIGS[family]))
    text = config.get("text_config", config)
    text["num_hidden_layers"] += 1
    module = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    return randomise(lambda: module.Model(module.ModelArgs.from_dict(config)), seed=4)


_EXPERTS = re.compile(r"(.*\.)switch_mlp\.(\w+)\.weight")
_LATENTS = re.compile(r"(.*\.self_attn\.)embed_q\.weight")


def _published(family: str) -> Tensors:
    """The deeper model's weights under the names and in the shapes of published checkpoints, and the other parts."""
    model = deeper(family)
    own = dict(tree_flatten(model.parameters()))
    tensors: Tensors = {}
    for name, array in own.items():
        experts, latents = _EXPERTS.fullmatch(name), _LATENTS.fullmatch(name)
        if experts:
            for each in range(array.shape[0]):
                tensors[f"{experts[1]}experts.{each}.{experts[2]}.weight"] = array[each]
        elif latents:
            both = [array.swapaxes(-1, -2), own[f"{latents[1]}unembed_out.weight"]]
            joined = mx.concatenate(both, axis=1)
            tensors[f"{latents[1]}kv_b_proj.weight"] = joined.reshape(-1, joined.shape[-1])
        elif not name.endswith("unembed_out.weight"):
            tensors[name] = array
    names, size = names_of(family), model.args.hidden_size if family == "mimo" else 36
    rng = np.random.default_rng(7)

    def normal(*shape: int) -> mx.array:
        return mx.array(rng.standard_normal(shape, dtype=np.float32))

    for part in (names.embedding_norm, names.hidden_norm, names.final_norm):
        tensors[f"{names.place}{part}.weight"] = 1 + 0.1 * normal(size)
    tensors[f"{names.place}{names.projection}.weight"] = normal(size, 2 * size) / (2 * size) ** 0.5
    if family == "mimo":
        for name in [name for name in tensors if name.startswith("model.layers.3.")]:
            tensors[name.replace("model.layers.3.", names.place)] = tensors.pop(name)
    else:
        tensors[f"{names.place}embed_tokens.weight"] = normal(VOCAB, size)
        tensors[f"{names.place}shared_head.head.weight"] = normal(VOCAB, size)
    return tensors


# A prediction layer that is often right

_ROWS, _LENGTH = 64, 24

_NEAR_ZERO = 1e-6


def _plant(tensors: Tensors, family: str) -> None:
    names, own = names_of(family), target(family)
    for name, array in tensors.items():
        if name.startswith(names.place) and re.search(r"o_proj|down_proj", name):
            tensors[name] = mx.zeros_like(array)
    one = mx.zeros if names is _QWEN else mx.ones
    size = own.hidden_size
    for part in (names.embedding_norm, names.hidden_norm):
        tensors[f"{names.place}{part}.weight"] = one((size,))
    (norm,) = [
        array for name, array in tensors.items() if re.fullmatch(r"(model\.|language_model\.)*norm\.weight", name)
    ]
    tensors[f"{names.place}{names.final_norm}.weight"] = norm
    tensors[f"{names.place}{names.projection}.weight"] = _fitted(own, hidden_first=family == "mimo")


def _fitted(own: Target, hidden_first: bool) -> mx.array:
    """[H, 2H] M such that the last layer's output at t + 1 is near M @ [normed embedding of it, normed state at t]."""
    last = own.layer_count - 1
    own.attach_taps((last,))
    ids = mx.array(np.random.default_rng(5).integers(0, VOCAB, (_ROWS, _LENGTH)))
    tapped = own.forward(ids, make_prompt_cache(own.model), (last,)).hidden
    assert tapped is not None
    embedded = np.array(own.embed(ids))[:, 1:]
    # The norm before the head takes any length away.
    before, after = np.array(own.final_norm(tapped))[:, :-1], _normed(np.array(tapped)[:, 1:])
    seen = [_normed(embedded), _normed(before)]
    width = after.shape[-1]
    pairs = np.concatenate(seen[::-1] if hidden_first else seen, axis=-1).reshape(-1, 2 * width)
    square = pairs.T @ pairs + _NEAR_ZERO * np.eye(2 * width)
    return mx.array(np.linalg.solve(square, pairs.T @ after.reshape(-1, width)).T.astype(np.float32))


def _normed(rows: np.ndarray) -> np.ndarray:
    return rows / np.sqrt((rows**2).mean(-1, keepdims=True) + _NEAR_ZERO)
