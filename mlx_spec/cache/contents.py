"""What caches of any kind hold: arrays, rows, tokens."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from mlx_spec.cache.adopt import leaves


def tokens_read(caches: Sequence[Any]) -> int | None:
    """Tokens of text the caches have read so far, of the row that has read most; None when they do not tell.

    Cost:
        A host read where they are those of a batch.
    """
    counts = [getattr(cache, "offset", None) for cache in leaves(caches)]
    by_row = (int(mx.max(count)) for count in counts if isinstance(count, mx.array))
    longest = max(chain(by_row, (count for count in counts if isinstance(count, int))), default=0)
    return None if longest <= 0 and rows_held(caches) is not None else max(0, longest)


def rows_held(caches: Sequence[Any]) -> int | None:
    """B, rows that a model's caches hold; None where none holds anything that tells."""
    shapes = map(_first_shape, leaves(caches))
    return next((shape[0] for shape in shapes if shape is not None), None)


def _first_shape(cache: Any) -> tuple[int, ...] | None:
    """Shape of the first array a cache holds; its first axis is the batch."""
    pending = list(cache.__dict__.values())
    while pending:
        value = pending.pop(0)
        if isinstance(value, mx.array) and value.ndim > 1:
            return tuple(value.shape)
        if isinstance(value, list | tuple):
            pending.extend(value)
    return None


def cache_arrays(caches: Sequence[Any]) -> list[mx.array]:
    """Every array in the caches' state, for evaluation."""
    return [array for cache in leaves(caches) for _, array in tree_flatten(cache.state) if isinstance(array, mx.array)]
