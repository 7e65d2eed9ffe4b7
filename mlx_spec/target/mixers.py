"""Token mixers inside a transaction: the submodules that read a layer's cache, driven so that a prefix can be kept.

A mixer is the outermost submodule of a decoder layer that is handed the layer's cache. Its class is swapped
for one that, inside a transaction, runs position by position where the round asks for it and leaves a
tape for recurrent states. Outside a transaction it is stock.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import mlx.core as mx
from mlx import nn

from mlx_spec.cache.adopt import new_caches
from mlx_spec.cache.base import is_leaf, journals_of
from mlx_spec.cache.transaction import SpeculativeCacheTransaction
from mlx_spec.errors import CannotMix

_swap_lock = threading.Lock()


def attach(model: Any) -> int:
    """Find a model's mixers by tracing one forward and swap their classes. Attaching twice is attaching once.

    Returns:
        Mixers attached now or before.
    """
    with _swap_lock:
        mixers = [module for module in model.modules() if "__mixes__" in vars(type(module))]
        if mixers:
            return len(mixers)
        mixers = _trace(model)
        for mixer in mixers:
            mixer.__class__ = _mixing_class(type(mixer))  # type: ignore[arg-type]
        return len(mixers)


def detach(model: Any) -> None:
    """Give every mixer of a model its own class back."""
    with _swap_lock:
        for module in model.modules():
            base = vars(type(module)).get("__mixes__")
            if base is not None:
                module.__class__ = base


@cache
def _mixing_class(base: type[Any]) -> type[Any]:
    def call(self: Any, *args: Any, **keywords: Any) -> Any:
        mix = Mix(partial(base.__call__, self), args, keywords)
        return mix.run()

    return type(base.__name__, (base,), {"__call__": call, "__module__": base.__module__, "__mixes__": base})


class Mix:
    """One call of a mixer.

    Attributes:
        width: positions it was given; 0 when nothing marks its input.
    """

    def __init__(self, call: Callable[..., Any], args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        self._call = call
        self._args = args
        self._keywords = keywords
        leaves = [value for value in (*args, *keywords.values()) if is_leaf(value)]
        self._journals = [journal for leaf in leaves for journal in journals_of(leaf)]
        given = (*args, *keywords.values())
        inputs = next((value for value in given if isinstance(value, mx.array) and value.ndim >= 3), None)
        self._inputs = inputs
        self.width = 0 if inputs is None else inputs.shape[1]

    def run(self) -> Any:
        """The stock call, or the same position by position; recurrent caches get a tape."""
        journals = self._journals
        if not journals or self.width < 2 or self.width > journals[0].width:
            return self._call(*self._args, **self._keywords)
        positions = any(journal.by_position for journal in journals)
        if len(journals) == 1 and self._inputs is not None and self.width == journals[0].width:
            # A mixer with several caches cannot be run again for one of them: that one keeps a handle per position.
            # Nor can a part of the round be run again for the whole of it.
            journals[0].tape(partial(self._replay, positions), self._inputs.nbytes)
        return self._positions(self.width) if positions else self._call(*self._args, **self._keywords)

    def _replay(self, positions: bool, count: int) -> None:
        if positions:
            self._positions(count)
        else:
            self._call(*self._cut(0, count)[0], **self._cut(0, count)[1])

    def _positions(self, count: int) -> Any:
        outputs = []
        for position in range(count):
            for journal in self._journals:
                journal.before_position(position)
            try:
                args, keywords = self._cut(position, position + 1)
                outputs.append(self._call(*args, **keywords))
            except (ValueError, TypeError, IndexError) as error:
                # What mlx raises when shapes do not fit: the mixer wants something per position that is not known here.
                raise CannotMix(f"position {position} of a block: {error}") from error
        return _join(outputs)

    def _cut(self, start: int, stop: int) -> tuple[list[Any], dict[str, Any]]:
        args = [self._at(value, start, stop) for value in self._args]
        keywords = {name: self._at(value, start, stop) for name, value in self._keywords.items()}
        return args, keywords

    def _at(self, value: Any, start: int, stop: int) -> Any:
        """What the stock model would hand the mixer for these positions alone."""
        if isinstance(value, str) and value == "causal":
            return None if stop - start == 1 else value
        if isinstance(value, tuple):
            return tuple(self._at(item, start, stop) for item in value)
        if not isinstance(value, mx.array):
            return value
        for journal in self._journals:
            asked = journal.masks.get(id(value))
            if asked is not None and type(journal.leaf) is asked.asker:
                return journal.leaf.make_mask(stop - start, *asked.args, **asked.keywords)
        if value.ndim >= 3 and value.shape[1] == self.width:
            return value[:, start:stop]
        if value.ndim >= 2 and value.shape[-2] == self.width:
            # A mask made by the model itself: one row per query, its columns ending with the block's last key.
            lost = self._journals[0].lost if self._journals else 0
            return value[..., start:stop, lost : value.shape[-1] - (self.width - stop)]
        return value


def _join(outputs: list[Any]) -> Any:
    if isinstance(outputs[0], tuple):
        return tuple(_join(list(parts)) for parts in zip(*outputs, strict=True))
    if isinstance(outputs[0], mx.array) and outputs[0].ndim >= 2:
        return outputs[0] if len(outputs) == 1 else mx.concatenate(outputs, axis=1)
    return outputs[-1]


def _trace(model: Any) -> list[Any]:
    """The mixers, in calling order, found by running one token through fresh caches."""
    layers = {id(layer) for layer in model.layers}
    stack: list[tuple[Any, bool]] = []
    mixers: dict[int, Any] = {}
    fed_layers: dict[int, Any] = {}

    def entered(module: Any, fed: bool) -> None:
        if fed and id(module) in layers:
            fed_layers[id(module)] = module
        elif (
            fed and module is not model and not any(was_fed and id(outer) not in layers for outer, was_fed in stack[1:])
        ):
            mixers[id(module)] = module
            for outer, _ in stack:
                fed_layers.pop(id(outer), None)
        stack.append((module, fed))

    with _traced(model, entered, stack.pop), SpeculativeCacheTransaction(new_caches(model), 1) as tx:
        model(mx.zeros((1, 1), mx.int32), cache=tx.caches)
    return [*mixers.values(), *fed_layers.values()]


@contextmanager
def _traced(model: Any, entered: Callable[[Any, bool], None], left: Callable[[], Any]) -> Iterator[None]:
    """Report every call of a submodule, and whether it was handed one layer's cache."""
    modules = [module for module in model.modules() if isinstance(module, nn.Module)]
    classes = [type(module) for module in modules]

    def traced(base: type[Any]) -> type[Any]:
        def call(self: Any, *args: Any, **keywords: Any) -> Any:
            entered(self, any(is_leaf(value) for value in (*args, *keywords.values())))
            try:
                return base.__call__(self, *args, **keywords)
            finally:
                left()

        return type(base.__name__, (base,), {"__call__": call, "__module__": base.__module__})

    try:
        for module, base in zip(modules, classes, strict=True):
            module.__class__ = traced(base)
        yield
    finally:
        for module, base in zip(modules, classes, strict=True):
            module.__class__ = base
