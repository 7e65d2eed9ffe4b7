"""A drafter made of one Python function."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import mlx.core as mx

from mlx_spec.accept.proposal import Proposal
from mlx_spec.arguments import FUNCTION, refusal, require, whole_number
from mlx_spec.drafters.base import Drafter, DrafterState, Rows
from mlx_spec.drafters.ngram import NO_TOKEN
from mlx_spec.model.target import Target

DraftFunction = Callable[[list[int], int], list[int]]
"""(ids so far, the newest last; count) -> exactly `count` ids that may follow, or [] for none."""

_INT32 = range(-(2**31), 2**31)


class CallableDrafter(Drafter):
    """Proposes what a function returns.

    Example:
        >>> drafter = CallableDrafter(lambda ids, count: [ids[-1] + 1 + i for i in range(count)])
        >>> drafter.kind, drafter.default_width
        ('callable', 4)
    """

    kind = "callable"
    remembers = True
    may_propose_fewer = True

    def __init__(self, fn: DraftFunction, *, name: str = "callable", default_width: int = 4) -> None:
        """Wrap a function.

        Args:
            fn: gets all ids the drafter was shown (with a warm cache: the new ones) and the bonus token as a list
                of its own, and the number of ids wanted. It must return a list of exactly that many ints, or an
                empty one. Ids that are no token of the target are never accepted.
            name: what the statistics call it.
            default_width: verify width W when the user names none.

        Raises:
            InvalidRequest: one of them is of another kind, or a width below 2.
        """
        require("fn", fn, FUNCTION, "a function (ids, count) to a list of ids")
        require("name", name, str, "a word for the statistics")
        if whole_number("default_width", default_width, "a verify width, at least 2") < 2:
            raise refusal("default_width", "a verify width, at least 2", default_width)
        self.fn = fn
        self.name = name
        self.default_width = default_width

    def check(self, target: Target) -> None:
        """Any target will do."""

    def open(self, target: Target, start: int = 0) -> CallableState:
        """Make the state for one request; see `Drafter.open`."""
        del target, start
        return CallableState(self.fn)


class CallableState(DrafterState):
    """The ids of one request, for the function to look at."""

    def __init__(self, fn: DraftFunction) -> None:
        self._fn = fn
        self._ids: list[list[int]] = []

    def read_prompt(self, ids: Rows, hidden: mx.array | None) -> None:
        """Append to the ids the function sees."""
        del hidden
        if not self._ids:
            self._ids = [[] for _ in ids]
        for known, new in zip(self._ids, ids, strict=True):
            known.extend(new)

    def catch_up(self, ids: Rows, hidden: mx.array | None) -> None:
        """Append to the ids the function sees."""
        self.read_prompt(ids, hidden)

    def propose(self, bonus: Sequence[int], count: int) -> Proposal:
        """Ask the function, once per row; [B] -> [B, n] int32 with n == count, or n == 0 when no row has a proposal.

        Raises:
            ValueError: the function returned something else than a list of `count` ints or an empty list.
            Exception: whatever the function raises.

        Cost:
            Each call gets a copy of the ids: O(ids so far) on the host.
        """
        known = self._ids or [[] for _ in bonus]
        answers = [
            self._checked(self._fn([*ids, token], count), count) for ids, token in zip(known, bonus, strict=True)
        ]
        width = max(map(len, answers))
        padded = [answer or [NO_TOKEN] * width for answer in answers]
        return Proposal(mx.array(padded, dtype=mx.int32).reshape(len(padded), width))

    def abort(self) -> None:
        """Nothing to do: `propose` changes nothing."""

    @staticmethod
    def _checked(answer: object, count: int) -> list[int]:
        if not isinstance(answer, list):
            raise ValueError(f"the draft function returned {type(answer).__name__}, expected a list of {count} ints")
        if answer and len(answer) != count:
            raise ValueError(
                f"the draft function returned {len(answer)} ids, expected exactly {count}, or an empty list for none"
            )
        strange = [item for item in answer if not isinstance(item, int) or isinstance(item, bool)]
        if strange:
            raise ValueError(
                f"the draft function returned {strange[0]!r} of type {type(strange[0]).__name__} among its ids, "
                "expected int; convert arrays with .tolist()"
            )
        return [item if item in _INT32 else NO_TOKEN for item in answer]
