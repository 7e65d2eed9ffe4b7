"""The settings of a Gemma 4 assistant, read from its config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx_lm.models.gemma4_text import ModelArgs

from mlx_spec.errors import CheckpointError

KINDS_OF_LAYERS = ("sliding_attention", "full_attention")


@dataclass(frozen=True)
class AssistantConfig:
    """What the file says, checked.

    Attributes:
        args: of the decoder layers, as mlx-lm takes them.
        backbone_hidden_size: the target's hidden size.
        centroids: clusters of the vocabulary; 0 where the head scores every token.
        chosen_centroids: clusters whose tokens are scored.
    """

    args: ModelArgs
    backbone_hidden_size: int
    centroids: int
    chosen_centroids: int

    @classmethod
    def parse(cls, config: Mapping[str, Any], folder: Path) -> AssistantConfig:
        """Read and check a config.

        Raises:
            CheckpointError: names what is missing, out of range or not supported.
        """
        path = folder / "config.json"
        text = config.get("text_config")
        if not isinstance(text, dict):
            raise CheckpointError(f"{path} lacks text_config, the settings of the assistant's layers")
        ordered = config.get("use_ordered_embeddings", False)
        if not isinstance(ordered, bool):
            raise CheckpointError(f"{path}: use_ordered_embeddings is {ordered!r}, expected true or false")
        counts = dict.fromkeys(("num_centroids", "centroid_intermediate_top_k"), 0)
        if ordered:
            counts = {key: _positive(config, key, path) for key in counts}
        args = _args(text, path)
        if ordered and args.vocab_size % counts["num_centroids"]:
            raise CheckpointError(
                f"{path}: num_centroids={counts['num_centroids']} does not divide vocab_size={args.vocab_size}"
            )
        if counts["centroid_intermediate_top_k"] > counts["num_centroids"]:
            raise CheckpointError(
                f"{path}: centroid_intermediate_top_k={counts['centroid_intermediate_top_k']} of only "
                f"num_centroids={counts['num_centroids']}"
            )
        return cls(args, _positive(config, "backbone_hidden_size", path), *counts.values())


_NEEDED = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "sliding_window",
)


def _args(text: Mapping[str, Any], path: Path) -> ModelArgs:
    sizes = {key: _positive(text, key, path, "text_config.") for key in _NEEDED}
    layers = sizes["num_hidden_layers"]
    kinds = text.get("layer_types")
    if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in KINDS_OF_LAYERS for kind in kinds):
        raise CheckpointError(
            f"{path}: text_config.layer_types is {kinds!r}, expected {layers} of {', '.join(KINDS_OF_LAYERS)}"
        )
    shared = text.get("num_kv_shared_layers")
    if shared != layers:
        raise CheckpointError(
            f"{path}: text_config.num_kv_shared_layers={shared!r}, but an assistant has no keys of its own: "
            f"expected all {layers} layers"
        )
    for key in ("enable_moe_block", "hidden_size_per_layer_input"):
        if text.get(key):
            raise CheckpointError(f"{path}: text_config.{key}={text[key]!r} is not supported in an assistant")
    if text.get("tie_word_embeddings", True) is not True:
        raise CheckpointError(f"{path}: text_config.tie_word_embeddings must be true: an assistant has no other head")
    wide = {**_of_full_layers(text, kinds, path), "use_double_wide_mlp": False}
    args: ModelArgs = ModelArgs.from_dict({**text, **wide})
    return args


def _of_full_layers(text: Mapping[str, Any], kinds: list[str], path: Path) -> dict[str, Any]:
    """Head size and key heads of the full-attention layers, in either spelling."""
    if "global_head_dim" in text:
        return {}
    per_layer = text.get("per_layer_config", {})
    full = [str(place) for place, kind in enumerate(kinds) if kind == "full_attention"]
    if not full:
        return {}
    if not isinstance(per_layer, dict) or any(not isinstance(per_layer.get(place), dict) for place in full):
        raise CheckpointError(
            f"{path} has neither text_config.global_head_dim nor text_config.per_layer_config for its full-attention "
            f"layers {', '.join(full)}"
        )
    sizes = {(per_layer[place].get("head_dim"), per_layer[place].get("num_key_value_heads")) for place in full}
    head_dim, key_heads = next(iter(sizes))
    if len(sizes) > 1 or not isinstance(head_dim, int) or not isinstance(key_heads, int):
        raise CheckpointError(
            f"{path}: text_config.per_layer_config gives the full-attention layers (head_dim, num_key_value_heads) "
            f"{sorted(map(str, sizes))}, expected one pair for all"
        )
    return {"global_head_dim": head_dim, "num_global_key_value_heads": key_heads}


def _positive(config: Mapping[str, Any], key: str, path: Path, prefix: str = "") -> int:
    value = config.get(key)
    if type(value) is not int or value < 1:
        raise CheckpointError(f"{path}: {prefix}{key} is {value!r}, expected a whole number of at least 1")
    return value
