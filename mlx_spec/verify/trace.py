"""Watching the calls that one forward of a model makes to its submodules."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from mlx import nn

from mlx_spec.model.swap import lock, swap_class

Entered = Callable[[Any, str, tuple[Any, ...], dict[str, Any]], None]
"""(module, name of the method, positional arguments, keyword arguments)."""

_METHODS = ("__call__", "as_linear")

_WATCH = "watch"
"""Kind of the swap."""

_watch: ContextVar[object | None] = ContextVar("mlx_spec_watch", default=None)
"""The watch of the forward that is being built in this context. Other contexts run the same modules unwatched."""


@contextmanager
def watched(model: nn.Module, entered: Entered, left: Callable[[], Any] = lambda: None) -> Iterator[None]:
    """Report every call of a submodule, and every use of an embedding as a head, that is made in this context.

    Nothing can be attached to any model meanwhile: what stands under a watch must be there when it ends.
    """
    own_watch = object()

    def reporting(method: Callable[..., Any], name: str) -> Callable[..., Any]:
        def call(self: Any, *args: Any, **keywords: Any) -> Any:
            if _watch.get() is not own_watch:
                return method(self, *args, **keywords)
            entered(self, name, args, keywords)
            try:
                return method(self, *args, **keywords)
            finally:
                left()

        return call

    def watching(base: type[Any]) -> type[Any]:
        methods = {name: reporting(getattr(base, name), name) for name in _METHODS if hasattr(base, name)}
        return swap_class(base, _WATCH, **methods)

    token = _watch.set(own_watch)
    with lock:
        modules = [module for module in model.modules() if isinstance(module, nn.Module)]
        classes = [type(module) for module in modules]
        try:
            for module, base in zip(modules, classes, strict=True):
                module.__class__ = watching(base)
            yield
        finally:
            for module, base in zip(modules, classes, strict=True):
                module.__class__ = base
            _watch.reset(token)
