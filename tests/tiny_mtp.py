"""Tiny targets that carry a prediction layer, as checkpoints are published, for families without a fixture too.

The prediction layer is made as the last of a model with one layer more, by mlx-lm's own class, so that what it must
give can be computed without ours. A random one is nearly always wrong. A planted one is right about a quarter of the
time: its decoder layer changes nothing, and its projection is fitted by least squares to what the target does with
random text.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx import nn
from mlx.utils import tree_flatten
from mlx_lm.models import longcat_flash
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import _get_classes

from mlx_spec.model.target import Target
from tests.drafters.native import FIXTURES, build_target
from tests.tiny import randomise
from tests.tiny_mtp_configs import CONFIGS, VOCAB, Config

Tensors = dict[str, mx.array]

LOUDNESS = 8
"""Times the fixtures' embeddings, which their layers drown: what comes next would depend on the whole text alone."""

FROM_FIXTURES = ("deepseek_v3", "glm4_moe", "qwen35_dense_real", "qwen35_moe_real", "qwen3_next")

FAMILIES = (*FROM_FIXTURES, *CONFIGS)


@dataclass(frozen=True)
class Names:
    """What a family calls the parts of its prediction layer, after the place, and what is special about it."""

    embedding_norm: str
    hidden_norm: str
    projection: str
    final_norm: str | None
    place: str
    layer: str = ""
    copies: tuple[str, ...] = ()
    hidden_first: bool = False
    zero_centred: bool = False
    reads_normed: bool = True


_NEXTN_PARTS = ("enorm", "hnorm", "eh_proj")
_NEXTN = Names(
    *_NEXTN_PARTS,
    *("shared_head.norm", "model.layers.3."),
    copies=("embed_tokens.weight", "shared_head.head.weight"),
)
_QWEN = Names(
    *("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm", "mtp."), layer="layers.0.", zero_centred=True
)
_NAMES = {
    "kimi_k25": replace(_NEXTN, place="language_model.model.layers.3."),
    "mimo": Names(
        *("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm", "model.mtp_layers.0."),
        hidden_first=True,
    ),
    "step3p5": replace(
        _NEXTN, layer="transformer.", copies=("tok_embeddings.weight",), zero_centred=True, reads_normed=False
    ),
    "nemotron_h": Names(
        *("layers.0.enorm", "layers.0.hnorm", "layers.0.eh_proj", "layers.1.final_layernorm", "mtp."), layer="layers."
    ),
    "exaone_moe": replace(_QWEN, zero_centred=False),
    "longcat_flash": Names(
        *("layers.0.enorm.m", "layers.0.hnorm.m", "layers.0.eh_proj", "norm", "model.mtp."),
        layer="layers.0.",
        copies=("embed_tokens.weight",),
    ),
    "mimo_v2_flash": Names(*_NEXTN_PARTS, "final_layernorm", "model.mtp.layers.0.", reads_normed=False),
    "ernie4_5_moe": Names("emb_norm.0", "hidden_norm.0", "linear_proj.0", None, "model.mtp_", layer="block.0."),
    "bailing_hybrid": Names(*_NEXTN_PARTS, "final_layernorm", "model.layers.2."),
    "bailing_moe_v3": Names(*_NEXTN_PARTS, "final_layernorm", "model.layers.2."),
}


def names_of(family: str) -> Names:
    """The parts' names in a family's checkpoint."""
    return _QWEN if family.startswith("qwen") else _NAMES.get(family, _NEXTN)


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
    for part in names_of(family).copies if family in ("deepseek_v3", "glm4_moe") else ():
        # Random in the fixtures; published ones are the target's.
        tensors[f"{_NEXTN.place}{part}"] = tensors["lm_head.weight" if "head" in part else "model.embed_tokens.weight"]
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
    return write(folder, family, edit_tensors=lambda tensors: plant(tensors, family))


# The reference for families without a fixture


@functools.cache
def deeper(family: str) -> nn.Module:
    """The family's mlx-lm model with one layer more, or two: its last is the prediction layer's."""
    config = json.loads(json.dumps(CONFIGS[family]))
    text = config.get("text_config", config)
    if family == "nemotron_h":
        text["hybrid_override_pattern"] += "*E"
    elif family != "longcat_flash":
        text["num_hidden_layers"] += 1
    if family == "exaone_moe":
        text["layer_types"].append("full_attention")
        text["is_moe_layer"].append(False)
    if family == "mimo_v2_flash":
        text["hybrid_layer_pattern"].append(1)
        text["moe_layer_freq"].append(0)
    model_class, arguments = _get_classes(config)
    args = arguments.from_dict(config)

    def build() -> nn.Module:
        model: nn.Module = model_class(args)
        if family == "longcat_flash":
            model.layers.append(OneAttention(args))
        return model

    return randomise(build, seed=4)


class OneAttention(nn.Module):
    """LongCat-Flash's prediction layer: mlx-lm has its parts, and no layer of one attention and no experts."""

    def __init__(self, args: Any) -> None:
        super().__init__()
        self.self_attn = longcat_flash.LongcatFlashMLA(args)
        self.mlp = longcat_flash.LongcatFlashMLP(args)
        self.input_layernorm = nn.RMSNorm(args.hidden_size, eps=args.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(args.hidden_size, eps=args.rms_norm_eps)

    def __call__(self, x: mx.array, mask: Any, cache: Any) -> mx.array:
        x = x + self.self_attn(self.input_layernorm(x), mask=mask, cache=cache[0])
        out: mx.array = x + self.mlp(self.post_attention_layernorm(x))
        return out


_EXPERTS = re.compile(r"(.*\.)switch_mlp\.(\w+)\.weight")
_LATENTS = re.compile(r"(.*\.(?:self_attn|attention)\.(?:\d\.)?)embed_q\.weight")
_EXPERT_PARTS = {"fc1": "up_proj", "fc2": "down_proj"}

_STORED_AS: Mapping[str, Mapping[str, str]] = {
    # Its experts stay side by side.
    "step3p5": {
        r"mlp\.switch_mlp\.": "moe.",
        r"mlp\.gate\.gate\.": "moe.gate.",
        r"mlp\.gate\.router_bias": "moe.router_bias",
        r"mlp\.share_expert\.": "share_expert.",
    },
    "exaone_moe": {r"mlp\.gate\.e_score_correction_bias": "mlp.e_score_correction_bias"},
    "longcat_flash": {r"(?<=layers\.2\.)mlp\.": "transformer_layer.mlp."},
    "mimo_v2_flash": {r"(?<=layers\.3\.)post_attention_layernorm": "pre_mlp_layernorm"},
    "bailing_hybrid": {r"mlp\.gate\.gate_proj\.": "mlp.gate."},
}
"""Family -> part of a name in mlx-lm -> in the files."""


def _published(family: str) -> Tensors:
    """The deeper model's weights under the names and in the shapes of published checkpoints, and the other parts."""
    model, names = deeper(family), names_of(family)
    own = dict(tree_flatten(model.parameters()))
    tensors: Tensors = {}
    for name, array in own.items():
        experts, latents = _EXPERTS.fullmatch(name), _LATENTS.fullmatch(name)
        if experts and family != "step3p5":
            part = _EXPERT_PARTS.get(experts[2], experts[2])
            for each in range(array.shape[0]):
                tensors[f"{experts[1]}experts.{each}.{part}.weight"] = array[each]
        elif latents:
            both = [array.swapaxes(-1, -2), own[f"{latents[1]}unembed_out.weight"]]
            joined = mx.concatenate(both, axis=1)
            tensors[f"{latents[1]}kv_b_proj.weight"] = joined.reshape(-1, joined.shape[-1])
        elif not name.endswith("unembed_out.weight"):
            tensors[name] = array.moveaxis(1, 2) if "conv1d.weight" in name else array
    for part, stored in _STORED_AS.get(family, {}).items():
        tensors = {re.sub(part, stored, name): array for name, array in tensors.items()}
    tensors = {_placed(name, family): array for name, array in tensors.items()}
    if family in ("step3p5", "exaone_moe"):
        tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"] * LOUDNESS
    _add_parts(tensors, family)
    if names.zero_centred:
        tensors = {name: array - 1 if _is_norm(name) else array for name, array in tensors.items()}
    return tensors


def _is_norm(name: str) -> bool:
    return "norm" in name and name.endswith(".weight")


def _placed(name: str, family: str) -> str:
    """A name in the deeper model, with the prediction layer's in its place."""
    names = names_of(family)
    if family == "nemotron_h":
        layer = re.fullmatch(r"backbone\.layers\.([34])\.(.*)", name)
        return f"{names.place}{names.layer}{int(layer[1]) - 3}.{layer[2]}" if layer else name
    layer = re.fullmatch(r"((?:language_model\.)?model\.)layers\.([23])\.(.*)", name)
    last = "2" if family in ("longcat_flash", "bailing_hybrid", "bailing_moe_v3") else "3"
    return f"{names.place}{names.layer}{layer[3]}" if layer and layer[2] == last else name


def _add_parts(tensors: Tensors, family: str) -> None:
    """What stands around the decoder layer, and what else is beside it."""
    names, config = names_of(family), CONFIGS[family]
    size = config.get("text_config", config)["hidden_size"]
    rng = np.random.default_rng(7)

    def normal(*shape: int) -> mx.array:
        return mx.array(rng.standard_normal(shape, dtype=np.float32))

    for part in filter(None, (names.embedding_norm, names.hidden_norm, names.final_norm)):
        tensors[f"{names.place}{part}.weight"] = 1 + 0.1 * normal(size)
    tensors[f"{names.place}{names.projection}.weight"] = normal(size, 2 * size) / (2 * size) ** 0.5
    if config.get("use_bias") and family == "ernie4_5_moe":
        tensors[f"{names.place}{names.projection}.bias"] = 0.1 * normal(size)
    before = "language_model." if family == "kimi_k25" else ""
    for part in names.copies:
        same = f"{before}lm_head.weight" if "head" in part else f"{before}model.embed_tokens.weight"
        tensors[f"{names.place}{part}"] = tensors[same]
    if family == "step3p5":
        tensors[f"{names.place}shared_head.output.weight"] = normal(VOCAB, size)


# A prediction layer that is often right

_ROWS, _LENGTH = 64, 24

_NEAR_ZERO = 1e-6


def plant(tensors: Tensors, family: str) -> None:
    """Put the weights of a prediction layer that is often right in place of the random ones."""
    names, own = names_of(family), target(family)
    for name, array in tensors.items():
        if name.startswith(names.place) and re.search(r"o_proj|dense|down_proj|linear_proj\.0\.bias", name):
            tensors[name] = mx.zeros_like(array)
    one = mx.zeros if names.zero_centred else mx.ones
    size = own.hidden_size
    for part in (names.embedding_norm, names.hidden_norm):
        tensors[f"{names.place}{part}.weight"] = one((size,))
    final = r"(model\.|language_model\.|backbone\.)*norm(_f)?\.weight"
    (norm,) = [array for name, array in tensors.items() if re.fullmatch(final, name)]
    if names.final_norm is not None:
        tensors[f"{names.place}{names.final_norm}.weight"] = norm
    tensors[f"{names.place}{names.projection}.weight"] = _fitted(own, names)
    if family == "step3p5":
        tensors[f"{names.place}shared_head.output.weight"] = tensors["lm_head.weight"]


def _fitted(own: Target, names: Names) -> mx.array:
    """[H, 2H] M such that the last layer's output at t + 1 is near M @ [normed embedding of it, normed state at t]."""
    last = own.layer_count - 1
    own.attach_taps((last,))
    ids = mx.array(np.random.default_rng(5).integers(0, VOCAB, (_ROWS, _LENGTH)))
    tapped = own.forward(ids, make_prompt_cache(own.model), (last,)).hidden
    assert tapped is not None
    embedded = np.array(own.embed(ids))[:, 1:]
    # The norm before the head takes any length away.
    read = own.final_norm(tapped) if names.reads_normed else tapped
    before, after = np.array(read)[:, :-1], _normed(np.array(tapped)[:, 1:])
    seen = [_normed(embedded), _normed(before)]
    width = after.shape[-1]
    pairs = np.concatenate(seen[::-1] if names.hidden_first else seen, axis=-1).reshape(-1, 2 * width)
    square = pairs.T @ pairs + _NEAR_ZERO * np.eye(2 * width)
    return mx.array(np.linalg.solve(square, pairs.T @ after.reshape(-1, width)).T.astype(np.float32))


def _normed(rows: np.ndarray) -> np.ndarray:
    return rows / np.sqrt((rows**2).mean(-1, keepdims=True) + _NEAR_ZERO)
