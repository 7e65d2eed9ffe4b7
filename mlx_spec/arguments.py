"""An argument that is not what it looks like is refused by its name, with what was wanted and what came."""

from __future__ import annotations

import operator
import os
import reprlib
from collections.abc import Callable, Iterable
from typing import Any

import mlx.core as mx
from mlx import nn

from mlx_spec.errors import InvalidRequest

PATH = (str, os.PathLike)
FUNCTION: type = Callable  # type: ignore[assignment]


def refusal(name: str, wanted: str, got: object, way_out: str = "") -> InvalidRequest:
    """The error that says so."""
    return InvalidRequest(f"{name} is {wanted}; got {shown(got)}.{way_out and ' '}{way_out}")


def shown(value: object) -> str:
    """A value in a message: short, and in one line."""
    if isinstance(value, mx.array | nn.Module):
        return f"a {type(value).__name__}"
    return " ".join(reprlib.repr(value).split())


def require(name: str, value: object, kinds: type | tuple[type, ...], wanted: str, way_out: str = "") -> None:
    """Refuse a value of another kind.

    Raises:
        InvalidRequest: see the module.
    """
    if not isinstance(value, kinds):
        raise refusal(name, wanted, value, way_out)


def require_or_none(name: str, value: object, kinds: type | tuple[type, ...], wanted: str) -> None:
    """As `require`, where None means left out."""
    if value is not None:
        require(name, value, kinds, wanted)


def whole(value: Any) -> Any:
    """A whole number of any library, as Python's own; what merely passes for one stays as it is."""
    if isinstance(value, bool | mx.array) or not hasattr(value, "__index__"):
        return value
    return operator.index(value)


def whole_number(name: str, value: object, wanted: str) -> int:
    """The value as Python's own number.

    Raises:
        InvalidRequest: it is none.
    """
    number = whole(value)
    if not isinstance(number, int) or isinstance(number, bool):
        raise refusal(name, wanted, value)
    return number


def whole_numbers(name: str, values: object, wanted: str) -> tuple[int, ...]:
    """Several of them.

    Raises:
        InvalidRequest: it is no list, or one of its entries is none.
    """
    if isinstance(values, str | bytes | mx.array) or not isinstance(values, Iterable):
        raise refusal(name, wanted, values)
    given = tuple(values)
    for value in given:
        if not isinstance(whole(value), int) or isinstance(value, bool):
            raise refusal(name, wanted, values)
    return tuple(map(whole, given))
