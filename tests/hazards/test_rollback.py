"""Kinds of fault in taking back what was rejected: a row too many, a window out of order, a state that went ahead."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import KVCache, RotatingKVCache

from mlx_spec.accept.proposal import Proposal
from mlx_spec.drafters import Drafter, DrafterState, NgramDrafter
from mlx_spec.drafters.ngram import NgramState
from mlx_spec.generate import generate_step
from mlx_spec.model.target import Target
from tests.bits import assert_same_bits, bit_difference
from tests.checkpoints import WIDE, tiny_model
from tests.oracle import OracleRun, assert_same_output
from tests.rounds.runs import (
    CHOICES,
    SPARE,
    assert_accepts_as_scripted,
    assert_equals_stock,
    record_stock,
    speculate,
    stock,
)
from tests.scripted import CyclingDrafter, ScriptedState
from tests.tiny import LONG, MIXES, PROMPT, REQUIRED, VOCAB, WINDOW
from tests.tiny_eagle import planted_drafter

WIDTH = 5
EMITTED = 24
DEPTHS = range(WIDTH)
"""Proposals accepted in every round."""

RINGS = {"sliding": WINDOW, "ring_with_keep": 15}
"""Mix -> size of its windows."""


@functools.cache
def short_stock(mix: str, prompt: tuple[int, ...] = PROMPT, emitted: int = EMITTED) -> OracleRun:
    return record_stock(MIXES[mix], emitted + SPARE, {emitted}, prompt=prompt)


# Any cache


@pytest.mark.part(5)
@pytest.mark.parametrize("mix", MIXES)
def test_rejection_at_every_depth_leaves_the_state_of_single_steps(mix: str) -> None:
    """Where undoing does nothing for a kind of cache, the text changes after the first rejection, or much later."""
    run = short_stock(mix)
    for pattern in (tuple(DEPTHS), tuple(reversed(DEPTHS))):
        got = speculate(MIXES[mix], CyclingDrafter(run.ids, VOCAB, pattern), max_tokens=EMITTED, draft_block_size=WIDTH)
        assert_equals_stock(got, run, EMITTED)
        assert sum(count > 0 for count in got.statistics.accepted_by_depth) >= WIDTH - 2
        assert got.statistics.accepted_by_depth[0] < got.statistics.proposed_by_depth[0]


# Sliding windows


class Noted(CyclingDrafter):
    """Notes where every round began: tokens read before it."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.starts: list[int] = []

    def script(self, state: ScriptedState, row: int, count: int) -> list[int]:
        self.starts.append(state.prompt_tokens + state.caught_up[row])
        return super().script(state, row, count)


@pytest.mark.part(1)
@pytest.mark.slow
@pytest.mark.parametrize("mix", RINGS)
def test_window_that_fills_up_inside_a_block_is_rolled_back_at_every_depth(mix: str) -> None:
    """The last free row of a window is taken by each position of a block in turn, with each number of tokens kept.

    That the prompt fitted into the window tells nothing: it fills up while generating.
    """
    seen = set()
    for length in range(3, 8):
        emitted = RINGS[mix] - length + WIDTH
        run = short_stock(mix, PROMPT[:length], emitted)
        for accepted in DEPTHS:
            drafter = Noted(run.ids, VOCAB, (accepted,))
            got = speculate(MIXES[mix], drafter, prompt=PROMPT[:length], max_tokens=emitted, draft_block_size=WIDTH)
            assert_equals_stock(got, run, emitted)
            seen |= {(RINGS[mix] - start, accepted) for start in drafter.starts}
    assert {(depth, accepted) for depth in range(1, WIDTH + 1) for accepted in DEPTHS} <= seen


@pytest.mark.part(2)
@pytest.mark.slow
@pytest.mark.parametrize("accepted", DEPTHS)
def test_window_after_rollbacks_holds_the_newest_tokens_in_order(accepted: int) -> None:
    """Read oldest first, it is the kept front and the newest rows of a cache that never dropped any.

    The first layer's rows depend on token and position alone, so a run without any window is the witness.
    """
    mix, run = MIXES["ring_with_keep"], stock("ring_with_keep", "greedy")
    for length in (9, 10, 13, 21, 34):
        drafter = CyclingDrafter(run.ids, VOCAB, (accepted,))
        ring = speculate(mix, drafter, length, max_tokens=-1, draft_block_size=WIDTH).cache[0]
        assert isinstance(ring, RotatingKVCache)
        whole = [KVCache() for _ in mix.model().layers]
        for token in (*PROMPT, *run.ids[:length]):
            mx.eval(mix.model()(mx.array([[token]]), cache=whole))
        rows, total = min(ring.max_size, len(PROMPT) + length), len(PROMPT) + length
        places = mx.array([*range(ring.keep), *range(total - rows + ring.keep, total)])
        for held, kept in ((ring.keys, whole[0].keys), (ring.values, whole[0].values)):
            assert_same_bits(ring._temporal_order(held)[..., :rows, :], mx.take(kept, places, axis=2), "the window")


@functools.cache
def one_layer() -> Any:
    """With a window of WINDOW rows, what it draws depends on the newest WINDOW tokens alone."""
    return tiny_model(num_hidden_layers=1, vocab_size=VOCAB, **{key: WIDE[key] for key in WIDE if "hidden" not in key})


@pytest.mark.parametrize("step", [2048, 5], ids=["prompt at once", "prompt in chunks"])
def test_tokens_that_left_the_window_have_no_say(step: int) -> None:
    """Rows appended several at a time must not let attention reach further back than single steps do."""
    newest = (*PROMPT, 50, 71, 4, 12)
    assert len(newest) == WINDOW
    prompts = {
        "one": (33, 60, 2, 9, *newest),
        "other": (81, 7, 90, 45, *newest),
        "nearer": (33, 60, 2, 9, 70, *newest[1:]),
    }
    rows = {}
    for name, prompt in prompts.items():
        options: dict[str, Any] = {"prefill_step_size": step, "max_tokens": 12}
        plain = list(generate_step(mx.array(prompt), one_layer(), prompt_cache=[RotatingKVCache(WINDOW)], **options))
        drafter = CyclingDrafter([token for token, _ in plain], VOCAB, (4, 1, 0, 2))
        options |= {"draft_model": drafter, "draft_block_size": WIDTH, "prompt_cache": [RotatingKVCache(WINDOW)]}
        rows[name] = list(generate_step(mx.array(prompt), one_layer(), **options))
        assert [token for token, _ in rows[name]] == [token for token, _ in plain]
    for (_, mine), (_, theirs) in zip(rows["one"], rows["other"], strict=True):
        assert_same_bits(mine, theirs, "log-probabilities after texts that differ before the window")
    assert bit_difference(rows["one"][0][1], rows["nearer"][0][1]) is not None


@pytest.mark.parametrize("mix", RINGS)
def test_speculation_goes_on_past_a_full_window(mix: str) -> None:
    """A window that cannot be trimmed is no reason to stop drafting, let alone to fail."""
    run = stock(mix, "greedy")
    got = speculate(MIXES[mix], CyclingDrafter(run.ids, VOCAB, (7,)), max_tokens=LONG, draft_block_size=WIDTH)
    assert_equals_stock(got, run, LONG)
    assert_accepts_as_scripted(got, "right", WIDTH)
    full = RINGS[mix] - len(PROMPT)
    assert sum(from_draft for _, _, from_draft in got.tokens[full:]) >= (LONG - full) * (WIDTH - 1) // WIDTH


# The drafter's own memory


class Checked(NgramDrafter):
    """After every round it must propose what a fresh drafter would that reads the same tokens at once."""

    rounds = 0

    def open(self, target: Target, start: int = 0) -> NgramState:
        return CheckedState(self)


class CheckedState(NgramState):
    def __init__(self, drafter: Checked) -> None:
        super().__init__(drafter)
        self.drafter = drafter
        self.text: list[int] = []

    def read_prompt(self, ids: Any, hidden: mx.array | None) -> None:
        """`catch_up` comes through here too."""
        self.text.extend(ids[0])
        super().read_prompt(ids, hidden)

    def propose(self, bonus: Sequence[int], count: int) -> Proposal:
        fresh = NgramState(self.drafter)
        fresh.read_prompt([self.text], None)
        proposal = super().propose(bonus, count)
        assert proposal.ids.tolist() == fresh.propose(bonus, count).ids.tolist()
        self.drafter.rounds += 1
        return proposal


@pytest.mark.parametrize("searched", [4, 8, 16])
def test_drafter_with_a_short_memory_survives_blocks_of_which_nothing_is_kept(searched: int) -> None:
    """Its window is long full when a block is rejected whole; what it then knows is still the committed text."""
    prompt, choice = (5, 17, 5, 42, 5, 17) * 3, CHOICES["top_p"]
    run = record_stock(MIXES["dense"], EMITTED, {EMITTED}, prompt=prompt, **choice())
    drafter = Checked(min_ngram=1, max_ngram=2, search_tokens=searched)
    got = speculate(MIXES["dense"], drafter, prompt=prompt, max_tokens=EMITTED, draft_block_size=WIDTH, **choice())
    assert_equals_stock(got, run, EMITTED)
    assert got.statistics.drafter_failures == 0, got.statistics.notes
    proposed = got.statistics.proposed_by_depth[0]
    assert drafter.rounds >= proposed > got.statistics.accepted_by_depth[0], "no block was rejected whole"


class Watched(Drafter):
    """An EAGLE-3 drafter that notes the length of its own cache beside the number of tokens it was shown."""

    def __init__(self, inner: Drafter) -> None:
        self.inner = inner
        self.kind, self.name, self.default_width, self.taps = inner.kind, inner.name, inner.default_width, inner.taps
        self.logs: list[list[tuple[str, int, int, int]]] = []

    def check(self, target: Target) -> None:
        self.inner.check(target)

    def open(self, target: Target, start: int = 0) -> DrafterState:
        state: Any = self.inner.open(target, start)
        log: list[tuple[str, int, int, int]] = []
        shown = 0

        def watch(name: str) -> None:
            method = getattr(state, name)

            def watched(ids: Any, extra: Any) -> Any:
                nonlocal shown
                result = method(ids, extra)
                shown += len(ids[0])
                (cache,) = state.cache_tree([])["draft"]
                log.append((name, shown, cache.offset, state.pending))
                return result

            setattr(state, name, watched)

        # A proposal's own pairs lie in an open round until the next of these.
        for name in ("read_prompt", "catch_up"):
            watch(name)
        self.logs.append(log)
        return state  # type: ignore[no-any-return]


@pytest.mark.part(3)
@pytest.mark.parametrize("mix", REQUIRED)
def test_drafters_own_cache_is_as_long_as_the_committed_text_after_every_round(mix: str) -> None:
    """For each of two requests by itself: rows of rejected proposals must not stay, and none may be missing."""
    run = short_stock(mix)
    watched = Watched(planted_drafter(mix))
    caches = [MIXES[mix].new_cache() for _ in range(2)]
    options = {"draft_model": watched, "draft_block_size": 4, "max_tokens": EMITTED, **MIXES[mix].warm_kv}
    steps = [generate_step(mx.array(PROMPT), MIXES[mix].model(), prompt_cache=cache, **options) for cache in caches]
    taken = [[next(steps[0]) for _ in range(5)], []]
    for pairs, step in zip(taken, steps, strict=True):
        pairs.extend(step)
        assert_same_output(pairs, run, EMITTED)
    for log in watched.logs:
        for name, shown, length, pending in log:
            assert length + pending == shown, f"after {name}: {length} pairs and {pending} waiting, {shown} tokens"
        assert log[-1][1] > len(PROMPT) + EMITTED - 6
    assert len(watched.logs) == 2
