"""What tells the caches of two models apart: kinds, heads and sizes of what they hold, whatever they have read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import mlx.core as mx

from mlx_spec.cache.adopt import holds_states, is_shared_class, members_of

Axes = tuple[int | None, ...]
"""An array's axes that stay as they are whatever is read; None for one that does not."""


@dataclass(frozen=True)
class Form:
    """What one cache is like. Holds no array.

    Attributes:
        kind: "unknown" for a class that is none of mlx-lm's shared ones.
        axes: name -> the axes of what it holds, the batch and the number of tokens apart; what is empty is not there.
        members: of a cache of caches.
    """

    kind: Literal["nothing", "rows", "states", "caches", "unknown"]
    axes: dict[str, Axes] = field(default_factory=dict)
    slots: int = 0
    members: tuple[Form, ...] = ()


def form_of(cache: Any) -> Form:
    """What a cache is like now."""
    if cache is None:
        return Form("nothing")
    members = members_of(cache)
    if members is not None:
        return Form("caches", members=tuple(map(form_of, members)))
    if not is_shared_class(cache):
        return Form("unknown")
    if holds_states(cache):
        held = {f"state {slot}": state.shape[1:] for slot, state in enumerate(cache.cache) if state is not None}
        return Form("states", held, len(cache.cache))
    sides = {"keys": _row(cache, cache.keys), "values": _row(cache, cache.values)}
    return Form("rows", {name: axes for name, axes in sides.items() if axes})


def steady(form: Form, later: Form) -> Form:
    """The first of two forms of a cache, but for the axes that reading on has changed."""
    axes = {
        name: tuple(
            size if size == after else None for size, after in zip(form.axes[name], later.axes[name], strict=True)
        )
        for name in form.axes
        if len(form.axes[name]) == len(later.axes.get(name, ()))
    }
    members = tuple(map(steady, form.members, later.members))
    return Form(form.kind, axes, form.slots, members)


def misfit(held: Form, own: Form) -> str | None:
    """Why a cache cannot be one that a model's own was like; None where nothing tells.

    Args:
        held: of the cache in question.
        own: of the model's own, as far as it is known.
    """
    if held.kind == "unknown" or own.kind in ("unknown", "nothing"):
        return None
    if held.kind != own.kind:
        return f"{_KINDS[held.kind]}, the model wants {_KINDS[own.kind]}"
    if len(held.members) != len(own.members):
        return f"{len(held.members)} caches in one, the model wants {len(own.members)}"
    if held.slots != own.slots:
        return f"{held.slots} states, the model wants {own.slots}"
    for name, axes in held.axes.items():
        wanted = own.axes.get(name, axes)
        if len(axes) != len(wanted) or any(want not in (None, size) for size, want in zip(axes, wanted, strict=True)):
            return f"{name} of {_sized(held.kind, axes)}, the model's have {_sized(own.kind, wanted)}"
    return next(filter(None, map(misfit, held.members, own.members)), None)


_KINDS = {
    "nothing": "nothing",
    "rows": "keys and values",
    "states": "states of fixed size",
    "caches": "several caches in one",
}


def first_misfit(held: Sequence[Form], own: Sequence[Form]) -> tuple[int, str] | None:
    """Which of as many caches does not fit, and why; None where all of them may."""
    found = ((place, misfit(*pair)) for place, pair in enumerate(zip(held, own, strict=True)))
    return next(((place, why) for place, why in found if why is not None), None)


def _row(cache: Any, side: Any) -> Axes:
    """Heads and entries of a row; nothing where there is none, or it is laid out in another way."""
    if isinstance(side, list | tuple) and len(side) > 1:
        # Packed entries have another size; there is a scale for each group of them.
        heads, entries = side[0].shape[1], side[1].shape[-1] * cache.group_size
        return heads, entries
    return (side.shape[1], side.shape[3]) if isinstance(side, mx.array) and side.ndim == 4 else ()


def _sized(kind: str, axes: Axes) -> str:
    sizes = ["any" if size is None else str(size) for size in axes]
    return f"{sizes[0]} heads of {sizes[1]}" if kind == "rows" else f"shape [B, {', '.join(sizes)}]"
