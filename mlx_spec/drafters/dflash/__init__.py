"""Drafters that propose a block in one forward: DFlash, DFlash2, DSpark, Laguna's and Muse-Glimmer's."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mlx_spec.drafters.checkpoint import CONFIG_NAME, read_config, read_tensors
from mlx_spec.drafters.dflash.config import BlockConfig
from mlx_spec.drafters.dflash.model import BlockDrafter
from mlx_spec.drafters.dflash.weights import BlockWeights, read_weights
from mlx_spec.drafters.quantization import Format, foreign_quantization
from mlx_spec.errors import UnsupportedOption
from mlx_spec.model.target import Target

__all__ = ["load"]


def load(
    folder: Path, target: Target, taps: Sequence[int] | None = None, quantize: Mapping[str, Any] | None = None
) -> BlockDrafter:
    """Load a drafter from its folder.

    Args:
        folder: holds config.json and safetensors.
        target: what it will draft for.
        taps: 0-based target layers whose outputs it reads, instead of those the config lists.
        quantize: `group_size`, `bits` and `mode`, to quantize its matrices after they are loaded.

    Raises:
        CheckpointError: names everything that is missing, of a wrong shape, or not supported.
        UnsupportedOption: `quantize` cannot be done.

    Warns:
        UserWarning: names the matrices that `quantize` leaves as they are.
    """
    settings = read_config(folder)
    config = BlockConfig.parse(settings, folder, target.vocab_size, taps)
    ignored = foreign_quantization(settings, read_tensors(folder), folder / CONFIG_NAME)
    if ignored:
        warnings.warn(f"{folder}: {ignored}", stacklevel=3)
    weights = read_weights(folder, config)
    if quantize is not None:
        weights = _quantized(weights, quantize, folder)
    return BlockDrafter(folder.name, config, weights)


def _quantized(weights: BlockWeights, wanted: Mapping[str, Any], folder: Path) -> BlockWeights:
    if weights.formats:
        raise UnsupportedOption("quantize was given, but the drafter is stored quantized already. Leave it out.")
    try:
        form = Format.parse(dict(wanted), "quantize")
    except ValueError as error:
        raise UnsupportedOption(str(error)) from None
    packed, left = weights.quantized(form)
    if not packed.formats:
        raise UnsupportedOption(
            f"quantize={dict(wanted)}: no matrix of the drafter has rows that are a multiple of {form.group_size}"
        )
    if left:
        warnings.warn(f"{folder}: not quantized, their rows are no whole groups: {', '.join(left)}", stacklevel=4)
    return packed
