"""Reads a drafter's folder: JSON as dicts, safetensors as arrays. Nothing is unpickled and no code in it is run."""

from __future__ import annotations

import json
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import mlx.core as mx

from mlx_spec.errors import CheckpointError, ModelNotFound

CONFIG_NAME = "config.json"
INDEX_NAME = "model.safetensors.index.json"
TENSOR_PATTERN = "*.safetensors"
WEIGHTS_PATTERN = "model*.safetensors"
"""Files of this name hold a model's weights, as mlx-lm has it; what lies beside them is something else."""


def read_config(folder: Path) -> dict[str, Any]:
    """The folder's config.json.

    Raises:
        ModelNotFound: no such folder, or no config.json in it.
        CheckpointError: the file cannot be read as one JSON object.
    """
    if not folder.is_dir():
        raise ModelNotFound(f"no checkpoint folder at {folder}")
    path = folder / CONFIG_NAME
    if not path.exists():
        raise ModelNotFound(f"{folder} holds no {CONFIG_NAME}, so it is no checkpoint folder")
    return _read_object(path)


def read_tensors(folder: Path) -> dict[str, mx.array]:
    """Every tensor of the folder's safetensors files, under the names they have there.

    With a `model.safetensors.index.json` the files it names are read, otherwise all `model*.safetensors`, or all
    `*.safetensors` where no file is called so.

    Returns:
        name -> array, lazy: the values are read from the file when first evaluated.

    Raises:
        CheckpointError: no weights, a damaged file, a name that two files define, or an index that names a file
            outside the folder.
    """
    tensors: dict[str, mx.array] = {}
    origin: dict[str, Path] = {}
    for path in _tensor_files(folder):
        for name, array in _load(path).items():
            if name in origin:
                raise CheckpointError(f"tensor {name!r} is in {origin[name]} and in {path}: keep one of the files")
            tensors[name], origin[name] = array, path
    return tensors


def _read_object(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    # RecursionError: JSON nested thousands deep.
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {_first_line(error)}") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds a JSON {type(content).__name__}, expected an object")
    return content


def _tensor_files(folder: Path) -> list[Path]:
    index = folder / INDEX_NAME
    if index.exists():
        return _indexed_files(index)
    patterns = (WEIGHTS_PATTERN, TENSOR_PATTERN)
    found = (sorted(path for path in folder.glob(pattern) if path.is_file()) for pattern in patterns)
    files = next(filter(None, found), [])
    if not files:
        raise CheckpointError(
            f"{folder} holds no {TENSOR_PATTERN} file. Only safetensors are read: convert other formats first."
        )
    return files


def _indexed_files(index: Path) -> list[Path]:
    weight_map = _read_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(v, str) for v in weight_map.values()):
        raise CheckpointError(f"{index} has no weight_map from tensor names to file names")
    files = []
    for name in sorted(set(weight_map.values())):
        path = index.parent / name
        if _leaves_folder(name) or path.suffix != ".safetensors":
            raise CheckpointError(f"{index} names {name!r}: only safetensors files inside the folder are read")
        if not path.is_file():
            raise CheckpointError(f"{index} names {name!r}, which is not in the folder: the download is incomplete")
        files.append(path)
    return files


def _leaves_folder(name: str) -> bool:
    posix, windows = PurePosixPath(name), PureWindowsPath(name)
    return posix.is_absolute() or bool(windows.anchor) or ".." in posix.parts + windows.parts or "\0" in name


def _load(path: Path) -> dict[str, mx.array]:
    try:
        loaded = mx.load(str(path))
    except (RuntimeError, ValueError, OSError) as error:
        raise CheckpointError(
            f"{path} is not a complete safetensors file: {_first_line(error)}. Download or convert it again."
        ) from None
    assert isinstance(loaded, dict)  # what mx.load gives for this suffix
    return loaded


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
