"""Gemma 4's assistants: drafters that attend to the target's own keys."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mlx_spec.drafters.checkpoint import CONFIG_NAME, read_config, read_tensors
from mlx_spec.drafters.gemma4_assistant.config import AssistantConfig
from mlx_spec.drafters.gemma4_assistant.model import AssistantNetwork, Gemma4Assistant
from mlx_spec.drafters.quantization import quantize_as_stored, quantize_on_load, read_quantization
from mlx_spec.drafters.same_names import fill
from mlx_spec.errors import UnsupportedOption
from mlx_spec.model.target import Target
from mlx_spec.sampling import random_state_kept

__all__ = ["AssistantConfig", "AssistantNetwork", "load"]


def load(
    folder: Path, target: Target, taps: Sequence[int] | None = None, quantize: Mapping[str, Any] | None = None
) -> Gemma4Assistant:
    """Load an assistant from its folder.

    Args:
        folder: holds config.json and safetensors.
        target: what it will draft for.
        taps: not for this family: it reads the last layer.
        quantize: `group_size`, `bits` and `mode`, to quantize its matrices after they are loaded.

    Raises:
        CheckpointError: names everything that is missing, of a wrong shape, or not supported.
        UnsupportedOption: `taps` was given, or `quantize` cannot be done.

    Warns:
        UserWarning: names the matrices that `quantize` leaves as they are.
    """
    last = target.layer_count - 1
    if taps is not None and tuple(taps) != (last,):
        raise UnsupportedOption(
            f"taps={tuple(taps)} was given, but an assistant reads the target's last layer, {last}. Leave it out."
        )
    settings, tensors = read_config(folder), read_tensors(folder)
    config = AssistantConfig.parse(settings, folder)
    with random_state_kept():
        network = AssistantNetwork(config)
        quantize_as_stored(network, read_quantization(settings, folder / CONFIG_NAME), tensors, folder)
    fill(network, tensors, folder)
    if quantize is not None:
        left = quantize_on_load(network, quantize)
        if left:
            warnings.warn(f"{folder}: not quantized, their rows are no whole groups: {', '.join(left)}", stacklevel=4)
    return Gemma4Assistant(folder.name, config, network, target)
