"""Drafters that are right, wrong, broken or random exactly as a test tells them.

All know the right continuation (the oracle's ids) and find their place in it by counting the ids `catch_up` gave
them, which is itself part of the contract under test: a miscounting engine makes a right drafter wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import mlx.core as mx
import numpy as np

from mlx_spec.accept.proposal import Proposal
from mlx_spec.drafters.base import Drafter, DrafterState, Rows

if TYPE_CHECKING:
    from mlx_spec.model.target import Target

Stage = Literal["open", "read_prompt", "propose", "catch_up"]


class ScriptedDrafter(Drafter):
    """Proposes what `script` returns. Holds the oracle's continuation, taps nothing.

    Args:
        right: ids the target will emit, one sequence for B = 1 or a list with one per batch row. Should reach
            `default_width` past the last token a test generates; beyond its end, id 0 is taken for right.
        vocab: size of the target's vocabulary.
        width: what `default_width` declares.
    """

    kind = "ngram"
    name = "scripted"
    default_width = 4

    def __init__(self, right: Sequence[int] | Sequence[Sequence[int]], vocab: int, width: int = 4) -> None:
        rows = [right] if not right or isinstance(right[0], int) else right
        self.right: list[list[int]] = [[int(token) for token in row] for row in rows]
        self.vocab = vocab
        self.default_width = width
        self.name = type(self).__name__

    def check(self, target: Target) -> None:
        """Fits every target."""

    def open(self, target: Target, start: int = 0) -> DrafterState:
        """A fresh state: call and round counters start at 0 for every request."""
        return ScriptedState(self)

    def script(self, state: ScriptedState, row: int, count: int) -> list[int]:
        """Ids to propose for one row; `state.round` says which call this is. Default: the right ones."""
        return state.right(row, count)

    def before(self, stage: Stage, call: int) -> None:
        """Called at the start of every stage with the number of earlier calls of it. May raise."""

    def a_wrong(self, token: int) -> int:
        """Some id of the vocabulary that is not `token`."""
        return (token + 1) % self.vocab


class ScriptedState(DrafterState):
    """Counts, and asks its drafter's script."""

    def __init__(self, drafter: ScriptedDrafter) -> None:
        self.drafter = drafter
        self.prompt_tokens = 0
        self.caught_up = [0] * len(drafter.right)
        self.calls: dict[Stage, int] = {}
        self.rng = np.random.default_rng(0)
        self._enter("open")

    @property
    def round(self) -> int:
        """Index of the running `propose` call."""
        return self.calls.get("propose", 0) - 1

    def right(self, row: int, count: int) -> list[int]:
        """What the target will choose after the row's bonus token."""
        ids = self.drafter.right[row]
        start = self.caught_up[row] + 1
        return (ids[start : start + count] + [0] * count)[:count]

    def read_prompt(self, ids: Rows, hidden: mx.array | None) -> None:
        self._enter("read_prompt")
        self.prompt_tokens += len(ids[0])

    def propose(self, bonus: Sequence[int], count: int) -> Proposal:
        self._enter("propose")
        ids = [self.drafter.script(self, row, count) for row in range(len(bonus))]
        return Proposal(mx.array(ids, dtype=mx.int32))

    def catch_up(self, ids: Rows, hidden: mx.array | None) -> None:
        self._enter("catch_up")
        for row, kept in enumerate(ids):
            self.caught_up[row] += len(kept)

    def abort(self) -> None:
        """Nothing was left behind by `propose`."""

    def _enter(self, stage: Stage) -> None:
        call = self.calls.get(stage, 0)
        self.calls[stage] = call + 1
        self.drafter.before(stage, call)


class RightDrafter(ScriptedDrafter):
    """Every proposal is what the target will choose."""


class WrongDrafter(ScriptedDrafter):
    """No proposal is what the target will choose."""

    def script(self, state: ScriptedState, row: int, count: int) -> list[int]:
        return [self.a_wrong(token) for token in state.right(row, count)]


class CyclingDrafter(ScriptedDrafter):
    """Round r has exactly `pattern[r % len(pattern)]` proposals accepted, or all if that is more than there are.

    What follows the wrong proposal is right again: an acceptance that does not stop at the first miss shows.
    """

    def __init__(
        self, right: Sequence[int] | Sequence[Sequence[int]], vocab: int, pattern: Sequence[int], width: int = 4
    ) -> None:
        super().__init__(right, vocab, width)
        self.pattern = tuple(pattern)

    def script(self, state: ScriptedState, row: int, count: int) -> list[int]:
        proposals = state.right(row, count)
        accepted = self.pattern[state.round % len(self.pattern)]
        if accepted < count:
            proposals[accepted] = self.a_wrong(proposals[accepted])
        return proposals


class AlternatingDrafter(CyclingDrafter):
    """Rounds 0, 2, 4, ... are right throughout; rounds 1, 3, 5, ... miss with the first proposal."""

    def __init__(self, right: Sequence[int] | Sequence[Sequence[int]], vocab: int, width: int = 4) -> None:
        super().__init__(right, vocab, (2**31, 0), width)


class RandomDrafter(ScriptedDrafter):
    """Each proposal is right with probability `p_right`, else a random id. Draws from a numpy RNG of its own."""

    def __init__(
        self,
        right: Sequence[int] | Sequence[Sequence[int]],
        vocab: int,
        seed: int,
        p_right: float = 0.6,
        width: int = 4,
    ) -> None:
        super().__init__(right, vocab, width)
        self.seed = seed
        self.p_right = p_right

    def open(self, target: Target, start: int = 0) -> DrafterState:
        state = ScriptedState(self)
        state.rng = np.random.default_rng(self.seed)
        return state

    def script(self, state: ScriptedState, row: int, count: int) -> list[int]:
        hits = state.rng.random(count) < self.p_right
        noise = state.rng.integers(0, self.vocab, count)
        right = state.right(row, count)
        return [int(right[i]) if hits[i] else int(noise[i]) for i in range(count)]


class DrafterFault(RuntimeError):
    """What a raising drafter raises; no other code does."""


class RaisingDrafter(ScriptedDrafter):
    """Right, but raises at `stage`: at its call number `at`, or at every call if `at` is None."""

    def __init__(
        self,
        right: Sequence[int] | Sequence[Sequence[int]],
        vocab: int,
        stage: Stage,
        at: int | None = None,
        width: int = 4,
    ) -> None:
        super().__init__(right, vocab, width)
        self.stage = stage
        self.at = at

    def before(self, stage: Stage, call: int) -> None:
        if stage == self.stage and self.at in (None, call):
            raise DrafterFault(f"told to fail in {stage}, call {call}")


class OutOfRangeDrafter(ScriptedDrafter):
    """Every other proposal is right; the ones between are ids no target has, a different one each time."""

    def script(self, state: ScriptedState, row: int, count: int) -> list[int]:
        absent = (-1, self.vocab, self.vocab + 5, 2**31 - 1, -(2**31))
        proposals = state.right(row, count)
        for i in range(state.round % 2, count, 2):
            proposals[i] = absent[(state.round + i) % len(absent)]
        return proposals


class WrongCountDrafter(ScriptedDrafter):
    """Right ids, but `surplus` too many (negative: too few) each time, without declaring `may_propose_fewer`."""

    def __init__(
        self, right: Sequence[int] | Sequence[Sequence[int]], vocab: int, surplus: int, width: int = 4
    ) -> None:
        super().__init__(right, vocab, width)
        self.surplus = surplus

    def script(self, state: ScriptedState, row: int, count: int) -> list[int]:
        return state.right(row, max(0, count + self.surplus))


class FewerDrafter(ScriptedDrafter):
    """Declares `may_propose_fewer` and cycles through 0, 1, 2, ... right proposals, up to what was asked."""

    may_propose_fewer = True

    def script(self, state: ScriptedState, row: int, count: int) -> list[int]:
        return state.right(row, state.round % (count + 1))


class RecordingDrafter(Drafter):
    """Wraps a drafter and keeps, per request, what it was called with.

    Attributes:
        logs: one `FeedLog` per opened state, in order of opening.
    """

    def __init__(self, inner: Drafter) -> None:
        self.inner = inner
        self.kind = inner.kind
        self.name = f"recording {inner.name}"
        self.default_width = inner.default_width
        self.taps = inner.taps
        self.may_propose_fewer = inner.may_propose_fewer
        self.logs: list[FeedLog] = []

    @property
    def log(self) -> FeedLog:
        """The log of the only request there was."""
        (log,) = self.logs
        return log

    def check(self, target: Target) -> None:
        self.inner.check(target)

    def open(self, target: Target, start: int = 0) -> DrafterState:
        log = FeedLog()
        self.logs.append(log)
        return _RecordingState(self.inner.open(target, start), log)


class FeedLog:
    """Calls one drafter state received: `(stage, value)` pairs, ids as lists, in order."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []
        self.hidden_shapes: list[tuple[int, ...] | None] = []
        self.proposals: list[mx.array] = []

    @property
    def proposed(self) -> list[Any]:
        """[B][n] ids of every proposal, in order."""
        return [ids.tolist() for ids in self.proposals]

    def rows(self, *stages: str) -> list[list[int]]:
        """[B] ids received in these stages, joined."""
        joined: list[list[int]] = []
        for stage, ids in self.calls:
            if stage in stages:
                joined = joined or [[] for _ in ids]
                for row, part in zip(joined, ids, strict=True):
                    row.extend(part)
        return joined

    def of(self, stage: str) -> list[Any]:
        """The values of one stage's calls."""
        return [value for name, value in self.calls if name == stage]

    def assert_fed_exactly(self, prompt: Sequence[int], emitted: Sequence[int], row: int = 0) -> None:
        """The prompt was read once, then the emitted ids in order, each bonus being the next of them.

        The end of `emitted` may be missing: nobody has to catch up with what no proposal will follow. A draft may
        be under way when a run is closed, so give the oracle's ids, which reach further than what was handed out.
        """
        read = self.rows("read_prompt")
        assert read, "read_prompt was never called"
        assert read[row] == list(prompt), f"read_prompt gave {read[row]}, want {list(prompt)}"
        caught = 0
        for number, (stage, value) in enumerate(self.calls):
            if stage == "read_prompt":
                assert caught == 0, f"call {number}: read_prompt after catch_up"
            elif stage == "catch_up":
                want = list(emitted[caught : caught + len(value[row])])
                assert value[row], f"call {number}: catch_up with no ids"
                assert value[row] == want, f"call {number}: catch_up gave {value[row]} at {caught}, want {want}"
                caught += len(value[row])
            elif stage == "propose":
                bonus, count = value
                assert count >= 1, f"call {number}: propose was asked for {count} ids"
                assert caught < len(emitted), f"call {number}: propose after everything emitted was caught up with"
                assert bonus[row] == emitted[caught], (
                    f"call {number}: bonus {bonus[row]} at {caught}, want {emitted[caught]}"
                )


class _RecordingState(DrafterState):
    def __init__(self, inner: DrafterState, log: FeedLog) -> None:
        self.inner = inner
        self.log = log

    def read_prompt(self, ids: Rows, hidden: mx.array | None) -> None:
        self._note("read_prompt", ids, hidden)
        self.inner.read_prompt(ids, hidden)

    def propose(self, bonus: Sequence[int], count: int) -> Proposal:
        self.log.calls.append(("propose", (list(bonus), count)))
        proposal = self.inner.propose(bonus, count)
        self.log.proposals.append(proposal.ids)
        return proposal

    def catch_up(self, ids: Rows, hidden: mx.array | None) -> None:
        self._note("catch_up", ids, hidden)
        self.inner.catch_up(ids, hidden)

    def abort(self) -> None:
        self.log.calls.append(("abort", None))
        self.inner.abort()

    def arrays(self) -> list[mx.array]:
        return self.inner.arrays()

    def _note(self, stage: str, ids: Rows, hidden: mx.array | None) -> None:
        self.log.calls.append((stage, [list(row) for row in ids]))
        self.log.hidden_shapes.append(None if hidden is None else tuple(hidden.shape))


class TappingDrafter(ScriptedDrafter):
    """Right, and asks for the outputs of some layers.

    Keeps every row it is given, which a real drafter must not: a test compares them with the stock model's.

    Attributes:
        states: one per request, in order of opening; `states[i].hidden` is [B, n, K*H] of all ids so far.
    """

    kind = "dflash"

    def __init__(
        self, right: Sequence[int] | Sequence[Sequence[int]], vocab: int, taps: Sequence[int], width: int = 4
    ) -> None:
        super().__init__(right, vocab, width)
        self.taps = tuple(taps)
        self.states: list[TappingState] = []

    def open(self, target: Target, start: int = 0) -> DrafterState:
        self.states.append(TappingState(self))
        return self.states[-1]


class TappingState(ScriptedState):
    """Checks that every id comes with its row, and keeps both."""

    def __init__(self, drafter: TappingDrafter) -> None:
        super().__init__(drafter)
        self.ids: list[list[int]] = [[] for _ in drafter.right]
        self.shapes: list[tuple[int, ...]] = []
        self.chunks: list[mx.array] = []

    @property
    def hidden(self) -> mx.array:
        """[B, n, K*H] everything read so far."""
        return mx.concatenate(self.chunks, axis=1)

    def read_prompt(self, ids: Rows, hidden: mx.array | None) -> None:
        super().read_prompt(ids, hidden)
        self._keep(ids, hidden)

    def catch_up(self, ids: Rows, hidden: mx.array | None) -> None:
        super().catch_up(ids, hidden)
        self._keep(ids, hidden)

    def arrays(self) -> list[mx.array]:
        return list(self.chunks)

    def _keep(self, ids: Rows, hidden: mx.array | None) -> None:
        assert hidden is not None, f"asked for layers {self.drafter.taps} and was given no hidden states"
        assert hidden.ndim == 3, f"hidden states have shape {hidden.shape}, want [B, n, K*H]"
        assert hidden.shape[:2] == (len(ids), len(ids[0])), f"{hidden.shape} for ids {[len(row) for row in ids]}"
        for row, part in zip(self.ids, ids, strict=True):
            row.extend(part)
        self.shapes.append(tuple(hidden.shape))
        self.chunks.append(hidden)
