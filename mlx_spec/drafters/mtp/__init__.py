"""Prediction layers (MTP, nextn): read from the target's own checkpoint, or from a folder of their own."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mlx_spec.drafters.checkpoint import read_config
from mlx_spec.drafters.mtp.config import check_settings, width_of
from mlx_spec.drafters.mtp.copies import differing_copies
from mlx_spec.drafters.mtp.files import count_depths, find
from mlx_spec.drafters.mtp.layouts import layout_of
from mlx_spec.drafters.mtp.model import MtpDrafter, MtpNetwork, new_predictor
from mlx_spec.drafters.mtp.stored_packing import quantize_as_stored
from mlx_spec.drafters.mtp.weights import assign, file_name
from mlx_spec.drafters.quantization import quantize_on_load
from mlx_spec.errors import UnsupportedOption
from mlx_spec.model.target import Target

__all__ = ["load"]


_ROUTERS = ("mlp.gate", "mlp.gate.gate_proj", "mlp.shared_expert_gate")
"""Stay in floating point: which experts are asked hangs on small differences."""


def load(
    folder: Path, target: Target, taps: Sequence[int] | None = None, quantize: Mapping[str, Any] | None = None
) -> MtpDrafter:
    """Load the prediction layer of a folder, or those of every depth.

    Args:
        folder: the target's own checkpoint, whole or the shards with these tensors, or a folder made by
            `python -m mlx_spec.split_mtp`.
        target: what it will draft for. What the checkpoint does not say is as in the target.
        taps: not for this family: it reads the last layer.
        quantize: `group_size`, `bits` and `mode`, to quantize its matrices after they are loaded, but for routers.

    Raises:
        CheckpointError: names everything that is missing, of a wrong shape, or not supported.
        IncompatiblePair: the checkpoint is another model's; names both values.
        UnsupportedOption: `taps` was given, or `quantize` cannot be done.

    Warns:
        UserWarning: names the matrices that `quantize` leaves as they are, and copies of the target's embedding and
            head that are none.
    """
    last = target.layer_count - 1
    if taps is not None and tuple(taps) != (last,):
        raise UnsupportedOption(
            f"taps={tuple(taps)} was given, but a prediction layer reads the target's last layer, {last}. Leave it out."
        )
    layout = layout_of(target.name)
    config = read_config(folder)
    check_settings(config, folder, target, layout)
    count = count_depths(folder, config, layout, target.layer_count)
    networks = [_network(folder, config, target, (depth, count), quantize) for depth in range(count)]
    return MtpDrafter(folder.name, layout, networks, target, width_of(config, folder, layout, count))


def _network(
    folder: Path,
    config: Mapping[str, Any],
    target: Target,
    depth: tuple[int, int],
    quantize: Mapping[str, Any] | None,
) -> MtpNetwork:
    """The prediction layer of a depth, of so many."""
    layout = layout_of(target.name)
    stored = find(folder, config, layout, target.layer_count, depth)
    layout = layout.as_stored(stored.tensors)
    predictor, sole = new_predictor(layout, target, depth[0])
    quantize_as_stored(predictor, layout, stored)
    assign(predictor, layout, stored)
    for name in differing_copies(stored, layout, target):
        warnings.warn(
            f"{stored.full_name(name)} in {folder} is not the target's {layout.copies[name]}, which serves in its "
            "place. Is this the prediction layer of another model?",
            stacklevel=6,
        )
    if quantize is not None:
        left = quantize_on_load(predictor, quantize, _ROUTERS)
        if left:
            names = ", ".join(stored.full_name(file_name(f"{name}.weight", layout)) for name in left)
            warnings.warn(f"{folder}: not quantized, their rows are no whole groups: {names}", stacklevel=6)
    return MtpNetwork(predictor, sole, layout)
