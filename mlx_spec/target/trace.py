"""Watching the calls that one forward of a model makes to its submodules."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from mlx import nn

Entered = Callable[[Any, str, tuple[Any, ...], dict[str, Any]], None]
"""(module, name of the method, positional arguments, keyword arguments)."""

_METHODS = ("__call__", "as_linear")


@contextmanager
def watched(model: Any, entered: Entered, left: Callable[[], Any] = lambda: None) -> Iterator[None]:
    """Report every call of a submodule, and every use of an embedding as a head, while the context lasts."""
    modules = [module for module in model.modules() if isinstance(module, nn.Module)]
    classes = [type(module) for module in modules]

    def watching(base: type[Any]) -> type[Any]:
        own: dict[str, Any] = {"__module__": base.__module__}
        for name in _METHODS:
            if hasattr(base, name):
                own[name] = reporting(getattr(base, name), name)
        return type(base.__name__, (base,), own)

    def reporting(method: Callable[..., Any], name: str) -> Callable[..., Any]:
        def call(self: Any, *args: Any, **keywords: Any) -> Any:
            entered(self, name, args, keywords)
            try:
                return method(self, *args, **keywords)
            finally:
                left()

        return call

    try:
        for module, base in zip(modules, classes, strict=True):
            module.__class__ = watching(base)
        yield
    finally:
        for module, base in zip(modules, classes, strict=True):
            module.__class__ = base
