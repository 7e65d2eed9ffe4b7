"""Classes swapped on the modules of a model: one lock, one stack on each module, one way back.

A swap gives an instance a subclass of the class it has, made here. Swaps of several kinds stand on one another:

    type(module)        Attention   kind "tap"      records what the module returns
      stands on         Attention   kind "mix"      drives the module position by position
        stands on       Attention   mlx-lm's own

All of them bear the name and the module of the class at the bottom, compute what it computes unless something is in
force in the context of the call, and leave parameters and attributes alone.
"""

from __future__ import annotations

import copyreg
import threading
from collections.abc import Iterable, Iterator
from typing import Any

from mlx import nn

lock = threading.RLock()
"""Held by whoever changes the class of a module, or what else is attached to a model. Reentrant: a model may be
collected, and let go of what is attached, while another is attached in the same thread."""

_KIND, _STANDS_ON = "__swap_kind__", "__swap_stands_on__"


def swap_class(base: type[Any], kind: str, **own: Any) -> type[Any]:
    """A subclass of `base` that is a swap of some kind.

    Args:
        base: the class to stand on, itself a swap or not.
        kind: what the swap is for; a module has at most one of a kind.
        own: attributes of the class, its `__call__` among them.
    """
    names = {"__module__": base.__module__, "__reduce_ex__": _reduce_as_own, **own, _KIND: kind, _STANDS_ON: base}
    return type(base.__name__, (base,), names)


def _reduce_as_own(self: Any, protocol: Any) -> Any:
    """A module is copied and pickled as one of its own class: nobody finds a swap by its name, and copies are stock."""
    made: Any = type(self)
    own: Any = own_class(made)
    reduced = own.__reduce_ex__(self, protocol)
    if not isinstance(reduced, tuple):
        return reduced
    make, args, *rest = reduced
    if make is copyreg.__newobj__:  # type: ignore[attr-defined]
        # As it stands pickle refuses another class than the object's.
        return own.__new__, (own, *args[1:]), *rest
    return own if make is made else make, tuple(own if arg is made else arg for arg in args), *rest


def stack(swapped: type[Any]) -> Iterator[type[Any]]:
    """The swaps of a class, from the top down; the class at the bottom is none of them."""
    while _KIND in vars(swapped):
        yield swapped
        swapped = vars(swapped)[_STANDS_ON]


def swap_of(module: object, kind: str) -> type[Any] | None:
    """The swap of a kind that a module has, wherever in its stack; None where it has none."""
    return next((each for each in stack(type(module)) if vars(each)[_KIND] == kind), None)


def own_class(swapped: type[Any]) -> type[Any]:
    """The class at the bottom: what the module was before anything of ours was attached to it."""
    for each in stack(swapped):
        swapped = vars(each)[_STANDS_ON]
    return swapped


def unswap(modules: Iterable[nn.Module]) -> None:
    """Give modules their own classes back, whatever stands on them and in whatever order it was put there."""
    with lock:
        for module in modules:
            own = own_class(type(module))
            if own is not type(module):
                module.__class__ = own
