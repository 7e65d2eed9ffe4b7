"""Drafters that propose a block in one forward: DFlash, DFlash2, DSpark, Laguna's and Muse-Glimmer's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mlx_spec.drafters.checkpoint import read_config
from mlx_spec.drafters.dflash.config import BlockConfig
from mlx_spec.drafters.dflash.model import BlockDrafter
from mlx_spec.drafters.dflash.weights import read_weights
from mlx_spec.errors import UnsupportedOption
from mlx_spec.target.model import Target

__all__ = ["load"]


def load(
    folder: Path, target: Target, taps: Sequence[int] | None = None, quantize: Mapping[str, Any] | None = None
) -> BlockDrafter:
    """Load a drafter from its folder.

    Args:
        folder: holds config.json and safetensors.
        target: what it will draft for.
        taps: 0-based target layers whose outputs it reads, instead of those the config lists.
        quantize: not supported yet.

    Raises:
        CheckpointError: names everything that is missing, of a wrong shape, or not supported.
        UnsupportedOption: `quantize` was given.
    """
    if quantize is not None:
        raise UnsupportedOption("quantize was given, but block drafters cannot be quantized yet. Leave it out.")
    config = BlockConfig.parse(read_config(folder), folder, target.vocab_size, taps)
    return BlockDrafter(folder.name, config, read_weights(folder, config))
