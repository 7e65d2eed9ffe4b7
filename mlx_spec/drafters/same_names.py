"""Weights for a network whose parameters have the names they have in the checkpoint."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten

from mlx_spec.drafters.stored_tensors import dtypes_like, fault, fault_of_values
from mlx_spec.errors import CheckpointError

_NAMED = 12
"""Faults spelled out in one message."""

_IGNORED = re.compile(r"(.*\.)?rotary_emb\.inv_freq")


def fill(network: nn.Module, tensors: Mapping[str, mx.array], folder: Path) -> None:
    """Give every parameter the tensor of its name.

    Args:
        network: changed in place and evaluated; where the files are quantized it is already.
        tensors: name -> array, as in the files.
        folder: where they are from, for messages.

    Raises:
        CheckpointError: names every tensor that is missing, misshapen, of a wrong dtype, not finite or unknown.
            The network is not to be used then.
    """
    wanted: dict[str, mx.array] = dict(tree_flatten(network.parameters()))
    faults = []
    for name, like in wanted.items():
        array = tensors.get(name)
        said = fault(array, like.shape, dtypes_like(like.dtype)) or fault_of_values(array)
        if said:
            faults.append(f"{name} {said}")
    unknown = [name for name in tensors if name not in wanted and not _IGNORED.fullmatch(name)]
    if unknown:
        faults.append(f"not known in this family: {', '.join(unknown[:_NAMED])}")
    if faults:
        more = f"; and {len(faults) - _NAMED} more" if len(faults) > _NAMED else ""
        raise CheckpointError(f"{folder}: {'; '.join(faults[:_NAMED])}{more}")
    network.load_weights([(name, tensors[name]) for name in wanted])
    mx.eval(network.parameters())
