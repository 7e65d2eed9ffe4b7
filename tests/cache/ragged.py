"""Batches whose rows keep different counts: each row must stay what it would be alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import initialize

from mlx_spec.cache.base import Drive
from tests.cache.machine import MOST_AT_ONCE, CacheMachine, Happening, lengths_near, prefixes
from tests.cache.stock import RowsAlone, RowsOfAStockBatch, RowStock
from tests.cache.subjects import Subject

MOST_ROWS = 4
PADS = (2, 0, 1)
"""Left padding of a batch that is begun with a padded prompt."""

MAX_ROOM = 12


@dataclass(frozen=True)
class Batch:
    """A subject of one row, and the batch form of its caches.

    Attributes:
        alone: one row.
        padded: fresh batch caches, given the left padding of each row; None where a batch only ever comes of merging.
        rows_agree: a stock batch gives each row the bits it has alone.
        pads_right: it may read prompts padded at the right. In a batch ring the padding pushes out rows that a
            ring alone still holds.
    """

    alone: Subject
    padded: Callable[[list[int]], list[Any]] | None = None
    rows_agree: bool = True
    pads_right: bool = True

    @property
    def name(self) -> str:
        return self.alone.name

    def stock(self, rows: list[list[Any]]) -> RowStock:
        return (RowsAlone if self.rows_agree else RowsOfAStockBatch)(self.alone, rows)


def merged(rows: Sequence[Sequence[Any]]) -> list[Any]:
    """One batch of several rows' caches, which stay as they are."""
    return [type(layer[0]).merge(list(layer)) for layer in zip(*rows, strict=True)]


class RaggedMachine(CacheMachine):
    """Every row keeps a count of its own.

    Attributes:
        batch: set by the class that is run.
    """

    batch: Batch

    @initialize(count=st.integers(2, 3), data=st.data())
    def prefill(self, count: int, data: st.DataObject) -> None:
        self.kept, self.pads = [], [0] * count
        if self.batch.padded is not None and data.draw(st.booleans()):
            self._begin_with_padding(PADS[:count], data)
        else:
            rows = self._rows(count, data)
            self.stock, self.mine = self.batch.stock(rows), merged(rows)

    def _begin_with_padding(self, pads: Sequence[int], data: st.DataObject) -> None:
        rows = [self.subject.make() for _ in pads]
        self.kept = [[] for _ in pads]
        prompts = self.fresh(data.draw(lengths_near(self.subject.edge, max(pads) + 1)))
        self.stock, self.mine = self.batch.stock(rows), self.batch.padded(list(pads))
        self.subject.read_plainly(self.mine, prompts)
        self.kept = [prompt[pad:] for prompt, pad in zip(prompts, pads, strict=True)]
        for row, prompt in zip(rows, self.kept, strict=True):
            self.subject.read_plainly(row, [prompt])

    def _rows(self, count: int, data: st.DataObject) -> list[list[Any]]:
        """Rows of different lengths, each read alone; their tokens are kept."""
        rows = []
        for _ in range(count):
            self.kept.append([])
            prompt = self.fresh(data.draw(lengths_near(self.subject.edge, 1)))[-1]
            self.kept[-1] = prompt
            rows.append(self.subject.make())
            self.subject.read_plainly(rows[-1], [prompt])
        return rows

    def draw_counts(self, data: st.DataObject) -> list[int]:
        most = len(self.block[0])
        if self.drive is Drive.WHOLE and not self.subject.refuses_first(self.drive):
            # Stepped through without its mixers, a cache that has no length is kept alike for all rows.
            return [data.draw(prefixes(most))] * len(self.kept)
        return [data.draw(prefixes(most)) for _ in self.kept]

    # What mlx-lm does to batches

    def happenings(self) -> dict[str, Happening]:
        possible: dict[str, Happening] = {}
        if len(self.kept) > 1:
            possible["filter"] = self.filter
        if self.room is None:
            possible["extract and merge"] = self.extract_and_merge
            if len(self.kept) < MOST_ROWS:
                possible["extend"] = self.extend
            if self.batch.pads_right:
                possible["prompts of different lengths"] = self.read_prompts_of_different_lengths
        return super().happenings() | possible

    def filter(self, data: st.DataObject) -> None:
        """Some requests are done."""
        indices = data.draw(st.lists(st.sampled_from(range(len(self.kept))), min_size=1, unique=True))
        self.stock.follow(self.mine)
        for cache in self.mine:
            cache.filter(indices)
        self.stock.rows, self.kept, self.pads = (
            [held[index] for index in indices] for held in (self.stock.rows, self.kept, self.pads)
        )
        if self.room is not None:
            self.room = [self.room[index] for index in indices]

    def extend(self, data: st.DataObject) -> None:
        """New requests join."""
        rows = self._rows(data.draw(st.integers(1, MOST_ROWS - len(self.kept))), data)
        self.pads = [0] * len(self.kept)
        for cache, joining in zip(self.mine, merged(rows), strict=True):
            cache.extend(joining)
        self.stock.rows.extend(rows)

    def extract_and_merge(self, data: st.DataObject) -> None:
        """Every request is taken out and put into a new batch."""
        self.mine = merged([[cache.extract(index) for cache in self.mine] for index in range(len(self.kept))])

    def read_prompts_of_different_lengths(self, data: st.DataObject) -> None:
        """Padded at the right, as a batch reads prompts."""
        lengths = [data.draw(st.integers(1, MOST_AT_ONCE)) for _ in self.kept]
        padding = [max(lengths) - length for length in lengths]
        # A batch that came from a file can be prepared for padding, but not finalized without any.
        if max(padding):
            for cache in self.mine:
                cache.prepare(lengths=lengths, right_padding=padding)
            self.room = lengths
        self.read_plainly(self.fresh(max(lengths)))
        if max(padding):
            self._end_padding()

    def _end_padding(self) -> None:
        for cache in self.mine:
            cache.finalize()
        self.room = None


class RightPadded:
    """Rounds while rows run into their right padding: only caches of fixed size can do that."""

    def happenings(self) -> dict[str, Happening]:
        possible = {"begin padding": self.begin_padding} if self.room is None else {"end padding": self.end_padding}
        return super().happenings() | possible  # type: ignore[misc]

    def begin_padding(self, data: st.DataObject) -> None:
        self.room = [data.draw(st.integers(0, MAX_ROOM)) for _ in self.kept]
        for cache in self.mine:
            cache.prepare(lengths=self.room)

    def end_padding(self, data: st.DataObject) -> None:
        self._end_padding()
