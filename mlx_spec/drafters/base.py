"""What a drafter is: the contract between the round engine and everything that proposes tokens."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from mlx_spec.accept.proposal import Proposal

if TYPE_CHECKING:
    from mlx_spec.model.target import Target

Rows = Sequence[Sequence[int]]
"""Token ids on the host, one sequence per batch row: [B][n]."""


class DrafterState(abc.ABC):
    """Everything one request needs from a drafter. Owned by the request, never by the drafter.

    Between calls the state is a function of the committed tokens (and their true hidden states) alone.
    What a method draws from `mx.random` comes from a random state of the request's own; the thread's is never moved.
    """

    def look_at(self, caches: Sequence[Any]) -> None:
        """Told once, before anything else: the target's caches of this request. Default: of no interest.

        Args:
            caches: changed in place from round to round. May be read in `propose` alone, when no round is open on
                them and they hold exactly the committed tokens; never to be written or kept a part of.
        """
        del caches

    @abc.abstractmethod
    def read_prompt(self, ids: Rows, hidden: mx.array | None) -> None:
        """Read one prefill chunk.

        Args:
            ids: [B][T] token ids of the chunk.
            hidden: [B, T, K*H] the target's tapped states for these tokens, K = len(drafter.taps),
                concatenated in ascending layer order; None when the drafter taps nothing.
                Must not be kept beyond the last row.
        """

    @abc.abstractmethod
    def propose(self, bonus: Sequence[int], count: int) -> Proposal:
        """Propose what follows the bonus token.

        Args:
            bonus: [B] newest emitted token of each row; not yet read by `read_prompt` or `catch_up`.
            count: proposals wanted, >= 1.

        Returns:
            [B, n] int32 token ids in the target's vocabulary, lazy, with the log-probabilities they were chosen from
            where there are some. n == count, or 0 <= n <= count if the drafter declares `may_propose_fewer`.
        """

    @abc.abstractmethod
    def catch_up(self, ids: Rows, hidden: mx.array | None) -> None:
        """Read the verify inputs that stay in the target cache: the bonus and the accepted proposals.

        Args:
            ids: [B][n] token ids, n >= 1.
            hidden: [B, n, K*H] their tapped states; None when the drafter taps nothing.
        """

    @abc.abstractmethod
    def abort(self) -> None:
        """Drop what `propose` left behind. Safe to call twice."""

    def arrays(self) -> list[mx.array]:
        """The arrays the state holds, so that the engine can evaluate them. Default: none."""
        return []


class Drafter(abc.ABC):
    """Proposes tokens. Holds weights and settings only; two requests may share one drafter.

    Attributes:
        kind: what it is reported as; its family's word. A label: nothing is dispatched on it.
        name: what the statistics call it.
        default_width: verify width W (proposals + 1) used when the user names none.
        taps: 0-based decoder layers whose outputs it reads, ascending; empty for none.
        remembers: it works from a memory of the text, so what it was not shown makes it worse. What taps hidden
            states does so anyway, unless it `reads_caches`.
        reads_caches: it finds the text before the last token in the target's caches, whoever put it there.
        may_propose_fewer: whether `propose` may return fewer than `count` ids.
        trained_width: verify width its checkpoint was trained for, which is also the widest; None where none is.
        architecture: what its checkpoint is; None without a checkpoint of its own.
        methods: the values of SpeculativeConfig's `speculative_method` that its checkpoint is for; empty for any of
            its kind.
        remarks: sentences for the statistics of every run it drafts in.
        reads_ids: whether it reads the prompt's token ids. Where a prompt has embeddings in place of ids, it is shown
            no more of it than the last position's hidden states.
    """

    kind: str
    name: str
    default_width: int
    taps: tuple[int, ...] = ()
    remembers: bool = False
    reads_caches: bool = False
    may_propose_fewer: bool = False
    trained_width: int | None = None
    architecture: str | None = None
    methods: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()
    reads_ids: bool = True

    @abc.abstractmethod
    def check(self, target: Target) -> None:
        """Raise IncompatiblePair if this drafter cannot serve the target. Names both values."""

    def check_width(self, width: int) -> None:
        """Raise UnsupportedOption if this drafter cannot draft for rounds of this width. Default: any will do."""
        del width

    def check_tokenizer(self, tokenizer: Any | None) -> str:
        """Raise IncompatiblePair if the target's tokenizer gives ids another meaning than this drafter does.

        Args:
            tokenizer: the target's, with `get_vocab` and `get_added_vocab`; None when the caller has none.

        Returns:
            A sentence for the statistics; empty when there is nothing to tell. Default: a drafter made for one
            target has that target's tokens.
        """
        del tokenizer
        return ""

    @abc.abstractmethod
    def open(self, target: Target, start: int = 0) -> DrafterState:
        """Make the state for one request on this target.

        Args:
            target: the target the drafter was checked against.
            start: tokens already in the target's cache that the drafter will not be shown. Its first token has
                this absolute position.
        """
