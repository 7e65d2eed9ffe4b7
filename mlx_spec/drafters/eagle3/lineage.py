"""What a drafter for DeepSeek-V3 or Kimi takes from its target, and how such files count layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from mlx_spec.model.target import Target

_ARGUMENTS_OF = {"deepseek_v3": "args", "kimi_k25": "args.text_config"}
_KIMI_TYPES = ("kimi_k2", "kimi_k25")

BORROWED = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "rms_norm_eps",
    "vocab_size",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "rope_theta",
    "rope_scaling",
)
"""Settings that a drafter with latent attention shares with the target it was made for, unless its file says else."""


@dataclass(frozen=True)
class Lineage:
    """What a drafter's file alone does not say about its target.

    Attributes:
        name: the target's architecture.
        layer_count: its decoder layers.
        deepseek: whether it is DeepSeek-V3 or Kimi K2, for which lists of layers are counted in another way.
        kimi: whether it is Kimi K2 or K2.5.
        settings: of the target's attention, by the names of a config.json; empty unless `deepseek`.
    """

    name: str
    layer_count: int
    deepseek: bool
    kimi: bool
    settings: Mapping[str, Any]

    @classmethod
    def of(cls, target: Target) -> Lineage:
        """Read a target."""
        where = _ARGUMENTS_OF.get(target.name)
        if where is None:
            return cls(target.name, target.layer_count, False, False, {})
        arguments = target.model
        for part in where.split("."):
            arguments = getattr(arguments, part)
        assert is_dataclass(arguments)
        said = {field.name: getattr(arguments, field.name) for field in fields(arguments)}
        kimi = target.name in _KIMI_TYPES or said["model_type"] in _KIMI_TYPES
        return cls(target.name, target.layer_count, True, kimi, {key: said[key] for key in BORROWED if key in said})

    def default_taps(self, count: int) -> tuple[int, ...] | None:
        """The 0-based layer outputs that files which list none mean; None where no such default is known.

        Source: of three layers, what SafeAILab, speculators, ModelOpt and SpecForge all take, in their several ways of
        counting: after layers 1, L/2 - 1 and L - 4. Modular MAX has pairs for these targets, and other layers for Kimi.
        """
        last = self.layer_count
        known: dict[int, tuple[int, ...]] = {3: (1, last // 2 - 1, last - 4)}
        if self.kimi:
            known = {3: (2, last // 2, last - 3), 2: (2, last - 3)}
        elif self.deepseek:
            known[2] = (1, last - 4)
        taps = known.get(count)
        return taps if taps is not None and list(taps) == sorted(set(taps)) and taps[0] >= 0 else None
