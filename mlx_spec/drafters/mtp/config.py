"""What a config.json says of a prediction layer, and whether it is the target's."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mlx_spec.drafters.checkpoint import CONFIG_NAME
from mlx_spec.drafters.mtp.files import DECLARED_COUNTS
from mlx_spec.drafters.mtp.layouts import Layout
from mlx_spec.drafters.mtp.model import target_args
from mlx_spec.errors import CheckpointError, IncompatiblePair
from mlx_spec.model.target import Target

# Say nothing about the prediction layer, or are told by other means: how much text there can be, what the target's
# head is, and how the target's own weights are packed.
_FREE = frozenset(
    [
        "model_type",
        "max_position_embeddings",
        "tie_word_embeddings",
        "quantization",
        "quantization_config",
        "num_nextn_predict_layers",
        "attention_dropout",
        "text_config",
    ]
)

_SAME_IN_ROPE = frozenset(["type", "rope_type"])

_ROTATION = "rope_parameters"
_BESIDE = ("rope_theta", "partial_rotary_factor")
"""Settings of a rotation that may stand in an object of their own, or beside the others."""


def text_settings(config: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """The settings of the text model, with those of its rotation beside the others."""
    text = config.get("text_config", config)
    if not isinstance(text, dict):
        raise CheckpointError(f"{path}: text_config is {text!r}, expected an object")
    rope = text.get(_ROTATION)
    if rope is not None and not isinstance(rope, dict):
        raise CheckpointError(f"{path}: rope_parameters is {rope!r}, expected an object")
    return {**{key: rope[key] for key in _BESIDE if rope and key in rope}, **text}


def _unread(config: Mapping[str, Any], args: Any) -> dict[str, Any]:
    """What `rope_parameters` says and mlx-lm does not read for such a target, so that it has another value there.

    Told by letting mlx-lm read the config: then the target's value is what this very checkpoint gives.
    """
    text, known = config.get("text_config", config), asdict(args)
    rope = text.get(_ROTATION) or {}
    moved = [key for key in _BESIDE if key in rope and key in known and text.get(key) is None]
    try:
        built = type(args).from_dict({**{key: known[key] for key in known if key not in moved}, **text})
    except Exception:  # noqa: BLE001  any line of a model's code may fail; then nothing is known
        return {}
    found = {
        key: rope[key]
        for key in moved
        if not _same(rope[key], known[key]) and _same(getattr(built, key, None), known[key])
    }
    if _ROTATION not in known and not known.get("rope_scaling") and rope.get("rope_type", "default") != "default":
        found |= {key: value for key, value in rope.items() if key not in _BESIDE}
    return found


def check_settings(config: Mapping[str, Any], folder: Path, target: Target, layout: Layout) -> None:
    """Refuse a checkpoint of another model than the target's. What it leaves out is the target's.

    Args:
        config: the checkpoint's config.json object.
        folder: where it came from, for messages.
        target: as mlx-lm built it.
        layout: of the target's family.

    Raises:
        IncompatiblePair: names each setting that differs, with both values.
        CheckpointError: settings under which the prediction layer is not the one that is known.

    Warns:
        UserWarning: what the checkpoint says and mlx-lm left unread when it built the target.
    """
    path = folder / CONFIG_NAME
    stated, known = text_settings(config, path), asdict(target_args(target))
    unread = _unread(config, target_args(target))
    stated = {key: value for key, value in stated.items() if key not in unread}
    if unread:
        left = ", ".join(f"{_ROTATION}.{key}={value!r}" for key, value in unread.items())
        has = ", ".join(f"{key}={known[key]!r}" for key in unread if key in known) or "no such setting"
        warnings.warn(
            f"{path}: mlx-lm does not read {left} for {target.name} and built the target with {has}. The prediction "
            "layer follows the target as it was built.",
            stacklevel=5,
        )
    _refuse_unsupported(stated, path, layout)
    wrong = [
        f"{key}={stated[key]!r} against {known[key]!r}"
        for key in known
        if key not in _FREE and stated.get(key) is not None and not _same(stated[key], known[key])
    ]
    if wrong:
        raise IncompatiblePair(
            f"{path} is of another model than target {target.name!r}: {', '.join(wrong)}. "
            "Use the prediction layer of the target's own checkpoint."
        )


def width_of(config: Mapping[str, Any], folder: Path, layout: Layout, depths: int) -> int:
    """Tokens per verify call: what the checkpoint names as `block_size`, or the family's, or what its depths draft."""
    width = config.get("block_size")
    if width is None:
        return layout.width if depths == 1 else depths + 1
    if type(width) is not int or width < 2:
        raise CheckpointError(f"{folder / CONFIG_NAME}: block_size is {width!r}, expected an integer of at least 2")
    return width


def _refuse_unsupported(stated: Mapping[str, Any], path: Path, layout: Layout) -> None:
    refused = []
    for key in DECLARED_COUNTS:
        count = stated.get(key)
        known = count in (0, 1) or (layout.one_per_depth and type(count) is int and count > 0)
        if count is not None and not known:
            refused.append(f"{key}={count!r}: one prediction layer, run again for every token, is what is known")
    if stated.get("mtp_use_dedicated_embeddings"):
        refused.append("mtp_use_dedicated_embeddings=True: where the embedding would be is not known")
    for key, accepted in layout.settings.items():
        if stated.get(key) is not None and stated[key] not in accepted:
            refused.append(f"{key}={stated[key]!r}: what is known is {' or '.join(map(repr, accepted))}")
    if refused:
        raise CheckpointError(f"{path} asks for what is not supported: {'; '.join(refused)}.")


def _same(stated: object, known: object) -> bool:
    """Whether two values say the same; of two objects, whether they do where both say something."""
    if isinstance(stated, dict) and isinstance(known, dict):
        return all(_same(stated[key], known[key]) for key in stated.keys() & known.keys() - _SAME_IN_ROPE)
    if isinstance(stated, list | tuple | str) and isinstance(known, list | tuple | str):
        # A pattern of layers may be one string of a character per layer.
        return list(stated) == list(known)
    return stated == known
