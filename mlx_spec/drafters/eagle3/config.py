"""The settings of an EAGLE-3 drafter with one Llama layer, read from a config.json in the flat layout."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, PositiveFloat, PositiveInt, ValidationError

from mlx_spec.drafters.checkpoint import CONFIG_NAME
from mlx_spec.drafters.rope import NESTED_KEYS, Rope, read_rope
from mlx_spec.errors import CheckpointError

SUPPORTED = (
    "Supported are EAGLE-3 drafters with one Llama layer in the flat layout: "
    "no norm before fc, the un-normalised hidden state as residual, full attention, unquantized."
)

EAGLE_CONFIG = "eagle_config"

# Where the tapped layers are listed, and what to subtract to get 0-based layer outputs. A list that counts
# hidden states has the embedding as entry 0, so layer i's output is entry i + 1.
_TAP_KEYS = (
    (EAGLE_CONFIG, "eagle_aux_hidden_state_layer_ids", 0),
    (EAGLE_CONFIG, "aux_hidden_state_layer_ids", 0),
    (None, "target_layer_ids", 0),
    (None, "eagle_aux_hidden_state_layer_ids", 1),
    (None, "aux_hidden_state_layer_ids", 1),
)

_NEEDED = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "num_hidden_layers",
    "rms_norm_eps",
    "hidden_act",
    "vocab_size",
)

_OPTIONAL = (
    "head_dim",
    "draft_vocab_size",
    "target_hidden_size",
    "attention_bias",
    "mlp_bias",
    "bias",
    "tie_word_embeddings",
)

# Keys that change what is computed -> values under which they change nothing. null and absence are always fine.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "speculators_model_type": (),
    "speculators_config": (),
    "transformer_layer_config": (),
    "dflash_config": (),
    "model_type": ("llama",),
    "hidden_act": ("silu",),
    "num_hidden_layers": (1,),
    "norm_before_residual": (False,),
    "norm_before_fc": (False,),
    "fc_norm": (False,),
    "use_aux_norm": (False,),
    "norm_output": (False,),
    "qk_norm": (False,),
    "use_qk_norm": (False,),
    "q_lora_rank": (),
    "kv_lora_rank": (),
    "num_experts": (0,),
    "num_local_experts": (0,),
    "n_routed_experts": (0,),
    "num_nextn_predict_layers": (0,),
    "quantization": (),
    "quantization_config": (),
    "use_sliding_window": (False,),
    "layer_types": (["full_attention"],),
    "attn_logit_softcapping": (),
    "final_logit_softcapping": (),
    "logit_scale": (1,),
    "logits_scaling": (1,),
    "embedding_multiplier": (1,),
    "residual_multiplier": (1,),
    "attention_multiplier": (),
    "is_neox_style": (True,),
    "rope_is_neox_style": (True,),
    "rope_interleave": (False,),
    "rope_interleaved": (False,),
    "rope_traditional": (False,),
}

_NEUTRAL_NESTED: dict[str, tuple[object, ...]] = {
    "use_aux_hidden_state": (True,),
    "use_input_layernorm_in_first_layer": (True,),
    "use_last_layernorm": (True,),
    "use_mtp_layernorm": (False,),
    "parallel_draft_step": (0, 1),
    **{
        key: _NEUTRAL[key]
        for key in ("norm_before_residual", "norm_before_fc", "fc_norm", "use_aux_norm", "norm_output")
    },
}

# Say nothing about a forward pass with one layer.
_INERT = frozenset(
    [
        "architectures",
        "auto_map",
        "_name_or_path",
        "name_or_path",
        "torch_dtype",
        "dtype",
        "transformers_version",
        "target_model_type",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "unk_token_id",
        "sep_token_id",
        "cls_token_id",
        "decoder_start_token_id",
        "initializer_range",
        "use_cache",
        "attention_dropout",
        "hidden_dropout",
        "pretraining_tp",
        "gradient_checkpointing",
        "max_position_embeddings",
        "max_window_layers",
        "is_decoder",
        "is_encoder_decoder",
        "id2label",
        "label2id",
        "return_dict",
        "output_attentions",
        "output_hidden_states",
        "chunk_size_feed_forward",
        "problem_type",
        "task_specific_params",
        "ttt_length",
        "has_lm_head",
        "embed_requires_grad",
        "sliding_window",
        "num_aux_hidden_states",
        "next_layer_regular",
        "parallel_draft_heads_num_layers",
        "num_eagle_features",
    ]
)


class Eagle3Config(BaseModel):
    """Geometry and conventions of one drafter.

    Attributes:
        hidden_size: H, the drafter's own.
        target_hidden_size: H_t, of each tapped state.
        vocab_size: the target's vocabulary as the drafter knows it; rows of its embedding, if it has one.
        draft_vocab_size: tokens its head can propose.
        bias: whether fc has a bias.
        taps: 0-based decoder layers whose outputs are read, ascending.
        taps_from: where they were listed, for messages.
    """

    model_config = ConfigDict(frozen=True, strict=True, allow_inf_nan=False, arbitrary_types_allowed=True)

    hidden_size: PositiveInt
    intermediate_size: PositiveInt
    num_attention_heads: PositiveInt
    num_key_value_heads: PositiveInt
    head_dim: PositiveInt
    rms_norm_eps: PositiveFloat
    vocab_size: PositiveInt
    draft_vocab_size: PositiveInt
    target_hidden_size: PositiveInt
    attention_bias: bool = False
    mlp_bias: bool = False
    bias: bool = False
    tie_word_embeddings: bool = False
    rope: Rope
    taps: tuple[int, ...]
    taps_from: str

    @classmethod
    def parse(cls, config: Mapping[str, Any], folder: Path, taps: Sequence[int] | None = None) -> Self:
        """Check and read a config.json object.

        Args:
            config: the object.
            folder: where it came from, for messages.
            taps: 0-based layer outputs to read instead of those the file lists.

        Raises:
            CheckpointError: names every key that is missing, of a wrong value, or not supported.

        Warns:
            UserWarning: once, naming the keys nothing is known about.
        """
        path = folder / CONFIG_NAME
        _refuse_unsupported(config, path)
        missing = [key for key in _NEEDED if config.get(key) is None]
        if missing:
            raise CheckpointError(f"{path} lacks {', '.join(missing)}. None of these is guessed.")
        fields = {key: config[key] for key in (*_NEEDED, *_OPTIONAL) if config.get(key) is not None}
        fields.setdefault("draft_vocab_size", fields["vocab_size"])
        fields.setdefault("target_hidden_size", fields["hidden_size"])
        fields.setdefault("head_dim", _head_dim(fields, path))
        tapped, taps_from = _taps(config, path, taps)
        try:
            parsed = cls(**fields, rope=read_rope(config, path), taps=tapped, taps_from=taps_from)
        except ValidationError as error:
            wrong = [f"{'.'.join(map(str, e['loc']))}={e['input']!r} ({e['msg']})" for e in error.errors()]
            raise CheckpointError(f"{path} has wrong values: {'; '.join(wrong)}") from None
        parsed._check_relations(path)
        _warn_unknown(config, path)
        return parsed

    def _check_relations(self, path: Path) -> None:
        if self.num_attention_heads % self.num_key_value_heads:
            raise CheckpointError(
                f"{path}: num_attention_heads={self.num_attention_heads} is not a multiple of "
                f"num_key_value_heads={self.num_key_value_heads}"
            )
        if self.draft_vocab_size > self.vocab_size:
            raise CheckpointError(
                f"{path}: draft_vocab_size={self.draft_vocab_size} is larger than vocab_size={self.vocab_size}"
            )
        rotated = self.rope.rotated_dims(self.head_dim)
        if rotated < 2 or rotated % 2:
            raise CheckpointError(
                f"{path}: head_dim={self.head_dim} with partial_rotary_factor={self.rope.fraction} would rotate "
                f"{rotated} entries per head, expected an even number"
            )


def _refuse_unsupported(config: Mapping[str, Any], path: Path) -> None:
    eagle = config.get(EAGLE_CONFIG)
    if eagle is not None and not isinstance(eagle, dict):
        raise CheckpointError(f"{path}: {EAGLE_CONFIG} is {eagle!r}, expected an object")
    refused = [
        *_non_neutral(config, _NEUTRAL, ""),
        *_non_neutral(eagle or {}, _NEUTRAL_NESTED, f"{EAGLE_CONFIG}."),
    ]
    if config.get("sliding_window") is not None and config.get("use_sliding_window") is not False:
        refused.append(f"sliding_window={config['sliding_window']!r}")
    if refused:
        raise CheckpointError(f"{path} asks for what is not supported: {', '.join(refused)}. {SUPPORTED}")


def _non_neutral(config: Mapping[str, Any], neutral: Mapping[str, tuple[object, ...]], prefix: str) -> list[str]:
    return [
        f"{prefix}{key}={_shortened(config[key])}"
        for key, values in neutral.items()
        if config.get(key) is not None and config[key] not in values
    ]


def _shortened(value: object) -> str:
    return "{...}" if isinstance(value, dict) else repr(value)


def _head_dim(fields: Mapping[str, Any], path: Path) -> Any:
    hidden, heads = fields["hidden_size"], fields["num_attention_heads"]
    if not isinstance(hidden, int) or not isinstance(heads, int) or heads < 1:
        return 1  # those two are reported by their own checks
    if hidden % heads and "head_dim" not in fields:
        raise CheckpointError(
            f"{path} lacks head_dim, and hidden_size={hidden} is not a multiple of num_attention_heads={heads}"
        )
    return hidden // heads


def _taps(config: Mapping[str, Any], path: Path, override: Sequence[int] | None) -> tuple[tuple[int, ...], str]:
    if override is not None:
        return _checked_taps(list(override), 0, "taps=", path), "taps="
    found = []
    for place, key, shift in _TAP_KEYS:
        ids = (config if place is None else config.get(place) or {}).get(key)
        if ids is not None and ids != []:
            name = key if place is None else f"{place}.{key}"
            found.append((_checked_taps(ids, shift, name, path), f"{name}={ids}"))
    if not found:
        raise CheckpointError(
            f"{path} does not list the target layers the drafter reads "
            f"({EAGLE_CONFIG}.eagle_aux_hidden_state_layer_ids, target_layer_ids or eagle_aux_hidden_state_layer_ids). "
            "They are not guessed: add the list to the file, or pass taps=(...), 0-based layer outputs."
        )
    if len({taps for taps, _ in found}) > 1:
        raise CheckpointError(
            f"{path} lists different layers in {' and '.join(name for _, name in found)}. Lists in {EAGLE_CONFIG} and "
            "target_layer_ids count layer outputs from 0, the others count hidden states, one more. "
            "Remove the wrong one, or pass taps=(...), 0-based layer outputs."
        )
    taps, name = found[0]
    wanted = config.get("num_aux_hidden_states")
    if wanted is not None and wanted != len(taps):
        raise CheckpointError(f"{path}: num_aux_hidden_states={wanted!r}, but {name} lists {len(taps)} layers")
    return taps, name


def _checked_taps(ids: object, shift: int, name: str, path: Path) -> tuple[int, ...]:
    if not isinstance(ids, list) or not ids or any(type(item) is not int for item in ids):
        raise CheckpointError(f"{path}: {name} is {ids!r}, expected a list of layer numbers")
    taps = tuple(item - shift for item in ids)
    if list(taps) != sorted(set(taps)):
        raise CheckpointError(f"{path}: {name} is {ids}, expected ascending layer numbers, each once")
    if taps[0] < 0:
        raise CheckpointError(
            f"{path}: {name} is {ids}, but the smallest layer number is {shift} here: "
            "reading the embedding instead of a layer's output is not supported"
        )
    return taps


def _warn_unknown(config: Mapping[str, Any], path: Path) -> None:
    top = {*_NEEDED, *_OPTIONAL, *_NEUTRAL, *NESTED_KEYS, *(key for _, key, _ in _TAP_KEYS), *_INERT}
    top |= {"rope_theta", "partial_rotary_factor", EAGLE_CONFIG}
    nested = {*_NEUTRAL_NESTED, *(key for _, key, _ in _TAP_KEYS), *_INERT}
    unknown = [key for key in config if key not in top]
    unknown += [f"{EAGLE_CONFIG}.{key}" for key in config.get(EAGLE_CONFIG) or {} if key not in nested]
    if unknown:
        warnings.warn(f"{path} has keys that are not known here and are ignored: {', '.join(unknown)}", stacklevel=4)
