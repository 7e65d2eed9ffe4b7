"""The calls that reach a model's own token mixers, told or refused before they are made."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import mlx.core as mx
import pytest

from mlx_spec.cache.base import is_leaf, journals_of


class MixerCall(NamedTuple):
    """One call.

    Attributes:
        tokens: positions it reads.
        alone: they are one position of a block, which the mixer takes on its own.
    """

    tokens: int
    alone: bool


def before_each_call(patch: pytest.MonkeyPatch, mixer: type[Any], told: Callable[[MixerCall], object]) -> None:
    """Let `told` hear of every call of a class of mixers. Where it raises, the call raises."""
    stock = mixer.__call__

    # Whoever stands on the class asks for the names of the stock call's arguments.
    @functools.wraps(stock)
    def call(self: Any, x: mx.array, *args: Any, **keywords: Any) -> Any:
        leaves = [value for value in (*args, *keywords.values()) if is_leaf(value)]
        looking_at = [journal.looking_at for leaf in leaves for journal in journals_of(leaf)]
        told(MixerCall(x.shape[1], any(position is not None for position in looking_at)))
        return stock(self, x, *args, **keywords)

    patch.setattr(mixer, "__call__", call)


def refuse_positions(patch: pytest.MonkeyPatch, mixer: type[Any]) -> None:
    """Let the mixers of a class take no single position of a block."""

    def told(call: MixerCall) -> None:
        if call.alone:
            raise ValueError("shapes do not fit")

    before_each_call(patch, mixer, told)
