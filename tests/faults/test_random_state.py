"""The random state is the caller's: whatever a drafter draws, seeds or raises, text and state are stock's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import pytest

from mlx_spec.accept.proposal import Proposal
from mlx_spec.drafters.base import Drafter, DrafterState, Rows
from mlx_spec.generate import generate_step
from tests.host_reads import count_host_reads
from tests.oracle import rng_key
from tests.rounds.runs import CHOICES, assert_equals_stock, record_stock, speculate
from tests.tiny import MIXES, PROMPT, VOCAB

pytestmark = pytest.mark.faults

EMITTED = 9


def in_place() -> None:
    mx.random.state[0][:] = mx.array([7, 9], mx.uint32)


DRAWS: dict[str, Callable[[], Any]] = {
    "randint": lambda: mx.random.randint(0, VOCAB, (3,)),
    "normal": lambda: mx.random.normal((2,)),
    "seed": lambda: mx.random.seed(99),
    "written": in_place,
}


class DrawingDrafter(Drafter):
    """Draws in every method; raises in one of them afterwards. Its proposals are drawn, too.

    Attributes:
        drawn: what `propose` drew, in order, one list per request.
    """

    kind = name = "drawing"
    default_width = 4

    def __init__(self, draw: str = "randint", raising: str = "") -> None:
        self._draw = DRAWS[draw]
        self._raising = raising
        self.drawn: list[list[mx.array]] = []

    def enter(self, stage: str) -> None:
        self._draw()
        if stage in self._raising.split("+"):
            raise RuntimeError(f"told to fail in {stage}")

    def check(self, target: Any) -> None:
        self._draw()

    def check_width(self, width: int) -> None:
        self._draw()

    def check_tokenizer(self, tokenizer: Any) -> str:
        self._draw()
        return ""

    def open(self, target: Any, start: int = 0) -> DrafterState:
        self._draw()
        self.drawn.append([])
        return DrawingState(self, self.drawn[-1])


class DrawingState(DrafterState):
    def __init__(self, drafter: DrawingDrafter, drawn: list[mx.array]) -> None:
        self._drafter = drafter
        self._drawn = drawn

    def look_at(self, caches: Sequence[Any]) -> None:
        self._drafter.enter("look_at")

    def read_prompt(self, ids: Rows, hidden: mx.array | None) -> None:
        self._drafter.enter("read_prompt")

    def propose(self, bonus: Sequence[int], count: int) -> Proposal:
        self._drafter.enter("propose")
        self._drawn.append(mx.random.randint(0, VOCAB, (1, count)))
        return Proposal(self._drawn[-1])

    def catch_up(self, ids: Rows, hidden: mx.array | None) -> None:
        self._drafter.enter("catch_up")

    def abort(self) -> None:
        self._drafter.enter("abort")

    def arrays(self) -> list[mx.array]:
        self._drafter.enter("arrays")
        return []


@pytest.mark.part(4)
@pytest.mark.parametrize("choice", ["greedy", "top_p"])
@pytest.mark.parametrize("draw", DRAWS)
@pytest.mark.parametrize("width", range(1, 7))
def test_a_drafter_that_draws_moves_neither_text_nor_random_state(width: int, draw: str, choice: str) -> None:
    run = record_stock(MIXES["dense"], EMITTED, {EMITTED}, **CHOICES[choice]())
    drafter = DrawingDrafter(draw)
    got = speculate(MIXES["dense"], drafter, max_tokens=EMITTED, draft_block_size=width, **CHOICES[choice]())
    assert_equals_stock(got, run, EMITTED)


@pytest.mark.part(4)
@pytest.mark.parametrize("choice", ["top_p", "greedy"])
@pytest.mark.parametrize("stage", ["look_at", "read_prompt", "propose", "catch_up", "arrays", "propose+abort"])
def test_a_drafter_that_raises_after_it_drew_moves_neither_text_nor_random_state(stage: str, choice: str) -> None:
    run = record_stock(MIXES["dense"], EMITTED, {EMITTED}, **CHOICES[choice]())
    drafter = DrawingDrafter("randint", stage)
    got = speculate(MIXES["dense"], drafter, max_tokens=EMITTED, draft_block_size=3, **CHOICES[choice]())
    assert_equals_stock(got, run, EMITTED)
    assert got.statistics.drafter_failures > 0


@pytest.mark.parametrize("draw", ["randint", "seed"])
def test_a_run_that_is_closed_in_a_block_leaves_stocks_random_state_whatever_was_drawn(draw: str) -> None:
    lengths = (1, 2, 5)
    run = record_stock(MIXES["dense"], EMITTED, lengths, **CHOICES["top_p"]())
    for length in lengths:
        got = speculate(MIXES["dense"], DrawingDrafter(draw), length, draft_block_size=5, **CHOICES["top_p"]())
        assert_equals_stock(got, run, length)


def test_keeping_the_random_state_reads_nothing_on_the_host() -> None:
    counts, run = [], {"max_tokens": EMITTED, "draft_block_size": 3}
    speculate(MIXES["dense"], DrawingDrafter("normal"), **run)  # certifies, and trials read
    for draw in ("normal", "randint"):
        drafter = DrawingDrafter(draw)
        with count_host_reads() as reads:
            got = speculate(MIXES["dense"], drafter, **run)
        # One read of the prompt, one for every round; the last round's token is handed out before it is read.
        counts.append(reads.count - got.statistics.rounds)
    assert counts == [1, 1]


def proposals(prompt: Sequence[int], seed: int, drafter: DrawingDrafter) -> list[list[int]]:
    mx.random.seed(seed)
    list(generate_step(mx.array(prompt), MIXES["dense"].model(), draft_model=drafter, draft_block_size=3, max_tokens=5))
    return [each.tolist()[0] for each in drafter.drawn[-1]]


def test_a_drafters_draws_come_from_its_request_and_go_on_from_call_to_call() -> None:
    drafter, other = DrawingDrafter(), list(reversed(PROMPT))
    first = proposals(PROMPT, 3, drafter)
    assert len({tuple(each) for each in first if len(each) == 2}) > 1, "every round drew the same"
    assert proposals(PROMPT, 3, drafter) == first, "the same seed does not repeat"
    assert proposals(PROMPT, 4, drafter) != first, "another seed draws the same"
    assert proposals(other, 3, drafter) != first, "another request draws the same"


def test_requests_at_once_on_one_drafter_draw_each_its_own() -> None:
    prompts = [PROMPT, list(reversed(PROMPT))]
    alone = [proposals(prompt, 3, DrawingDrafter()) for prompt in prompts]
    drafter = DrawingDrafter()
    mx.random.seed(3)
    before = rng_key()
    runs = [
        generate_step(mx.array(p), MIXES["dense"].model(), draft_model=drafter, draft_block_size=3, max_tokens=5)
        for p in prompts
    ]
    for _ in range(5):
        for run in runs:
            next(run)
    assert rng_key() == before
    assert [[each.tolist()[0] for each in drawn] for drawn in drafter.drawn] == alone
