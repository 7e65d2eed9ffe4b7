"""The stock side of a cache machine: mlx-lm's own caches, fed what was kept, one token at a time."""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from mlx_spec.cache.adopt import leaves
from tests.cache.kinds import arrays_of
from tests.cache.subjects import Rows, Subject
from tests.oracle import independent_copy
from tests.same_cache import assert_same_cache, assert_same_rows

Outputs = list[list[mx.array]]
"""What the layers gave for each kept token of each row; empty lists where a subject gives nothing."""


class Stock(abc.ABC):
    """One machine's oracle. It never sees a transaction."""

    def follow(self, mine: Sequence[Any]) -> None:
        """Something is about to happen to these caches; only a side without caches of its own must look."""
        del mine

    @abc.abstractmethod
    def read(self, tokens: Rows) -> None:
        """One forward over some tokens of every row, as a prompt is read. Padding is not among them."""

    @abc.abstractmethod
    def keep(self, block: Rows, counts: Sequence[int]) -> Outputs:
        """Read the first `counts[row]` tokens of each row one at a time."""

    @abc.abstractmethod
    def change(self, how: Callable[[list[Any]], list[Any]]) -> None:
        """Do to the caches what mlx-lm can do to one set of them."""

    @abc.abstractmethod
    def assert_same(self, mine: Sequence[Any]) -> None:
        """Raise AssertionError where the caches differ from stock's."""

    @abc.abstractmethod
    def copied(self) -> Stock:
        """The same with caches of its own."""

    @abc.abstractmethod
    def sides(self) -> list[list[Any]]:
        """Every set of caches that it keeps."""


class Twin(Stock):
    """The same caches, driven by single steps: for rows that keep equal counts."""

    def __init__(self, subject: Subject, caches: list[Any]) -> None:
        self._subject = subject
        self._caches = caches

    def read(self, tokens: Rows) -> None:
        self._subject.read_plainly(self._caches, tokens)

    def keep(self, block: Rows, counts: Sequence[int]) -> Outputs:
        outputs: Outputs = [[] for _ in block]
        for position in range(counts[0]):
            given = self._subject.read_plainly(self._caches, [row[position : position + 1] for row in block])
            for row, made in enumerate(outputs):
                made.extend([] if given is None else [given[row, 0]])
        return outputs

    def change(self, how: Callable[[list[Any]], list[Any]]) -> None:
        self._caches = how(self._caches)

    def assert_same(self, mine: Sequence[Any]) -> None:
        assert_same_cache(list(mine), self._caches)

    def copied(self) -> Stock:
        return Twin(self._subject, independent_copy(self._caches))

    def sides(self) -> list[list[Any]]:
        return [self._caches]


class RowStock(Stock):
    """One set of single-row caches per row: what `extract(row)` must equal.

    Attributes:
        rows: by row, the caches of one request.
    """

    def __init__(self, subject: Subject, rows: list[list[Any]]) -> None:
        self.subject = subject
        self.rows = rows

    def change(self, how: Callable[[list[Any]], list[Any]]) -> None:
        self.rows = [how(row) for row in self.rows]

    def assert_same(self, mine: Sequence[Any]) -> None:
        assert_same_rows(list(leaves(mine)), [list(leaves(row)) for row in self.rows])

    def copied(self) -> Stock:
        return type(self)(self.subject, independent_copy(self.rows))

    def sides(self) -> list[list[Any]]:
        return self.rows


class RowsAlone(RowStock):
    """Every row run alone by stock: where a stock batch gives a row the bits it has alone."""

    def read(self, tokens: Rows) -> None:
        for index, row in enumerate(tokens):
            self._read_row(index, row)

    def keep(self, block: Rows, counts: Sequence[int]) -> Outputs:
        outputs: Outputs = []
        for index, count in enumerate(counts):
            given = [self._read_row(index, [token]) for token in block[index][:count]]
            outputs.append([row[0, 0] for row in given if row is not None])
        return outputs

    def _read_row(self, index: int, tokens: Sequence[int]) -> mx.array | None:
        return self.subject.read_plainly(self.rows[index], [tokens]) if tokens else None


class RowsOfAStockBatch(RowStock):
    """Each row as the stock batch has it after that row's own count.

    A sliding window of several rows keeps them in another order than one row alone does, so attention adds up
    in another order too, and a row alone is no oracle bit for bit. What is well defined is one round: a copy of the
    batch it began with, stepped by stock with all rows; row i is taken out of it after its n_i steps. From round
    to round the rows are equal because each of them was compared.
    """

    def follow(self, mine: Sequence[Any]) -> None:
        self._batch = independent_copy(list(mine))

    def read(self, tokens: Rows) -> None:
        self.subject.read_plainly(self._batch, tokens)
        self.rows = [self._taken_out(index) for index in range(len(self.rows))]

    def keep(self, block: Rows, counts: Sequence[int]) -> Outputs:
        outputs: Outputs = [[] for _ in counts]
        for position in range(max(counts)):
            given = self.subject.read_plainly(self._batch, [row[position : position + 1] for row in block])
            for index, count in enumerate(counts):
                if position < count:
                    outputs[index].extend([] if given is None else [given[index, 0]])
                if position + 1 == count:
                    self.rows[index] = self._taken_out(index)
        return outputs

    def _taken_out(self, index: int) -> list[Any]:
        row = [cache.extract(index) for cache in self._batch]
        mx.eval([arrays_of(cache) for cache in row])
        return row
