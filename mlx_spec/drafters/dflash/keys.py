"""Which keys of a block drafter's config.json are read, which must have one value, and which say nothing."""

from __future__ import annotations

from collections.abc import Mapping

OWN = "dflash_config"
GEOMETRY = "transformer_layer_config"

SHAPE_KEYS = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rms_norm_eps",
    "vocab_size",
)
"""Needed; none is guessed. They stand at top level, or in `transformer_layer_config`."""

SHAPE_OPTIONS = (
    "attention_bias",
    "tie_word_embeddings",
    "layer_types",
    "sliding_window",
    "use_sliding_window",
    "rope_theta",
    "partial_rotary_factor",
    "global_head_dim",
    "num_global_key_value_heads",
    "attention_k_eq_v",
    "rope_parameters",
    "rope_scaling",
)

DRAFT_NUMBERS = (
    "block_size",
    "mask_token_id",
    "num_target_layers",
    "draft_vocab_size",
    "target_hidden_size",
    "runtime_block_size",
    "draft_window_size",
    "markov_rank",
    "markov_head_type",
    "enable_confidence_head",
    "confidence_head_with_markov",
    "conv_kernel_size",
    "conv_group_size",
    "selector_rank",
    "selector_top_k",
    "input_embedding_scale",
    "output_multiplier",
    "final_logit_softcapping",
    "attention_sink_bias",
)
"""Settings whose name here is the key's. They stand at top level or in `dflash_config`, in both if they agree."""

DRAFT_OPTIONS = (
    "target_layer_ids",
    "aux_hidden_state_layer_ids",
    "sample_from_anchor",
    "dspark_bonus_anchor",
    "causal",
    "is_causal",
    "dflash_query_causal",
    "sliding_window_non_causal",
    "use_swa",
    "swa_window_size",
    "is_neox_style",
    "rope_is_neox_style",
)

NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "hidden_act": ("silu",),
    "projector_type": ("dflash", "dflash2", "dspark"),
    "attention_value_scale": (1,),
    "mlp_bias": (False,),
    "qkv_bias": (False,),
    "q_lora_rank": (),
    "kv_lora_rank": (),
    "num_experts": (0,),
    "num_local_experts": (0,),
    "n_routed_experts": (0,),
    "enable_moe_block": (False,),
    "hidden_size_per_layer_input": (0,),
    "num_kv_shared_layers": (0,),
    "use_double_wide_mlp": (False,),
    "attn_logit_softcapping": (),
    "embedding_multiplier": (1,),
    "residual_multiplier": (1,),
    "eagle_config": (),
}
"""Keys that change what is computed -> the values under which they do not. null and absence are always fine."""

NEUTRAL_FOR_GEMMA: Mapping[str, tuple[object, ...]] = {
    **NEUTRAL,
    "hidden_act": ("gelu_pytorch_tanh",),
    "hidden_activation": ("gelu_pytorch_tanh",),
}

INERT = frozenset(
    [
        "quantization",
        "quantization_config",
        "architectures",
        "auto_map",
        "_name_or_path",
        "name_or_path",
        "model_type",
        "speculators_model_type",
        "speculators_version",
        "speculators_config",
        "target_model_type",
        "target_text_model_type",
        "torch_dtype",
        "dtype",
        "transformers_version",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "initializer_range",
        "use_cache",
        "attention_dropout",
        "max_position_embeddings",
        "max_window_layers",
        "num_anchors",
        "gating",
        "eagle_aux_hidden_state_layer_ids",
        "sliding_windows",
        "block_size_policy",
        "dflash_initial_block_size",
        "prefer_requested_block_size",
        "vocab_size_per_layer_input",
        "_attn_implementation",
        "attn_implementation",
        "id2label",
        "label2id",
        "return_dict",
        "output_attentions",
        "output_hidden_states",
        "chunk_size_feed_forward",
        "is_encoder_decoder",
        "problem_type",
    ]
)
"""Say nothing about a draft."""

LEFT_OUT: Mapping[str, Mapping[str, object]] = {
    "qwen3": {
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 22016,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "head_dim": 128,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
    },
}
"""`model_type` -> what a `transformer_layer_config` leaves out: its writer drops what equals the class's defaults."""

SPECULATORS_DEFAULTS: Mapping[str, Mapping[str, object]] = {
    "dflash": {"sample_from_anchor": False, "sliding_window_non_causal": False},
    "dflash2": {"sample_from_anchor": False, "sliding_window_non_causal": True},
    "dspark": {
        "sample_from_anchor": True,
        "sliding_window_non_causal": False,
        "markov_rank": 256,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    },
}
"""What the speculators format means by a key that is absent."""
