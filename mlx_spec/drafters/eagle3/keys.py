"""What an EAGLE-3 config.json may say: the flat layout and the nested one, read as one flat object."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx_spec.drafters.rope import NESTED_KEYS
from mlx_spec.errors import CheckpointError

SUPPORTED = (
    "Supported are EAGLE-3 drafters with Llama or Qwen3 layers, flat or nested, and with one layer of latent "
    "attention: full attention, dense feed-forward, one token per step."
)

EAGLE_CONFIG = "eagle_config"
NESTED = "transformer_layer_config"
SPECULATORS = "speculators_config"
LATENT_ARCHITECTURE = "Eagle3DeepseekV2ForCausalLM"
REPEATING_ARCHITECTURE = "Qwen3Eagle3Model"

LATENT_KEYS = ("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")

NEEDED = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "num_hidden_layers",
    "rms_norm_eps",
    "hidden_act",
    "vocab_size",
)

OPTIONAL = (
    "head_dim",
    "draft_vocab_size",
    "target_hidden_size",
    "num_target_layers",
    "attention_bias",
    "mlp_bias",
    "bias",
    "tie_word_embeddings",
)

TAP_LISTS = ("eagle_aux_hidden_state_layer_ids", "aux_hidden_state_layer_ids", "target_layer_ids")

# What is said at top level, in eagle_config, or by the tensors.
SWITCHES = ("norm_before_residual", "norm_before_fc", "fc_norm", "use_aux_norm", "norm_output")
_QK_SWITCHES = ("qk_norm", "use_qk_norm")

# Of an original of which the drafter has one dense layer: nothing of this is computed.
_MIXTURE = (
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
    "n_shared_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "moe_layer_freq",
    "first_k_dense_replace",
    "routed_scaling_factor",
    "scoring_func",
    "topk_method",
    "n_group",
    "topk_group",
    "norm_topk_prob",
    "aux_loss_alpha",
    "seq_aux",
    "ep_size",
    "num_nextn_predict_layers",
)

# Keys that change what is computed -> values under which they change nothing. null and absence are always fine.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "dflash_config": (),
    "hidden_act": ("silu",),
    "num_experts": (0,),
    "num_local_experts": (0,),
    "n_routed_experts": (0,),
    "num_nextn_predict_layers": (0,),
    "use_sliding_window": (False,),
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

# Latent attention rotates neighbours.
_NEUTRAL_LATENT = {
    **{key: values for key, values in _NEUTRAL.items() if key not in _MIXTURE},
    "is_neox_style": (False,),
    "rope_is_neox_style": (False,),
    "rope_interleave": (True,),
    "rope_interleaved": (True,),
    "rope_traditional": (True,),
}

_NEUTRAL_EAGLE: dict[str, tuple[object, ...]] = {
    "use_aux_hidden_state": (True,),
    "use_input_layernorm_in_first_layer": (True,),
    "use_last_layernorm": (True,),
    "use_mtp_layernorm": (False,),
    "parallel_draft_step": (0, 1),
}

# Say nothing about a forward pass.
# fmt: off
_INERT = frozenset([
    "architectures", "auto_map", "_name_or_path", "name_or_path", "torch_dtype", "dtype", "transformers_version",
    "target_model_type", "bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "sep_token_id",
    "cls_token_id", "decoder_start_token_id", "initializer_range", "use_cache", "attention_dropout", "hidden_dropout",
    "pretraining_tp", "gradient_checkpointing", "max_position_embeddings", "max_window_layers", "is_decoder",
    "is_encoder_decoder", "id2label", "label2id", "return_dict", "output_attentions", "output_hidden_states",
    "chunk_size_feed_forward", "problem_type", "task_specific_params", "has_lm_head", "embed_requires_grad",
    "sliding_window", "num_aux_hidden_states", "next_layer_regular", "parallel_draft_heads_num_layers",
    "num_eagle_features", "speculators_model_type", "speculators_version", "step_loss_decay",
    "draft_num_hidden_layers", "target_model_name_or_path", "ttt_length", "model_type", "layer_types", "quantization",
    "quantization_config", "enable_sp_ulysses",
])
# fmt: on

MOST_PROPOSALS = 4096
"""Tokens per round above which a file is taken for damaged."""


@dataclass(frozen=True)
class Settings:
    """A config.json in one flat layout.

    Attributes:
        values: every key but `eagle_config`; keys of the nested layout are at top level.
        eagle: what is under `eagle_config`.
        nested: whether the file had the nested layout, in which no switch is left out.
        architecture: the first of `architectures`.
        path: of the file, for messages.
    """

    values: Mapping[str, Any]
    eagle: Mapping[str, Any]
    nested: bool
    architecture: str | None
    path: Path

    @property
    def latent(self) -> bool:
        """Whether its attention keeps latents instead of keys and values."""
        return self.architecture == LATENT_ARCHITECTURE or self.values.get("kv_lora_rank") is not None

    def switch(self, *names: str) -> bool | None:
        """What the file says under the first of some equivalent names that it has; None where it says nothing.

        Raises:
            CheckpointError: two places contradict each other, or a value is neither true nor false.
        """
        said = {
            f"{prefix}{name}": place[name]
            for prefix, place in (("", self.values), (f"{EAGLE_CONFIG}.", self.eagle))
            for name in names
            if place.get(name) is not None
        }
        wrong = [f"{name}={value!r}" for name, value in said.items() if not isinstance(value, bool)]
        if wrong:
            raise CheckpointError(f"{self.path}: {', '.join(wrong)}, expected true or false")
        if len(set(said.values())) > 1:
            raise CheckpointError(f"{self.path}: {' and '.join(said)} contradict each other; keep one")
        return next(iter(said.values()), None)


def read_settings(config: Mapping[str, Any], path: Path) -> Settings:
    """Bring a config.json object into the flat layout.

    Raises:
        CheckpointError: names every key that asks for what is not supported, or that contradicts another.
    """
    nested = config.get(NESTED)
    if nested is not None or config.get("speculators_model_type") is not None:
        values = _flattened(config, nested, path)
    else:
        values = dict(config)
    eagle = values.pop(EAGLE_CONFIG, None)
    if eagle is not None and not isinstance(eagle, dict):
        raise CheckpointError(f"{path}: {EAGLE_CONFIG} is {eagle!r}, expected an object")
    architectures = config.get("architectures")
    architecture = architectures[0] if isinstance(architectures, list) and architectures else None
    settings = Settings(values, eagle or {}, nested is not None, architecture, path)
    _refuse_unsupported(settings)
    return settings


def warn_unknown(settings: Settings) -> None:
    """Name the keys that nothing is known about."""
    top = {*NEEDED, *OPTIONAL, *_NEUTRAL, *NESTED_KEYS, *TAP_LISTS, *SWITCHES, *_QK_SWITCHES, *LATENT_KEYS, *_INERT}
    top |= {"rope_theta", "partial_rotary_factor", SPECULATORS, *_MIXTURE}
    nested = {*_NEUTRAL_EAGLE, *TAP_LISTS, *SWITCHES, *_INERT}
    unknown = [key for key in settings.values if key not in top]
    unknown += [f"{EAGLE_CONFIG}.{key}" for key in settings.eagle if key not in nested]
    if unknown:
        warnings.warn(
            f"{settings.path} has keys that are not known here and are ignored: {', '.join(unknown)}", stacklevel=5
        )


def read_proposals(settings: Settings) -> int | None:
    """Tokens per round that the drafter was trained to propose, if the file says.

    Raises:
        CheckpointError: it was trained for another algorithm, or the number is none.
    """
    speculators = settings.values.get(SPECULATORS)
    if speculators is None:
        return _count(settings.values.get("ttt_length"), "ttt_length", settings.path)
    if not isinstance(speculators, dict):
        raise CheckpointError(f"{settings.path}: {SPECULATORS} is {speculators!r}, expected an object")
    algorithm = speculators.get("algorithm", "eagle3")
    if algorithm != "eagle3":
        raise CheckpointError(f"{settings.path}: {SPECULATORS}.algorithm is {algorithm!r}, expected 'eagle3'")
    methods = speculators.get("proposal_methods") or []
    if not isinstance(methods, list) or not all(isinstance(method, dict) for method in methods):
        raise CheckpointError(f"{settings.path}: {SPECULATORS}.proposal_methods is {methods!r}, expected objects")
    wanted = speculators.get("default_proposal_method")
    named = [method for method in methods if wanted in (None, method.get("proposal_type"))]
    return _count((named or [{}])[0].get("speculative_tokens"), "speculative_tokens", settings.path)


def _count(value: object, name: str, path: Path) -> int | None:
    if value is None:
        return None
    if type(value) is not int or not 1 <= value <= MOST_PROPOSALS:
        raise CheckpointError(f"{path}: {name} is {value!r}, expected a number of tokens up to {MOST_PROPOSALS}")
    return value


def _flattened(config: Mapping[str, Any], nested: object, path: Path) -> dict[str, Any]:
    """The keys of the layers and those around them, together."""
    if not isinstance(nested, dict):
        raise CheckpointError(f"{path}: {NESTED} is {nested!r}, expected an object that describes the layers")
    around = {key: value for key, value in config.items() if key != NESTED and value is not None}
    # The inner object describes an ordinary model; whether its head was tied says nothing about the drafter's.
    harmless = {*_INERT, "tie_word_embeddings"}
    contradicting = [
        f"{key} ({around[key]!r}, and {nested[key]!r} in {NESTED})"
        for key in around
        if key not in harmless and nested.get(key) is not None and nested[key] != around[key]
    ]
    if contradicting:
        raise CheckpointError(f"{path} says two things about {', '.join(contradicting)}; remove the wrong one")
    inner = {key: value for key, value in nested.items() if key != "tie_word_embeddings"}
    return {**inner, **{key: value for key, value in around.items() if key != "model_type"}}


def _refuse_unsupported(settings: Settings) -> None:
    refused = [
        *_non_neutral(settings.values, _NEUTRAL_LATENT if settings.latent else _NEUTRAL, ""),
        *_non_neutral(settings.eagle, _NEUTRAL_EAGLE, f"{EAGLE_CONFIG}."),
    ]
    values = settings.values
    if values.get("model_type") not in (None, "llama", "qwen3") and not settings.latent:
        refused.append(f"model_type={values['model_type']!r}")
    window = values.get("sliding_window")
    switched_off = values.get("use_sliding_window") is False or (type(window) is int and window <= 0)
    if window is not None and not switched_off:
        refused.append(f"sliding_window={window!r}")
    kinds = values.get("layer_types")
    if kinds is not None and (not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds)):
        refused.append(f"layer_types={kinds!r}")
    if refused:
        raise CheckpointError(f"{settings.path} asks for what is not supported: {', '.join(refused)}. {SUPPORTED}")


def _non_neutral(config: Mapping[str, Any], neutral: Mapping[str, tuple[object, ...]], prefix: str) -> list[str]:
    return [
        f"{prefix}{key}={'{...}' if isinstance(config[key], dict) else repr(config[key])}"
        for key, values in neutral.items()
        if config.get(key) is not None and config[key] not in values
    ]
