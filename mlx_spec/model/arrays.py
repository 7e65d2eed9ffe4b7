"""The arrays that a module holds by itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import mlx.core as mx
from mlx import nn


def own_arrays(module: nn.Module) -> list[mx.array]:
    """Arrays of a module, in lists and dicts of it too, but for those of the modules it holds."""
    return list(_arrays(list(module.values())))


def _arrays(values: list[Any]) -> Iterator[mx.array]:
    for value in values:
        if isinstance(value, mx.array):
            yield value
        elif isinstance(value, list | tuple):
            yield from _arrays(list(value))
        elif isinstance(value, dict) and not isinstance(value, nn.Module):
            yield from _arrays(list(value.values()))
