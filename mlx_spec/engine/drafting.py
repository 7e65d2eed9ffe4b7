"""The drafter's side of a row: who proposes, and what it is shown."""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx

from mlx_spec.accept.proposal import Proposal
from mlx_spec.drafters.base import Drafter, DrafterState
from mlx_spec.engine.prompt import Prompt
from mlx_spec.model.target import Target
from mlx_spec.sampling import OwnDraws
from mlx_spec.stats import Statistics

_MOST_UNSHOWN = 64
"""Tokens that are kept from a drafter while nobody asks it: they are read in one forward, and their states are held."""


class Drafting(abc.ABC):
    """The drafter's side of one row.

    Attributes:
        name: what the statistics call it.
        taps: 0-based target layers whose outputs it wants, ascending.
        proposes: whether it may be asked; once it is False it stays so.
    """

    name: str
    taps: tuple[int, ...] = ()
    proposes: bool = True

    def look_at(self, caches: Sequence[Any]) -> None:
        """See `DrafterState.look_at`."""
        del caches

    @abc.abstractmethod
    def read_prompt(self, ids: list[int], hidden: mx.array | None) -> None:
        """See `DrafterState.read_prompt`; one row's."""

    @abc.abstractmethod
    def propose(self, bonus: int, count: int) -> Proposal | None:
        """1 <= n <= count proposals, or None for a plain step."""

    @abc.abstractmethod
    def show(self, ids: list[int], hidden: mx.array | None) -> None:
        """What was kept of a round: [n] ids, [1, n, K*H] their hidden states. The drafter may be shown it later."""

    @abc.abstractmethod
    def arrays(self) -> list[mx.array]:
        """The drafter's arrays, for evaluation."""


class NoDrafting(Drafting):
    """Nobody proposes."""

    name = "plain"
    proposes = False

    def read_prompt(self, ids: list[int], hidden: mx.array | None) -> None:
        del ids, hidden

    def propose(self, bonus: int, count: int) -> Proposal | None:
        del bonus, count
        return None

    def show(self, ids: list[int], hidden: mx.array | None) -> None:
        del ids, hidden

    def arrays(self) -> list[mx.array]:
        return []


def open_drafting(
    drafter: Drafter | None,
    target: Target,
    prompt: Prompt,
    start: int | None,
    statistics: Statistics,
    draws: OwnDraws,
) -> Drafting:
    """Make the drafter's side of one request. What the drafter will not see of the text is told.

    Args:
        drafter: who proposes; None for plain decoding.
        target: the model it proposes to.
        prompt: what will be read.
        start: tokens already in the target's caches, which the drafter has not seen; None where there are some that
            the caches do not count, so that it begins at position 0 all the same.
        statistics: where this and failures are told.
        draws: the random state that the drafter draws from in this request.

    Raises:
        IncompatiblePair: the drafter cannot serve this target.
    """
    if drafter is None:
        return NoDrafting()
    draws.lend(drafter.check, target)
    target.attach_taps(drafter.taps)
    if start != 0 and (drafter.taps or drafter.remembers) and not drafter.reads_caches:
        missed = "text" if start is None else f"{start} tokens"
        uncounted = "; how much it is, caches of this kind do not count" if start is None else ""
        statistics.note(f"the drafter has not seen the {missed} already in the cache{uncounted}")
    unseen = _unseen(drafter, prompt, statistics)
    return Drafted(drafter, draws.lend(drafter.open, target, (start or 0) + unseen), statistics, draws, unseen)


def _unseen(drafter: Drafter, prompt: Prompt, statistics: Statistics) -> int:
    """How many positions of the prompt a drafter cannot be shown, for want of their ids."""
    if prompt.embeddings is None or not drafter.reads_ids:
        return 0
    if prompt.has_ids:
        statistics.note(f"{drafter.name} reads the prompt's ids, not the input_embeddings the target reads")
        return 0
    # Whoever reads hidden states goes on from the last position's, which needs no id of its own.
    unseen = prompt.length - 1 if drafter.taps else prompt.length
    statistics.note(
        f"{drafter.name} has not seen {unseen} of the prompt's {prompt.length} positions: they are input_embeddings "
        "without ids"
    )
    return unseen


class Drafted(Drafting):
    """A drafter, of whatever kind.

    What the drafter does wrong costs proposals and is told; it never costs a token, nor moves the random state of
    the thread: every call into it goes through `draws.lend`.
    """

    def __init__(
        self, drafter: Drafter, state: DrafterState, statistics: Statistics, draws: OwnDraws, unseen: int = 0
    ) -> None:
        self.name = drafter.kind
        self.taps = drafter.taps
        self._drafter = drafter
        self._state = state
        self._statistics = statistics
        self._draws = draws
        self._unseen = unseen
        self._held: list[mx.array] = []
        self._unshown: tuple[list[int], list[mx.array]] = [], []

    def look_at(self, caches: Sequence[Any]) -> None:
        self._draws.lend(self._follow, self._state.look_at, caches)
        self._draws.lend(self._look)

    def read_prompt(self, ids: list[int], hidden: mx.array | None) -> None:
        skipped = min(self._unseen, len(ids))
        if skipped:
            self._unseen -= skipped
            ids = ids[skipped:]
            hidden = None if hidden is None else hidden[:, skipped:]
        if ids:
            self._draws.lend(self._follow, self._state.read_prompt, [ids], hidden)
            self._draws.lend(self._look)

    def show(self, ids: list[int], hidden: mx.array | None) -> None:
        unshown, states = self._unshown
        unshown.extend(ids)
        if hidden is not None:
            states.append(hidden)
        if len(unshown) >= _MOST_UNSHOWN:
            self._draws.lend(self._catch_up)
            self._draws.lend(self._look)

    def propose(self, bonus: int, count: int) -> Proposal | None:
        return self._draws.lend(self._propose, bonus, count)

    def arrays(self) -> list[mx.array]:
        return [*self._held, *self._unshown[1], self._draws.key] if self.proposes else []

    # Called while the random state is the drafter's; none of these borrows it again.

    def _propose(self, bonus: int, count: int) -> Proposal | None:
        self._catch_up()
        if not self.proposes:
            return None
        try:
            proposal = self._state.propose([bonus], count)
            self._check(proposal, count)
        except Exception as error:  # noqa: BLE001  a drafter's fault must never cost a token
            self._statistics.drafter_failed(error, "its round went on without proposals")
            self._abort()
            self._look()
            return None
        self._look()
        if proposal.ids.dtype != mx.int32:
            proposal = replace(proposal, ids=proposal.ids.astype(mx.int32))
        return proposal if proposal.count else None

    def _catch_up(self) -> None:
        ids, states = self._unshown
        if ids:
            self._unshown = [], []
            hidden = mx.concatenate(states, axis=1) if len(states) > 1 else next(iter(states), None)
            self._follow(self._state.catch_up, [ids], hidden)

    def _follow(self, read: Callable[..., None], *shown: Any) -> None:
        """Show the drafter something. One that missed some cannot be trusted with the rest of the request."""
        if not self.proposes:
            return
        try:
            read(*shown)
        except Exception as error:  # noqa: BLE001  a drafter's fault must never cost a token
            self._give_up(error)
            self._abort()

    def _look(self) -> None:
        """What the state holds may be other arrays now."""
        try:
            self._held = self._state.arrays() if self.proposes else []
        except Exception as error:  # noqa: BLE001  a drafter's fault must never cost a token
            self._give_up(error)

    def _abort(self) -> None:
        try:
            self._state.abort()
        except Exception as error:  # noqa: BLE001  a drafter's fault must never cost a token
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        self.proposes, self._held = False, []
        self._statistics.drafter_failed(error, "the rest of the text was decoded plainly")

    def _check(self, proposal: Proposal, count: int) -> None:
        fewer = self._drafter.may_propose_fewer
        wanted = f"[1, 0..{count}]" if fewer else f"[1, {count}]"
        ids = proposal.ids if isinstance(proposal, Proposal) else None
        if not isinstance(ids, mx.array) or ids.ndim != 2 or ids.shape[0] != 1:
            got = type(proposal).__name__ if ids is None else getattr(ids, "shape", type(ids).__name__)
            raise ValueError(f"a Proposal with an integer array of shape {wanted} is wanted, got {got}")
        if not (ids.shape[1] == count or (fewer and ids.shape[1] < count)):
            raise ValueError(f"proposals must have shape {wanted}, got {ids.shape}")
        if not mx.issubdtype(ids.dtype, mx.integer):
            raise ValueError(f"proposals must be integers, got {ids.dtype}")
