"""Rotary position settings of a drafter's config, in each of the places where they are kept."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx import nn
from mlx_lm.models.rope_utils import initialize_rope

from mlx_spec.errors import CheckpointError

NESTED_KEYS = ("rope_parameters", "rope_scaling")

PROPORTIONAL = "proportional"
"""Frequencies counted over the whole head, of which the leading part alone is rotated."""

# type -> (keys it needs, keys it may have). Types whose frequencies depend on the length read so far are not among
# them: rows cached before the change would no longer fit.
_KEYS_BY_TYPE: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "default": ((), ()),
    "linear": (("factor",), ()),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"), ()),
    "yarn": (
        ("factor", "original_max_position_embeddings"),
        ("beta_fast", "beta_slow", "mscale", "mscale_all_dim"),
    ),
    PROPORTIONAL: ((), ("factor",)),
}
# Sections give each axis of an image its share of the frequencies; all axes of a text have one position.
_SECTIONS = ("mrope_section", "mrope_interleaved")
_SHARED_KEYS = ("rope_type", "type", "rope_theta", "partial_rotary_factor", *_SECTIONS)


@dataclass(frozen=True)
class Rope:
    """Rotary positions.

    Attributes:
        theta: base of the frequencies.
        fraction: leading part of each head that is rotated, 0 < fraction <= 1.
        scaling: what mlx-lm calls `scaling_config`; None for plain frequencies.
        interleaved: whether neighbouring entries form a pair, instead of those half a head apart (NeoX).
    """

    theta: float
    fraction: float = 1.0
    scaling: Mapping[str, Any] | None = None
    interleaved: bool = False

    def rotated_dims(self, head_dim: int) -> int:
        """Entries of a head that are rotated."""
        return int(head_dim * self.fraction)

    def build(self, head_dim: int) -> nn.Module:
        """mlx-lm's rotation for heads of this size: (x [B, heads, T, head_dim], offset=first row's position) -> x."""
        dims, scaling = self.rotated_dims(head_dim), self.scaling
        if scaling is not None and scaling["rope_type"] == PROPORTIONAL:
            dims, scaling = head_dim, {**scaling, "partial_rotary_factor": self.fraction}
        rotation: nn.Module = initialize_rope(dims, self.theta, self.interleaved, scaling)
        return rotation


def read_rope(config: Mapping[str, Any], path: Path) -> Rope:
    """Read `rope_theta`, `rope_parameters`, `rope_scaling` and `partial_rotary_factor`, flat or nested.

    Args:
        config: the config.json object.
        path: where it came from, for messages.

    Raises:
        CheckpointError: the base is missing, two places contradict each other, or a kind of scaling is unknown.
    """
    nested = _nested(config, path)
    kind = _kind(nested, path)
    needed, optional = _KEYS_BY_TYPE[kind]
    missing = [key for key in needed if nested.get(key) is None]
    if missing:
        raise CheckpointError(f"{path}: rope type {kind!r} needs {', '.join(missing)} beside it")
    unknown = [
        f"{k}={v!r}" for k, v in nested.items() if v is not None and k not in (*needed, *optional, *_SHARED_KEYS)
    ]
    if unknown:
        raise CheckpointError(f"{path}: rope type {kind!r} with {', '.join(unknown)} is not supported")
    numbers = {key: _number(nested, key, path) for key in (*needed, *optional) if nested.get(key) is not None}
    fraction = _either(config, nested, "partial_rotary_factor", path)
    if fraction is not None and fraction > 1:
        raise CheckpointError(f"{path}: partial_rotary_factor is {fraction!r}, expected a share, at most 1")
    theta = _either(config, nested, "rope_theta", path)
    if theta is None:
        raise CheckpointError(
            f"{path}: rope_theta is missing, at top level and in {' and '.join(NESTED_KEYS)}. It is not guessed; "
            "Llama files that leave it out usually mean 10000.0: add it to the file if you know so."
        )
    scaling = None if kind == "default" else {"rope_type": kind, **numbers}
    return Rope(theta, 1.0 if fraction is None else fraction, scaling)


def _nested(config: Mapping[str, Any], path: Path) -> Mapping[str, Any]:
    found = {key: config[key] for key in NESTED_KEYS if config.get(key) is not None}
    for key, value in found.items():
        if not isinstance(value, dict):
            raise CheckpointError(f"{path}: {key} is {value!r}, expected an object")
    if len(found) == 2 and found["rope_parameters"] != found["rope_scaling"]:
        raise CheckpointError(f"{path}: rope_parameters and rope_scaling contradict each other; keep one")
    return next(iter(found.values()), {})


def _kind(nested: Mapping[str, Any], path: Path) -> str:
    named = [nested[key] for key in ("rope_type", "type") if nested.get(key) is not None]
    if len(named) == 2 and named[0] != named[1]:
        raise CheckpointError(f"{path}: rope_type {named[0]!r} and type {named[1]!r} contradict each other; keep one")
    for kind in named:
        if not isinstance(kind, str) or kind not in _KEYS_BY_TYPE:
            raise CheckpointError(
                f"{path}: rope type {kind!r} is not supported; rope_type may be {', '.join(_KEYS_BY_TYPE)}"
            )
    return named[0] if named else "default"


def _either(config: Mapping[str, Any], nested: Mapping[str, Any], key: str, path: Path) -> float | None:
    values = {_number(place, key, path) for place in (config, nested) if place.get(key) is not None}
    if len(values) > 1:
        raise CheckpointError(
            f"{path}: {key} is {config[key]!r} at top level and {nested[key]!r} nested; remove the wrong one"
        )
    return next(iter(values), None)


def _number(place: Mapping[str, Any], key: str, path: Path) -> float:
    value = place[key]
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        raise CheckpointError(f"{path}: {key} is {value!r}, expected a number")
    if value == 0 and key != "mscale_all_dim":
        raise CheckpointError(f"{path}: {key} is 0, expected a positive number")
    return float(value)
