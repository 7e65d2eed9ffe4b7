"""Weights for a network whose parameters have the names they have in the checkpoint."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten

from mlx_spec.errors import CheckpointError

_FLOATS = (mx.bfloat16, mx.float16, mx.float32)
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
    faults = [f"{name} {fault}" for name, like in wanted.items() if (fault := _fault(tensors.get(name), like))]
    unknown = [name for name in tensors if name not in wanted and not _IGNORED.fullmatch(name)]
    if unknown:
        faults.append(f"not known in this family: {', '.join(unknown[:_NAMED])}")
    if faults:
        more = f"; and {len(faults) - _NAMED} more" if len(faults) > _NAMED else ""
        raise CheckpointError(f"{folder}: {'; '.join(faults[:_NAMED])}{more}")
    network.load_weights([(name, tensors[name]) for name in wanted])
    mx.eval(network.parameters())


def _fault(array: mx.array | None, like: mx.array) -> str | None:
    if array is None:
        return f"is missing, wanted {list(like.shape)}"
    if array.shape != like.shape:
        return f"has shape {list(array.shape)}, wanted {list(like.shape)}"
    dtypes = _FLOATS if like.dtype in _FLOATS else (like.dtype,)
    if array.dtype not in dtypes:
        return f"has dtype {_short(array.dtype)}, wanted {' or '.join(map(_short, dtypes))}"
    if array.dtype in _FLOATS and not mx.isfinite(array).all().item():
        return "holds NaN or infinity"
    return None


def _short(dtype: mx.Dtype) -> str:
    return str(dtype).removeprefix("mlx.core.")
