"""How each family keeps its prediction layer in a checkpoint, and how mlx-lm builds the decoder layer in it.

A prediction layer is one decoder layer of the target's own architecture between a projection and a norm:
norm(layer(projection([embedding_norm(E[token at t + 1]), hidden_norm(h[t])]))).

Source: DeepSeek-V3 technical report 2024, arXiv:2412.19437, section 2.2. Several layers, one per depth, are in
`depths.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from mlx_spec.errors import IncompatiblePair

SPLIT_SUFFIX = "_mtp"
"""What `model_type` ends with in a folder that holds a prediction layer alone, its names without a place."""

_FULL_ATTENTION = (["full_attention"],)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """One family.

    Attributes:
        module: the mlx-lm module that has the decoder layer.
        builder: the module that has `model`, where mlx-lm's has no model of such a layer.
        model: the class of the whole model, which takes the arguments the target keeps as `args`.
        trunk: its attribute that has the layers, and ends with a norm.
        lookup, trunk_norm: the trunk's attributes for the embedding and for that norm.
        epsilon: the argument that norms are given.
        sole_layer: the arguments under which the only layer of such a model is the kind of layer that predicts, or
            what tells them from the target's arguments and the number of its layers.
        body: attributes its trunk is given then.
        whole_caches: its window is kept by the mask alone, as a ring cannot be cut inside a block written at once.
        empty_caches: places after its caches where the trunk looks for one and needs none.
        places: what tensor names start with; "{n}" stands for the number of the target's layers, and one more for each
            depth, "{k}" for the depth's number.
        embedding_norm, hidden_norm, projection: names after the place.
        final_norm: the same; None where the target's own norm serves, before the head and before the next pair.
        biased: the argument that says whether the projection has a bias; None where it has none.
        layer: what follows the place in names of the decoder layer's tensors; "{i}" stands for its number.
        renamed: start of a name in mlx-lm's decoder layer -> in the files.
        wrapped: what files may have between `layer` and the names of the decoder layer's tensors.
        head: name of a head of its own, which serves in place of the target's.
        copies: names of the target's embedding and head repeated there -> which of the two. They are compared and not
            used: the target's own serve, as they do in transformers' `MtpModel` and in SGLang.
        hidden_first: the projection reads [hidden, embedding].
        reads_normed: the hidden states are those after a norm, the target's final one or the layer's own; otherwise
            those before it, and the norm is passed on the way to the head alone.
        zero_centred: norm weights are kept as w - 1, as the architecture's other norms are, until converted for MLX.
        one_per_depth: checkpoints have several prediction layers, each in a place of its own. Each drafts one token.
        chained: of several, each reads what the one before it gave at the same position; otherwise all read the target.
        settings: key of config.json -> what it may say. Anything else describes a layer that is not known.
        split_type: `model_type` of a folder that holds the prediction layer alone.
        width: tokens per verify call where the checkpoint names none.
    """

    module: str
    builder: str | None = None
    model: str = "Model"
    trunk: str = "model"
    lookup: str = "embed_tokens"
    trunk_norm: str = "norm"
    epsilon: str = "rms_norm_eps"
    sole_layer: Mapping[str, object] | Callable[[Any, int], Mapping[str, object]]
    body: Mapping[str, object] = field(default_factory=dict)
    whole_caches: bool = False
    empty_caches: int = 0
    places: tuple[str, ...]
    embedding_norm: str
    hidden_norm: str
    projection: str
    final_norm: str | None
    biased: str | None = None
    layer: str = ""
    renamed: Mapping[str, str] = field(default_factory=dict)
    wrapped: str | None = None
    head: str | None = None
    copies: Mapping[str, str] = field(default_factory=dict)
    hidden_first: bool = False
    reads_normed: bool = True
    zero_centred: bool = False
    one_per_depth: bool = False
    chained: bool = True
    settings: Mapping[str, Collection[object]] = field(default_factory=lambda: {"mtp_layer_types": _FULL_ATTENTION})
    split_type: str
    width: int = 2

    def as_stored(self, names: Collection[str]) -> Layout:
        """The layout of files with tensors of these names, which may wrap the decoder layer's."""
        wrapped = self.layer + (self.wrapped or "")
        return replace(self, layer=wrapped) if any(name.startswith(wrapped) for name in names) else self


def _full_attention_beside_windows(args: Any, layers: int) -> Mapping[str, object]:
    """EXAONE-MoE's: dense, over the whole text. Whether it is rotated hangs on the target having windows."""
    del layers
    return {
        "num_hidden_layers": 1,
        "is_moe_layer": [False],
        "layer_types": ["full_attention", *args.layer_types],
    }


_PER_LAYER = ("layer_types", "rope_theta", "partial_rotary_factors", "swiglu_limits", "swiglu_limits_shared")


def _next_in_every_list(args: Any, layers: int) -> Mapping[str, object]:
    """Step 3.5's: dense, its settings those that the target's lists have past the target's layers.

    Raises:
        IncompatiblePair: the lists end before, so nothing says what kind of layer it is.
    """
    lists = {name: value for name in _PER_LAYER if isinstance(value := getattr(args, name), list)}
    short = [name for name in ("layer_types", "rope_theta") if name in lists and len(lists[name]) <= layers]
    if short or "layer_types" not in lists:
        raise IncompatiblePair(
            f"the target's {' and '.join(short) or 'layer_types'} say nothing of layer {layers}, so it is "
            "not known what kind of layer predicts. Load the target from its original repository."
        )
    entries = {name: value[layers : layers + 1] for name, value in lists.items()}
    return {"num_hidden_layers": 1, "moe_layers_enum": None, **entries}


_QWEN3_5 = Layout(
    module="qwen3_5",
    model="TextModel",
    sole_layer={"num_hidden_layers": 1, "full_attention_interval": 1},
    body={"ssm_idx": None},  # no layer is recurrent, so none needs the mask of one
    places=("mtp.", "model.mtp.", "language_model.mtp.", "model.language_model.mtp."),
    embedding_norm="pre_fc_norm_embedding",
    hidden_norm="pre_fc_norm_hidden",
    projection="fc",
    final_norm="norm",
    layer="layers.{i}.",
    zero_centred=True,
    split_type="qwen3_5_mtp",
    width=3,
)
_QWEN3_NEXT = replace(
    _QWEN3_5,
    module="qwen3_next",
    model="Model",
    sole_layer={
        "num_hidden_layers": 1,
        "full_attention_interval": 1,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
    split_type="qwen3_next_mtp",
)
_DEEPSEEK_V3 = Layout(
    module="deepseek_v3",
    sole_layer={"num_hidden_layers": 1, "first_k_dense_replace": 0, "moe_layer_freq": 1},
    places=("model.layers.{n}.", "language_model.model.layers.{n}.", "model.language_model.layers.{n}."),
    embedding_norm="enorm",
    hidden_norm="hnorm",
    projection="eh_proj",
    final_norm="shared_head.norm",
    copies={"embed_tokens.weight": "embedding", "shared_head.head.weight": "head"},
    split_type="deepseek_v3_mtp",
)
_DEEPSEEK_V32 = replace(_DEEPSEEK_V3, module="deepseek_v32", split_type="deepseek_v32_mtp")
_GLM4_MOE = replace(
    _DEEPSEEK_V3,
    module="glm4_moe",
    sole_layer={"num_hidden_layers": 1, "first_k_dense_replace": 0},
    split_type="glm4_moe_mtp",
)
_MIMO = Layout(
    module="mimo",
    sole_layer={"num_hidden_layers": 1},
    places=("model.mtp_layers.0.",),
    embedding_norm="token_layernorm",
    hidden_norm="hidden_layernorm",
    projection="input_proj",
    final_norm="final_layernorm",
    hidden_first=True,
    split_type="mimo_mtp",
)

_STEP3P5 = replace(
    _DEEPSEEK_V3,
    module="step3p5",
    sole_layer=_next_in_every_list,
    whole_caches=True,
    places=("model.layers.{n}.",),
    wrapped="transformer.",
    head="shared_head.output",
    copies={"embed_tokens.weight": "embedding", "tok_embeddings.weight": "embedding"},
    reads_normed=False,
    zero_centred=True,
    one_per_depth=True,
    split_type="step3p5_mtp",
)
_NEMOTRON_H = Layout(
    module="nemotron_h",
    trunk="backbone",
    lookup="embeddings",
    trunk_norm="norm_f",
    epsilon="layer_norm_epsilon",
    sole_layer={"hybrid_override_pattern": ["*", "E"]},
    empty_caches=1,  # the mask of recurrent layers is made of the cache of one, which there is not
    places=("mtp.", "language_model.mtp."),
    embedding_norm="layers.0.enorm",
    hidden_norm="layers.0.hnorm",
    projection="layers.0.eh_proj",
    final_norm="layers.1.final_layernorm",
    layer="layers.{i}.",
    renamed={
        "mixer.switch_mlp.fc1.": "mixer.switch_mlp.up_proj.",
        "mixer.switch_mlp.fc2.": "mixer.switch_mlp.down_proj.",
    },
    settings={
        "mtp_hybrid_override_pattern": ("*E", ["*", "E"]),
        "mtp_layers_block_type": (["attention", "moe"], ["full_attention", "moe"]),
    },
    split_type="nemotron_h_mtp",
)
_EXAONE_MOE = replace(
    _QWEN3_5,
    module="exaone_moe",
    model="Model",
    sole_layer=_full_attention_beside_windows,
    body={},
    places=("mtp.",),
    zero_centred=False,
    settings={"mtp_layer_types": _FULL_ATTENTION, "mtp_sliding_windows": ([0], [None])},
    split_type="exaone_moe_mtp",
    width=2,
)
_LONGCAT_FLASH = Layout(
    module="longcat_flash",
    builder="mlx_spec.drafters.mtp.longcat",
    sole_layer={},
    places=("model.mtp.",),
    embedding_norm="layers.0.enorm.m",
    hidden_norm="layers.0.hnorm.m",
    projection="layers.0.eh_proj",
    final_norm="norm",
    layer="layers.{i}.",
    renamed={"mlp.": "transformer_layer.mlp."},
    copies={"embed_tokens.weight": "embedding"},
    split_type="longcat_flash_mtp",
)
_MIMO_V2_FLASH = replace(
    _DEEPSEEK_V3,
    module="mimo_v2_flash",
    epsilon="layernorm_epsilon",
    # Dense, with a window. The trunk looks for a layer of either kind among those it is told of.
    sole_layer={"num_hidden_layers": 1, "hybrid_layer_pattern": [1, 0], "moe_layer_freq": [0, 0]},
    whole_caches=True,
    empty_caches=1,
    places=("model.mtp.layers.{k}.",),
    final_norm="final_layernorm",
    copies={},
    renamed={"post_attention_layernorm.": "pre_mlp_layernorm."},
    reads_normed=False,
    one_per_depth=True,
    chained=False,
    split_type="mimo_v2_flash_mtp",
)
_ERNIE4_5_MOE = Layout(
    module="ernie4_5_moe",
    sole_layer={"num_hidden_layers": 1, "moe_layer_start_index": 1},
    # Nothing but these starts so.
    places=("model.mtp_",),
    embedding_norm="emb_norm.0",
    hidden_norm="hidden_norm.0",
    projection="linear_proj.0",
    final_norm=None,
    biased="use_bias",
    layer="block.{i}.",
    split_type="ernie4_5_moe_mtp",
)
_BAILING_MOE_V3 = replace(
    _DEEPSEEK_V3,
    module="bailing_moe_v3",
    lookup="word_embeddings",
    # Latent attention and experts, whatever the place in the pattern of layers.
    sole_layer={"num_hidden_layers": 1, "layer_group_size": 1, "first_k_dense_replace": 0},
    places=("model.layers.{n}.",),
    final_norm="final_layernorm",
    copies={},
    split_type="bailing_moe_v3_mtp",
)
_BAILING_HYBRID = replace(
    _BAILING_MOE_V3,
    module="bailing_hybrid",
    renamed={"mlp.gate.gate_proj.": "mlp.gate."},
    split_type="bailing_hybrid_mtp",
)

LAYOUT_BY_ARCHITECTURE: Mapping[str, Layout] = {
    "qwen3_5": _QWEN3_5,
    "qwen3_5_moe": _QWEN3_5,
    "qwen3_next": _QWEN3_NEXT,
    "deepseek_v3": _DEEPSEEK_V3,
    "kimi_k25": _DEEPSEEK_V3,
    "deepseek_v32": _DEEPSEEK_V32,
    "glm_moe_dsa": replace(_DEEPSEEK_V32, split_type="glm_moe_dsa_mtp"),
    "glm4_moe": _GLM4_MOE,
    "glm4_moe_lite": replace(_DEEPSEEK_V3, module="glm4_moe_lite", split_type="glm4_moe_lite_mtp"),
    "mimo": _MIMO,
    "step3p5": _STEP3P5,
    "nemotron_h": _NEMOTRON_H,
    "exaone_moe": _EXAONE_MOE,
    "longcat_flash": _LONGCAT_FLASH,
    "mimo_v2_flash": _MIMO_V2_FLASH,
    "ernie4_5_moe": _ERNIE4_5_MOE,
    "bailing_hybrid": _BAILING_HYBRID,
    "bailing_moe_v3": _BAILING_MOE_V3,
}
"""mlx-lm module of the target -> layout."""

_NO_REFERENCE = "no reference for the order and norms of its parts is known well enough"

WITHOUT_LAYOUT: Mapping[str, str] = {
    "longcat_flash_ngram": "it embeds the last few tokens together, so there is no table to share",
    "kimi_linear": _NO_REFERENCE,
    "mellum": _NO_REFERENCE,
    "youtu_llm": _NO_REFERENCE,
    "solar_open": _NO_REFERENCE,
}
"""Targets whose checkpoints may carry prediction layers that are not read, and why."""


def layout_of(architecture: str) -> Layout:
    """The layout of a target's prediction layer.

    Args:
        architecture: the target's mlx-lm module.

    Raises:
        IncompatiblePair: there is none. Says why, or lists those that have one.
    """
    layout = LAYOUT_BY_ARCHITECTURE.get(architecture)
    if layout is not None:
        return layout
    reason = WITHOUT_LAYOUT.get(architecture, "no layout of a prediction layer is known for it")
    raise IncompatiblePair(
        f"a prediction layer (MTP) cannot serve target {architecture!r}: {reason}. "
        f"Targets it can serve: {', '.join(sorted(LAYOUT_BY_ARCHITECTURE))}. "
        'The n-gram drafter (draft_model="ngram") works with every target.'
    )
