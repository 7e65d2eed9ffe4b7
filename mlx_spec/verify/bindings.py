"""The names under which mlx-lm's models call attention and state updates, bound to functions that can go by position.

Each model file of mlx-lm imports the functions by name, so a name is bound in every such file that a model's classes
come from. Outside a verify call whose plan asks for it the functions compute what stock does. Models that
call mlx directly are not reached; a probe of the model tells.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import mlx.core as mx
from mlx import nn
from mlx_lm.models import base, ssm

from mlx_spec.cache.append import AppendJournal
from mlx_spec.cache.base import is_leaf, journals_of
from mlx_spec.model.swap import lock
from mlx_spec.ops.attention import Attend, AttentionCall, KeyStretch, QueryBlock, Side, rows_of
from mlx_spec.ops.recurrence import StateUpdates
from mlx_spec.verify.routes import ATTENTION, Plan, plan_in_force

NAME = "scaled_dot_product_attention"
STATE_UPDATE = "ssm_update"

_stock = base.scaled_dot_product_attention
_stock_update = ssm.ssm_update
_FAMILIES = base.__name__.removesuffix("base")


class Bound(NamedTuple):
    """What `attach` did.

    Attributes:
        names: modules of mlx-lm in which something is bound for the model.
        kinds: what is bound there, in words.
        refused: sentences on modules where it is not, since somebody else has replaced the function there.
    """

    names: tuple[str, ...]
    kinds: tuple[str, ...]
    refused: tuple[str, ...]


class Place(NamedTuple):
    """A name in a module of mlx-lm."""

    module: str
    name: str


class Bindings:
    """What is bound for one model. Its owner calls `release` when the model goes."""

    def __init__(self) -> None:
        self._places: set[Place] = set()

    def attach(self, model: nn.Module) -> Bound:
        """Bind what a model's classes call. Attaching twice is attaching once."""
        names, kinds, refused = [], [], []
        with lock:
            for module, name in _places_of(model):
                named = NAMES[name]
                if not named.is_own(vars(module)[name]):
                    refused.append(
                        f"{named.kind} cannot go by position: another library has replaced {name} in {module.__name__}"
                    )
                    continue
                place = Place(module.__name__, name)
                # Claimed before it is bound: a model that goes meanwhile must not take the binding with it.
                self._places.add(place)
                _claims.setdefault(place, set()).add(self)
                setattr(module, name, named.ours)
                names.append(module.__name__)
                kinds.append(named.kind)
        return Bound(*(tuple(dict.fromkeys(each)) for each in (names, kinds, refused)))

    def release(self) -> None:
        """Give the modules that no other model needs bound mlx-lm's own function back."""
        with lock:
            for place in self._places:
                claims = _claims[place]
                claims.discard(self)
                module, named = sys.modules.get(place.module), NAMES[place.name]
                # Whoever has wrapped the function since keeps it; theirs calls stock outside verify calls.
                if not claims and module is not None and vars(module).get(place.name) is named.ours:
                    setattr(module, place.name, named.stock)
            self._places.clear()


_claims: dict[Place, set[Bindings]] = {}
"""Who wants what bound."""


def owners() -> set[Bindings]:
    """Whoever has something bound now."""
    with lock:
        return set().union(*_claims.values())


def _places_of(model: nn.Module) -> list[tuple[ModuleType, str]]:
    """The modules of mlx-lm that a model's classes, and those they derive from, find a name in; with the name."""
    classes = {base_class for part in model.modules() for base_class in type(part).__mro__}
    homes = {named.home.__name__ for named in NAMES.values()}
    names = sorted({each.__module__ for each in classes if each.__module__.startswith(_FAMILIES)} - homes)
    found = [sys.modules[name] for name in names if name in sys.modules]
    return [(module, name) for name in NAMES for module in found if name in vars(module)]


class Named(NamedTuple):
    """A function of mlx-lm that models import by name.

    Attributes:
        kind: what it computes, as routes call it.
        home: the module that defines it.
        stock: itself, as it was found.
        ours: what stands for it where it is bound.
    """

    kind: str
    home: ModuleType
    stock: Callable[..., Any]
    ours: Callable[..., Any]

    def is_own(self, function: Any) -> bool:
        """Whether a function is mlx-lm's, or stands for it here.

        One that was replaced at home before anything of ours was imported is neither.
        """
        ours = function is self.stock or function is self.ours
        return ours and getattr(self.stock, "__globals__", None) is vars(self.home)


@wraps(_stock)
def attention(
    queries: mx.array, keys: Side, values: Side, cache: Any, scale: float, mask: Any, sinks: mx.array | None = None
) -> mx.array:
    plan, noted = plan_in_force(), _noted.get()
    apart = plan if plan is not None and plan.by_position and _counts(queries, plan.width) else None
    if apart is not None or (noted is not None and _counts(queries, noted.width)):
        masks = MasksAlone(mask, cache, queries.shape[2], rows_of(keys))
        block = QueryBlock(_attend(cache, scale, sinks), queries, keys, values, mask, masks.of, scale, sinks)
        if noted is not None and masks.known:
            noted.add(block, cache)
        if apart is not None and masks.known:
            return _apart(block, cache, apart)
    out: mx.array = _stock(queries, keys, values, cache=cache, scale=scale, mask=mask, sinks=sinks)
    return out


def _apart(block: QueryBlock, cache: Any, plan: Plan) -> mx.array:
    """Every query as if it came alone, by the way that is known to be equal for so many keys."""
    if plan.attention is None:
        return block.by_position()
    stretch = KeyStretch.at(rows_of(block.keys), plan.width) or KeyStretch.short()
    return block.run(plan.attention(call_of(block, cache), stretch))


@wraps(_stock_update)
def _state_update(*args: Any, **keywords: Any) -> tuple[mx.array, mx.array]:
    plan = plan_in_force()
    if plan is not None and plan.by_position:
        given = _UPDATE.bind(*args, **keywords)
        given.apply_defaults()
        x, decay, inward, outward, skip, steps, bias, state, limits, mask, lengths = given.arguments.values()
        # Rows of a batch that end inside the block have lengths, which no single position has.
        if x.shape[1] == plan.width and lengths is None:
            weights = decay, skip, bias
            return StateUpdates(_stock_update, x, inward, outward, steps, state, weights, limits, mask).by_position()
    out: tuple[mx.array, mx.array] = _stock_update(*args, **keywords)
    return out


_UPDATE = inspect.signature(_stock_update)

NAMES = {
    NAME: Named(ATTENTION, base, _stock, attention),
    STATE_UPDATE: Named("state updates", ssm, _stock_update, _state_update),
}
"""What is bound, by the name models import it under."""


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

    def add(self, block: QueryBlock, cache: Any) -> None:
        """Note a call. Neither the cache nor any of its rows is held."""
        if block.sinks is not None:
            # Another thread may be the one that tries the call.
            mx.eval(block.sinks)
        call = call_of(block, cache)
        self._calls[repr(call)] = call


def call_of(block: QueryBlock, cache: Any) -> AttentionCall:
    """How a block attends, without its arrays."""
    packing, keys, values = _unpacked(block, cache)
    stand_in = None if packing is None else SimpleNamespace(group_size=packing[0], bits=packing[1])
    return AttentionCall(
        attend=_attend(stand_in, block.scale, block.sinks),
        queries=tuple(block.queries.shape),
        key_heads=keys.shape[1],
        values=values,
        dtypes=(block.queries.dtype, keys.dtype),
        packing=packing,
        mask=block.mask.dtype if isinstance(block.mask, mx.array) else block.mask,
        masked_alone=block.mask_of(0, 1) is not None,
        sinks=block.sinks is not None,
        scale=block.scale,
        sink_values=block.sinks,
    )


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
    """The masks that single tokens, and chunks of them, would meet in place of a block's mask.

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

    def of(self, start: int, stop: int) -> Any:
        """The mask for queries of the block in a call of their own, over the keys up to the last of them."""
        if stop - start == 1:
            return self.at(start)
        if not self._array:
            return "causal"
        cut = self._cut(start, stop)
        # A cache's own mask hides what comes later; of a model's, only the columns up to a query are known.
        return cut if self._asked is not None else _hiding_later(cut, stop - start, self._spare + stop)

    def at(self, position: int) -> Any:
        """The mask for the query at a position of the block alone, over the keys up to it."""
        if not self._array:
            # Nothing that stands up to a query is hidden from it.
            return None
        if self._journal is not None and self._asked is not None:
            return self._journal.mask_alone(self._asked, position)
        return self._cut(position, position + 1)

    def _cut(self, start: int, stop: int) -> mx.array:
        mask: mx.array = self._mask
        if mask.ndim > 1 and mask.shape[-2] > 1:
            mask = mask[..., start:stop, :]
        return mask[..., : self._spare + stop] if mask.ndim and mask.shape[-1] > 1 else mask

    def _fits(self, width: int, keys: int) -> bool:
        rows, columns = ((1, 1) + tuple(self._mask.shape))[-2:]
        return rows in (1, width) and columns in (1, keys)


def _hiding_later(mask: mx.array, queries: int, keys: int) -> mx.array:
    """The mask, with the keys behind each query hidden from it."""
    seen = mx.arange(keys - queries, keys)[:, None] >= mx.arange(keys)
    return mask & seen if mask.dtype == mx.bool_ else mx.where(seen, mask, mx.array(-float("inf"), mask.dtype))
