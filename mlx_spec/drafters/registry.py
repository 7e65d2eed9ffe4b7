"""Which family of drafters a checkpoint is of, and which module reads it. Declared by hand; nothing is guessed."""

from __future__ import annotations

import importlib
import importlib.util
import re
import warnings
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, cast

from mlx_lm.utils import MODEL_REMAPPING

from mlx_spec.drafters.base import Drafter
from mlx_spec.drafters.families import ANY_TARGET, FAMILIES, Family
from mlx_spec.drafters.speculators import meant_architecture
from mlx_spec.drafters.table import known_families
from mlx_spec.errors import CheckpointError, IncompatiblePair, UnknownDrafter, UnsupportedOption
from mlx_spec.model.target import Target

DRAFTER_KIND_BY_MODEL_TYPE = {name: family.kind for family in FAMILIES for name in family.model_types}
"""`model_type` or `speculators_model_type` -> kind, of our own families. No ordinary language model has such a type."""

_FAMILY_BY_KEY = {"eagle_config": "eagle3", "draft_vocab_size": "eagle3"}
"""Keys that only such drafters have -> family."""

_NATIVE_KEYS = ("mtp_num_hidden_layers", "num_nextn_predict_layers")
"""Keys by which a target's own config says that layers for drafting come with it."""

_EAGLE3_TENSORS = ("midlayer.hidden_norm.weight", "layers.0.hidden_norm.weight")

_NATIVE_TENSOR = re.compile(r"(^|\.)mtp[._]|\.(eh_proj|enorm|hnorm|shared_head)\.")
"""What the names of a target's own drafting layers have in them."""

_LANGUAGE_MODEL_SUFFIXES = ("ForCausalLM", "ForConditionalGeneration")

_METHOD_BY_KIND = {"eagle3": "eagle", "mtp": "mtp", "dflash": "dflash"}


class FamilyModule(Protocol):
    """What the package of a family offers."""

    def load(
        self,
        folder: Path,
        target: Target,
        taps: Sequence[int] | None = None,
        quantize: Mapping[str, Any] | None = None,
    ) -> Drafter:
        """Read a checkpoint folder for a target, and quantize what was read if asked to."""
        ...


class _Said(NamedTuple):
    """What a checkpoint says of itself.

    Attributes:
        kind: what it is reported as.
        family: its row; None when the kind is known and no row is.
        also: a second kind it can serve as.
    """

    kind: str
    family: Family | None
    also: str | None = None


def resolve_family(config: Mapping[str, Any], wanted: str | None = None, tensors: Collection[str] = ()) -> Family:
    """Say which family a checkpoint is of.

    Looked at in order: `speculators_model_type`, `architectures[0]`, `model_type`, the keys only drafters have, the
    tensor names. What the checkpoint says wins over `wanted`; `wanted` decides where it says nothing, and where it
    says two things: a language model that carries drafting layers beside its own can serve as either.

    Args:
        config: its config.json object.
        wanted: the kind the caller asked for.
        tensors: names of its tensors; empty when they are not known.

    Raises:
        UnknownDrafter: `wanted` is no kind, or nothing says what the checkpoint is.

    Warns:
        UserWarning: once, when `wanted` contradicts the checkpoint.

    Example:
        >>> resolve_family({"architectures": ["LlamaForCausalLMEagle3"]}).name
        'eagle3'
    """
    said = _resolve(config, wanted, tensors)
    if said.family is None:
        raise UnknownDrafter(
            f"a drafter of kind {said.kind!r}, but no family is known for model_type {config.get('model_type')!r}. "
            f"Known model types of such checkpoints: {', '.join(_types_of(said.kind))}."
        )
    return said.family


def resolve_drafter_kind(config: Mapping[str, Any], wanted: str | None = None, tensors: Collection[str] = ()) -> str:
    """Say which kind of drafter a checkpoint is; see `resolve_family`.

    Returns:
        One of `known_families().kinds`; not every family of it can be loaded yet.

    Example:
        >>> resolve_drafter_kind({"architectures": ["DFlashDraftModel"], "model_type": "qwen3"})
        'dflash'
    """
    return _resolve(config, wanted, tensors).kind


def drafter_family(config: Mapping[str, Any]) -> Family | None:
    """The family whose checkpoints alone have such a config.json; None where it may be a target's.

    Example:
        >>> drafter_family({"architectures": ["LlamaForCausalLM"], "model_type": "llama"}) is None
        True
    """
    said = _stated(config, _architecture(config))
    return None if said is None else said.family


def check_kind(wanted: str | None) -> None:
    """Refuse a kind that no family is of.

    Raises:
        UnknownDrafter: lists those that are known.
    """
    kinds = known_families().kinds
    if wanted is not None and wanted not in kinds:
        raise UnknownDrafter(f"unknown drafter kind {wanted!r}. Known kinds: {', '.join(kinds)}.")


def open_family(family: Family) -> FamilyModule:
    """Import the package that reads checkpoints of a family.

    Raises:
        UnsupportedOption: it is not built yet, or mlx-lm lacks its target. Lists what works.
    """
    works = f"What works now: {', '.join(row.name for row in known_families().rows if row.loadable)}."
    if family.absent_target is not None:
        raise UnsupportedOption(
            f"drafters of family {family.name!r} need a target of type {family.absent_target!r}, "
            f"which this mlx-lm has no module for. {works}"
        )
    if family.module is None:
        raise UnsupportedOption(
            f"drafters of family {family.name!r} (kind {family.kind!r}) are known but cannot be loaded yet. {works}"
        )
    return cast(FamilyModule, importlib.import_module(family.module))


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


def check_target(family: Family, target: Target) -> None:
    """Refuse a target that drafters of this family are never made for.

    Raises:
        IncompatiblePair: names the target and the targets that fit.
    """
    if family.targets != ANY_TARGET and target.name not in family.targets:
        raise IncompatiblePair(
            f"drafters of family {family.name!r} are made for {' or '.join(family.targets)}, "
            f"the target is {target.name!r}. Use a drafter made for this target."
        )


def _resolve(config: Mapping[str, Any], wanted: str | None, tensors: Collection[str]) -> _Said:
    check_kind(wanted)
    architecture = _architecture(config)
    said = _stated(config, architecture) or _by_layers(config, architecture, wanted, tensors)
    if said is None and architecture is not None and architecture.endswith(_LANGUAGE_MODEL_SUFFIXES):
        said = _as_asked(config["architectures"], wanted)
    if said is not None:
        if wanted is None or wanted == said.kind:
            return said
        if wanted == said.also:
            return _row(wanted)
        warnings.warn(
            f"drafter kind {wanted!r} was asked for, but the checkpoint is {said.kind!r}: used as that", stacklevel=4
        )
        return said
    if wanted is not None:
        return _unsaid(wanted)
    if architecture is None and _mlx_lm_has(config.get("model_type")):
        return _row("standalone")
    raise UnknownDrafter(
        f"nothing says which kind of drafter this is: architecture {architecture!r}, model_type "
        f"{config.get('model_type')!r}. Known architectures: {', '.join(known_families().by_architecture)}. "
        f"Known kinds, which you may name yourself: {', '.join(known_families().kinds)}."
    )


def _architecture(config: Mapping[str, Any]) -> str | None:
    named = config.get("architectures")
    if named is None or named == []:
        return None
    if not isinstance(named, list) or not isinstance(named[0], str):
        raise CheckpointError(f"config.json: architectures is {named!r}, expected a list with one name")
    return named[0]


def _stated(config: Mapping[str, Any], architecture: str | None) -> _Said | None:
    """By what only drafters say of themselves."""
    speculator = config.get("speculators_model_type")
    if speculator is not None:
        if not isinstance(speculator, str) or speculator not in known_families().by_model_type:
            raise UnknownDrafter(
                f"unknown speculators_model_type {speculator!r}. Known: {', '.join(known_families().by_model_type)}."
            )
        family = known_families().by_architecture.get(architecture or "")
        named = known_families().by_model_type[speculator]
        # The type names the method; the architecture may name a variant of it.
        return _of(family if family is not None and family.kind == named.kind else named)
    model_type = config.get("model_type")
    family = known_families().by_architecture.get(architecture or "")
    if family is None and isinstance(model_type, str):
        family = known_families().by_model_type.get(model_type)
    if family is None and config.get("dflash_config"):
        family = known_families().by_name["dflash"]
    if family is not None:
        return _of(_dflash_variant(config) if family.name == "dflash" else family)
    # A count of 0 says that there is nothing.
    by_key = next((name for key, name in _FAMILY_BY_KEY.items() if config.get(key)), None)
    return None if by_key is None else _row(by_key)


def _dflash_variant(config: Mapping[str, Any]) -> Family:
    """Which of the families that share the name it is: they differ in what `dflash_config` holds."""
    own = config.get("dflash_config")
    own = own if isinstance(own, dict) else {}
    if own.get("projector_type") == "dspark" or own.get("markov_rank"):
        return known_families().by_name["dspark"]
    return known_families().by_name["laguna_dflash" if config.get("model_type") == "laguna" else "dflash"]


def _by_layers(
    config: Mapping[str, Any], architecture: str | None, wanted: str | None, tensors: Collection[str]
) -> _Said | None:
    """By the tensors that are there, or, while their names are not known, by the counts the config gives."""
    if {name.removeprefix("model.") for name in tensors} & set(_EAGLE3_TENSORS):
        return _row("eagle3")
    carried = any(_NATIVE_TENSOR.search(name) for name in tensors)
    promised = any(place.get(key) for place in _places(config) for key in _NATIVE_KEYS)
    # Conversions drop the layers and keep the promise; who asks for them is told so by the family.
    if not carried and not (promised and (not tensors or wanted == "mtp")):
        return None
    natives = known_families().by_native
    types = (str(place.get("model_type")) for place in _places(config))
    family = next((natives[name] for name in types if name in natives), None)
    whole = architecture is None or architecture.endswith(_LANGUAGE_MODEL_SUFFIXES)
    return _Said("mtp", family, "standalone" if whole else None)


def _places(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The config, and that of its text model."""
    text = config.get("text_config")
    return [config, text] if isinstance(text, dict) else [config]


def _unsaid(kind: str) -> _Said:
    """The kind a caller named where the checkpoint says nothing; the family follows where the kind has one."""
    families = [family for family in known_families().rows if family.kind == kind]
    return _Said(kind, families[0] if kind != "mtp" else None)


def _as_asked(architectures: Sequence[str], wanted: str | None) -> _Said:
    """What a language model's architecture means where a kind of drafter was asked for."""
    method = _METHOD_BY_KIND.get(wanted or "")
    meant = architectures[0] if method is None else meant_architecture(method, architectures)
    family = known_families().by_architecture.get(meant)
    return _row("standalone") if family is None else _of(family)


def _mlx_lm_has(model_type: object) -> bool:
    """Whether mlx-lm has a module for targets of this type."""
    if not isinstance(model_type, str) or not re.fullmatch(r"[\w-]+", model_type):
        return False
    return importlib.util.find_spec(f"mlx_lm.models.{MODEL_REMAPPING.get(model_type, model_type)}") is not None


def _types_of(kind: str) -> list[str]:
    families = [family for family in known_families().rows if family.kind == kind]
    return [name for family in families for name in (*family.model_types, *family.natives)]


def _row(name: str) -> _Said:
    return _of(known_families().by_name[name])


def _of(family: Family) -> _Said:
    return _Said(family.kind, family)
