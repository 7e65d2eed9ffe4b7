"""Quantizing a drafter's weights when it is loaded, in mlx-lm's modes."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
from mlx import nn

from mlx_spec.errors import UnsupportedOption

DEFAULTS = {"affine": (64, 4), "mxfp4": (32, 4), "nvfp4": (16, 4), "mxfp8": (32, 8)}
"""Mode -> group size and bits where none are given. All but affine allow no others."""

_AFFINE_BITS, _AFFINE_GROUPS = (2, 3, 4, 5, 6, 8), (32, 64, 128)


@dataclass(frozen=True)
class Packing:
    """How to quantize.

    Attributes:
        bits: per weight; None is the mode's default.
        group_size: weights that share a scale; None is the mode's default.
        mode: one of DEFAULTS.

    Raises:
        UnsupportedOption: not a combination that mlx has.
    """

    bits: int | None = None
    group_size: int | None = None
    mode: str = "affine"

    def __post_init__(self) -> None:
        if self.mode not in DEFAULTS:
            raise UnsupportedOption(f"quantization mode {self.mode!r}; known modes: {', '.join(DEFAULTS)}")
        group_size, bits = self.settled
        if self.mode == "affine":
            if bits not in _AFFINE_BITS or group_size not in _AFFINE_GROUPS:
                raise UnsupportedOption(
                    f"{bits} bits in groups of {group_size}: mode affine takes bits {_AFFINE_BITS} "
                    f"and groups of {_AFFINE_GROUPS}"
                )
        elif (group_size, bits) != DEFAULTS[self.mode]:
            only = DEFAULTS[self.mode]
            raise UnsupportedOption(
                f"{bits} bits in groups of {group_size}: mode {self.mode} has {only[1]} bits in groups of {only[0]}"
            )

    @property
    def settled(self) -> tuple[int, int]:
        """Group size and bits."""
        group_size, bits = DEFAULTS[self.mode]
        return self.group_size or group_size, self.bits or bits

    @property
    def entry(self) -> dict[str, int | str]:
        """What a config.json says of it."""
        group_size, bits = self.settled
        return {"group_size": group_size, "bits": bits, "mode": self.mode}

    def apply(self, module: nn.Module, spared: tuple[str, ...] = ()) -> int:
        """Quantize every part whose rows divide into groups, and evaluate the result.

        Args:
            module: whose parts become quantized ones.
            spared: what paths of parts that stay as they are end with.

        Returns:
            How many parts were quantized.

        Raises:
            UnsupportedOption: none can be.
        """
        group_size, bits = self.settled
        packed = []

        def wanted(path: str, part: nn.Module) -> bool:
            fits = (
                hasattr(part, "to_quantized") and part.weight.shape[-1] % group_size == 0 and not path.endswith(spared)
            )
            if fits:
                packed.append(path)
            return fits

        nn.quantize(module, group_size=group_size, bits=bits, mode=self.mode, class_predicate=wanted)
        if not packed:
            raise UnsupportedOption(f"no weight has rows that divide into groups of {group_size}: nothing to quantize")
        mx.eval(module.parameters())
        return len(packed)
