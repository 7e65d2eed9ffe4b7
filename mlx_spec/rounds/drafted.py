"""The round loop of a request with a drafter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from mlx_spec.drafters.base import Drafter, DrafterState, Rows
from mlx_spec.model.target import Target
from mlx_spec.request import Prompt
from mlx_spec.rounds.base import RoundLoop
from mlx_spec.rounds.plain import PlainLoop
from mlx_spec.sampling import OwnDraws
from mlx_spec.stats import Statistics


def open_loop(
    drafter: Drafter | None,
    target: Target,
    prompt: Prompt,
    start: int | None,
    statistics: Statistics,
    draws: OwnDraws,
) -> RoundLoop:
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
        return PlainLoop()
    draws.lend(drafter.check, target)
    target.attach_taps(drafter.taps)
    if start != 0 and (drafter.taps or drafter.remembers) and not drafter.reads_caches:
        missed = "text" if start is None else f"{start} tokens"
        uncounted = "; how much it is, caches of this kind do not count" if start is None else ""
        statistics.note(f"the drafter has not seen the {missed} already in the cache{uncounted}")
    unseen = _unseen(drafter, prompt, statistics)
    return DraftedLoop(drafter, draws.lend(drafter.open, target, (start or 0) + unseen), statistics, draws, unseen)


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


class DraftedLoop(RoundLoop):
    """A loop with a drafter, of whatever kind.

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
        self._able = True
        self._unseen = unseen

    def look_at(self, caches: Sequence[Any]) -> None:
        try:
            self._draws.lend(self._state.look_at, caches)
        except Exception as error:  # noqa: BLE001  a drafter's fault must never cost a token
            self._give_up(error)

    def read_prompt(self, ids: Rows, hidden: mx.array | None) -> None:
        skipped = min(self._unseen, len(ids[0]))
        if skipped:
            self._unseen -= skipped
            ids = [row[skipped:] for row in ids]
            hidden = None if hidden is None else hidden[:, skipped:]
        if ids[0]:
            self._follow(self._state.read_prompt, ids, hidden)

    def catch_up(self, ids: Rows, hidden: mx.array | None) -> bool:
        self._follow(self._state.catch_up, ids, hidden)
        return self._able

    def propose(self, bonus: int, count: int) -> mx.array | None:
        if not self._able:
            return None
        try:
            proposals = self._draws.lend(self._state.propose, [bonus], count)
            self._check(proposals, count)
        except Exception as error:  # noqa: BLE001  a drafter's fault must never cost a token
            self._statistics.drafter_failed(error, "its round went on without proposals")
            self._abort()
            return None
        return proposals.astype(mx.int32) if proposals.shape[1] else None

    def arrays(self) -> list[mx.array]:
        try:
            held = self._draws.lend(self._state.arrays) if self._able else []
        except Exception as error:  # noqa: BLE001  a drafter's fault must never cost a token
            self._give_up(error)
            return []
        return [*held, self._draws.key] if self._able else []

    def _follow(self, read: Callable[[Rows, Any], None], ids: Rows, hidden: mx.array | None) -> None:
        """Show the drafter tokens. One that missed some cannot be trusted with the rest of the request."""
        if not self._able:
            return
        try:
            self._draws.lend(read, ids, hidden)
        except Exception as error:  # noqa: BLE001  a drafter's fault must never cost a token
            self._give_up(error)
            self._abort()

    def _give_up(self, error: Exception) -> None:
        self._able = False
        self._statistics.drafter_failed(error, "the rest of the text was decoded plainly")

    def _abort(self) -> None:
        try:
            self._draws.lend(self._state.abort)
        except Exception as error:  # noqa: BLE001  a drafter's fault must never cost a token
            self._give_up(error)

    def _check(self, proposals: mx.array, count: int) -> None:
        fewer = self._drafter.may_propose_fewer
        wanted = f"[1, 0..{count}]" if fewer else f"[1, {count}]"
        if not isinstance(proposals, mx.array) or proposals.ndim != 2 or proposals.shape[0] != 1:
            got = getattr(proposals, "shape", type(proposals).__name__)
            raise ValueError(f"proposals must be an integer array of shape {wanted}, got {got}")
        if not (proposals.shape[1] == count or (fewer and proposals.shape[1] < count)):
            raise ValueError(f"proposals must have shape {wanted}, got {proposals.shape}")
        if not mx.issubdtype(proposals.dtype, mx.integer):
            raise ValueError(f"proposals must be integers, got {proposals.dtype}")
