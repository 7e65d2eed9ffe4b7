"""The ops of a model, found by tracing it."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import mlx.core as mx
from mlx import nn

from mlx_spec.cache.adopt import new_caches
from mlx_spec.cache.base import is_leaf
from mlx_spec.model.arrays import own_arrays
from mlx_spec.model.swap import own_class
from mlx_spec.ops.adapters import ADAPTERS
from mlx_spec.ops.base import Op, Shape, WeightedModule
from mlx_spec.ops.choose import Subject
from mlx_spec.ops.experts import EXPERTS
from mlx_spec.ops.linear import HeldMatrix
from mlx_spec.ops.packed import HEADS, LINEARS
from mlx_spec.verify import products
from mlx_spec.verify.routes import op_key
from mlx_spec.verify.trace import watched

_TRACED_TOKENS = 3


def find_subjects(model: nn.Module) -> dict[int, Subject]:
    """Every op of a model as the model calls it: id of the module -> subject.

    Found by tracing one forward over a token and one over three; what differs between the shapes tells which axis
    counts positions. Modules with caches and what is not called with rows are no ops. A product that the model makes
    itself counts as the module that holds the matrix. A module that has matrices of its own beside other modules, as
    an adapter has, is an op, and so are those others.

    Cost:
        Two forwards on fresh caches, of which nothing is evaluated but what the model itself reads.
    """
    single = _calls(model, 1)
    try:
        several = _calls(model, _TRACED_TOKENS)
    except (ValueError, TypeError, IndexError):
        # A model that reads one token at a time shows no axis: rows are taken to lie where they mostly do.
        several = {}
    subjects = {}
    for key, (op, args, stock) in single.items():
        axis = _axis(args, several[key].args) if key in several else None
        if not several:
            axis = 1 if args[0].ndim >= 3 else 0
        if axis is not None:
            subjects[key] = _subject(op, args, stock, axis)
    return subjects


class _Seen(NamedTuple):
    op: Op
    args: tuple[Any, ...]
    stock: Any


def _calls(model: nn.Module, tokens: int) -> dict[int, _Seen]:
    """The first call of every op in a forward over some tokens."""
    seen: dict[int, _Seen] = {}
    classes = {id(module): own_class(type(module)) for module in model.modules()}
    holders = _holders_of_others(model)
    entered_now: list[int] = []
    fed: set[int] = set()

    def entered(module: Any, method: str, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        entered_now.append(id(module))
        if any(map(is_leaf, (*args, *keywords.values()))):
            fed.update(entered_now)
        own = classes.get(id(module))
        key = op_key(module, method)
        if own is None or key in seen or keywords or not args or not isinstance(args[0], mx.array):
            return
        made_by = _maker(own, method, module, id(module) in holders and len(args) > 1)
        if made_by is not None:
            seen[key] = _Seen(made_by(module), args, partial(getattr(own, method), module))

    def multiplied(module: Any, held: HeldMatrix, rows: mx.array) -> None:
        seen.setdefault(id(module), _Seen(held, (rows,), held.times))

    with products.watched(model, multiplied), watched(model, entered, entered_now.pop):
        model(mx.zeros((1, tokens), mx.int32), cache=new_caches(model))
    # What works on a cache, or holds what does, computes no row by itself.
    return {key: each for key, each in seen.items() if key not in holders or key not in fed}


def _maker(own: type[Any], method: str, module: Any, is_bound_up: bool) -> type[Op] | None:
    """is_bound_up: it holds other modules and is given more than rows."""
    if own in HEADS:
        return HEADS[own] if method == "as_linear" else None
    known = ADAPTERS.get((own, method)) or LINEARS.get(own) or EXPERTS.get(own)
    if known is not None or is_bound_up:
        return known
    matrices = [array for array in own_arrays(module) if array.ndim >= 2]
    return WeightedModule if matrices and not hasattr(module, "stride") else None


def _holders_of_others(model: nn.Module) -> set[int]:
    """Modules that have modules of their own, whose matrices are used together with those."""
    return {id(module) for module in model.modules() if len(module.modules()) > 1}


def _axis(single: tuple[Any, ...], several: tuple[Any, ...]) -> int | None:
    one, more = single[0].shape, several[0].shape
    if len(one) != len(more) or one == more:
        return None
    changed = [axis for axis, (a, b) in enumerate(zip(one, more, strict=True)) if (a, b) == (1, _TRACED_TOKENS)]
    return changed[0] if len(changed) == 1 else None


def _subject(op: Op, args: tuple[Any, ...], stock: Any, axis: int) -> Subject:
    shapes: list[Shape | None] = [
        (tuple(value.shape), value.dtype) if isinstance(value, mx.array) else None for value in args
    ]
    extras = tuple((place, value) for place, value in enumerate(args) if not isinstance(value, mx.array))
    return Subject(op, stock, tuple(shapes), extras, axis)
