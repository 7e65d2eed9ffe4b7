"""EAGLE-3 drafters with one Llama layer, flat layout."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mlx_spec.drafters.checkpoint import read_config
from mlx_spec.drafters.eagle3.config import Eagle3Config
from mlx_spec.drafters.eagle3.model import Eagle3Drafter
from mlx_spec.drafters.eagle3.weights import read_weights
from mlx_spec.target.model import Target

__all__ = ["load"]


def load(folder: Path, target: Target, taps: Sequence[int] | None = None) -> Eagle3Drafter:
    """Load a drafter from its folder.

    Args:
        folder: holds config.json and safetensors.
        target: what it will draft for.
        taps: 0-based target layers whose outputs it reads, instead of those the config lists.

    Raises:
        CheckpointError: names everything that is missing, of a wrong shape, or not supported.
    """
    del target
    config = Eagle3Config.parse(read_config(folder), folder, taps)
    return Eagle3Drafter(folder.name, config, read_weights(folder, config))
