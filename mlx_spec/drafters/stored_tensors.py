"""What a tensor of a checkpoint must be like to be used, and how it is said where it is not."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple, cast

import mlx.core as mx

from mlx_spec.errors import CheckpointError

FLOATS = (mx.bfloat16, mx.float16, mx.float32)
INTEGERS = (mx.int64, mx.int32)


def dtypes_like(dtype: mx.Dtype) -> tuple[mx.Dtype, ...]:
    """What may be stored for a parameter of this dtype: any float for a float, otherwise the dtype itself."""
    return FLOATS if dtype in FLOATS else (dtype,)


def fault(array: mx.array | None, shape: tuple[int, ...], dtypes: tuple[mx.Dtype, ...]) -> str | None:
    """What is wrong with a tensor, to be said after its name; None if nothing is. Values are not looked at."""
    if array is None:
        return f"is missing, wanted {list(shape)}"
    if array.shape != shape:
        return f"has shape {list(array.shape)}, wanted {list(shape)}"
    if array.dtype not in dtypes:
        return f"has dtype {_short(array.dtype)}, wanted {' or '.join(map(_short, dtypes))}"
    return None


def fault_of_values(array: mx.array | None) -> str | None:
    """The same for its values, which are evaluated; what is missing has none."""
    if array is not None and array.dtype in FLOATS and not mx.isfinite(array).all().item():
        return "holds NaN or infinity"
    return None


class TargetIds(NamedTuple):
    """What a head over a smaller vocabulary proposes.

    Attributes:
        ids: [draft_vocab] int32, the target's id of each.
        largest: of them.
    """

    ids: mx.array
    largest: int


def target_ids(offsets: mx.array, vocab_size: int, folder: Path) -> TargetIds:
    """Read `d2t`: [draft_vocab] offsets, which added to a proposed id give the id in the target's vocabulary.

    Raises:
        CheckpointError: an id outside the vocabulary. Names the first.
    """
    ids = mx.arange(offsets.shape[0], dtype=mx.int64) + offsets.astype(mx.int64)
    beyond = (ids < 0) | (ids >= vocab_size)
    if beyond.any().item():
        first = cast(int, mx.argmax(beyond).item())
        raise CheckpointError(
            f"{folder}: d2t[{first}] maps draft id {first} to {ids[first].item()}, outside the vocabulary of "
            f"{vocab_size}. d2t holds offsets: target id = draft id + d2t[draft id]."
        )
    return TargetIds(ids.astype(mx.int32), cast(int, ids.max().item()))


def _short(dtype: mx.Dtype) -> str:
    return str(dtype).removeprefix("mlx.core.")
