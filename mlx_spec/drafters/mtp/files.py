"""Finds a prediction layer among the files of a checkpoint, which may hold a whole model besides."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlx_spec.drafters.checkpoint import TensorFile, files_holding, indexed_names, tensor_names
from mlx_spec.drafters.mtp.block_scales import dequantized
from mlx_spec.drafters.mtp.layouts import LAYOUT_BY_ARCHITECTURE, SPLIT_SUFFIX, Layout
from mlx_spec.errors import CheckpointError
from mlx_spec.model.target import Target

SIDE_FILES = "*mtp*.safetensors"
"""Files of prediction layers that an index may not name."""

MOST_DEPTHS = 8
"""Prediction layers that are looked for, where there is one per depth."""

DECLARED_COUNTS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers")
"""Keys that say how many prediction layers the original checkpoint has."""


@dataclass(frozen=True)
class PredictionTensors:
    """The tensors of one prediction layer.

    Attributes:
        folder: where they came from.
        place: what their names start with there.
        tensors: name after the place -> array, lazy; packed blocks of floats are unpacked.
        converted: the files were written for MLX, so that norm weights are what multiplies.
    """

    folder: Path
    place: str
    tensors: dict[str, mx.array]
    converted: bool

    def full_name(self, name: str) -> str:
        """A name as the file has it."""
        return self.place + name


def is_split(config: Mapping[str, Any]) -> bool:
    """Whether a folder holds a prediction layer alone, its tensors named without a place."""
    model_type = config.get("model_type")
    return isinstance(model_type, str) and model_type.endswith(SPLIT_SUFFIX)


def places_of(layout: Layout, layers: int, depth: int = 0) -> tuple[str, ...]:
    """What names of a prediction layer's tensors may start with, in a checkpoint of a target with so many layers."""
    return tuple(place.format(n=layers + depth, k=depth) for place in layout.places)


def place_alone(depth: int, count: int) -> str:
    """The same in a folder of so many prediction layers and nothing else."""
    return f"depths.{depth}." if count > 1 else ""


def count_depths(folder: Path, config: Mapping[str, Any], layout: Layout, layers: int) -> int:
    """How many prediction layers a folder has: as many as it holds tensors of, or as its config says if that is more.

    Raises:
        CheckpointError: a damaged file or index, or neither an index nor a file.
    """
    if not layout.one_per_depth:
        return 1
    stated = {**config.get("text_config", {}), **config}
    said = max([1, *(stated[key] for key in DECLARED_COUNTS if type(stated.get(key)) is int)])
    names = tensor_names(folder)
    depth = 0
    while depth < MOST_DEPTHS and any(name.startswith(places_of(layout, layers, depth)) for name in names):
        depth += 1
    return max(said, depth)


def files_to_fetch(folder: Path, target: Target, asked_for: bool) -> list[str] | None:
    """Which files of a target's own repository hold its prediction layer, told by the index.

    Args:
        folder: has the repository's JSON files.
        target: what will be drafted for.
        asked_for: a prediction layer is wanted, whatever else the repository may serve as.

    Returns:
        Patterns of file names; those of files beside the index are among them. None where the whole repository is
        wanted: its index names no such layer, or it has none.
    """
    layout = LAYOUT_BY_ARCHITECTURE.get(target.name)
    index = indexed_names(folder)
    if layout is None or not index:
        return None
    depths = range(MOST_DEPTHS if layout.one_per_depth else 1)
    places = tuple(place for depth in depths for place in places_of(layout, target.layer_count, depth))
    named = {file for name, file in index.items() if name.startswith(places)}
    return [*sorted(named), SIDE_FILES] if named or asked_for else None


def declared_counts(config: Mapping[str, Any]) -> list[str]:
    """What a config says of how many prediction layers the original checkpoint has, as `key=count`."""
    text = config.get("text_config")
    stated = {**(text if isinstance(text, dict) else {}), **config}
    return [f"{key}={stated[key]}" for key in DECLARED_COUNTS if stated.get(key)]


def find(
    folder: Path, config: Mapping[str, Any], layout: Layout, layers: int, depth: tuple[int, int] = (0, 1)
) -> PredictionTensors:
    """Read the prediction layer's tensors of a folder.

    Args:
        folder: a checkpoint of the whole model, or a part of it, or of the prediction layer alone.
        config: its config.json object.
        layout: of the target's family.
        layers: the target's.
        depth: which of how many.

    Raises:
        CheckpointError: there are none, they are damaged, or a file the index names for them is absent.
    """
    places = (place_alone(*depth),) if is_split(config) else places_of(layout, layers, depth[0])
    files = files_holding(folder, _starting(places))
    used = {place for file in files for name in file.tensors for place in places if name.startswith(place)}
    if not used:
        raise CheckpointError(_nothing_found(folder, config, places))
    if len(used) > 1:
        raise CheckpointError(
            f"{folder} holds prediction layers under several names: {', '.join(sorted(used))}. Keep one of them."
        )
    (place,) = used
    tensors = {
        name.removeprefix(place): array
        for file in files
        for name, array in file.tensors.items()
        if name.startswith(place)
    }
    unpacked = dequantized(tensors, config, lambda name: f"{folder}: {place}{name}")
    return PredictionTensors(folder, place, unpacked, _converted(files, place))


def _starting(places: tuple[str, ...]) -> Callable[[str], bool]:
    return lambda name: name.startswith(places)


def _converted(files: list[TensorFile], place: str) -> bool:
    """Whether the files were written for MLX.

    mlx-lm tells by the layout of convolutions in the same file, where there are any; a converter says so in the
    metadata; and a name without a place is one that a converter gave.
    """
    for file in files:
        convolutions = [array for name, array in file.tensors.items() if "conv1d.weight" in name]
        if convolutions:
            return convolutions[0].shape[-1] == 1
    formats = {file.metadata.get("format") for file in files}
    return "mlx" in formats or (formats == {None} and place == "")


def _nothing_found(folder: Path, config: Mapping[str, Any], places: tuple[str, ...]) -> str:
    declared = declared_counts(config)
    although = f" although config.json says {', '.join(declared)}" if declared else ""
    wanted = " or ".join(f"{place}*" for place in places)
    return (
        f"{folder} holds no prediction layer{although}: no safetensors file in it has a tensor {wanted}. "
        "Conversions made by mlx-lm leave these tensors out. Give the original repository, or a folder that "
        "`python -m mlx_spec.split_mtp` made from it."
    )
