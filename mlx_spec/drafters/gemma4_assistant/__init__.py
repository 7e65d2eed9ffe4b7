"""Gemma 4's assistants: drafters that attend to the target's own keys."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mlx_spec.drafters.checkpoint import read_config, read_tensors
from mlx_spec.drafters.gemma4_assistant.config import AssistantConfig
from mlx_spec.drafters.gemma4_assistant.model import AssistantNetwork, Gemma4Assistant
from mlx_spec.drafters.same_names import fill
from mlx_spec.errors import UnsupportedOption
from mlx_spec.sampling import random_state_kept
from mlx_spec.target.model import Target

__all__ = ["AssistantConfig", "AssistantNetwork", "load"]


def load(folder: Path, target: Target, taps: Sequence[int] | None = None) -> Gemma4Assistant:
    """Load an assistant from its folder.

    Args:
        folder: holds config.json and safetensors.
        target: what it will draft for.
        taps: not for this family: it reads the last layer.

    Raises:
        CheckpointError: names everything that is missing, of a wrong shape, or not supported.
        UnsupportedOption: `taps` was given.
    """
    last = target.layer_count - 1
    if taps is not None and tuple(taps) != (last,):
        raise UnsupportedOption(
            f"taps={tuple(taps)} was given, but an assistant reads the target's last layer, {last}. Leave it out."
        )
    config = AssistantConfig.parse(read_config(folder), folder)
    with random_state_kept():
        network = AssistantNetwork(config)
    fill(network, read_tensors(folder), folder)
    return Gemma4Assistant(folder.name, config, network, target)
