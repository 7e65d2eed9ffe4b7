"""EAGLE-3 drafters: Llama, Qwen3 and latent-attention layers, in the layouts their authors publish."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlx_spec.drafters.checkpoint import CONFIG_NAME, read_config
from mlx_spec.drafters.eagle3.config import Beside, Eagle3Config
from mlx_spec.drafters.eagle3.lineage import Lineage
from mlx_spec.drafters.eagle3.model import Eagle3Drafter
from mlx_spec.drafters.eagle3.weights import canonical, read_stored, read_weights
from mlx_spec.drafters.quantization import foreign_quantization, quantize_on_load, read_quantization
from mlx_spec.drafters.spelling import AS_IT_IS, Spelling
from mlx_spec.errors import UnsupportedOption
from mlx_spec.model.target import Target
from mlx_spec.sampling import random_state_kept

__all__ = ["load"]


def load(
    folder: Path,
    target: Target,
    taps: Sequence[int] | None = None,
    quantize: Mapping[str, Any] | None = None,
    spelling: Spelling = AS_IT_IS,
) -> Eagle3Drafter:
    """Load a drafter from its folder.

    Args:
        folder: holds config.json and safetensors.
        target: what it will draft for. Lends settings to drafters with latent attention, and its depth where the
            file does not list the layers to read.
        taps: 0-based target layers whose outputs it reads, instead of those the config lists.
        quantize: `group_size`, `bits` and `mode`, to quantize the drafter's matrices after they are loaded. What the
            target is quantized to plays no part.
        spelling: what the folder's files call otherwise; its names as they are, if left out.

    Raises:
        CheckpointError: names everything that is missing, of a wrong shape, or not supported.
        UnsupportedOption: `quantize` cannot be done, or this process is one of several that share a model.

    Warns:
        UserWarning: names keys and tensors that are ignored, and whatever was taken from elsewhere.
    """
    _refuse_group(mx.distributed.init().size())
    config, stored, path = spelling.config(read_config(folder)), read_stored(folder, spelling), folder / CONFIG_NAME
    ignored = foreign_quantization(config, stored.tensors, path)
    quantization = read_quantization(config, path, lambda name: canonical(spelling.tensor(name)))
    beside = Beside(
        names=stored.tensors.keys(),
        fc_columns=stored.fc_columns(quantization),
        quantization=quantization,
        lineage=Lineage.of(target),
    )
    parsed = Eagle3Config.parse(config, folder, taps, beside)
    if ignored is not None:
        warnings.warn(f"{path}: {ignored}", stacklevel=3)
    with random_state_kept():
        weights = read_weights(stored, parsed)
        left = [] if quantize is None else quantize_on_load(weights.modules, quantize)
    if left:
        warnings.warn(f"{folder}: not quantized, their rows are no whole groups: {', '.join(left)}", stacklevel=3)
    drafter = Eagle3Drafter(folder.name, parsed, weights)
    if beside.lineage is not None and beside.lineage.deepseek and drafter.network.has_embedding:
        sentence = f"{folder.name} reads an embedding of its own, where drafters for {target.name} share the target's"
        drafter.remarks = (*drafter.remarks, sentence)
    return drafter


def _refuse_group(size: int) -> None:
    if size > 1:
        raise UnsupportedOption(
            f"EAGLE-3 drafts on one device, but this process is one of a distributed group of {size}. Start it alone."
        )
