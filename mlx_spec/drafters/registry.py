"""Which kind of drafter a checkpoint is, and which module reads it. Declared by hand; nothing is guessed."""

from __future__ import annotations

import importlib
import re
import warnings
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from mlx_spec.drafters.base import Drafter
from mlx_spec.errors import CheckpointError, IncompatiblePair, UnknownDrafter, UnsupportedOption
from mlx_spec.target.model import Target

KNOWN_DRAFTER_KINDS = ("dflash", "mtp", "eagle3", "ngram")

_MODULE_BY_KIND = {"eagle3": "mlx_spec.drafters.eagle3", "mtp": "mlx_spec.drafters.mtp"}
"""Kinds that are read from a checkpoint -> the package that does, imported when first asked for."""

DRAFTER_KIND_BY_MODEL_TYPE = {
    "ngram": "ngram",
    "eagle3": "eagle3",
    "dflash": "dflash",
    "dspark": "dflash",
    "muse_glimmer_assistant": "dflash",
    "mtp": "mtp",
    "gemma4_assistant": "mtp",
    "gemma4_unified_assistant": "mtp",
    "qwen3_5_mtp": "mtp",
    "nemotron_h_mtp": "mtp",
    "qwen3_next_mtp": "mtp",
    "deepseek_v3_mtp": "mtp",
    "deepseek_v32_mtp": "mtp",
    "glm4_moe_mtp": "mtp",
    "glm4_moe_lite_mtp": "mtp",
    "glm_moe_dsa_mtp": "mtp",
    "mimo_mtp": "mtp",
    "deepseek_v4_mtp": "mtp",
}
"""`model_type` or `speculators_model_type` -> kind. Only types that no ordinary language model has."""

_KIND_BY_ARCHITECTURE = {
    "LlamaForCausalLMEagle3": "eagle3",
    "Eagle3LlamaForCausalLM": "eagle3",
    "Eagle3Speculator": "eagle3",
    "Eagle3DraftModel": "eagle3",
    "Qwen3Eagle3Model": "eagle3",
    "Eagle3DeepseekV2ForCausalLM": "eagle3",
    "DFlashDraftModel": "dflash",
    "DFlash2DraftModel": "dflash",
    "DFlashLagunaForCausalLM": "dflash",
    "DSparkDraftModel": "dflash",
    "Qwen3DSparkModel": "dflash",
    "Gemma4DSparkModel": "dflash",
    "MuseGlimmerAssistantModel": "dflash",
    "Gemma4AssistantForCausalLM": "mtp",
    "MTPDraftModel": "mtp",
}

_KIND_BY_KEY = {
    "dflash_config": "dflash",
    "eagle_config": "eagle3",
    "draft_vocab_size": "eagle3",
    "mtp_num_hidden_layers": "mtp",
    "num_nextn_predict_layers": "mtp",
}

_KIND_BY_TENSOR = {
    "midlayer.hidden_norm.weight": "eagle3",
    "layers.0.hidden_norm.weight": "eagle3",
}

_PREDICTION_TENSOR = re.compile(r"(^|\.)mtp[._]|\.eh_proj\.")
"""What names of prediction layers in a target's own checkpoint have in them."""

_LANGUAGE_MODEL_SUFFIX = "ForCausalLM"


class Family(Protocol):
    """What a package of drafters offers."""

    def load(
        self,
        folder: Path,
        target: Target,
        taps: Sequence[int] | None = None,
        quantize: Mapping[str, Any] | None = None,
    ) -> Drafter:
        """Read a checkpoint folder for a target, and quantize what was read if asked to."""
        ...


def resolve_drafter_kind(config: Mapping[str, Any], wanted: str | None = None, tensors: Collection[str] = ()) -> str:
    """Say which kind of drafter a checkpoint is.

    Looked at in order: `speculators_model_type`, `architectures[0]`, `model_type`, the keys only drafters have, the
    tensor names. What the checkpoint says wins over `wanted`; `wanted` decides where it says nothing.

    Args:
        config: its config.json object.
        wanted: the kind the caller asked for.
        tensors: names of its tensors.

    Returns:
        One of KNOWN_DRAFTER_KINDS; not every one can be loaded yet.

    Raises:
        UnknownDrafter: `wanted` is no kind, or nothing says what the checkpoint is.
        UnsupportedOption: the checkpoint is an ordinary language model.

    Warns:
        UserWarning: once, when `wanted` contradicts the checkpoint.

    Example:
        >>> resolve_drafter_kind({"architectures": ["LlamaForCausalLMEagle3"]})
        'eagle3'
    """
    if wanted is not None and wanted not in KNOWN_DRAFTER_KINDS:
        raise UnknownDrafter(f"unknown drafter kind {wanted!r}. Known kinds: {', '.join(KNOWN_DRAFTER_KINDS)}.")
    architecture = _architecture(config)
    found = _stated_kind(config, architecture) or _by_tensors(tensors)
    if found is None:
        if architecture is not None and architecture.endswith(_LANGUAGE_MODEL_SUFFIX):
            raise UnsupportedOption(
                f"the checkpoint is an ordinary language model ({architecture}); small language models as drafters "
                f"are not built yet. What works now: {', '.join(_working())}."
            )
        if wanted is None:
            raise UnknownDrafter(
                f"nothing says which kind of drafter this is: architecture {architecture!r}, model_type "
                f"{config.get('model_type')!r}. Known architectures: {', '.join(_KIND_BY_ARCHITECTURE)}. "
                f"Known kinds, which you may name yourself: {', '.join(KNOWN_DRAFTER_KINDS)}."
            )
        return wanted
    if wanted is not None and wanted != found:
        warnings.warn(
            f"drafter kind {wanted!r} was asked for, but the checkpoint is {found!r}: used as that", stacklevel=2
        )
    return found


def family(kind: str) -> Family:
    """The package that reads checkpoints of this kind.

    Raises:
        UnsupportedOption: there is none yet.
    """
    module = _MODULE_BY_KIND.get(kind)
    if module is None:
        raise UnsupportedOption(
            f"drafters of kind {kind!r} cannot be loaded yet. What works now: {', '.join(_working())}."
        )
    loaded: Family = importlib.import_module(module)
    return loaded


def validate_drafter_compatibility(drafter: Drafter, target: Target) -> None:
    """Refuse a pair that cannot work, before the first token.

    Raises:
        IncompatiblePair: names both values.
        UnknownAnatomy: the drafter needs a part of the target about which nothing is known.
    """
    drafter.check(target)
    taps = drafter.taps
    if list(taps) != sorted(set(taps)) or any(not 0 <= tap < target.layer_count for tap in taps):
        raise IncompatiblePair(
            f"drafter {drafter.name!r} reads layers {list(taps)}; expected ascending layers, each once, of the "
            f"{target.layer_count} that target {target.name!r} has"
        )


def _working() -> list[str]:
    return [kind for kind in KNOWN_DRAFTER_KINDS if kind in _MODULE_BY_KIND or kind == "ngram"]


def _architecture(config: Mapping[str, Any]) -> str | None:
    named = config.get("architectures")
    if named is None or named == []:
        return None
    if not isinstance(named, list) or not isinstance(named[0], str):
        raise CheckpointError(f"config.json: architectures is {named!r}, expected a list with one name")
    return named[0]


def _stated_kind(config: Mapping[str, Any], architecture: str | None) -> str | None:
    speculator = config.get("speculators_model_type")
    if speculator is not None:
        if not isinstance(speculator, str) or speculator not in DRAFTER_KIND_BY_MODEL_TYPE:
            raise UnknownDrafter(
                f"unknown speculators_model_type {speculator!r}. Known: {', '.join(DRAFTER_KIND_BY_MODEL_TYPE)}."
            )
        return DRAFTER_KIND_BY_MODEL_TYPE[speculator]
    if architecture in _KIND_BY_ARCHITECTURE:
        return _KIND_BY_ARCHITECTURE[architecture]
    model_type = config.get("model_type")
    if isinstance(model_type, str) and model_type in DRAFTER_KIND_BY_MODEL_TYPE:
        return DRAFTER_KIND_BY_MODEL_TYPE[model_type]
    text = config.get("text_config")
    stated = {**(text if isinstance(text, dict) else {}), **config}
    # A count of 0 says that there is nothing.
    return next((kind for key, kind in _KIND_BY_KEY.items() if stated.get(key)), None)


def _by_tensors(tensors: Collection[str]) -> str | None:
    short = {name.removeprefix("model.") for name in tensors}
    found = next((kind for name, kind in _KIND_BY_TENSOR.items() if name in short), None)
    return found or ("mtp" if any(_PREDICTION_TENSOR.search(name) for name in tensors) else None)
