"""Text as it streams out, and the strings that end it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mlx_spec.errors import InvalidRequest


class TextStream:
    """Turns tokens into text segments and notices a stop string the moment its last character is certain.

    The text ends before the stop string. A tail that may yet turn out to be one is held back.

    Attributes:
        segment: text that became certain with the latest token, or with `finish`.
        stopped: a stop string is complete.

    Example:
        >>> class Letters:
        ...     last_segment = ""
        ...     def add_token(self, token):
        ...         self.last_segment = chr(token)
        ...     def finalize(self):
        ...         self.last_segment = ""
        >>> stream = TextStream(Letters(), ["END"])
        >>> [(stream.feed(ord(letter)), stream.segment) for letter in "aEbENDc"][:6]
        [(False, 'a'), (False, ''), (False, 'Eb'), (False, ''), (False, ''), (True, '')]
    """

    def __init__(self, detokenizer: Any, stop: Sequence[str] = ()) -> None:
        """Wrap one of mlx-lm's streaming detokenizers, fresh.

        Raises:
            InvalidRequest: a stop string is empty or not a string.
        """
        if isinstance(stop, str) or any(not isinstance(item, str) or not item for item in stop):
            raise InvalidRequest(f"stop wants a list of non-empty strings, got {stop!r}.")
        self._detokenizer = detokenizer
        self._stop = tuple(stop)
        self._held = ""
        self.segment = ""
        self.stopped = False

    def feed(self, token: int) -> bool:
        """Add one token. Returns whether a stop string is now complete."""
        self._detokenizer.add_token(token)
        self._release(self._detokenizer.last_segment, final=False)
        return self.stopped

    def finish(self) -> None:
        """No token follows: what was held back becomes certain."""
        self._detokenizer.finalize()
        self._release(self._detokenizer.last_segment, final=True)

    def _release(self, addition: str, *, final: bool) -> None:
        self.segment = ""
        if self.stopped:
            return
        text = self._held + addition
        ends = [text.find(item) for item in self._stop if item in text]
        if ends:
            self.stopped = True
            self.segment, self._held = text[: min(ends)], ""
            return
        kept = 0 if final else self._undecided(text)
        self.segment, self._held = text[: len(text) - kept], text[len(text) - kept :]

    def _undecided(self, text: str) -> int:
        """Length of the longest tail that a stop string begins with."""
        longest = max((len(item) for item in self._stop), default=1) - 1
        for length in range(min(longest, len(text)), 0, -1):
            if any(item.startswith(text[len(text) - length :]) for item in self._stop):
                return length
        return 0
