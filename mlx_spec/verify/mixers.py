"""Token mixers inside a transaction: the submodules that read a layer's cache, driven so that a prefix can be kept.

A mixer is the outermost submodule of a decoder layer that is handed the layer's cache. Its class is swapped
for one that, inside a transaction, runs position by position where the round asks for it and leaves a
tape for recurrent states. Outside a transaction it is stock.
"""

from __future__ import annotations

import inspect
from functools import cache, partial
from typing import Any

import mlx.core as mx
from mlx import nn

from mlx_spec.cache.adopt import new_caches
from mlx_spec.cache.base import is_leaf, journals_of
from mlx_spec.cache.transaction import SpeculativeCacheTransaction
from mlx_spec.model.swap import lock, own_class, swap_class, swap_of
from mlx_spec.verify.mix import MAY_HOLD, Mix
from mlx_spec.verify.recall import RUNS_AGAIN
from mlx_spec.verify.trace import watched

MIX = "mix"
"""Kind of the swap."""


def attach(model: nn.Module) -> int:
    """Find a model's mixers by tracing one forward and swap their classes. Attaching twice is attaching once.

    Returns:
        Mixers attached now or before.
    """
    return len(attach_all(model))


def attach_all(model: nn.Module) -> list[Any]:
    """Attach, and return the mixers. That some are attached says nothing about others: a layer may be a new one."""
    with lock:
        mixers, run_again = _trace(model)
        found = [type(mixer) for mixer in mixers]
        try:
            for mixer in mixers:
                if swap_of(mixer, MIX) is None:
                    mixer.__class__ = mixing_class(type(mixer), id(mixer) in run_again)  # type: ignore[arg-type]
        except BaseException:
            for mixer, base in zip(mixers, found, strict=True):
                mixer.__class__ = base
            raise
        return mixers


@cache
def mixing_class(base: type[Any], runs_again: bool) -> type[Any]:
    """The swap for a mixer: calls go through `Mix`, by the names of the stock call's arguments."""
    names = tuple(inspect.signature(base.__call__).parameters)[1:]

    def call(self: Any, *args: Any, **keywords: Any) -> Any:
        for value in (*args, *keywords.values()):
            made = type(value)
            if made in MAY_HOLD or getattr(made, "__leaf__", False):
                break
        else:
            # Plain decoding comes here for every layer: nothing that is driven was handed over.
            return base.__call__(self, *args, **keywords)
        positional = {names[place] if place < len(names) else str(place): arg for place, arg in enumerate(args)}
        return Mix(partial(base.__call__, self), positional, keywords, id(self)).run()

    return swap_class(base, MIX, __call__=call, **{RUNS_AGAIN: runs_again})


def _trace(model: nn.Module) -> tuple[list[Any], set[int]]:
    """The mixers, in calling order, found by running one token through fresh caches; ids of those that run again."""
    layers = {id(layer) for layer in model.layers}
    stack: list[tuple[Any, bool]] = []
    mixers: dict[int, Any] = {}
    fed_layers: dict[int, Any] = {}
    run_again: set[int] = set()

    def entered(module: Any, method: str, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        del method
        given = [value for value in (*args, *keywords.values()) if is_leaf(value)]
        fed = bool(given)
        if any(journal.runs_again for leaf in given for journal in journals_of(leaf)):
            run_again.add(id(module))
        if fed and id(module) in layers:
            fed_layers[id(module)] = module
        elif (
            fed and module is not model and not any(was_fed and id(outer) not in layers for outer, was_fed in stack[1:])
        ):
            mixers[id(module)] = module
            for outer, _ in stack:
                fed_layers.pop(id(outer), None)
        stack.append((module, fed))

    with watched(model, entered, stack.pop), SpeculativeCacheTransaction(new_caches(model), 1) as tx:
        model(mx.zeros((1, 1), mx.int32), cache=tx.caches)
    return [*mixers.values(), *fed_layers.values(), *_readers(model, mixers)], run_again


def _readers(model: nn.Module, mixers: dict[int, Any]) -> list[Any]:
    """In layers without a cache of their own, what elsewhere is a mixer: it reads the keys of another one."""
    kinds = {own_class(type(mixer)) for mixer in mixers.values()}
    found: list[Any] = []
    for layer in model.layers:
        parts = list(layer.modules())
        if not any(id(part) in mixers for part in parts):
            found.extend(part for part in parts if own_class(type(part)) in kinds)
    return found
