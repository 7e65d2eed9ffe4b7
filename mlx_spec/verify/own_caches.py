"""Whether caches are those of a model, before anything is read into them."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

from mlx import nn

from mlx_spec.cache.adopt import new_caches
from mlx_spec.cache.forms import Form, first_misfit, form_of, steady
from mlx_spec.errors import InvalidRequest
from mlx_spec.model.target import Target
from mlx_spec.sampling import random_state_kept

_WAY_OUT = (
    "Give caches that were made for this model, by mlx_lm.models.cache.make_prompt_cache(model) or its own make_cache."
)


class OwnCaches:
    """What the caches of one model are like, found out when some that hold something are first looked at."""

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        self._found: list[Form] | None = None

    def require(self, caches: Sequence[Any], fresh: Sequence[Any], name: str) -> None:
        """Refuse caches that cannot be this model's. What only may be wrong is taken, and so is any unknown class.

        Args:
            caches: in question. Nothing is done to them.
            fresh: what mlx-lm makes for the model.
            name: what the caller calls them, for the message.

        Raises:
            InvalidRequest: another number of them, or one that is none, of another kind, or holds what no forward of
                this model leaves.

        Cost:
            A look at every cache. Once, for the first caches that hold something, two forwards over a token, built and
            not evaluated.
        """
        for place, cache in enumerate(caches):
            if not _is_cache(cache) and not (cache is None and place < len(fresh) and fresh[place] is None):
                kind = (
                    "None" if cache is None else f"a {type(cache).__name__}, which has no state, or keeps it in slots"
                )
                raise InvalidRequest(f"cache {place} of {name} is {kind}. {_WAY_OUT}")
        if len(caches) != len(fresh) and (hasattr(self._model(), "make_cache") or self._forms() is not None):
            raise InvalidRequest(
                f"{name} holds {len(caches)} caches, this model has {len(fresh)}. "
                "Give the target's caches alone; a drafter keeps its own."
            )
        held = list(map(form_of, caches))
        empty = len(caches) == len(fresh) and not any(map(_holds_something, held))
        if empty and first_misfit(held, list(map(form_of, fresh))) is None:
            return
        known = self._found is not None
        # The model may have been given other layers since they were found.
        found = self._misfit(held, again=False) and self._misfit(held, again=known)
        if found is not None:
            place, why = found
            raise InvalidRequest(
                f"cache {place} of {name}, a {type(caches[place]).__name__}, is not one of {_name(self._model())}: "
                f"it is for {why}. {_WAY_OUT}"
            )

    def _misfit(self, held: list[Form], again: bool) -> tuple[int, str] | None:
        forms = self._forms(again)
        return None if forms is None or len(forms) != len(held) else first_misfit(held, forms)

    def _forms(self, again: bool = False) -> list[Form] | None:
        if self._found is None or again:
            self._found = _forms_of(self._model())
        return self._found


def _name(model: Any) -> str:
    return Target(model).name


def _forms_of(model: Any) -> list[Form] | None:
    """What a model's caches are like; None where mlx-lm's own do not serve it, as in a wrapper of another model."""
    target, caches = Target(model), new_caches(model)
    try:
        with random_state_kept():
            first = list(map(form_of, target.used_caches(caches)))
            return list(map(steady, first, map(form_of, target.used_caches(caches))))
    except Exception:  # noqa: BLE001  a model of any kind; a forward of the run tells what is wrong with it
        return None


def _is_cache(cache: Any) -> bool:
    if isinstance(cache, type) or not hasattr(cache, "__dict__"):
        return False
    # Not by asking for the state: an empty cache may have none to give.
    return hasattr(type(cache), "state") or "state" in vars(cache)


def _holds_something(form: Form) -> bool:
    return bool(form.axes) or any(map(_holds_something, form.members))
