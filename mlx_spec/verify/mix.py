"""One call of a token mixer inside a transaction: as the model made it, or position by position."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from mlx_spec.cache.base import AskedMask, journals_among, with_leaf
from mlx_spec.errors import CannotMix
from mlx_spec.verify.recall import Recall
from mlx_spec.verify.routes import plan_in_force

_FIRST_POSITION = ("offset", "start_pos")
"""Names of arguments by which models tell a mixer where its first token stands."""


@dataclass(frozen=True, eq=False)
class PerPosition:
    """What a mixer returned beside its output when it went position by position, on its way to another mixer.

    A model that shares keys between layers hands one mixer's keys to later ones. Those must see them as
    they stood at each position, so the later mixers go position by position as well. A model that does anything else
    with such a value gets an error of Python's, and the block is stepped through.

    Attributes:
        values: one per position.
        masks: those asked for in this round, by id of the array.
    """

    values: list[Any]
    masks: dict[int, AskedMask]


MAY_HOLD = frozenset({tuple, PerPosition})
"""Classes of arguments, beside those of leaves, that may make a mixer's call another than stock's."""


class Mix:
    """One call of a mixer.

    Position by position each argument is cut to what the stock model would hand over for that token alone. Of a block
    of W = 3 after 5 tokens, over a cache that keeps chunks of 5 (B = 2, H = 7), a mixer gets:

        given                      position 0         position 1         position 2
        input [2, 3, 7]            [:, 0:1]           [:, 1:2]           [:, 2:3]
        offset 5                   5                  6                  7
        mask "causal"              None               None               None
        mask [3, 8]  row           0                  1                  2
            its column is key      0 1 2 3 4 5 . .    . 1 2 3 4 5 6 .    . . 2 3 4 5 6 7
            lost                   0                  1                  2
        returns [2, 1, 7] each: joined on axis 1, [2, 3, 7]; anything else, as keys for another mixer: `PerPosition`

    The mask is the model's own, made for the block over keys 0 to 7. On the right, keys of later positions are not
    there yet. On the left, a full chunk drops a key before each further token: `lost` of them so far.

    Attributes:
        width: positions it was given; 0 when nothing marks its input.
    """

    def __init__(
        self, call: Callable[..., Any], positional: dict[str, Any], keywords: dict[str, Any], mixer: int = 0
    ) -> None:
        """
        Args:
            call: the stock call, with the module bound.
            positional: arguments given by place, under their names.
            keywords: arguments given by name.
            mixer: id of the module.
        """
        self._call = call
        self._mixer = mixer
        self._positional = positional
        self._keywords = keywords
        given = [*positional.values(), *keywords.values()]
        self._journals = journals_among(given)
        self._passed_on = _first_passed_on(given)
        self._inputs = _inputs_among(given)
        self._masks = self._journals[0].masks if self._journals else {}
        self._recall: Recall | None = None
        self._singly = False
        self.width = 0 if self._inputs is None else self._inputs.shape[1]

    def run(self) -> Any:
        """The stock call, or the same position by position; recurrent caches get a tape."""
        if self._passed_on is not None and not self._journals:
            self._masks = self._passed_on.masks
            return self._positions(len(self._passed_on.values))
        journals = self._journals
        for journal in journals:
            journal.feed(self._mixer, self.width)
        if not journals or self.width < 2:
            return self._call(*self._positional.values(), **self._keywords)
        positions = self._passed_on is not None or any(journal.by_position for journal in journals)
        if len(journals) == 1 and self._inputs is not None:
            # A mixer with several caches cannot be run again for one of them: that one keeps a handle per position.
            # Another number of rows may need other routes for the mixer's ops; one row needs none.
            self._singly = positions or plan_in_force() is not None
            self._recall = Recall(self._inputs.shape[0]) if journals[0].runs_again else None
            journals[0].tape(self)
        if positions:
            return self._positions(self.width)
        with self._running(0, self.width, again=False):
            return self._call(*self._positional.values(), **self._keywords)

    @property
    def nbytes(self) -> int:
        """Bytes held to run it again: its input, and what its linear maps gave."""
        held = 0 if self._inputs is None else self._inputs.nbytes
        return held if self._recall is None else held + self._recall.nbytes

    def replay(self, count: int) -> None:
        """Run the first `count` positions again, for the caches alone."""
        if self._singly:
            self._positions(count, again=True)
            return
        args, keywords = self._cut(0, count)
        with self._running(0, count, again=True):
            self._call(*args, **keywords)

    def onto(self, leaf: Any, other: Any) -> Mix:
        """The same call with one leaf in the place of another, to be replayed there."""
        twin = copy.copy(self)
        twin._positional = {name: with_leaf(value, leaf, other) for name, value in self._positional.items()}
        twin._keywords = {name: with_leaf(value, leaf, other) for name, value in self._keywords.items()}
        twin._journals = journals_among([other])
        twin._masks = twin._journals[0].masks
        return twin

    def _running(self, start: int, stop: int, *, again: bool) -> AbstractContextManager[None]:
        return nullcontext() if self._recall is None else self._recall.running(start, stop, again=again)

    def _positions(self, count: int, *, again: bool = False) -> Any:
        outputs = []
        for position in range(count):
            for journal in self._journals:
                journal.before_position(position)
            try:
                args, keywords = self._cut(position, position + 1)
                with self._running(position, position + 1, again=again):
                    outputs.append(_held(self._call(*args, **keywords)))
            except (ValueError, TypeError, IndexError) as error:
                # What mlx raises when shapes do not fit: the mixer wants something per position that is not known here.
                raise CannotMix(f"position {position} of a block: {error}") from error
        for journal in self._journals:
            journal.after_positions()
        return self._join(outputs)

    def _cut(self, start: int, stop: int) -> tuple[list[Any], dict[str, Any]]:
        args = [self._argument(name, value, start, stop) for name, value in self._positional.items()]
        keywords = {name: self._argument(name, value, start, stop) for name, value in self._keywords.items()}
        return args, keywords

    def _argument(self, name: str, value: Any, start: int, stop: int) -> Any:
        if name in _FIRST_POSITION and isinstance(value, int | mx.array):
            return value + start
        return self._at(value, start, stop)

    def _at(self, value: Any, start: int, stop: int) -> Any:
        """What the stock model would hand the mixer for these positions alone."""
        if isinstance(value, PerPosition):
            return value.values[start]
        if isinstance(value, str) and value == "causal":
            return None if stop - start == 1 else value
        if isinstance(value, tuple):
            return tuple(self._at(item, start, stop) for item in value)
        if not isinstance(value, mx.array):
            return value
        asked = self._masks.get(id(value))
        if asked is not None:
            return self._mask(asked, start, stop)
        return self._rows(value, start, stop)

    def _mask(self, asked: AskedMask, start: int, stop: int) -> Any:
        """The mask the model's cache gives for these positions, asked for when the cache stands right before them."""
        if stop - start == 1 and start in asked.rows:
            return asked.rows[start]
        leaf = next((journal.leaf for journal in self._journals if type(journal.leaf) is asked.asker), None)
        if leaf is None:
            return self._rows(asked.mask, start, stop)
        mask = leaf.make_mask(stop - start, *asked.args, **asked.keywords)
        if stop - start == 1:
            asked.rows[start] = mask
        return mask

    def _rows(self, value: mx.array, start: int, stop: int) -> mx.array:
        if value.ndim >= 3 and value.shape[1] == self.width:
            return value[:, start:stop]
        if value.ndim == 2 and value.shape[1] == self.width and mx.issubdtype(value.dtype, mx.integer):
            return value[:, start:stop]
        if value.ndim >= 2 and value.shape[-2] == self.width:
            if value.shape[-1] < self.width:
                return value[..., start:stop, :]
            # A mask made by the model itself: one row per query, its columns ending with the block's last key.
            lost = self._journals[0].lost if self._journals else 0
            return value[..., start:stop, lost : value.shape[-1] - (self.width - stop)]
        return value

    def _join(self, outputs: list[Any]) -> Any:
        """The outputs of single positions as the mixer returns them for all."""
        first = outputs[0]
        if isinstance(first, tuple):
            return tuple(self._join(list(parts)) for parts in zip(*outputs, strict=True))
        if isinstance(first, mx.array) and self._is_output(first):
            return first if len(outputs) == 1 else mx.concatenate(outputs, axis=1)
        if all(output is first for output in outputs):
            return first
        return PerPosition(outputs, self._masks)

    def _is_output(self, value: mx.array) -> bool:
        """Whether the second axis of an array counts positions."""
        if value.ndim < 3 or value.shape[1] != 1:
            return False
        return value.ndim == 3 or (self._inputs is not None and value.shape[2:] == self._inputs.shape[2:])


def _held(value: Any) -> Any:
    """The value, each array by a handle of its own: a cache's next write re-points the object it returned."""
    if isinstance(value, tuple):
        return tuple(map(_held, value))
    return copy.copy(value) if isinstance(value, mx.array) else value


def _first_passed_on(given: list[Any]) -> PerPosition | None:
    for value in given:
        if isinstance(value, PerPosition):
            return value
        found = _first_passed_on(list(value)) if isinstance(value, tuple) else None
        if found is not None:
            return found
    return None


def _inputs_among(given: list[Any]) -> mx.array | None:
    """What the mixer reads: the first [B, W, ...] array, or else token ids [B, W]."""
    arrays = [value for value in given if isinstance(value, mx.array)]
    states = [array for array in arrays if array.ndim >= 3]
    ids = [array for array in arrays if array.ndim == 2 and mx.issubdtype(array.dtype, mx.integer)]
    return next(iter([*states, *ids]), None)
