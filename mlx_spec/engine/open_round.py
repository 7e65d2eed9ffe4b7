"""One round that is under way: what it holds, and how far it is."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import mlx.core as mx

from mlx_spec.accept.proposal import Proposal
from mlx_spec.accept.walks import Walk
from mlx_spec.cache.transaction import SpeculativeCacheTransaction
from mlx_spec.model.target import TargetOutput
from mlx_spec.records import RoundRecord
from mlx_spec.sampling import Sampling, random_state
from mlx_spec.verify.routes import Route


class First(NamedTuple):
    """The last position of a prompt of embeddings: [1] its id or [0] none, [1, H] what is read, how it is chosen."""

    tokens: mx.array
    embeddings: mx.array | None
    sampling: Sampling


class HostRead:
    """The one host read of a round: what the walks of all its rows have packed."""

    def __init__(self) -> None:
        self._walks: list[Walk] = []
        self._done = False

    def add(self, walk: Walk) -> None:
        """What it has packed is to be read along."""
        if walk.packed is not None:
            self._walks.append(walk)

    def make(self) -> None:
        """Wait for the device and tell every walk what it asked for. Done once."""
        if self._done:
            return
        if len(self._walks) == 1:
            walk = self._walks[0]
            walk.receive(walk.packed.tolist())  # type: ignore[union-attr, arg-type]
        elif self._walks:
            parts = [walk.packed.astype(mx.int32) for walk in self._walks]  # type: ignore[union-attr]
            read: list[int] = mx.concatenate(parts).tolist()  # type: ignore[assignment]
            end = 0
            for walk, part in zip(self._walks, parts, strict=True):
                start, end = end, end + part.size
                walk.receive(read[start:end])
        self._done = True


@dataclass(kw_only=True)
class OpenRound:
    """A row's round from before its transaction opens to its end.

    Attributes:
        inputs: [1, W] what is verified.
        width: W.
        proposal: what the drafter gave for it; None where it gave nothing.
        ids: the verify inputs that are part of the text or about to be: the bonus, then accepted proposals. Those
            handed out are counted by the transaction, as `certain`: they stay in the cache however the run ends.
        key: [2] the random state before the round; None when the sampler draws nothing.
        caches: the caches as the round found them; committing may put converted ones in their places.
        reads_prompt: its bonus is the prompt's last token.
        stage_ms: host milliseconds per stage.
        walk: the target's choices, once its forward was built.
        read: the host read that tells them, shared with the other rows of the round.
        first: what is read in place of `inputs`, where the prompt's last position has an embedding of its own.
        lent: the random state as the caller got it with a token, while it has it; None where nothing was drawn ahead.
        cut: somebody else drew since. What was chosen for later positions is not what the one-token loop would choose.
        thread: the thread that dispatched it, whose random state its keys belong to.
        kept: it was committed, and can still be revoked.
        record: what the statistics are told of it, once it is over.
        read_again: those of its tokens that were read again, because it could not be committed.
    """

    tx: SpeculativeCacheTransaction
    inputs: mx.array
    width: int
    proposal: Proposal | None
    key: mx.array | None
    caches: list[Any]
    stage_ms: dict[str, float]
    route: Route
    output: TargetOutput | None = None
    walk: Walk | None = None
    read: HostRead | None = None
    ids: list[int] = field(default_factory=list)
    first: First | None = None
    reads_prompt: bool = False
    kept: bool = False
    record: RoundRecord | None = None
    read_again: int = 0
    lent: mx.array | None = None
    cut: bool = False
    thread: int = field(default_factory=threading.get_ident)

    @property
    def out(self) -> int:
        """How many of its inputs are part of the text."""
        count: int = self.tx.certain  # type: ignore[assignment]
        return count

    @property
    def choices(self) -> Walk:
        """The walk of a round that was dispatched."""
        assert self.walk is not None
        return self.walk

    @property
    def is_foreign(self) -> bool:
        """Whether this thread is another one, or its random state was moved by somebody else: nobody's to move then."""
        moved = self.lent is not None and random_state() is not self.lent
        return self.cut or moved or self.thread != threading.get_ident()

    def lend_state(self, retained: int) -> None:
        """The caller is going to have the thread: leave the random state where the one-token loop has it."""
        lent = not self.cut and self.choices.lend_state(retained)
        self.lent = random_state() if lent else None

    def take_state_back(self) -> None:
        """The caller asked for the next token."""
        self.cut = self.cut or (self.lent is not None and self.is_foreign)
        self.lent = None

    def keep(self) -> None:
        """Commit the bonus, which is about to become part of the text. Until it is, that can be revoked."""
        self.tx.commit(1, revocable=True)
        self.kept = True

    def rewind(self) -> None:
        """Put the random state where the one-token loop has it after what is out."""
        if self.walk is not None and not self.is_foreign:
            self.walk.rewind(self.out)
