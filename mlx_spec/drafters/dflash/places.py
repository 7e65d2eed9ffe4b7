"""Where the settings of a block drafter stand: at top level, in `dflash_config`, or in `transformer_layer_config`."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from mlx_spec.drafters.dflash.keys import GEOMETRY, LEFT_OUT, OWN, SPECULATORS_DEFAULTS
from mlx_spec.errors import CheckpointError

_FAMILY_BY_ARCHITECTURE = {
    "DFlash2DraftModel": "dflash2",
    "DFlashLagunaForCausalLM": "laguna_dflash",
    "DSparkDraftModel": "dspark",
    "Qwen3DSparkModel": "dspark",
    "Gemma4DSparkModel": "gemma4_dspark",
    "MuseGlimmerAssistantModel": "muse_glimmer_assistant",
}

_FAMILY_BY_MODEL_TYPE = {
    "dflash2": "dflash2",
    "laguna": "laguna_dflash",
    "laguna_dflash": "laguna_dflash",
    "dspark": "dspark",
    "qwen3_dspark": "dspark",
    "gemma4_dspark": "gemma4_dspark",
    "muse_glimmer_assistant": "muse_glimmer_assistant",
}

_WITH_TABLES = ("Qwen3DSparkModel", "Gemma4DSparkModel")


_RENAMED = (
    (re.compile(r"^model\."), ""),
    (re.compile(r"^encoder\.fc\."), "fc."),
    (re.compile(r"^encoder\.output_norm_enc\."), "hidden_norm."),
    (re.compile(r"^(candidate_selector\.(?:predecessor|successor)_codebook)\.weight$"), r"\1"),
    (re.compile(r"\.self_attn\.sinks$"), ".self_attn.attention_sink_bias"),
)
"""Other spellings -> ours."""


def canonical_name(name: str) -> str:
    """A tensor's or module's name in a file -> ours."""
    for pattern, replacement in _RENAMED:
        name = pattern.sub(replacement, name)
    return name


class Causal(NamedTuple):
    """Whether block rows are blind to those on their right."""

    sliding: bool
    full: bool


class Places:
    """A config.json object and the two objects in it.

    Attributes:
        path: the file, for messages.
        family: row of the table of families.
        ships_tables: whether its authors always ship an embedding and an output projection.
    """

    def __init__(self, config: Mapping[str, Any], path: Path) -> None:
        self.path = path
        self._top = config
        self._own = _object(config, OWN, path)
        geometry = _object(config, GEOMETRY, path)
        self._speculators = bool(geometry)
        self._geometry: Mapping[str, Any] = geometry or config
        self.family = self._family()
        self.ships_tables = self.architecture in _WITH_TABLES
        self._defaults = SPECULATORS_DEFAULTS.get(self.family, {}) if self._speculators else {}
        self._left_out = LEFT_OUT.get(str(geometry.get("model_type")), {})

    def draft(self, key: str) -> Any:
        """A setting of the draft; None if it is absent.

        Raises:
            CheckpointError: two places disagree.
        """
        found = self.everywhere(key)
        if any(value != found[0] for value in found):
            raise CheckpointError(
                f"{self.path}: {key} is {found[0]!r} at top level and {found[-1]!r} in a nested object; "
                "remove the wrong one"
            )
        return found[0] if found else self._defaults.get(key)

    def shape(self, key: str) -> Any:
        """A setting of the layers; None if it is absent."""
        value = self._geometry.get(key)
        return self._left_out.get(key) if value is None else value

    def needed(self, key: str, kind: type[int]) -> Any:
        """A setting of the layers that this family must have: a positive number, or true or false."""
        value = self.shape(key)
        if value is None:
            raise CheckpointError(f"{self.path} lacks {key}. It is not guessed.")
        if type(value) is not kind or (kind is int and value < 1):
            wanted = "true or false" if kind is bool else "a positive number"
            raise CheckpointError(f"{self.path}: {key} is {value!r}, expected {wanted}")
        return value

    def everywhere(self, key: str) -> list[Any]:
        """The values of a key, wherever it stands."""
        places = [self._top, self._own, *([self._geometry] if self._speculators else [])]
        return [place[key] for place in places if place.get(key) is not None]

    def flag(self, key: str, default: bool) -> bool:
        """A boolean setting of the draft."""
        value = self.draft(key)
        if value is not None and not isinstance(value, bool):
            raise CheckpointError(f"{self.path}: {key} is {value!r}, expected true or false")
        return default if value is None else value

    def window(self) -> int | None:
        """Keys from a query on that a sliding layer sees."""
        found = [self.shape("sliding_window"), self.draft("swa_window_size")]
        found = [value for value in found if value is not None]
        if any(type(value) is not int or value < 1 or value != found[0] for value in found):
            raise CheckpointError(f"{self.path}: sliding_window and swa_window_size are {found}, expected one number")
        return found[0] if found else None

    def layer_types(self, layers: int) -> list[str]:
        """One kind of attention per layer."""
        kinds = self.shape("layer_types")
        if kinds is None:
            return ["sliding_attention" if self.flag("use_swa", False) else "full_attention"] * layers
        known = ("full_attention", "sliding_attention")
        if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in known for kind in kinds):
            raise CheckpointError(
                f"{self.path}: layer_types is {kinds!r}, expected {layers} entries of {' or '.join(known)}"
            )
        if "sliding_attention" in kinds and self.shape("use_sliding_window") is False:
            raise CheckpointError(
                f"{self.path}: layer_types has sliding_attention, but use_sliding_window is false; remove the wrong one"
            )
        return kinds

    def causal(self) -> Causal:
        """Which layers hide what is on a block row's right. Said once for all, or a habit of the sliding ones."""
        said = {self.flag(key, False) for key in _CAUSAL_KEYS if self.draft(key) is not None}
        if len(said) > 1:
            raise CheckpointError(f"{self.path}: {' and '.join(_CAUSAL_KEYS)} contradict each other; keep one")
        if said:
            (everywhere,) = said
            return Causal(everywhere, everywhere)
        habit = self.family not in ("muse_glimmer_assistant", "dflash2")
        return Causal(sliding=not self.flag("sliding_window_non_causal", not habit), full=False)

    def rope_settings(self) -> Mapping[str, Any]:
        """The object that holds the rotary settings, those of full attention where there is one per kind."""
        place = self._geometry
        parameters = place.get("rope_parameters")
        if isinstance(parameters, dict) and "full_attention" in parameters:
            return {**place, "rope_parameters": parameters["full_attention"]}
        if "rope_theta" in self._left_out and not any(place.get(key) for key in _ROPE_KEYS):
            return {**place, "rope_theta": self._left_out["rope_theta"]}
        return place

    def keys_not_among(self, known: Collection[str]) -> list[str]:
        """Keys nothing is known about, with the object they stand in."""
        places = {"": self._top, f"{OWN}.": self._own}
        if self._speculators:
            places[f"{GEOMETRY}."] = self._geometry
        return [f"{prefix}{key}" for prefix, place in places.items() for key in place if key not in known]

    @property
    def architecture(self) -> str | None:
        """What the file says its checkpoint is."""
        named = self._top.get("architectures")
        return str(named[0]) if isinstance(named, list) and named else None

    def _family(self) -> str:
        named = _FAMILY_BY_ARCHITECTURE.get(self.architecture or "")
        if named is not None:
            return named
        speculators = self._top.get("speculators_model_type")
        if isinstance(speculators, str) and speculators in SPECULATORS_DEFAULTS:
            return speculators
        typed = _FAMILY_BY_MODEL_TYPE.get(str(self._top.get("model_type")))
        # One architecture name serves several families; what `dflash_config` holds tells them apart.
        nested = "dspark" if self._own.get("projector_type") == "dspark" or self.everywhere("markov_rank") else "dflash"
        return typed or nested


_CAUSAL_KEYS = ("causal", "is_causal", "dflash_query_causal")
_ROPE_KEYS = ("rope_theta", "rope_parameters", "rope_scaling")


def _object(config: Mapping[str, Any], key: str, path: Path) -> Mapping[str, Any]:
    value = config.get(key)
    if value is not None and not isinstance(value, dict):
        raise CheckpointError(f"{path}: {key} is {value!r}, expected an object")
    return value or {}
