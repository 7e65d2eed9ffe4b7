"""Rounds in any order: a cache driven through transactions, beside stock caches that never see one."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from mlx_spec import SpeculativeCacheTransaction
from mlx_spec.errors import TransactionError
from tests.bits import assert_same_bits
from tests.cache.kinds import arrays_of
from tests.cache.stock import Stock, Twin
from tests.cache.subjects import Rows, Subject
from tests.oracle import independent_copy
from tests.same_cache import assert_same_cache

MAX_WIDTH = 7
MOST_APPENDS = 3
MOST_AT_ONCE = 9
"""Tokens of a further prompt, more than any window here has room for at some point."""

Happening = Callable[[st.DataObject], None]


def lengths_near(edge: int, least: int = 0) -> st.SearchStrategy[int]:
    """Nothing, or so much that a few rounds cross the edge, or just have."""
    return st.just(least) | st.integers(max(least, edge - 2 * MAX_WIDTH), edge + 2 * MAX_WIDTH)


def prefixes(most: int) -> st.SearchStrategy[int]:
    """A count up to `most`, oftener one that cuts."""
    anything = st.integers(0, most)
    return anything | st.integers(1, most - 1) | st.just(most - 1) if most > 1 else anything


class CacheMachine(RuleBasedStateMachine):
    """One set of caches driven through rounds, and the stock side that reads only what was kept.

    Attributes:
        subject: set by the class that is run.
        mine: the caches that see transactions.
        stock: the side that does not.
        kept: by row, every token the caches should hold, padding included.
        pads: by row, how many of them are padding at the left.
        room: by row, tokens until its right padding begins; None where nothing is padded.
        tx: the open round.
        drive, leaves: how it was opened and what it gave.
        block: by row, tokens appended in it.
        outputs: what the forwards of it gave.
        over: the round that closed last, and the leaves it had.
    """

    subject: Subject
    mine: list[Any]
    stock: Stock
    kept: list[list[int]]
    pads: list[int]

    def __init__(self) -> None:
        super().__init__()
        self.room: list[int] | None = None
        self.tx: SpeculativeCacheTransaction | None = None
        self.over: tuple[SpeculativeCacheTransaction, list[Any]] | None = None
        self._next = 0

    def draw_counts(self, data: st.DataObject) -> list[int]:
        """How many tokens of the block each row keeps."""
        raise NotImplementedError

    # Plain use

    @rule(counts=st.lists(st.integers(1, MOST_AT_ONCE), min_size=1, max_size=3))
    def read_blocks_plainly(self, counts: list[int]) -> None:
        """Single steps, and further prompts as in a chat."""
        for count in counts:
            self.read_plainly(self.fresh(count))

    def happenings(self) -> dict[str, Happening]:
        """What else may happen to the caches now, by name."""
        return {}

    def read_plainly(self, tokens: Rows) -> None:
        self.stock.follow(self.mine)
        self.subject.read_plainly(self.mine, tokens)
        self.stock.read(self.without_padding(tokens))
        self.keep(tokens)

    def change(self, how: Callable[[list[Any]], list[Any]]) -> None:
        """Something mlx-lm can do to a set of caches happens to both sides."""
        self.stock.follow(self.mine)
        self.mine = how(self.mine)
        self.stock.change(how)

    def fresh(self, count: int) -> list[list[int]]:
        """The next tokens of every row, told apart so that no mix-up goes unseen."""
        first, self._next = self._next, self._next + count
        return [[self.subject.token(first + i, row) for i in range(count)] for row in range(len(self.kept))]

    def without_padding(self, tokens: Rows) -> list[list[int]]:
        """By row, these tokens up to where the right padding begins."""
        if self.room is None:
            return [list(row) for row in tokens]
        return [list(row[: max(0, room)]) for row, room in zip(tokens, self.room, strict=True)]

    def keep(self, tokens: Rows) -> None:
        for held, new in zip(self.kept, self.without_padding(tokens), strict=True):
            held.extend(new)
        if self.room is not None:
            self.room = [room - len(new) for room, new in zip(self.room, tokens, strict=True)]

    # Rounds

    @rule(data=st.data())
    def keep_some_of_a_round(self, data: st.DataObject) -> None:
        self.open_and_fill(data)
        if self.tx is not None:
            self.commit(data)

    @rule(data=st.data(), through_block=st.booleans())
    def undo_a_round(self, data: st.DataObject, through_block: bool) -> None:
        self.open_and_fill(data)
        if self.tx is not None:
            self.abort(through_block)

    @rule(data=st.data())
    def go_on_after_something_happened(self, data: st.DataObject) -> None:
        happenings = self.happenings()
        if happenings:
            happenings[data.draw(st.sampled_from(sorted(happenings)))](data)
        self.stock.assert_same(self.mine)
        self.keep_some_of_a_round(data)

    def open_and_fill(self, data: st.DataObject) -> None:
        """Begin a round and append a block in any split; now and then something is refused."""
        self.begin(data)
        appends = data.draw(st.integers(2, MOST_APPENDS) | st.integers(0, MOST_APPENDS))
        refused_after = data.draw(st.integers(0, appends))
        for done in range(appends + 1):
            if done == refused_after:
                self.maybe_refuse(data)
            if self.tx is None or done == appends or len(self.block[0]) == self.tx.width:
                break
            self.append(data)
        self.holds_the_tokens()

    def begin(self, data: st.DataObject) -> None:
        width = data.draw(st.integers(4, MAX_WIDTH) | st.integers(1, MAX_WIDTH))
        self.drive = data.draw(st.sampled_from(self.subject.drives))
        self.stock.follow(self.mine)
        self.tx = SpeculativeCacheTransaction(self.mine, width, drive=self.drive)
        self.leaves = self.tx.caches
        self.block: list[list[int]] = [[] for _ in self.kept]
        self.outputs: list[mx.array] = []

    def append(self, data: st.DataObject) -> None:
        """Part of the block, or all that is left of it: in one forward where that can be cut, else token by token."""
        room = self.tx.width - len(self.block[0])
        count = data.draw(st.integers(1, min(2, room)) | st.integers(1, room) | st.just(room))
        evaluate = data.draw(st.booleans())
        for tokens in [count] if self.subject.takes_blocks(self.drive) else [1] * count:
            self._forward(self.fresh(tokens), evaluate)

    def _forward(self, tokens: Rows, evaluate: bool) -> None:
        output = self.subject.read(self.tx.caches, tokens)
        if evaluate:
            mx.eval(output, [arrays_of(cache) for cache in self.mine])
        self.tx.mark(len(tokens[0]))
        if output is not None:
            self.outputs.append(output)
        for row, new in zip(self.block, tokens, strict=True):
            row.extend(new)

    def maybe_refuse(self, data: st.DataObject) -> None:
        """Nothing is refused by a machine that tries nothing wrong."""

    def commit(self, data: st.DataObject) -> None:
        counts = self.draw_counts(data)
        self.tx.commit(self._counted(counts, data))
        self.close()
        retained = [row[:count] for row, count in zip(self.block, counts, strict=True)]
        want = self.stock.keep(self.block, [len(row) for row in self.without_padding(retained)])
        for row, outputs in enumerate(want):
            for position, output in enumerate(outputs):
                assert_same_bits(mx.concatenate(self.outputs, axis=1)[row, position], output)
        self.keep(retained)

    def _counted(self, counts: list[int], data: st.DataObject) -> Any:
        forms: list[Any] = [counts, mx.array(counts)]
        # How many rows a cache has that holds nothing is nobody's business: a round that was undone may have told it.
        if not (self.block[0] or any(self.kept)):
            return counts[0]
        if len(set(counts)) == 1:
            forms.append(counts[0])
        return data.draw(st.sampled_from(forms))

    def abort(self, through_block: bool) -> None:
        if through_block:
            with suppress(KeyError), self.tx:
                raise KeyError
        else:
            self.tx.abort()
        self.close()

    def close(self) -> None:
        assert not self.tx.active
        self.over = (self.tx, self.leaves)
        self.tx = None

    # What must hold

    @invariant()
    def equals_stock(self) -> None:
        self.stock.assert_same(self.mine)

    @invariant()
    def holds_the_tokens(self) -> None:
        block = [[] for _ in self.kept] if self.tx is None else self.without_padding(self.block)
        held = [[*old, *new] for old, new in zip(self.kept, block, strict=True)]
        seen = [tokens[pad:] for tokens, pad in zip(held, self.pads, strict=True)]
        if all(seen):
            self.subject.assert_holds(self.mine, seen)


class Refusals:
    """What a round must refuse, in which state, and what is left then."""

    def maybe_refuse(self, data: st.DataObject) -> None:
        refusals = {
            "a count that cannot be": self.refuse_counts_that_cannot_be,
            "a round within the round": self.refuse_a_round_within_the_round,
            "more tokens than the width": self.refuse_more_tokens_than_the_width,
        }
        if self.over is not None:
            refusals["use of a round that is over"] = self.refuse_use_of_a_round_that_is_over
        wrong = data.draw(st.none() | st.sampled_from(sorted(refusals)))
        if wrong is not None:
            refusals[wrong](data.draw(st.integers(1, 3)))

    def refuse_counts_that_cannot_be(self, beyond: int) -> None:
        before = independent_copy(self.mine)
        wrong = [self.tx.width + beyond, -beyond, [0] * (len(self.kept) + beyond)]
        if self.block[0]:
            wrong.append(len(self.block[0]) + beyond)
        for counts in wrong:
            with pytest.raises(TransactionError):
                self.tx.commit(counts)
        assert self.tx.active
        assert_same_cache(self.mine, before)

    def refuse_a_round_within_the_round(self, width: int) -> None:
        before = independent_copy(self.mine)
        for caches in (self.mine, self.tx.caches):
            with pytest.raises(TransactionError):
                SpeculativeCacheTransaction(caches, width)
        assert self.tx.active
        assert_same_cache(self.mine, before)

    def refuse_more_tokens_than_the_width(self, beyond: int) -> None:
        """A forward that was refused half way can only be undone."""
        before = independent_copy(self.mine)
        count = self.tx.width - len(self.block[0]) + beyond
        with pytest.raises(TransactionError):
            self._read_too_many(count)
        assert self.tx.active
        if self.subject.refuses_first(self.drive):
            assert_same_cache(self.mine, before)
        else:
            self.abort(through_block=False)

    def _read_too_many(self, count: int) -> None:
        self.subject.read(self.tx.caches, self.fresh(count))
        self.tx.mark(count)

    def refuse_use_of_a_round_that_is_over(self, count: int) -> None:
        before = independent_copy(self.mine)
        tx, leaves = self.over
        for use in (lambda: tx.commit(0), lambda: tx.validate(0), lambda: tx.mark(1)):
            with pytest.raises(TransactionError):
                use()
        tx.abort()
        # What the model was handed may have been the caches themselves, which outlive the round.
        if leaves[0] is not self.mine[0]:
            with pytest.raises(TransactionError):
                self.subject.read(leaves, self.fresh(count))
        assert_same_cache(self.mine, before)


class UniformMachine(CacheMachine):
    """All rows keep one count; the stock side is the same class of cache."""

    @initialize(data=st.data())
    def prefill(self, data: st.DataObject) -> None:
        """Start empty, or a few tokens before or after the edge, with a block as prefill gives."""
        self.mine = self.subject.make()
        self.stock = Twin(self.subject, self.subject.make())
        self.pads = list(self.subject.pads)
        self.kept = [[] for _ in self.pads]
        length = data.draw(lengths_near(self.subject.edge))
        if length:
            self.read_plainly(self.fresh(length))

    def draw_counts(self, data: st.DataObject) -> list[int]:
        return [data.draw(prefixes(len(self.block[0])))] * len(self.kept)
