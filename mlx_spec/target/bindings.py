"""The name under which mlx-lm's models call attention, bound to a function that can go query by query.

Each model file of mlx-lm imports the function by name, so the name is bound in every such file that a model's classes
come from. Outside a verify call whose plan asks for attention by position the function computes what stock
does. Models that call mlx directly are not reached; a probe of the model tells.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import mlx.core as mx
from mlx_lm.models import base

from mlx_spec.cache.append import AppendJournal
from mlx_spec.cache.base import is_leaf, journals_of
from mlx_spec.ops.attention import Attend, AttentionCall, QueryBlock, Side, rows_of
from mlx_spec.target.routes import plan_in_force

NAME = "scaled_dot_product_attention"

_stock = base.scaled_dot_product_attention
_FAMILIES = base.__name__.removesuffix("base")

_users: dict[str, set[int]] = {}
"""Name of a module -> ids of the models that want it bound."""

_lock = threading.RLock()
"""Reentrant: a model may be collected, and let go of its modules, while another is attached in the same thread."""


class Bound(NamedTuple):
    """What `attach` did.

    Attributes:
        names: modules of mlx-lm in which attention is bound for the model.
        refused: sentences on modules where it is not, since somebody else has replaced the function there.
    """

    names: tuple[str, ...]
    refused: tuple[str, ...]


def attach(model: Any) -> Bound:
    """Bind the attention of a model's classes. Attaching twice is attaching once; it ends with the model."""
    names, refused = [], []
    with _lock:
        known = any(id(model) in users for users in _users.values())
        for module in _modules_of(model):
            if not _is_mlx_lms_own(vars(module)[NAME]):
                refused.append(
                    f"attention is not taken by position: another library has replaced {NAME} in {module.__name__}"
                )
                continue
            # Counted before it is bound: a model that goes meanwhile must not take the binding with it.
            _users.setdefault(module.__name__, set()).add(id(model))
            setattr(module, NAME, _attention)
            names.append(module.__name__)
        if names and not known:
            weakref.finalize(model, _release, id(model))
    return Bound(tuple(names), tuple(refused))


def detach(model: Any) -> None:
    """Give the modules that no other attached model needs mlx-lm's own function back."""
    _release(id(model))


def _release(model: int) -> None:
    with _lock:
        for name, users in list(_users.items()):
            users.discard(model)
            module = sys.modules.get(name)
            # Whoever has wrapped the function since keeps it; theirs calls stock outside verify calls.
            if not users and module is not None and vars(module).get(NAME) is _attention:
                setattr(module, NAME, _stock)


def _modules_of(model: Any) -> list[ModuleType]:
    """The modules of mlx-lm that a model's classes, and those they derive from, find the name in."""
    classes = {base_class for part in model.modules() for base_class in type(part).__mro__}
    names = sorted({each.__module__ for each in classes if each.__module__.startswith(_FAMILIES)} - {base.__name__})
    found = [sys.modules[name] for name in names if name in sys.modules]
    return [module for module in found if NAME in vars(module)]


def _is_mlx_lms_own(function: Any) -> bool:
    """Whether a function is mlx-lm's, or stands for it here.

    One that was replaced in mlx-lm's base before anything of ours was imported is neither.
    """
    return (function is _stock or function is _attention) and getattr(_stock, "__globals__", None) is vars(base)


@wraps(_stock)
def _attention(
    queries: mx.array, keys: Side, values: Side, cache: Any, scale: float, mask: Any, sinks: mx.array | None = None
) -> mx.array:
    plan, noted = plan_in_force(), _noted.get()
    by_position = plan is not None and plan.attention_by_position and _counts(queries, plan.width)
    if by_position or (noted is not None and _counts(queries, noted.width)):
        masks = MasksAlone(mask, cache, queries.shape[2], rows_of(keys))
        block = QueryBlock(_attend(cache, scale, sinks), queries, keys, values, mask, masks.at)
        if noted is not None and masks.known:
            noted.add(block, cache, scale, sinks)
        if by_position and masks.known:
            return block.by_position()
    out: mx.array = _stock(queries, keys, values, cache=cache, scale=scale, mask=mask, sinks=sinks)
    return out


def _counts(queries: mx.array, width: int) -> bool:
    return queries.ndim == 4 and queries.shape[2] == width


def _attend(cache: Any, scale: float, sinks: mx.array | None) -> Attend:
    def attend(queries: mx.array, keys: Side, values: Side, mask: Any) -> mx.array:
        out: mx.array = _stock(queries, keys, values, cache=cache, scale=scale, mask=mask, sinks=sinks)
        return out

    return attend


class Noted:
    """The calls of attention that one forward makes with a block of some width, each kind once."""

    def __init__(self, width: int) -> None:
        self.width = width
        self._calls: dict[str, AttentionCall] = {}

    @property
    def calls(self) -> list[AttentionCall]:
        return list(self._calls.values())

    def add(self, block: QueryBlock, cache: Any, scale: float, sinks: mx.array | None) -> None:
        """Note a call. Neither the cache nor any of its rows is held."""
        if sinks is not None:
            # Another thread may be the one that tries the call.
            mx.eval(sinks)
        packing, keys, values = _unpacked(block, cache)
        stand_in = None if packing is None else SimpleNamespace(group_size=packing[0], bits=packing[1])
        call = AttentionCall(
            attend=_attend(stand_in, scale, sinks),
            queries=tuple(block.queries.shape),
            key_heads=keys.shape[1],
            values=values,
            dtypes=(block.queries.dtype, keys.dtype),
            packing=packing,
            mask=block.mask.dtype if isinstance(block.mask, mx.array) else block.mask,
            masked_alone=block.mask_alone(0) is not None,
            sinks=sinks is not None,
        )
        self._calls[repr(call)] = call


def _unpacked(block: QueryBlock, cache: Any) -> tuple[tuple[int, int] | None, mx.array, int]:
    """(group size and bits of packed sides, an array like the keys, columns of the values)."""
    keys, values = block.keys, block.values
    if isinstance(keys, mx.array) or isinstance(values, mx.array):
        return None, keys, values.shape[-1]  # type: ignore[return-value, union-attr]
    # The scales stand for packed keys: they have their heads and dtype.
    return (cache.group_size, cache.bits), keys[1], values[0].shape[-1] * 32 // cache.bits


_noted: ContextVar[Noted | None] = ContextVar("mlx_spec_noted_attention", default=None)


@contextmanager
def noting(width: int) -> Iterator[Noted]:
    """Note how the forwards built in this context attend with `width` queries, where their attention is bound."""
    token = _noted.set(Noted(width))
    try:
        yield _noted.get()  # type: ignore[misc]
    finally:
        _noted.reset(token)


class MasksAlone:
    """The masks that single tokens would meet in place of a block's mask.

    Attributes:
        known: the block's mask is of a form that tells them.
    """

    def __init__(self, mask: Any, cache: Any, width: int, keys: int) -> None:
        """
        Args:
            mask: the block's: None, "causal", or an array that broadcasts to [..., width, keys].
            cache: what the model passes with it; the masks of a leaf are asked for again.
            keys: rows that the last position attends to.
        """
        self._mask = mask
        self._spare = keys - width
        self._array = isinstance(mask, mx.array)
        journals = journals_of(cache) if is_leaf(cache) else []
        self._journal = journals[0] if len(journals) == 1 and isinstance(journals[0], AppendJournal) else None
        asked = None if self._journal is None else self._journal.masks.get(id(mask))
        self._asked = asked if asked is not None and asked.asker is type(cache) else None
        self.known = self._spare >= 0 and (not self._array or self._fits(width, keys))

    def at(self, position: int) -> Any:
        """The mask for the query at a position of the block alone, over the keys up to it."""
        if not self._array:
            # Nothing that stands up to a query is hidden from it.
            return None
        if self._journal is not None and self._asked is not None:
            return self._journal.mask_alone(self._asked, position)
        mask, keys = self._mask, self._spare + position + 1
        if mask.ndim > 1 and mask.shape[-2] > 1:
            mask = mask[..., position : position + 1, :]
        return mask[..., :keys] if mask.ndim and mask.shape[-1] > 1 else mask

    def _fits(self, width: int, keys: int) -> bool:
        rows, columns = ((1, 1) + tuple(self._mask.shape))[-2:]
        return rows in (1, width) and columns in (1, keys)
