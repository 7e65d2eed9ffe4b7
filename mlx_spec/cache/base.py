"""The contract of a cache inside a transaction: what one open round remembers of one cache."""

from __future__ import annotations

import abc
import copy
import enum
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any, NamedTuple, Protocol

import mlx.core as mx

from mlx_spec.errors import CacheChanged, TransactionError


class Drive(enum.Enum):
    """How the token mixers take the tokens of a round.

    WHOLE: as the model hands them over. Caches without a length to cut are kept whole or not at all.
    BLOCK: likewise, but a sliding window's mixers go position by position, and recurrent ones leave a tape.
    ALONE: as BLOCK, for a model that is known to write what it is handed and nothing else: where all caches are cut by
        their length, it is handed the caches themselves, and what it writes is looked at when it is marked.
    QUERIES: as BLOCK for the caches; the mixers that take the block whole update states by position, and attend by
        position or by what was found equal to that.
    POSITIONS: every mixer goes position by position, as in one-token decode.
    """

    WHOLE = "whole"
    BLOCK = "block"
    ALONE = "alone"
    QUERIES = "attention by position"
    POSITIONS = "positions"


class AskedMask(NamedTuple):
    """A mask a model got from a leaf for a block.

    Attributes:
        asker: the leaf's class.
        args, keywords: the arguments after the length.
        rows: position -> the mask for that position alone, once a mixer that goes by position needed it.
    """

    mask: mx.array
    asker: type[Any]
    args: tuple[Any, ...]
    keywords: dict[str, Any]
    rows: dict[int, Any]


class Forward:
    """What the leaves of one round are told of the forward that is running.

    Attributes:
        tokens: how many the model asked a mask for last; 0 before it asked for any.
        needs_mixers: some cache of the round can keep a part of what several tokens wrote only with the help of its
            token mixer, so a forward over several whose mixers are not attached is refused.
    """

    def __init__(self) -> None:
        self.tokens = 0
        self.needs_mixers = False


Apply = Callable[[], None]
"""Second half of a commit. Nothing a caller could mend makes it fail; when it is interrupted, or done, it can be called
again and does the whole of it, and `restore` undoes it."""


Method = Callable[..., Any]


class Tape(Protocol):
    """What a token mixer was fed in one forward."""

    @property
    def nbytes(self) -> int:
        """Bytes held only for this."""

    def replay(self, count: int) -> None:
        """Run the mixer again over the first `count` of its inputs, for the caches alone."""

    def onto(self, leaf: Any, other: Any) -> Tape:
        """The same inputs for the mixer of the same layer on another leaf."""


class Journal(abc.ABC):
    """One cache's memory of one open round.

    Made when the transaction opens; making it changes nothing a reader of the cache can see.
    Afterwards any prefix of the round can be kept (`plan`, then the returned call) or none
    of it (`restore`). A journal is used once.

    Attributes:
        methods: what a leaf does differently from its cache, by name.
        width: tokens the round may append at most.
        marked: tokens of the forwards that are told to be complete.
        begun: tokens before the forward that is running.
        driven: a token mixer that is attached has handed it tokens.
        closed: the round is over; its leaf can no longer be written.
        by_position: the token mixer that reads this cache must take the block one position at a time.
        wants_positions: only then can part of a block be kept.
        runs_again: a part of a block is kept by running the token mixer again, from its tape.
        counted: tokens of the round that the cache has seen by its own count; None while it has counted none.
        counts: it sees what is written, so it counts tokens by itself, and a number or a few fields of the cache tell
            whether somebody else wrote to it.
        needs_mixer: what several tokens wrote at once cannot be cut without the mixer.
        _noted: what tells whether the cache's arrays are the round's, let go of with the round.
        looking_at: position of the forward that a mixer takes on its own just now, None when none does.
        masks: id of a mask array the model asked this round's leaves for -> how it asked.
        forward: what this round's leaves know of the forward that is running.
    """

    methods: tuple[tuple[str, Method], ...] = ()
    closed: bool = False
    by_position: bool = False
    wants_positions: bool = False
    runs_again: bool = False
    needs_mixer: bool = False
    counts: bool = False
    counted: int | None = None
    looking_at: int | None = None
    marked: int = 0
    begun: int = 0
    driven: bool = False
    masks: dict[int, AskedMask]
    forward: Forward
    _noted: tuple[Any, ...] | None = None

    def __init__(self, cache: Any, width: int) -> None:
        self._cache = cache
        self._leaf: weakref.ref[Any] | None = None
        self._fed: dict[int, int] = {}
        self.width = width

    def make_leaf(self) -> Any:
        """What the model is handed in place of the cache.

        An instance of a subclass of the cache's own class that shares its instance dictionary: every
        attribute read or write reaches the real cache. The leaf holds the journal, not the other way round,
        so that nothing outlives the round.
        """
        leaf = object.__new__(leaf_class(type(self._cache), self.methods))  # type: ignore[arg-type]
        leaf.__dict__ = self._cache.__dict__
        leaf.journal = self
        self._leaf = weakref.ref(leaf)
        return leaf

    @property
    def kind(self) -> str:
        """What the cache is called in messages."""
        return type(self._cache).__name__

    @property
    def leaf(self) -> Any:
        """The leaf, while the transaction is open."""
        return None if self._leaf is None else self._leaf()

    def close(self) -> None:
        """The round is over and nothing of it will be undone: let go of everything it held."""
        if self.leaf is not None:
            self.part()

    def part(self) -> None:
        """The round is over: part the leaf from the cache. `restore` still works."""
        self.closed = True
        self._noted = None
        leaf = self.leaf
        if leaf is not None:
            leaf.__dict__ = {}

    def require_open(self) -> None:
        """Refuse a write through the leaf of a round that is over."""
        if self.closed:
            raise TransactionError(
                f"this {type(self._cache).__name__} stands for a cache in a transaction that is closed. "
                "Use the cache itself, or open a new transaction."
            )

    def too_many(self, held: int, tokens: int) -> TransactionError:
        """There are tokens beyond the round's width. Raised before anything is written."""
        return TransactionError(
            f"the round was opened for {self.width} tokens and holds {held}; "
            f"{tokens} more do not fit. Open the transaction with the width you verify."
        )

    def require_mixer(self) -> None:
        """Refuse what several tokens write at once, where no mixer helps to keep a part of it."""
        if not self.driven:
            raise TransactionError(
                f"{type(self._cache).__name__} cannot keep a part of what several tokens write at once, and this "
                "model's token mixers are not attached. Nothing of this write was made. Abort, then call "
                "mlx_spec.attach(model) before the round or mlx_spec.verify_forward instead of the model, or feed the "
                "block one token at a time."
            )

    def feed(self, mixer: int, tokens: int) -> None:
        """A token mixer is about to hand the cache so many tokens, all that it got in this forward.

        Args:
            mixer: id of the mixer. Mixers that share a cache see the same tokens, each once in a forward.
            tokens: 0 where nothing tells how many they are.

        Raises:
            TransactionError: more than the width. Nothing was changed.
        """
        if tokens:
            seen = self._fed.get(mixer, self.marked)
            if seen + tokens > self.width:
                raise self.too_many(seen, tokens)
            if seen > self.begun:
                # The forward before this one was not marked; it ended here. Further mixers of this one find that done.
                self.begin(seen)
            self._fed[mixer] = seen + tokens
        self.driven = True

    @property
    def appended(self) -> int:
        """Tokens of the round that the cache has seen, by its own count or by the marks; 0 while nothing tells."""
        return self.counted or self.marked

    @property
    def changed(self) -> bool:
        """Whether somebody else wrote to the cache, as far as its fields tell."""
        try:
            self.require_untouched()
        except CacheChanged:
            return True
        return False

    @abc.abstractmethod
    def require_untouched(self) -> None:
        """Raise CacheChanged where the cache's fields are not what the round left there."""

    def trimmed(self) -> int | None:
        """How many tokens somebody else trimmed off the cache; None if what they did was something else.

        Default: caches of which nothing can be trimmed.
        """
        return None if self.changed else 0

    def untrim(self) -> None:
        """Take back that trim. Default: there was none."""
        return

    def onto(self, twin: Any) -> Journal:
        """The same memory for a copy of the cache: what its plan does is done to the copy, and nothing to the cache.

        Args:
            twin: a deep copy of the cache as it stands.
        """
        journal = copy.copy(self)
        journal._cache = twin
        journal._leaf = None
        # What leaves and mixers write to while the copy is brought there is its own.
        journal._fed = dict(self._fed)
        journal.forward = copy.copy(self.forward)
        journal.masks = {key: asked._replace(rows=dict(asked.rows)) for key, asked in self.masks.items()}
        return journal

    @property
    def lost(self) -> int:
        """Rows dropped from the front of the cache since the round began; only some windows drop any."""
        return 0

    def before_position(self, position: int) -> None:
        """The token mixer is about to take this position of the forward on its own."""
        self.looking_at = position

    def after_positions(self) -> None:
        """It has taken the last one."""
        self.looking_at = None

    def tape(self, tape: Tape) -> None:
        """Offer a way to run the round's inputs again. Most caches need none."""
        del tape

    def mark(self, position: int) -> None:
        """Note that exactly `position` tokens of the round have been appended and all writes for them are made."""
        self.marked = position
        self._fed.clear()
        self.begin(position)

    def begin(self, position: int) -> None:
        """What comes from here on belongs to the forward after these tokens."""
        self.begun = position

    @abc.abstractmethod
    def plan(self, retained: Sequence[int]) -> Apply:
        """Check that `retained` tokens per row can be kept and return the call that does it. Changes nothing.

        Raises:
            TransactionError: they cannot. The round is still open.
        """

    @abc.abstractmethod
    def restore(self) -> None:
        """Put the cache back to where the round found it.

        From wherever it is: after part of a write, of a plan's call or of an earlier restore, and after all of it.
        """

    @property
    @abc.abstractmethod
    def nbytes(self) -> int:
        """Bytes held only because the round is open."""


class RowsJournal(Journal):
    """Of a cache that holds keys and values: whose they are is told by which objects they are.

    `_noted` are the keys and values that the last complete forward left; None until then, and from the next write on.
    They are held as the cache holds them: another handle would make the next in-place write copy the buffer, and an
    `id` could be another array's by then.
    """

    counts = True

    def onto(self, twin: Any) -> Journal:
        journal = super().onto(twin)
        # The copy's arrays are others.
        vars(journal).update(_noted=None)
        return journal

    def note_rows(self) -> None:
        """A forward is complete: these are its rows."""
        self._noted = (self._cache.keys, self._cache.values)

    @property
    def other_rows(self) -> bool:
        """Whether somebody put other keys or values into the cache since then."""
        noted, cache = self._noted, self._cache
        return noted is not None and (noted[0] is not cache.keys or noted[1] is not cache.values)

    @abc.abstractmethod
    def lengths(self) -> tuple[int, int]:
        """The cache's own count of its tokens, and the round's."""

    @property
    def changed(self) -> bool:
        own, expected = self.lengths()
        return own != expected or self.other_rows

    def require_untouched(self) -> None:
        if self.changed:
            own, expected = self.lengths()
            raise changed_outside(
                f"length {own}, expected {expected}"
                if own != expected
                else "its keys or values are other arrays than the last forward left"
            )


@cache
def leaf_class(base: type[Any], methods: tuple[tuple[str, Method], ...] = ()) -> type[Any]:
    """A subclass of a cache class whose instances can carry a journal without showing it.

    The journal sits in a slot, so it is no part of the instance dictionary that leaf and cache share.
    """
    own = {
        "__slots__": ("journal",),
        "__module__": base.__module__,
        "__leaf__": True,
        "__getattr__": _missing,
        **dict(methods),
    }
    if hasattr(base, "make_mask"):
        own["make_mask"] = _make_mask
    return type(base.__name__, (base,), own)


@cache
def nest_class(base: type[Any]) -> type[Any]:
    """A subclass of a class that holds caches in `caches`, whose instances hold their leaves there instead."""
    own = {
        "__slots__": ("members",),
        "__module__": base.__module__,
        "__leaf__": True,
        "caches": property(lambda self: self.members),
    }
    return type(base.__name__, (base,), own)


def make_nest(cache_object: Any, members: tuple[Any, ...]) -> Any:
    """A leaf for a cache of caches. It shares everything with the cache but the members."""
    nest = object.__new__(nest_class(type(cache_object)))  # type: ignore[arg-type]
    nest.__dict__ = cache_object.__dict__
    nest.members = members
    return nest


def _missing(self: Any, name: str) -> Any:
    """A leaf lacks what its cache lacks, and everything once the round is over."""
    self.journal.require_open()
    raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")


def _make_mask(self: Any, tokens: int, *args: Any, **keywords: Any) -> Any:
    """The cache's own mask; for a block it is remembered how it was asked for, so that one row can be."""
    self.journal.forward.tokens = tokens
    mask = super(type(self), self).make_mask(tokens, *args, **keywords)
    if tokens > 1 and isinstance(mask, mx.array):
        self.journal.masks[id(mask)] = AskedMask(mask, type(self), args, keywords, {})
    return mask


def with_leaf(value: Any, leaf: Any, other: Any) -> Any:
    """What a mixer was handed, with one leaf in the place of another, also in a cache of caches."""
    if value is leaf:
        return other
    if not is_leaf(value) or not hasattr(value, "members"):
        return value
    nest = object.__new__(type(value))
    nest.__dict__ = value.__dict__
    nest.members = tuple(with_leaf(member, leaf, other) for member in value.members)
    return nest


def is_leaf(value: Any) -> bool:
    """Whether a value stands for a cache inside a transaction."""
    return getattr(type(value), "__leaf__", False)


def drive_by(journals: Iterable[Journal], drive: Drive) -> None:
    """How mixers take the forwards of a round from here on."""
    every, some = drive is Drive.POSITIONS, drive is not Drive.WHOLE
    for journal in journals:
        journal.by_position = every or (some and journal.wants_positions)


def journals_of(leaf: Any) -> list[Journal]:
    """The journals of a leaf, or of every leaf nested in it."""
    if isinstance(leaf, nest_class(type(leaf).__base__)):
        return [journal for member in leaf.members for journal in journals_of(member)]
    return [leaf.journal]


def journals_among(values: Iterable[Any]) -> list[Journal]:
    """The journals of the leaves among some values."""
    # Asked for every call of a mixer, of each of its arguments: `is_leaf`, without a call for each.
    return [each for value in values if getattr(type(value), "__leaf__", False) for each in journals_of(value)]


def changed_outside(what: str) -> CacheChanged:
    """Somebody wrote to a cache behind its transaction's back."""
    return CacheChanged(
        f"the cache was changed outside its open transaction: {what}. "
        "Abort the transaction and begin again from a cache nobody else writes to."
    )


def too_few(count: int, appended: int) -> TransactionError:
    """More tokens are to be kept than there are."""
    return TransactionError(
        f"cannot keep {count} tokens: the round appended {appended}. Run the model on the block before committing it."
    )


def kept_whole() -> None:
    """A commit that leaves a cache as it stands."""


def per_row(retained: Sequence[int], rows: int) -> list[int]:
    """One count for each row, given one for all or one each."""
    return list(retained) * rows if len(retained) == 1 else list(retained)


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
