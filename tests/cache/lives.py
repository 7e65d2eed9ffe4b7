"""What may happen to a cache between rounds besides being read: happenings to mix into a cache machine."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
from hypothesis import strategies as st
from mlx_lm.models.cache import ConcatenateKVCache, KVCache, can_trim_prompt_cache, load_prompt_cache, save_prompt_cache

from mlx_spec.cache.adopt import leaves
from tests.cache.kinds import arrays_of
from tests.cache.machine import Happening

GROUP_SIZE = 32


class Copied:
    """A cache may be copied, and each copy goes its own way."""

    _parked: tuple[Any, ...] | None = None

    def happenings(self) -> dict[str, Happening]:
        possible = {"shallow copy": self.go_on_with_a_shallow_copy, "deep copy": self.park_a_deep_copy}
        if self._parked is not None:
            possible["change places"] = self.change_places_with_the_copy
        return super().happenings() | possible  # type: ignore[misc]

    def go_on_with_a_shallow_copy(self, data: st.DataObject) -> None:
        """The original is not used any more."""
        self.mine = [copy.copy(cache) for cache in self.mine]

    def park_a_deep_copy(self, data: st.DataObject) -> None:
        said = copy.deepcopy((self.kept, self.pads, self.room))
        self._parked = (copy.deepcopy(self.mine), self.stock.copied(), *said)

    def change_places_with_the_copy(self, data: st.DataObject) -> None:
        here = (self.mine, self.stock, self.kept, self.pads, self.room)
        self.mine, self.stock, self.kept, self.pads, self.room = self._parked
        self._parked = here


class Trimmed:
    """The last tokens may be taken off again, as when an answer is written anew."""

    def happenings(self) -> dict[str, Happening]:
        possible = {"trim": self.trim} if self.room_to_trim() > 0 else {}
        return super().happenings() | possible  # type: ignore[misc]

    def trim(self, data: st.DataObject) -> None:
        count = data.draw(st.integers(1, min(5, self.room_to_trim())))
        self.change(lambda caches: _trimmed(caches, count))
        for tokens in self.kept:
            del tokens[len(tokens) - count :]

    def room_to_trim(self) -> int:
        """Tokens that stock can take off every cache of both sides."""
        sides = [self.mine, *self.stock.sides()]
        return min(_room_to_trim(caches) for caches in sides)


class Saved:
    """A cache may be written to a file and read back, as often as one likes."""

    def happenings(self) -> dict[str, Happening]:
        possible = {"save and load": self.save_and_load} if self.subject.can_save and all(self.kept) else {}
        return super().happenings() | possible  # type: ignore[misc]

    def save_and_load(self, data: st.DataObject) -> None:
        self.change(_saved_and_loaded)


class Quantized:
    """A float cache may become a quantized one at any length."""

    def happenings(self) -> dict[str, Happening]:
        possible = {"quantize": self.quantize} if any(type(cache) is KVCache for cache in self.mine) else {}
        return super().happenings() | possible  # type: ignore[misc]

    def quantize(self, data: st.DataObject) -> None:
        bits = data.draw(st.sampled_from([4, 8]))
        self.change(lambda caches: [_quantized(cache, bits) for cache in caches])


def _room_to_trim(caches: Sequence[Any]) -> int:
    if not can_trim_prompt_cache(list(caches)):
        return 0
    return min(_room(cache) for cache in leaves(caches))


def _room(cache: Any) -> int:
    if isinstance(cache, ConcatenateKVCache):
        # Its next write brings the trimmed rows back: mlx-lm's own trim is of no use there.
        return 0
    if isinstance(cache.offset, mx.array):
        # A row of a batch that holds nothing cannot be taken out.
        return min(cache.offset.tolist()) - 1
    return cache.offset - getattr(cache, "start_position", 0)


def _trimmed(caches: list[Any], count: int) -> list[Any]:
    assert [cache.trim(count) for cache in caches] == [count] * len(caches)
    return caches


def _saved_and_loaded(caches: list[Any]) -> list[Any]:
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "cache.safetensors")
        save_prompt_cache(path, caches)
        loaded = load_prompt_cache(path)
        # The file is read when the arrays are.
        mx.eval([arrays_of(cache) for cache in loaded])
    return loaded


def _quantized(cache: Any, bits: int) -> Any:
    return cache.to_quantized(GROUP_SIZE, bits) if type(cache) is KVCache else cache
