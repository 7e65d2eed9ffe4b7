"""Prompt lookup: what followed the same few tokens the last time is proposed again. No weights."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from mlx_spec.accept.proposal import Proposal
from mlx_spec.arguments import whole_number
from mlx_spec.drafters.base import Drafter, DrafterState, Rows
from mlx_spec.errors import InvalidRequest
from mlx_spec.model.target import Target

NO_TOKEN = -1
"""Fills rows with fewer proposals than others; matches no token."""


class NgramDrafter(Drafter):
    """Looks the newest tokens up in the text so far and proposes what followed them.

    The longest matching suffix wins, and among equally long ones the newest occurrence. Where the continuation runs
    into the end of the text it goes on with what was just proposed, so that a repeated pattern is continued in full.

    Source: Saxena 2023, "Prompt Lookup Decoding". Left out: several candidates per round.
    """

    kind = "ngram"
    name = "ngram"
    remembers = True
    may_propose_fewer = True

    def __init__(
        self, *, max_ngram: int = 4, min_ngram: int = 2, search_tokens: int = 16384, default_width: int = 4
    ) -> None:
        """Set how far and how strictly to look.

        Args:
            max_ngram: longest suffix looked up, tokens.
            min_ngram: shortest suffix looked up, tokens.
            search_tokens: how far back an occurrence may lie.
            default_width: verify width W when the user names none.

        Raises:
            InvalidRequest: a number that is none, not 1 <= min_ngram <= max_ngram < search_tokens, a width below 2.
        """
        numbers = {"max_ngram": max_ngram, "min_ngram": min_ngram, "search_tokens": search_tokens}
        for name, number in {**numbers, "default_width": default_width}.items():
            whole_number(name, number, "a number of tokens")
        if not 1 <= min_ngram <= max_ngram < search_tokens:
            raise InvalidRequest(
                f"got min_ngram={min_ngram}, max_ngram={max_ngram}, search_tokens={search_tokens}; "
                "expected 1 <= min_ngram <= max_ngram < search_tokens"
            )
        if default_width < 2:
            raise InvalidRequest(f"got default_width={default_width}; a width below 2 leaves nothing to propose")
        self.max_ngram = max_ngram
        self.min_ngram = min_ngram
        self.search_tokens = search_tokens
        self.default_width = default_width

    def check(self, target: Target) -> None:
        """Any target will do."""

    def open(self, target: Target, start: int = 0) -> NgramState:
        """Make the state for one request; see `Drafter.open`. Only the tokens it is shown are searched."""
        del target, start
        return NgramState(self)


class NgramState(DrafterState):
    """One searchable text per batch row."""

    def __init__(self, drafter: NgramDrafter) -> None:
        self._drafter = drafter
        self._texts: list[_Text] = []

    def read_prompt(self, ids: Rows, hidden: mx.array | None) -> None:
        """Index a chunk. Cost: O(new tokens) on the host, whatever the length read before."""
        del hidden
        if not self._texts:
            self._texts = [_Text(self._drafter) for _ in ids]
        for text, new in zip(self._texts, ids, strict=True):
            text.extend(new)

    def catch_up(self, ids: Rows, hidden: mx.array | None) -> None:
        """Index what was committed; see `read_prompt`."""
        self.read_prompt(ids, hidden)

    def propose(self, bonus: Sequence[int], count: int) -> Proposal:
        """Look the suffix that ends in the bonus up; [B] -> [B, n] int32, 0 <= n <= count.

        Cost: O(max_ngram + count) on the host.
        """
        if not self._texts:
            self._texts = [_Text(self._drafter) for _ in bonus]
        proposed = [text.continuation(token, count) for text, token in zip(self._texts, bonus, strict=True)]
        longest = max(map(len, proposed))
        padded = [row + [NO_TOKEN] * (longest - len(row)) for row in proposed]
        return Proposal(mx.array(padded, dtype=mx.int32).reshape(len(padded), longest))

    def abort(self) -> None:
        """Nothing to do: `propose` changes nothing."""


class _Text:
    """The newest tokens of one row, and where each n-gram among them was last continued.

    Positions are absolute. `_tokens` starts at position `_first`. An n-gram is indexed once the token after it is
    known, under that token's position, and forgotten when that position leaves the search window.
    """

    def __init__(self, drafter: NgramDrafter) -> None:
        self._sizes = range(drafter.min_ngram, drafter.max_ngram + 1)
        self._search_tokens = drafter.search_tokens
        self._tokens: list[int] = []
        self._first = 0
        self._continued: dict[tuple[int, ...], int] = {}

    def extend(self, new: Sequence[int]) -> None:
        for token in new:
            self._index_before(self._first + len(self._tokens))
            self._tokens.append(token)
        # The window, and the n-gram that leaves it next. Cutting at twice that keeps the cost per token constant.
        kept = self._search_tokens + self._sizes[-1]
        if len(self._tokens) > 2 * kept:
            self._first += len(self._tokens) - kept
            del self._tokens[:-kept]

    def continuation(self, bonus: int, count: int) -> list[int]:
        """At most `count` tokens that followed the longest known suffix of text + bonus."""
        end = self._first + len(self._tokens)
        for size in reversed(self._sizes):
            suffix = (*self._before(end, size - 1), bonus)
            if len(suffix) == size:
                source = self._source(suffix, end)
                if source is not None:
                    return self._copied(source, bonus, count)
        return []

    def _source(self, suffix: tuple[int, ...], end: int) -> int | None:
        """Position of the token that followed this n-gram most recently; `end` is the bonus's own position."""
        if self._before(end, len(suffix)) == suffix:
            return end
        return self._continued.get(suffix)

    def _copied(self, source: int, bonus: int, count: int) -> list[int]:
        offset = source - self._first
        copied = [*self._tokens[offset : offset + count], bonus][:count]
        # Past the end the copy reads its own output, from the bonus on.
        period = len(self._tokens) + 1 - offset
        while len(copied) < count:
            copied.append(copied[-period])
        return copied

    def _before(self, position: int, size: int) -> tuple[int, ...]:
        """The last `size` tokens before a position, or fewer at the start of the text."""
        end = max(0, position - self._first)
        return tuple(self._tokens[max(0, end - size) : end])

    def _index_before(self, position: int) -> None:
        end, forgotten = position - self._first, position - self._search_tokens
        for size in self._sizes:
            if size <= end:
                self._continued[tuple(self._tokens[end - size : end])] = position
            if size > forgotten:
                continue
            stale = self._before(forgotten, size)
            if len(stale) == size and self._continued.get(stale) == forgotten:
                del self._continued[stale]
