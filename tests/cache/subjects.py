"""What the cache machines drive: caches, and the forward that writes them."""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import ChunkedKVCache, KVCache, QuantizedKVCache

from mlx_spec.cache.adopt import leaves
from mlx_spec.cache.base import Drive
from mlx_spec.verify import mixers, routes
from tests.cache.kinds import Kind, append_rows, arrays_of
from tests.cache.shown import Kept, assert_counts, assert_shows
from tests.tiny import VOCAB

Rows = Sequence[Sequence[int]]
"""Tokens by row, equally many in each."""


class Subject(abc.ABC):
    """One set of caches and its writer.

    Attributes:
        name: what reports call it.
        edge: length at which some cache changes its behaviour.
        pads: tokens by row that are padding at the left; as long as there are rows.
        drives: how a round's tokens may be taken.
        can_save: mlx-lm can write such a cache to a file and read it back.
    """

    name: str
    edge: int
    pads: tuple[int, ...] = (0,)
    drives: tuple[Drive, ...] = (Drive.BLOCK,)
    can_save: bool = True

    @abc.abstractmethod
    def make(self) -> list[Any]:
        """Fresh, empty caches."""

    @abc.abstractmethod
    def read(self, caches: Sequence[Any], tokens: Rows) -> mx.array | None:
        """One forward, not evaluated. Returns [B, T, ...], or None where nothing is computed from the caches."""

    @abc.abstractmethod
    def takes_blocks(self, drive: Drive) -> bool:
        """Whether a forward of a round may have several tokens and still be cut anywhere."""

    @abc.abstractmethod
    def refuses_first(self, drive: Drive) -> bool:
        """Whether a forward over too many tokens is refused before it has written anything."""

    @abc.abstractmethod
    def token(self, number: int, row: int) -> int:
        """A token unlike those before it and those of other rows."""

    @abc.abstractmethod
    def assert_holds(self, caches: Sequence[Any], kept: Kept) -> None:
        """Raise AssertionError where the caches do not hold these tokens, as far as that can be read back."""

    def read_plainly(self, caches: Sequence[Any], tokens: Rows) -> mx.array | None:
        """One forward outside a round, evaluated, as plain decoding does it."""
        output = self.read(caches, tokens)
        mx.eval(output, [arrays_of(cache) for cache in caches])
        return output


class StandIn(Subject):
    """One cache of a kind and a stand-in for its layer."""

    def __init__(self, kind: Kind) -> None:
        self._kind = kind
        self.name = kind.name
        self.edge = kind.edge
        self.pads = kind.pads or (0,) * kind.batch
        self.can_save = kind.can_save
        self.drives = (Drive.BLOCK, Drive.WHOLE, *([Drive.ALONE] if kind.by_length else []))

    def make(self) -> list[Any]:
        return [self._kind.make()]

    def read(self, caches: Sequence[Any], tokens: Rows) -> mx.array | None:
        append_rows(caches[0], tokens)
        return None

    def takes_blocks(self, drive: Drive) -> bool:
        return self._kind.by_length

    def refuses_first(self, drive: Drive) -> bool:
        # A layer over a chunk cuts its front before it writes.
        cuts = isinstance(self._kind.make(), ChunkedKVCache)
        if drive is Drive.ALONE and {type(leaf) for leaf in leaves(self.make())} <= {KVCache, QuantizedKVCache}:
            return False
        return not cuts and (self._kind.by_length or not (self._kind.stepwise or drive is Drive.WHOLE))

    def token(self, number: int, row: int) -> int:
        # Below 4096: more than that and the stand-in's entries are no longer exact in float32.
        return 1 + (number + 700 * row) % 4000

    def assert_holds(self, caches: Sequence[Any], kept: Kept) -> None:
        assert_shows(caches, kept)


class TinyModel(Subject):
    """All caches of a tiny model, written by its own layers through their token mixers."""

    def __init__(
        self, name: str, model: Callable[[], nn.Module], caches: Callable[[], list[Any]], edge: int, exact_blocks: bool
    ) -> None:
        """
        Args:
            model: gives the model; called when the first machine runs.
            caches: gives its fresh caches.
            exact_blocks: whether a block that the mixers take whole has the bits of single steps here.
        """
        self._model = model
        self._caches = caches
        self.name = name
        self.edge = edge
        self.drives = (Drive.POSITIONS, Drive.BLOCK, Drive.WHOLE) if exact_blocks else (Drive.POSITIONS, Drive.WHOLE)

    @property
    def model(self) -> nn.Module:
        """The same object each time."""
        return self._model()

    def make(self) -> list[Any]:
        # Other tests share the model and let its mixers go.
        mixers.attach(self._model())
        routes.remember(self._model())
        return self._caches()

    def read(self, caches: Sequence[Any], tokens: Rows) -> mx.array | None:
        return self._model()(mx.array(tokens), cache=list(caches))

    def takes_blocks(self, drive: Drive) -> bool:
        return drive is not Drive.WHOLE

    def refuses_first(self, drive: Drive) -> bool:
        return False

    def token(self, number: int, row: int) -> int:
        return (5 * number + 11 * row + 3) % VOCAB

    def assert_holds(self, caches: Sequence[Any], kept: Kept) -> None:
        assert_counts(caches, kept)
