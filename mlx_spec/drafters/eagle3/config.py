"""The settings of an EAGLE-3 drafter: geometry and conventions, from its config.json, its tensors and its target."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from mlx_spec.drafters.checkpoint import CONFIG_NAME
from mlx_spec.drafters.eagle3.keys import (
    LATENT_KEYS,
    NEEDED,
    OPTIONAL,
    REPEATING_ARCHITECTURE,
    Settings,
    read_proposals,
    read_settings,
    warn_unknown,
)
from mlx_spec.drafters.eagle3.lineage import BORROWED, Lineage
from mlx_spec.drafters.eagle3.taps import Taps, read_taps
from mlx_spec.drafters.quantization import Quantization
from mlx_spec.drafters.rope import Rope, read_rope
from mlx_spec.errors import CheckpointError

_FIRST_ATTENTION = "layers.0.self_attn."

LARGEST = 2**24
"""No axis of a drafter is longer; a number beyond it is a damaged one, and arrays of that size cannot be described."""

Size = Annotated[int, Field(gt=0, le=LARGEST)]


@dataclass(frozen=True)
class Beside:
    """What lies beside a config.json.

    Attributes:
        names: of the stored tensors, in the one layout.
        fc_columns: columns of fc, in entries; None for unknown.
        quantization: formats of the stored tensors.
        lineage: what is known about the target; None for nothing.
    """

    names: Collection[str] = ()
    fc_columns: int | None = None
    quantization: Quantization | None = None
    lineage: Lineage | None = None

    def holds(self, prefix: str) -> bool:
        """Whether a tensor's name begins so."""
        return any(name.startswith(prefix) for name in self.names)


class Latent(BaseModel):
    """Geometry of latent attention, by the names that DeepSeek-V3 gave.

    Attributes:
        q_lora_rank: None where queries are projected in one step.
    """

    model_config = ConfigDict(frozen=True, strict=True)

    q_lora_rank: Size | None = None
    kv_lora_rank: Size
    qk_nope_head_dim: Size
    qk_rope_head_dim: Size
    v_head_dim: Size


class Eagle3Config(BaseModel):
    """Geometry and conventions of one drafter.

    Attributes:
        hidden_size: H, the drafter's own.
        target_hidden_size: H_t, of each tapped state.
        vocab_size: the target's vocabulary as the drafter knows it; rows of its embedding, if it has one.
        draft_vocab_size: tokens its head can propose.
        num_target_layers: of the target it was made for; None where the file does not say.
        bias: whether fc has a bias.
        qk_norm: whether queries and keys are normalised per head.
        embeds_every_layer: whether every layer reads the embedding beside the hidden state, or only the first.
        norm_before_residual: whether the first layer adds to the normalised hidden state.
        norm_before_fc: whether the tapped states side by side are normalised.
        fc_norm: whether each tapped state is normalised.
        norm_output: whether a fed-back output is normalised.
        latent: geometry of latent attention; None for ordinary heads.
        taps: 0-based decoder layers whose outputs are read, ascending.
        taps_from: where they were listed, for messages.
        proposals: tokens per round it was trained for; None where the file does not say.
        quantization: formats of its matrices.
    """

    model_config = ConfigDict(frozen=True, strict=True, allow_inf_nan=False, arbitrary_types_allowed=True)

    hidden_size: Size
    intermediate_size: Size
    num_hidden_layers: Size
    num_attention_heads: Size
    num_key_value_heads: Size
    head_dim: Size
    rms_norm_eps: Annotated[float, Field(gt=0, lt=1)]
    vocab_size: Size
    draft_vocab_size: Size
    target_hidden_size: Size
    num_target_layers: Size | None = None
    attention_bias: bool = False
    mlp_bias: bool = False
    bias: bool = False
    tie_word_embeddings: bool = False
    qk_norm: bool = False
    embeds_every_layer: bool = False
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    latent: Latent | None = None
    rope: Rope
    taps: tuple[int, ...]
    taps_from: str
    proposals: Size | None = None
    quantization: Quantization | None = None

    @classmethod
    def parse(
        cls, config: Mapping[str, Any], folder: Path, taps: Sequence[int] | None = None, beside: Beside | None = None
    ) -> Self:
        """Check and read a config.json object.

        Args:
            config: the object.
            folder: where it came from, for messages.
            taps: 0-based layer outputs to read instead of those the file lists.
            beside: the tensors, and the target. What the file leaves out is taken from there where it can be.

        Raises:
            CheckpointError: names every key that is missing, of a wrong value, or not supported.

        Warns:
            UserWarning: names keys nothing is known about, keys taken from the target, and defaults that matter.
        """
        beside = beside or Beside()
        settings = read_settings(config, folder / CONFIG_NAME)
        if settings.latent:
            settings = _borrowing(settings, beside.lineage)
        path, values = settings.path, settings.values
        missing = [key for key in NEEDED if values.get(key) is None]
        if missing:
            raise CheckpointError(f"{path} lacks {', '.join(missing)}. None of these is guessed.")
        fields = {key: values[key] for key in (*NEEDED, *OPTIONAL) if values.get(key) is not None}
        fields.setdefault("draft_vocab_size", fields["vocab_size"])
        fields.setdefault("target_hidden_size", fields["hidden_size"])
        if settings.latent:
            fields |= _latent_fields(settings)
        fields.setdefault("head_dim", _head_dim(fields, path))
        read = read_taps(settings, taps, beside.lineage, _tap_count(fields, beside, path))
        fields |= _switches(settings, beside)
        parsed = cls._validated(fields, settings, read, beside)
        parsed._check_relations(path)
        _check_depth(parsed, beside, path)
        warn_unknown(settings)
        return parsed

    @classmethod
    def _validated(cls, fields: Mapping[str, Any], settings: Settings, taps: Taps, beside: Beside) -> Self:
        try:
            latent = Latent(**fields["latent"]) if settings.latent else None
            return cls(
                **{**fields, "latent": latent},
                rope=read_rope(settings.values, settings.path),
                taps=taps.layers,
                taps_from=taps.origin,
                proposals=read_proposals(settings),
                quantization=beside.quantization,
            )
        except ValidationError as error:
            wrong = [f"{'.'.join(map(str, e['loc']))}={e['input']!r} ({e['msg']})" for e in error.errors()]
            raise CheckpointError(f"{settings.path} has wrong values: {'; '.join(wrong)}") from None

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
        wide = self.num_attention_heads * self.head_dim
        if wide > LARGEST or len(self.taps) * self.target_hidden_size > LARGEST:
            raise CheckpointError(
                f"{path}: num_attention_heads={self.num_attention_heads}, head_dim={self.head_dim} and "
                f"target_hidden_size={self.target_hidden_size} cannot be: no axis of a drafter is longer than {LARGEST}"
            )
        if self.norm_before_fc and self.fc_norm:
            raise CheckpointError(f"{path}: norm_before_fc and fc_norm are two ways to do one thing; keep one")
        if self.latent is not None and self.num_hidden_layers != 1:
            raise CheckpointError(
                f"{path}: num_hidden_layers={self.num_hidden_layers}, but a drafter with latent attention has 1 layer"
            )
        size, name = (self.head_dim, "head_dim")
        if self.latent is not None:
            size, name = self.latent.qk_rope_head_dim, "qk_rope_head_dim"
        rotated = self.rope.rotated_dims(size)
        if rotated < 2 or rotated % 2:
            raise CheckpointError(
                f"{path}: {name}={size} with partial_rotary_factor={self.rope.fraction} would rotate "
                f"{rotated} entries per head, expected an even number"
            )


def _borrowing(settings: Settings, lineage: Lineage | None) -> Settings:
    """Fill in, from the target, what a drafter with latent attention leaves out."""
    target = {} if lineage is None else lineage.settings
    roped = settings.values.get("rope_parameters")
    inside = roped if isinstance(roped, dict) else {}
    held = {key for key in BORROWED if settings.values.get(key) is not None or key in inside}
    # Here null says something: queries are projected in one step.
    held |= {"q_lora_rank"} & settings.values.keys()
    if inside:
        held |= {"rope_scaling"}
    taken = {key: target[key] for key in BORROWED if key not in held and target.get(key) is not None}
    if taken and lineage is not None:
        warnings.warn(f"{settings.path} lacks {', '.join(taken)}: taken from the {lineage.name} target", stacklevel=5)
    values = {"hidden_act": "silu", **settings.values, **taken}
    return Settings(values, settings.eagle, settings.nested, settings.architecture, settings.path)


def _latent_fields(settings: Settings) -> dict[str, Any]:
    values, path = settings.values, settings.path
    missing = [key for key in LATENT_KEYS if key != "q_lora_rank" and values.get(key) is None]
    if missing:
        raise CheckpointError(
            f"{path} lacks {', '.join(missing)} of its latent attention, and the target does not have them either"
        )
    scaled = values.get("rope_scaling") or values.get("rope_parameters") or {}
    if not isinstance(scaled, dict) or "yarn" not in (scaled.get("type"), scaled.get("rope_type")):
        raise CheckpointError(
            f"{path}: latent attention needs rope_scaling of type 'yarn', got {scaled or None!r}. Add it to the file, "
            "or draft for a target that has it."
        )
    return {
        "latent": {key: values.get(key) for key in LATENT_KEYS},
        "head_dim": values.get("v_head_dim"),
        "num_key_value_heads": values["num_attention_heads"],
    }


def _switches(settings: Settings, beside: Beside) -> dict[str, bool]:
    """How the layers are put together. Where the file is silent, tensors that have but one use decide."""
    said = settings.switch("norm_before_residual")
    if said is None and settings.nested:
        raise CheckpointError(
            f"{settings.path} lacks norm_before_residual. It is not guessed: libraries that read this layout disagree "
            "about its default."
        )
    fc_norm = _decided(settings, beside, "fc_norm.", "fc_norm", "use_aux_norm")
    norm_output = settings.switch("norm_output")
    if fc_norm and norm_output is None:
        warnings.warn(
            f"{settings.path} has fc_norm but lacks norm_output: taken as false. If few proposals are accepted, add "
            '"norm_output": true.',
            stacklevel=6,
        )
    qk_norm = _decided(settings, beside, f"{_FIRST_ATTENTION}q_norm.", "qk_norm", "use_qk_norm")
    return {
        "norm_before_residual": bool(said),
        "norm_before_fc": _decided(settings, beside, "input_norm.", "norm_before_fc"),
        "fc_norm": fc_norm,
        "norm_output": bool(norm_output),
        "qk_norm": qk_norm or settings.values.get("model_type") == "qwen3",
        "embeds_every_layer": settings.architecture == REPEATING_ARCHITECTURE,
    }


def _decided(settings: Settings, beside: Beside, prefix: str, *names: str) -> bool:
    said, found = settings.switch(*names), beside.holds(prefix)
    if said is False and found:
        raise CheckpointError(
            f"{settings.path}: {names[0]} is false, but there are tensors {prefix}*; remove one of them"
        )
    return found if said is None else said


def _check_depth(config: Eagle3Config, beside: Beside, path: Path) -> None:
    """Whether the file has tensors of every layer, before layers are made."""
    stored = {name.split(".")[1] for name in beside.names if name.startswith("layers.")}
    if beside.names and config.num_hidden_layers > max(1, len(stored)):
        raise CheckpointError(
            f"{path}: num_hidden_layers={config.num_hidden_layers}, but there are tensors of {len(stored)} layers"
        )


def _tap_count(fields: Mapping[str, Any], beside: Beside, path: Path) -> int | None:
    """How many states of the target fc reads; None where its columns do not tell."""
    size, lineage = fields["target_hidden_size"], beside.lineage
    if beside.fc_columns is None or type(size) is not int or size < 1:
        return None  # both are reported by their own checks
    count, rest = divmod(beside.fc_columns, size)
    if lineage is not None and lineage.deepseek and (rest or count not in (2, 3)):
        raise CheckpointError(
            f"{path}: fc.weight has {beside.fc_columns} columns; drafters for {lineage.name} targets read 2 or 3 "
            f"states of the target's hidden size, which is {size} here (target_hidden_size, or hidden_size)"
        )
    return None if rest else count


def _head_dim(fields: Mapping[str, Any], path: Path) -> Any:
    hidden, heads = fields["hidden_size"], fields["num_attention_heads"]
    if not isinstance(hidden, int) or not isinstance(heads, int) or heads < 1:
        return 1  # those two are reported by their own checks
    if hidden % heads and "head_dim" not in fields:
        raise CheckpointError(
            f"{path} lacks head_dim, and hidden_size={hidden} is not a multiple of num_attention_heads={heads}"
        )
    return hidden // heads
