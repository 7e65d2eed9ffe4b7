"""Any order of begin, append, commit, abort and plain steps leaves the cache that plain steps alone would leave."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from mlx_lm.models.cache import ConcatenateKVCache, KVCache, RotatingKVCache

from mlx_spec import SpeculativeCacheTransaction
from mlx_spec.errors import TransactionError
from tests.cache.kinds import KINDS, Kind, append, arrays_of, tokens_in
from tests.oracle import independent_copy
from tests.same_cache import assert_same_cache

MAX_WIDTH = 7
TOKENS = 1000
"""Ids are drawn below this."""


class CacheMachine(RuleBasedStateMachine):
    """One cache driven through rounds, and its twin that stock single steps drive through what was kept.

    Attributes:
        kind: set by the subclass that is run.
        kept: every token the cache should hold.
        block: tokens appended in the open round.
        marks: lengths of the open round's prefixes that end a forward.
    """

    kind: Kind

    def __init__(self) -> None:
        super().__init__()
        self.mine: Any = self.kind.make()
        self.twin: Any = self.kind.make()
        self.kept: list[int] = []
        self.tx: SpeculativeCacheTransaction | None = None
        self.block: list[int] = []
        self.marks = [0]

    # Plain use

    @initialize(before_edge=st.integers(0, 2 * MAX_WIDTH), data=st.data())
    def prefill(self, before_edge: int, data: st.DataObject) -> None:
        """Start empty, or a few tokens before the edge, with a block as prefill gives."""
        length = data.draw(st.sampled_from([0, max(0, self.kind.edge - before_edge), self.kind.edge + before_edge]))
        self._plainly(list(range(length)))

    @precondition(lambda self: self.tx is None)
    @rule(tokens=st.lists(st.integers(0, TOKENS - 1), min_size=1, max_size=3))
    def step_plainly(self, tokens: list[int]) -> None:
        for token in tokens:
            self._plainly([token])

    @precondition(lambda self: self.tx is None)
    @rule(tokens=st.lists(st.integers(0, TOKENS - 1), min_size=2, max_size=9))
    def read_a_block_plainly(self, tokens: list[int]) -> None:
        """A further prompt, as in a chat."""
        self._plainly(tokens)

    def _plainly(self, tokens: Sequence[int]) -> None:
        if tokens:
            for cache in (self.mine, self.twin):
                append(cache, tokens, self.kind.batch)
                mx.eval(arrays_of(cache))
            self.kept.extend(tokens)

    # Rounds

    @precondition(lambda self: self.tx is None)
    @rule(width=st.integers(1, MAX_WIDTH))
    def begin(self, width: int) -> None:
        self.tx = SpeculativeCacheTransaction([self.mine], width)
        self.block, self.marks = [], [0]

    @precondition(lambda self: self.tx is not None and len(self.block) < self.tx.width)
    @rule(data=st.data(), evaluate=st.booleans())
    def forward(self, data: st.DataObject, evaluate: bool) -> None:
        """A forward over some tokens; over one where the cache cannot be cut inside a block."""
        room = self.tx.width - len(self.block)
        most = room if self.kind.by_length else 1
        tokens = data.draw(st.lists(st.integers(0, TOKENS - 1), min_size=1, max_size=most))
        append(self.tx.caches[0], tokens, self.kind.batch)
        if evaluate:
            mx.eval(arrays_of(self.mine))
        self.tx.mark(len(tokens))
        self.block.extend(tokens)
        self.marks.append(len(self.block))

    @precondition(lambda self: self.tx is not None)
    @rule(data=st.data(), form=st.sampled_from(["number", "list", "array"]))
    def commit(self, data: st.DataObject, form: str) -> None:
        possible = range(len(self.block) + 1) if self.kind.by_length else self.marks
        count = data.draw(st.sampled_from(list(possible)))
        self._commit(count, form)
        self.kind.step(self.twin, self.block[:count])
        self.kept.extend(self.block[:count])

    def _commit(self, count: int, form: str) -> None:
        # How many rows a cache has that holds nothing is nobody's business: a round that was undone may have told it.
        if not (self.block or self.kept):
            form = "number"
        rows = [count] * self.kind.batch
        self.tx.commit({"number": count, "list": rows, "array": mx.array(rows)}[form])
        assert not self.tx.active
        self.tx = None

    @precondition(lambda self: self.tx is not None)
    @rule(through_block=st.booleans())
    def abort(self, through_block: bool) -> None:
        if through_block:
            with suppress(KeyError), self.tx:
                raise KeyError
        else:
            self.tx.abort()
        assert not self.tx.active
        self.tx = None

    @precondition(lambda self: self.tx is not None and self.block)
    @rule(beyond=st.integers(1, 3))
    def refuse_too_much(self, beyond: int) -> None:
        before = independent_copy(self.mine)
        with pytest.raises(TransactionError):
            self.tx.commit(len(self.block) + beyond)
        with pytest.raises(TransactionError):
            SpeculativeCacheTransaction([self.mine], 1)
        assert self.tx.active
        assert_same_cache(self.mine, before)

    # What must hold

    @invariant()
    def equals_the_twin(self) -> None:
        if self.tx is None:
            assert_same_cache(self.mine, self.twin)

    @invariant()
    def shows_the_tokens(self) -> None:
        if self.kept or self.block:
            show_exactly(self.mine, [*self.kept, *self.block] if self.tx else self.kept)

    def teardown(self) -> None:
        if self.tx is not None:
            self.tx.abort()
        assert_same_cache(self.mine, self.twin)


def show_exactly(cache: Any, tokens: list[int]) -> None:
    """Where tokens can be read back from the rows, these are the ones the cache should hold."""
    if isinstance(cache, KVCache | ConcatenateKVCache):
        assert cache.offset == len(tokens)
        if tokens:
            assert tokens_in(cache) == tokens
    elif isinstance(cache, RotatingKVCache) and cache.keys is not None:
        shown = tokens_in(cache)
        ring = len(shown) - cache.keep
        want = tokens if len(tokens) <= len(shown) else tokens[: cache.keep] + tokens[-ring:]
        assert shown == want
        assert cache.offset == len(tokens)


@pytest.mark.parametrize("name", KINDS)
def test_rounds_in_any_order_leave_what_plain_steps_leave(name: str) -> None:
    machine = type(f"Machine_{name}", (CacheMachine,), {"kind": KINDS[name]})
    run_state_machine_as_test(machine, settings=settings(stateful_step_count=24))
