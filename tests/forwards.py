"""Puts a function around every forward of a model, which stays the same model for those who look at it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest
from mlx import nn

Around = Callable[..., Any]
"""Is given mlx-lm's own forward and what that was called with."""


class Forwards:
    """Changes the class of a model once, when it is first asked for, whatever is put around its forwards then.

    A model whose class was changed is another model, and all that was found out about its blocks is found out again.
    """

    def __init__(self) -> None:
        self._around: dict[type[nn.Module], Around] = {}
        self._patch = pytest.MonkeyPatch()
        self._changed: set[type[nn.Module]] = set()

    def wrap(self, model: nn.Module, around: Around) -> None:
        """From now on, `around(forward, model, ...)` is called for every forward of models of this class."""
        kind = type(model)
        self._change(kind)
        self._around[kind] = around

    def widths(self, model: nn.Module) -> list[int]:
        """How many tokens each forward of models of this class is given from now on; the list grows."""
        fed: list[int] = []

        def counting(forward: Around, model: nn.Module, inputs: mx.array, *args: Any, **keywords: Any) -> Any:
            fed.append(inputs.shape[1])
            return forward(model, inputs, *args, **keywords)

        self.wrap(model, counting)
        return fed

    def clear(self) -> None:
        """The forwards are mlx-lm's again."""
        self._around.clear()

    def undo(self) -> None:
        """The classes are mlx-lm's again."""
        self._patch.undo()

    def _change(self, kind: type[nn.Module]) -> None:
        if kind in self._changed:
            return
        forward = kind.__call__

        @functools.wraps(forward)
        def call(*args: Any, **keywords: Any) -> Any:
            around = self._around.get(kind)
            return forward(*args, **keywords) if around is None else around(forward, *args, **keywords)

        self._patch.setattr(kind, "__call__", call)
        self._changed.add(kind)
