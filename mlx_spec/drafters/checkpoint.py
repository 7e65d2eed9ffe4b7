"""Reads a drafter's folder: JSON as dicts, safetensors as arrays. Nothing is unpickled and no code in it is run."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import mlx.core as mx
from safetensors import SafetensorError, safe_open

from mlx_spec.errors import CheckpointError, MlxSpecError, ModelNotFound
from mlx_spec.files import read_regular

CONFIG_NAME = "config.json"
INDEX_NAME = "model.safetensors.index.json"
TENSOR_PATTERN = "*.safetensors"
WEIGHTS_PATTERN = "model*.safetensors"
"""Files of this name hold a model's weights, as mlx-lm has it; what lies beside them is something else."""

JSON_LIMIT_BYTES = 64 * 2**20
"""The largest JSON or text file that is read; an index of a hundred thousand tensors has some ten million bytes."""

JSON_LIMIT_MARKS = 6_000_000
"""The most brackets, braces, commas and colons in it: each may cost 60 bytes of memory. The largest tokenizers have two
million."""

HEADER_LIMIT_BYTES = 32 * 2**20
"""The longest header of a safetensors file that is read: that of some two hundred thousand tensors."""


@dataclass(frozen=True)
class TensorFile:
    """One safetensors file.

    Attributes:
        path: where it is.
        metadata: what its writer noted.
        tensors: name -> array, lazy.
    """

    path: Path
    metadata: Mapping[str, str]
    tensors: Mapping[str, mx.array]


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
    return read_object(path)


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


def indexed_names(folder: Path) -> dict[str, str]:
    """Tensor name -> file name, as the folder's index has them; nothing without an index.

    Raises:
        CheckpointError: the index is no index, or names a file outside the folder.
    """
    index = folder / INDEX_NAME
    return _weight_map(index) if index.exists() else {}


def tensor_names(folder: Path) -> set[str]:
    """Names of the folder's tensors: those its index lists, and those in its files. Files may be missing.

    Raises:
        CheckpointError: a damaged file or index, or neither an index nor a file.
    """
    names = set(indexed_names(folder))
    files = _present(folder)
    if not names and not files:
        raise _nothing_in(folder)
    for path in files:
        names |= _load(path).keys()
    return names


def files_holding(folder: Path, wanted: Callable[[str], bool]) -> list[TensorFile]:
    """The folder's safetensors files that hold a wanted tensor, whether or not an index names them.

    Args:
        folder: may lack the files of tensors that are not wanted.
        wanted: tensor name -> whether it is.

    Raises:
        CheckpointError: a damaged file, a wanted name that two files define, or an index that names a file outside
            the folder or an absent one for a wanted tensor.
    """
    for name, file in indexed_names(folder).items():
        if wanted(name) and not (folder / file).is_file():
            raise CheckpointError(
                f"{folder / INDEX_NAME} names {file!r} for {name}, which is not in the folder: the download is "
                "incomplete"
            )
    held: list[TensorFile] = []
    origin: dict[str, Path] = {}
    for path in _present(folder):
        tensors, metadata = _load_with_metadata(path)
        names = [name for name in tensors if wanted(name)]
        for name in names:
            if name in origin:
                raise CheckpointError(f"tensor {name!r} is in {origin[name]} and in {path}: keep one of the files")
            origin[name] = path
        if names:
            held.append(TensorFile(path, metadata, tensors))
    return held


def read_object(path: Path) -> dict[str, Any]:
    """One JSON object.

    Raises:
        CheckpointError: no regular file, too large, or something else.
    """
    try:
        content = json.loads(require_bounded(path).decode())
    # RecursionError: JSON nested thousands deep.
    except (ValueError, RecursionError) as error:
        if isinstance(error, MlxSpecError):
            raise
        raise CheckpointError(f"{path} cannot be read as JSON: {_first_line(error)}") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds a JSON {type(content).__name__}, expected an object")
    return content


def require_bounded(path: Path) -> bytes:
    """The content of a JSON or text file, which is not larger than can be read in a while.

    Raises:
        CheckpointError: no regular file, as reading a pipe or a device may never end; or too large.
    """
    if not path.is_file():
        raise CheckpointError(f"{path} is no regular file")
    try:
        size = path.stat().st_size
        if size > JSON_LIMIT_BYTES:
            raise CheckpointError(f"{path} is too large: it has {size} bytes, at most {JSON_LIMIT_BYTES} are read")
        content = read_regular(path, JSON_LIMIT_BYTES)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {_first_line(error)}") from None
    marks = sum(map(content.count, (b"[", b"{", b",", b":"))) if path.suffix == ".json" else 0
    if marks > JSON_LIMIT_MARKS:
        raise CheckpointError(f"{path} is too large: it has {marks} values, at most {JSON_LIMIT_MARKS} are read")
    return content


def stored_shapes(path: Path) -> list[tuple[int, ...]]:
    """Shapes of the tensors in a safetensors file whose header accounts for its bytes.

    Raises:
        CheckpointError: it does not.
    """
    _require_sound(path)
    with safe_open(path, framework="numpy") as file:
        return [tuple(file.get_slice(name).get_shape()) for name in file.keys()]  # noqa: SIM118  it is no dict


def _tensor_files(folder: Path) -> list[Path]:
    index = folder / INDEX_NAME
    if index.exists():
        return _indexed_files(index)
    files = [path for path in _present(folder) if path.match(WEIGHTS_PATTERN)] or _present(folder)
    if not files:
        raise _nothing_in(folder)
    return files


def _weight_map(index: Path) -> dict[str, str]:
    weight_map = read_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(v, str) for v in weight_map.values()):
        raise CheckpointError(f"{index} has no weight_map from tensor names to file names")
    for name in weight_map.values():
        if _leaves_folder(name) or not name.endswith(".safetensors"):
            raise CheckpointError(f"{index} names {name!r}: only safetensors files inside the folder are read")
    return weight_map


def _present(folder: Path) -> list[Path]:
    files = sorted(folder.glob(TENSOR_PATTERN))
    for path in files:
        # Reading a pipe or a device may never end.
        if not path.is_file():
            raise CheckpointError(f"{path} is no regular file")
    return files


def _nothing_in(folder: Path) -> CheckpointError:
    return CheckpointError(
        f"{folder} holds no {TENSOR_PATTERN} file. Only safetensors are read: convert other formats first."
    )


def _indexed_files(index: Path) -> list[Path]:
    files = []
    for name in sorted(set(_weight_map(index).values())):
        path = index.parent / name
        if not path.is_file():
            raise CheckpointError(f"{index} names {name!r}, which is not in the folder: the download is incomplete")
        files.append(path)
    return files


def _leaves_folder(name: str) -> bool:
    posix, windows = PurePosixPath(name), PureWindowsPath(name)
    return posix.is_absolute() or bool(windows.anchor) or ".." in posix.parts + windows.parts or "\0" in name


def _load(path: Path) -> dict[str, mx.array]:
    return _load_with_metadata(path)[0]


def _load_with_metadata(path: Path) -> tuple[dict[str, mx.array], dict[str, str]]:
    _require_sound(path)
    try:
        loaded, metadata = mx.load(str(path), return_metadata=True)
    except (RuntimeError, ValueError, OSError) as error:
        raise CheckpointError(
            f"{path} is not a complete safetensors file: {_first_line(error)}. Download or convert it again."
        ) from None
    assert isinstance(loaded, dict)  # what mx.load gives for this suffix
    assert isinstance(metadata, dict)
    return loaded, metadata


def _require_sound(path: Path) -> None:
    """Refuse a file whose header does not account for its bytes: too long a header, holes, overlaps, unknown dtypes."""
    try:
        with path.open("rb") as start:
            (length,) = struct.unpack("<Q", start.read(8).ljust(8, b"\0"))
        if HEADER_LIMIT_BYTES < length <= path.stat().st_size:
            raise OSError(f"its header has {length} bytes, at most {HEADER_LIMIT_BYTES} are read")
        with safe_open(path, framework="numpy"):
            pass
    except (SafetensorError, OSError, RuntimeError) as error:
        raise CheckpointError(
            f"{path} is not a complete safetensors file: {_first_line(error)}. Download or convert it again."
        ) from None


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


@contextmanager
def telling(folder: Path) -> Iterator[None]:
    """Name the folder in whatever mlx-lm has to say about it."""
    try:
        yield
    except (MlxSpecError, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    # A config may make any line of a model's code fail in any way, and a tokenizer's Rust code panic.
    except BaseException as error:
        kind = "" if isinstance(error, OSError | ValueError) else f"{type(error).__name__}: "
        raise CheckpointError(f"mlx-lm cannot load {folder}: {kind}{one_line(error)}") from error


def one_line(error: BaseException) -> str:
    """What an error says, on one line and of a readable length."""
    said = " ".join(str(error).split()) or type(error).__name__
    return said if len(said) <= 300 else f"{said[:300]}…"
