"""The contract of a cache inside a transaction: what one open round remembers of one cache."""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from mlx_spec.errors import TransactionError

Apply = Callable[[], None]
"""Second half of a commit: it only assigns, so it cannot fail for a reason a caller could mend."""


class Journal(abc.ABC):
    """One cache's memory of one open round.

    Made when the transaction opens; making it changes nothing a reader of the cache can see.
    Afterwards any prefix of the round can be kept (`plan`, then the returned call) or none
    of it (`restore`). A journal is used once.

    Attributes:
        leaf: what the model is handed in place of the cache: an instance of a subclass of the cache's own class.
        width: tokens the round may append at most.
    """

    leaf: Any
    width: int

    @abc.abstractmethod
    def mark(self, position: int) -> None:
        """Note that exactly `position` tokens of the round have been appended and all writes for them are made."""

    @abc.abstractmethod
    def plan(self, retained: Sequence[int]) -> Apply:
        """Check that `retained` tokens per row can be kept and return the call that does it. Changes nothing.

        Raises:
            TransactionError: they cannot. The round is still open.
        """

    @abc.abstractmethod
    def restore(self) -> None:
        """Put the cache back to where the round found it."""

    @property
    @abc.abstractmethod
    def nbytes(self) -> int:
        """Bytes held only because the round is open."""


@cache
def leaf_class(base: type[Any], methods: tuple[tuple[str, Callable[..., Any]], ...] = ()) -> type[Any]:
    """A subclass of a cache class whose instances can carry a journal without showing it.

    The journal sits in a slot, so it is no part of the instance dictionary that leaf and cache share.
    """
    return type(base.__name__, (base,), {"__slots__": ("journal",), "__module__": base.__module__, **dict(methods)})


def make_leaf(cache_object: Any, journal: Journal, methods: tuple[tuple[str, Callable[..., Any]], ...] = ()) -> Any:
    """A leaf that shares the cache's instance dictionary: every attribute read or write reaches the real cache."""
    leaf = object.__new__(leaf_class(type(cache_object), methods))  # type: ignore[arg-type]
    leaf.__dict__ = cache_object.__dict__
    leaf.journal = journal
    return leaf


def uniform(retained: Sequence[int], what: str) -> int:
    """The one count all rows share.

    Raises:
        TransactionError: the rows differ.
    """
    if len(set(retained)) != 1:
        raise TransactionError(
            f"{what} keeps one length for all rows, got counts {list(retained)}. "
            "Commit the same count for every row, or use a cache with per-row lengths."
        )
    return retained[0]
