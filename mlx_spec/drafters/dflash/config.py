"""The settings of a block drafter, read from a config.json in whichever layout its authors publish."""

from __future__ import annotations

import enum
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveFloat, ValidationError

from mlx_spec.drafters.checkpoint import CONFIG_NAME
from mlx_spec.drafters.dflash.keys import (
    DRAFT_NUMBERS,
    DRAFT_OPTIONS,
    GEOMETRY,
    INERT,
    NEUTRAL,
    NEUTRAL_FOR_GEMMA,
    OWN,
    SHAPE_KEYS,
    SHAPE_OPTIONS,
)
from mlx_spec.drafters.dflash.places import Places, canonical_name
from mlx_spec.drafters.dflash.state import Sight
from mlx_spec.drafters.quantization import Quantization, read_quantization
from mlx_spec.drafters.rope import Rope, read_rope
from mlx_spec.errors import CheckpointError

EMBEDDING = -1
"""Among the taps: what layer 0 reads, instead of a layer's output."""

LARGEST, MOST = 2**24, 2**10
"""No axis of a drafter is longer, and it has no more layers or rows: a number beyond is a damaged one."""

Size = Annotated[int, Field(gt=0, le=LARGEST)]
Count = Annotated[int, Field(gt=0, le=MOST)]

_USUAL_BLOCK = 16

_SLIDING, _FULL = "sliding_attention", "full_attention"


class Flavour(enum.Enum):
    """Which layers the drafter has."""

    PLAIN = "plain"
    CONVOLVED = "convolved"
    GEMMA = "gemma"


class BlockConfig(BaseModel):
    """Geometry and conventions of one drafter.

    Attributes:
        family: row of the table of families.
        architecture: what the file says its checkpoint is.
        target_hidden_size: H_t, of each tapped state.
        vocab_size: the target's vocabulary as the drafter knows it.
        knows_vocabulary: whether the file says so; otherwise it is whatever the target has.
        draft_vocab_size: tokens its output projection knows.
        sights: which keys each layer's rows see.
        block_size: rows of a block as the checkpoint counts them.
        names_block: whether the file says so; otherwise it is the usual number, and a width is up to the caller.
        from_anchor: whether the bonus token's own row predicts the first proposal; otherwise the first mask's does.
        proposals: tokens a whole block proposes.
        mask_token_id: what stands for the unknown tokens.
        taps: what is read of the target, ascending: layer outputs counted from 0, and EMBEDDING.
        taps_from: where they were listed, for messages.
        tap_norms: whether each tapped state is normed by itself first.
        gated: whether each head is scaled by a gate.
        quantization: how the file says its matrices are stored; None where it does not.
        ships_tables: whether the layout always comes with an embedding and an output projection of its own.
    """

    model_config = ConfigDict(frozen=True, strict=True, allow_inf_nan=False, arbitrary_types_allowed=True)

    family: str
    architecture: str | None
    hidden_size: Size
    intermediate_size: Size
    num_hidden_layers: Count
    num_attention_heads: Size
    num_key_value_heads: Size
    head_dim: Size
    rms_norm_eps: Annotated[float, Field(gt=0, lt=1)]
    vocab_size: Size
    knows_vocabulary: bool
    draft_vocab_size: Size
    target_hidden_size: Size
    attention_bias: bool = False
    tie_word_embeddings: bool = False
    attention_k_eq_v: bool = False
    rope: Rope
    sights: tuple[Sight, ...]
    block_size: Count
    names_block: bool = True
    from_anchor: bool
    proposals: NonNegativeInt
    mask_token_id: NonNegativeInt
    taps: tuple[int, ...]
    taps_from: str
    num_target_layers: Size | None = None
    runtime_block_size: Size | None = None
    markov_rank: Annotated[int, Field(ge=0, le=LARGEST)] = 0
    markov_head_type: Literal["vanilla", "gated", "rnn"] | None = None
    enable_confidence_head: bool = False
    confidence_head_with_markov: bool = False
    conv_kernel_size: Size | None = None
    conv_group_size: Size | None = None
    selector_rank: Size | None = None
    selector_top_k: Size | None = None
    input_embedding_scale: PositiveFloat | None = None
    output_multiplier: PositiveFloat = 1.0
    final_logit_softcapping: PositiveFloat | None = None
    attention_sink_bias: bool = False
    tap_norms: bool = False
    gated: bool = False
    ships_tables: bool = False
    quantization: Quantization | None = None

    @property
    def flavour(self) -> Flavour:
        """Which layers it has."""
        if self.family == "gemma4_dspark":
            return Flavour.GEMMA
        return Flavour.CONVOLVED if self.family == "dflash2" else Flavour.PLAIN

    @property
    def whole_blocks(self) -> bool:
        """Whether only a block of the trained size means anything to it."""
        return self.family == "dflash2"

    @classmethod
    def parse(cls, config: Mapping[str, Any], folder: Path, vocab_size: int, taps: Sequence[int] | None = None) -> Self:
        """Check and read a config.json object.

        Args:
            config: the object.
            folder: where it came from, for messages.
            vocab_size: of the target, for a drafter that knows no vocabulary but borrows all that has one.
            taps: 0-based layer outputs to read instead of those the file lists.

        Raises:
            CheckpointError: names every key that is missing, of a wrong value, contradictory or not supported.

        Warns:
            UserWarning: once, naming the keys nothing is known about; once, where the block's size is assumed.
        """
        places = Places(config, folder / CONFIG_NAME)
        _refuse_unsupported(places)
        fields = _shape(places, vocab_size)
        for key in DRAFT_NUMBERS:
            value = places.draft(key)
            if value is not None and key in cls.model_fields:
                fields[key] = value
        fields.setdefault("draft_vocab_size", fields["vocab_size"])
        fields.setdefault("target_hidden_size", fields["hidden_size"])
        fields["taps"], fields["taps_from"] = _taps(places, taps)
        fields["sights"] = _sights(places, fields["num_hidden_layers"])
        fields |= _block(places)
        try:
            parsed = cls(
                **fields,
                family=places.family,
                architecture=places.architecture,
                rope=_rope(places),
                tap_norms=places.family == "laguna_dflash",
                gated=places.family == "laguna_dflash",
                ships_tables=places.ships_tables,
                quantization=read_quantization(config, places.path, canonical_name),
            )
        except ValidationError as error:
            wrong = [f"{'.'.join(map(str, e['loc']))}={e['input']!r} ({e['msg']})" for e in error.errors()]
            raise CheckpointError(f"{places.path} has wrong values: {'; '.join(wrong)}") from None
        faults = parsed._faults()
        if faults:
            raise CheckpointError(f"{places.path}: {'; '.join(faults)}")
        _warn_unknown(places)
        return parsed

    def _faults(self) -> list[str]:
        """What does not fit together, one sentence each."""
        rotated = self.rope.rotated_dims(self.head_dim)
        checks = (
            (
                self.num_attention_heads % self.num_key_value_heads == 0,
                self._says("num_attention_heads", "multiple of"),
            ),
            (self.draft_vocab_size <= self.vocab_size, self._says("draft_vocab_size", "larger than vocab_size")),
            (
                self.mask_token_id < self.vocab_size or not self.knows_vocabulary,
                f"mask_token_id={self.mask_token_id} is outside vocab_size={self.vocab_size}",
            ),
            (rotated >= 2 and rotated % 2 == 0, f"head_dim={self.head_dim} would rotate {rotated} entries per head"),
            (self.proposals >= 1, f"block_size={self.block_size} leaves no row that predicts a token"),
            (
                not self.markov_rank or self.markov_head_type is not None,
                "markov_head_type is missing beside markov_rank",
            ),
            (
                not (self.enable_confidence_head and self.confidence_head_with_markov) or self.markov_rank > 0,
                "confidence_head_with_markov needs a markov_rank above 0",
            ),
            (
                max(self.num_attention_heads * self.head_dim, len(self.taps) * self.target_hidden_size) <= LARGEST,
                f"num_attention_heads={self.num_attention_heads}, head_dim={self.head_dim} and target_hidden_size="
                f"{self.target_hidden_size} cannot be: no axis of a drafter is longer than {LARGEST}",
            ),
            (
                self.num_target_layers is None or self.taps[-1] < self.num_target_layers,
                f"{self.taps_from} goes beyond num_target_layers={self.num_target_layers}; layers are counted from 0",
            ),
        )
        faults = [fault for holds, fault in checks if not holds]
        return faults + (self._second_faults() if self.whole_blocks else self._first_faults())

    def _first_faults(self) -> list[str]:
        """What the second version alone has, and what Gemma's layers do without."""
        names = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
        found = [f"{name}={getattr(self, name)}" for name in names if getattr(self, name) is not None]
        faults = [f"{', '.join(found)} belong to DFlash2, which the file does not say it is"] if found else []
        if self.flavour is Flavour.GEMMA and any(sight != Sight() for sight in self.sights):
            faults.append("this family's layers see everything; sliding or causal ones are not supported")
        return faults

    def _second_faults(self) -> list[str]:
        """The same for the second version's own settings."""
        names = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
        missing = [name for name in names if getattr(self, name) is None]
        if missing:
            return [f"{', '.join(missing)} missing. None of these is guessed."]
        assert self.conv_kernel_size
        assert self.conv_group_size
        assert self.selector_top_k
        checks = (
            (self.conv_kernel_size <= self.block_size, f"conv_kernel_size={self.conv_kernel_size} exceeds the block"),
            (
                self.hidden_size % self.conv_group_size == 0,
                f"hidden_size={self.hidden_size} is not a multiple of conv_group_size={self.conv_group_size}",
            ),
            (
                self.selector_top_k <= self.draft_vocab_size,
                f"selector_top_k={self.selector_top_k} exceeds the vocabulary of {self.draft_vocab_size}",
            ),
            (not any(sight.causal for sight in self.sights), "a causal block is not supported for this family"),
            (
                self.draft_vocab_size == self.vocab_size,
                f"draft_vocab_size={self.draft_vocab_size} is not vocab_size={self.vocab_size}, as this family needs",
            ),
        )
        return [fault for holds, fault in checks if not holds]

    def _says(self, key: str, what: str) -> str:
        if key == "draft_vocab_size":
            return f"draft_vocab_size={self.draft_vocab_size} is {what}={self.vocab_size}"
        return f"{key}={self.num_attention_heads} is not a {what} num_key_value_heads={self.num_key_value_heads}"


def _refuse_unsupported(places: Places) -> None:
    neutral = NEUTRAL_FOR_GEMMA if places.family == "gemma4_dspark" else NEUTRAL
    refused = [
        f"{key}={'{...}' if isinstance(value, dict) else repr(value)}"
        for key, allowed in neutral.items()
        for value in places.everywhere(key)
        if value not in allowed
    ]
    gating = next(iter(places.everywhere("gating")), None)
    if places.family == "laguna_dflash" and gating != "per-head":
        refused.append(f"gating={gating!r}")
    if refused:
        raise CheckpointError(
            f"{places.path} asks for what is not supported: {', '.join(refused)}. Supported are block "
            "drafters with dense layers."
        )


def _shape(places: Places, vocab_size: int) -> dict[str, Any]:
    borrowed = {"vocab_size": vocab_size} if places.family == "muse_glimmer_assistant" else {}
    missing = [key for key in SHAPE_KEYS if places.shape(key) is None and key not in borrowed]
    if missing:
        raise CheckpointError(f"{places.path} lacks {', '.join(missing)}. None of these is guessed.")
    fields = {**borrowed, **{key: places.shape(key) for key in SHAPE_KEYS if places.shape(key) is not None}}
    fields["knows_vocabulary"] = places.shape("vocab_size") is not None
    for key in ("attention_bias", "tie_word_embeddings"):
        if places.shape(key) is not None:
            fields[key] = places.shape(key)
    if places.family == "gemma4_dspark":
        fields["attention_k_eq_v"] = places.needed("attention_k_eq_v", bool)
        fields["head_dim"] = places.needed("global_head_dim", int)
        if fields["attention_k_eq_v"]:
            fields["num_key_value_heads"] = places.needed("num_global_key_value_heads", int)
    return fields


def _rope(places: Places) -> Rope:
    content = places.rope_settings()
    rope = read_rope(content, places.path)
    styles = [value for key in ("is_neox_style", "rope_is_neox_style") for value in places.everywhere(key)]
    if any(not isinstance(style, bool) for style in styles) or len(set(styles)) > 1:
        raise CheckpointError(f"{places.path}: is_neox_style and rope_is_neox_style are {styles}, expected one boolean")
    return replace(rope, interleaved=not styles[0]) if styles else rope


def _taps(places: Places, override: Sequence[int] | None) -> tuple[tuple[int, ...], str]:
    if override is not None:
        return _checked_taps(list(override), 0, "taps=", places.path), "taps="
    # The second list counts hidden states: the embedding is entry 0, so layer i's output is entry i + 1.
    listed = [(key, places.draft(key), shift) for key, shift in _TAP_KEYS if places.draft(key) is not None]
    if not listed:
        raise CheckpointError(
            f"{places.path} lacks target_layer_ids, the target layers the drafter reads (at top level or in {OWN}). "
            "They are not guessed: add the list to the file, or pass taps=(...), 0-based layer outputs."
        )
    read = [_checked_taps(ids, shift, f"{key}={ids}", places.path) for key, ids, shift in listed]
    if len(set(read)) > 1:
        names = " and ".join(f"{key}={ids}" for key, ids, _ in listed)
        raise CheckpointError(
            f"{places.path} lists different layers in {names}. The first counts layer outputs from 0, the second "
            "hidden states, one more. Remove the wrong one, or pass taps=(...), 0-based layer outputs."
        )
    return read[0], f"{listed[0][0]}={listed[0][1]}"


_TAP_KEYS = (("target_layer_ids", 0), ("aux_hidden_state_layer_ids", 1))


def _checked_taps(ids: object, shift: int, name: str, path: Path) -> tuple[int, ...]:
    if not isinstance(ids, list) or not ids or any(type(item) is not int for item in ids):
        raise CheckpointError(f"{path}: {name} is {ids!r}, expected a list of layer numbers")
    taps = tuple(item - shift for item in ids)
    if list(taps) != sorted(set(taps)) or taps[0] < EMBEDDING:
        raise CheckpointError(
            f"{path}: {name} is {ids}, expected ascending layer numbers, each once, from {EMBEDDING + shift} "
            f"(the embedding) on"
        )
    return taps


def _sights(places: Places, layers: object) -> tuple[Sight, ...]:
    if type(layers) is not int or not 1 <= layers <= MOST:
        return ()  # reported by its own check
    window = places.window()
    kinds = places.layer_types(layers)
    causal = places.causal()
    if _SLIDING in kinds and window is None:
        raise CheckpointError(f"{places.path}: layer_types has {_SLIDING}, but sliding_window is missing")
    limit = places.draft("draft_window_size")
    if limit is not None and (type(limit) is not int or limit < 1):
        raise CheckpointError(f"{places.path}: draft_window_size is {limit!r}, expected a positive number")
    sights = []
    for kind in kinds:
        sliding = kind == _SLIDING
        # Muse-Glimmer counts the distance itself, the others the keys from the query on.
        reach = None if not sliding or window is None else window - (places.family != "muse_glimmer_assistant")
        reaches = [each for each in (reach, limit) if each is not None]
        hides = causal.sliding if sliding else causal.full
        sights.append(Sight(min(reaches) if reaches else None, hides))
    return tuple(sights)


def _block(places: Places) -> dict[str, Any]:
    size = places.draft("block_size")
    named = size is not None
    if not named:
        if places.family != "dflash":
            raise CheckpointError(f"{places.path} lacks block_size, which this family of drafters depends on")
        size = _USUAL_BLOCK
        if places.draft("runtime_block_size") is None:
            warnings.warn(f"{places.path} lacks block_size, so every run must name a width.", stacklevel=5)
    from_anchor = places.flag("sample_from_anchor", places.family in ("dspark", "gemma4_dspark"))
    counts_anchor = places.flag("dspark_bonus_anchor", False)
    if type(size) is not int:
        return {"block_size": size, "names_block": named, "from_anchor": from_anchor, "proposals": 1}
    proposals = size if from_anchor and not counts_anchor else size - 1
    fields = {"block_size": size, "names_block": named, "from_anchor": from_anchor}
    return {**fields, "proposals": max(proposals, 0)}


def _warn_unknown(places: Places) -> None:
    known = {*SHAPE_KEYS, *SHAPE_OPTIONS, *DRAFT_NUMBERS, *DRAFT_OPTIONS, *NEUTRAL_FOR_GEMMA, *INERT, OWN, GEOMETRY}
    unknown = places.keys_not_among(known)
    if unknown:
        warnings.warn(
            f"{places.path} has keys that are not known here and are ignored: {', '.join(unknown)}", stacklevel=5
        )
