"""A chain of drafted tokens, whatever its networks compute: what is run when, what waits, and what a failure leaves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import pytest

from mlx_spec.cache.adopt import new_append_cache
from mlx_spec.cache.transaction import SpeculativeCacheTransaction
from mlx_spec.drafters.chain import ChainNetwork, ChainState
from mlx_spec.model.target import Target

TARGET: Any = None
"""Asked for nothing by these networks."""

SIZE = 3


class Lettered(ChainNetwork):
    """Writes down which tokens it runs as letters, and takes the letter after the last as the likeliest.

    A hidden state is [its position, who made it, 0], so that a pair of two that do not belong together is seen: -1 made
    the target's, and the network of depth k what it gave.
    """

    tapped_size = SIZE

    def __init__(self, depth: int, chained: bool) -> None:
        self.depth = depth
        self.reads = depth - 1 if chained else -1
        self.calls: list[str] = []
        self.fail_on: str | None = None

    def new_caches(self) -> list[Any]:
        return [new_append_cache()]

    def fuse(self, tapped: mx.array, target: Target) -> mx.array:
        assert self.reads == -1
        return tapped

    def run(self, tokens: mx.array, hidden: mx.array, caches: Sequence[Any], start: int, target: Target) -> mx.array:
        ids = tokens[0].tolist()
        self.calls.append("".join(map(chr, ids)))
        first = caches[0].offset
        for place, (token, row) in enumerate(zip(ids, hidden[0].tolist(), strict=True), first):
            position, maker, _ = row
            # Past the last depth a network reads itself, at the position before.
            own = maker == self.depth
            assert maker == self.reads or own
            assert position == place - own
            assert token == ord("a") + place + 1 + self.depth
        rows = tokens[:, None, :, None].astype(mx.float32)
        caches[0].update_and_fetch(rows, rows)
        if self.fail_on == self.calls[-1]:
            raise RuntimeError("no")
        made = [[place, self.depth, 0] for place in range(first, first + len(ids))]
        self.last = ids[-1]
        return mx.array([made], dtype=mx.float32)

    def carry(self, states: mx.array) -> mx.array:
        return states

    def logits(self, states: mx.array, target: Target) -> mx.array:
        raise AssertionError("nobody asks for these")

    def choose(self, states: mx.array, target: Target) -> mx.array:
        assert states.shape == (1, 1, SIZE)
        return mx.array([[self.last + 1]], dtype=mx.int32)


def opened(depths: int, chained: bool = True) -> tuple[ChainState, list[Lettered]]:
    networks = [Lettered(depth, chained) for depth in range(depths)]
    return ChainState(networks, TARGET, 0, chained=chained), networks


def shown(letters: str) -> tuple[list[list[int]], mx.array]:
    """A stretch of the alphabet and the target's states for it."""
    ids = [ord(letter) for letter in letters]
    return [ids], mx.array([[[each - ord("a"), -1, 0] for each in ids]], dtype=mx.float32)


def proposed(state: ChainState, bonus: str, count: int) -> str:
    return "".join(map(chr, state.propose([ord(bonus)], count).ids[0].tolist()))


def cached(state: ChainState) -> list[str]:
    """The tokens that complete the pairs in the caches, depth by depth."""
    caches = state.cache_tree([])["draft"]
    return ["".join(chr(int(row)) for row in cache.keys[0, 0, : cache.offset, 0].tolist()) for cache in caches]


def taken(networks: list[Lettered]) -> list[list[str]]:
    calls = [network.calls for network in networks]
    for network in networks:
        network.calls = []
    return calls


@pytest.mark.parametrize(("chained", "pending"), [(True, 3), (False, 5)])
def test_three_depths_hold_and_run_what_the_drawn_example_shows(chained: bool, pending: int) -> None:
    state, networks = opened(3, chained)
    state.read_prompt(*shown("abcdef"))
    assert taken(networks) == [["bcdef"], ["cdef"], ["def"]]
    assert proposed(state, "g", 3) == "hij"
    assert taken(networks) == [["g"], ["gh"], ["ghi"]]
    state.catch_up(*shown("ghi"))
    assert cached(state) == ["bcdefg", "cdefg", "defg"]
    assert state.pending == pending
    # What the next bonus is plays no part in what is run.
    assert proposed(state, "j", 3) == "klm"
    assert taken(networks) == [["hij"], ["hijk"], ["hijkl"]]


@pytest.mark.parametrize("chained", [True, False])
def test_past_the_last_depth_it_reads_itself_and_short_proposals_leave_the_deeper_ones_alone(chained: bool) -> None:
    state, networks = opened(2, chained)
    state.read_prompt(*shown("abcd"))
    taken(networks)
    assert proposed(state, "e", 4) == "fghi"
    assert taken(networks) == [["e"], ["ef", "g", "h"]]
    assert proposed(state, "e", 1) == "f"
    state.catch_up(*shown("e"))
    assert taken(networks) == [["e"], []]
    assert cached(state) == ["bcde", "cd"]
    assert proposed(state, "f", 2) == "gh"
    assert taken(networks) == [["f"], ["efg"]]


def test_one_network_runs_a_pair_once_and_then_reads_itself() -> None:
    state, (network,) = opened(1)
    state.read_prompt(*shown("abc"))
    assert proposed(state, "d", 3) == "efg"
    state.catch_up(*shown("def"))
    assert cached(state) == ["bcd"]
    assert proposed(state, "g", 2) == "hi"
    assert network.calls == ["bc", "d", "e", "f", "efg", "h"]


@pytest.mark.parametrize("fail_on", [(0, "g"), (1, "gh"), (2, "ghi"), (2, "j")])
def test_a_failure_at_any_depth_leaves_the_state_as_it_was(fail_on: tuple[int, str]) -> None:
    state, networks = opened(3)
    state.read_prompt(*shown("abcdef"))
    depth, tokens = fail_on
    networks[depth].fail_on = tokens
    with pytest.raises(RuntimeError, match="no"):
        state.propose([ord("g")], 4)
    networks[depth].fail_on = None
    assert cached(state) == ["bcdef", "cdef", "def"]
    assert proposed(state, "g", 4) == "hijk"
    state.catch_up(*shown("gh"))
    assert cached(state) == ["bcdefg", "cdefg", "defg"]


def test_states_that_do_not_fit_change_nothing() -> None:
    state, networks = opened(2)
    state.read_prompt(*shown("abc"))
    assert proposed(state, "d", 2) == "ef"
    ids, hidden = shown("de")
    for call in (state.catch_up, state.read_prompt):
        with pytest.raises(ValueError, match=r"expected \[B, T, 3\]"):
            call(ids, hidden[:, :1])
    state.catch_up(ids, hidden)
    assert cached(state) == ["bcd", "cd"]
    assert proposed(state, "f", 2) == "gh"


def afterwards_abort(state: ChainState) -> None:
    state.abort()


def afterwards_catch_up(state: ChainState) -> None:
    state.catch_up(*shown("d"))


@pytest.mark.parametrize("afterwards", [afterwards_abort, afterwards_catch_up])
@pytest.mark.parametrize("interrupted", [0, 1])
def test_an_abort_that_is_interrupted_at_any_depth_is_completed_by_the_next_call(
    interrupted: int, afterwards: Callable[[ChainState], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    state, _ = opened(2)
    state.read_prompt(*shown("abc"))
    state.propose([ord("d")], 2)
    stock, calls = SpeculativeCacheTransaction.abort, iter(range(2))

    def interrupting(self: SpeculativeCacheTransaction) -> None:
        if next(calls) == interrupted:
            raise KeyboardInterrupt
        stock(self)

    with monkeypatch.context() as patch:
        patch.setattr(SpeculativeCacheTransaction, "abort", interrupting)
        with pytest.raises(KeyboardInterrupt):
            state.abort()
    afterwards(state)
    assert cached(state) == ["bc", "c"]
    bonus = "d" if afterwards is afterwards_abort else "e"
    assert proposed(state, bonus, 2) == {"d": "ef", "e": "fg"}[bonus]
