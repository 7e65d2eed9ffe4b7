"""How each family keeps its prediction layer in a checkpoint, and how mlx-lm builds the decoder layer in it.

A prediction layer is one decoder layer of the target's own architecture between a projection and a norm:
norm(layer(projection([embedding_norm(E[token at t + 1]), hidden_norm(h[t])]))).

Source: DeepSeek-V3 technical report 2024, arXiv:2412.19437, section 2.2. Left out: several layers, one per depth.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from mlx_spec.errors import IncompatiblePair

SPLIT_SUFFIX = "_mtp"
"""What `model_type` ends with in a folder that holds a prediction layer alone, its names without a place."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """One family.

    Attributes:
        module: the mlx-lm module that has the decoder layer.
        model: its class that has `model.layers`, `model.norm`, and takes the arguments the target keeps as `args`.
        sole_layer: the arguments under which the only layer of such a model is the kind of layer that predicts.
        body: attributes its `model` is given then.
        places: what tensor names start with; "{n}" stands for the number of the target's layers.
        embedding_norm, hidden_norm, projection, final_norm: names after the place.
        layer: what follows the place in names of the decoder layer's tensors.
        copies: names of the target's embedding and head repeated there. They are not read: the target's own serve,
            as they do in transformers' `MtpModel` and in SGLang.
        hidden_first: the projection reads [hidden, embedding].
        zero_centred: norm weights are kept as w - 1, as the architecture's other norms are, until converted for MLX.
        split_type: `model_type` of a folder that holds the prediction layer alone.
        width: tokens per verify call where the checkpoint names none.
    """

    module: str
    model: str = "Model"
    sole_layer: Mapping[str, object]
    body: Mapping[str, object] = field(default_factory=dict)
    places: tuple[str, ...]
    embedding_norm: str
    hidden_norm: str
    projection: str
    final_norm: str
    layer: str = ""
    copies: tuple[str, ...] = ()
    hidden_first: bool = False
    zero_centred: bool = False
    split_type: str
    width: int = 2


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
    layer="layers.0.",
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
    copies=("embed_tokens.weight", "shared_head.head.weight"),
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
}
"""mlx-lm module of the target -> layout."""

_NO_REFERENCE = "no reference for the order and norms of its parts is known well enough"

WITHOUT_LAYOUT: Mapping[str, str] = {
    "mimo_v2_flash": "it has several prediction layers, one per depth",
    "step3p5": "it has several prediction layers, one per depth",
    "nemotron_h": "its prediction layer is a sequence of single mixers, and " + _NO_REFERENCE,
    "exaone_moe": "window and rotation of its prediction layer are settings that mlx-lm does not read",
    "ernie4_5_moe": "whether its output passes a norm before the head is not known",
    "longcat_flash": _NO_REFERENCE,
    "bailing_hybrid": _NO_REFERENCE,
    "bailing_moe_v3": _NO_REFERENCE,
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
