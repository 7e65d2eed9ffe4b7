"""Weights kept as 8-bit floats with a scale per block, row or tensor, as they are published for other hardware."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import mlx.core as mx

from mlx_spec.errors import CheckpointError

_BLOCKS = ".weight_scale_inv"
_ROWS = ".weight_scale"

_USUAL_BLOCK = (128, 128)


def dequantized(
    tensors: Mapping[str, mx.array], config: Mapping[str, Any], told: Callable[[str], str]
) -> dict[str, mx.array]:
    """Replace every 8-bit weight and its scales by the bfloat16 weight they stand for, as mlx-lm does.

    Args:
        tensors: name -> array.
        config: the checkpoint's; names the size of blocks.
        told: name -> what an error calls it.

    Returns:
        name -> array, lazy, without scales. Weights without scales are as they were.

    Raises:
        CheckpointError: scales without a weight, or of a wrong shape.
    """
    result = {name: array for name, array in tensors.items() if not name.endswith((_BLOCKS, _ROWS))}
    for name, scales in tensors.items():
        if not name.endswith((_BLOCKS, _ROWS)):
            continue
        base = name.removesuffix(_BLOCKS).removesuffix(_ROWS) + ".weight"
        weight = tensors.get(base)
        if weight is None or weight.dtype != mx.uint8 or weight.ndim != 2:
            got = "none" if weight is None else f"{weight.dtype} {list(weight.shape)}"
            raise CheckpointError(f"{told(name)} scales an 8-bit float matrix {base}, got {got}")
        if scales.dtype == mx.uint8:
            # An exponent of two, biased: what the format e8m0 is.
            scales = mx.power(2.0, scales.astype(mx.float32) - 127)
        if name.endswith(_BLOCKS):
            result[base] = _from_blocks(weight, scales, _block(config), told(name))
        else:
            result[base] = _from_rows(weight, scales, told(name))
    return result


def _block(config: Mapping[str, Any]) -> tuple[int, int]:
    text = config.get("text_config")
    for place in (config, text if isinstance(text, dict) else {}):
        settings = place.get("quantization_config")
        if isinstance(settings, dict) and settings.get("weight_block_size") is not None:
            rows, columns = settings["weight_block_size"]
            return int(rows), int(columns)
    return _USUAL_BLOCK


def _from_blocks(weight: mx.array, scales: mx.array, block: tuple[int, int], told: str) -> mx.array:
    rows, columns = weight.shape
    wanted = (-(-rows // block[0]), -(-columns // block[1]))
    if scales.shape != wanted:
        raise CheckpointError(f"{told} has shape {list(scales.shape)}, wanted {list(wanted)}: one per block of {block}")
    padded = mx.pad(mx.from_fp8(weight, dtype=mx.bfloat16), [(0, -rows % block[0]), (0, -columns % block[1])])
    blocks = padded.reshape(wanted[0], block[0], wanted[1], block[1]) * scales[:, None, :, None]
    return blocks.reshape(padded.shape)[:rows, :columns].astype(mx.bfloat16)


def _from_rows(weight: mx.array, scales: mx.array, told: str) -> mx.array:
    rows = weight.shape[0]
    if scales.size not in (1, rows):
        raise CheckpointError(f"{told} has shape {list(scales.shape)}, wanted one entry or {rows}")
    return (mx.from_fp8(weight, dtype=mx.bfloat16) * scales.reshape(-1, 1)).astype(mx.bfloat16)
