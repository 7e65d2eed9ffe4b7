"""Any cache at all: the state at each step of a round is kept by handle and put back whole."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_spec.cache.base import Apply, Journal, changed_outside, kept_whole, uniform
from mlx_spec.errors import TransactionError

_FOREIGN = (type, FunctionType, BuiltinFunctionType, MethodType, ModuleType, nn.Module, mx.Dtype)
"""Things a cache may refer to but does not own: they are kept by reference."""


class Snapshot:
    """The value of an object graph at one moment.

    Arrays are held by a handle of their own (`copy.copy`): `keys[..., a:b, :] = x` re-points the
    Python object it is applied to, so a plain reference would follow the write. Lists, dictionaries
    and objects keep their identity; only their contents are put back.
    """

    def __init__(self, root: Any) -> None:
        self._memo: dict[int, Any] = {}
        self._owners: list[tuple[Any, Any]] = []
        self._arrays: list[mx.array] = []
        self._capture(root)

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays in the snapshot, shared with the live cache or not."""
        return sum(array.nbytes for array in self._arrays)

    def restore(self) -> None:
        """Put every object of the graph back. What is done to them afterwards leaves the snapshot as it is."""
        fresh: dict[int, mx.array] = {}
        for owner, content in self._owners:
            if isinstance(owner, list):
                owner[:] = [_fresh(value, fresh) for value in content]
            else:
                fields = {key: _fresh(value, fresh) for key, value in content.items()}
                owner.clear()
                owner.update(fields)

    def onto(self, root: Any, twin: Any) -> Snapshot:
        """The same value for a copy of the root, which shares no list, dictionary or object with it.

        Args:
            root: what the snapshot was taken of.
            twin: a copy of it; all that hangs on it is replaced by `restore`.
        """
        made = copy.copy(self)
        memo = {id(root): twin, id(root.__dict__): twin.__dict__}
        contents = {id(owner): (owner, content) for owner, content in self._owners}
        made._owners = []
        for owner, content in self._owners:
            new = made._twin(owner, memo, contents)
            made._owners.append((new, made._content(content, memo, contents)))
        return made

    def _content(self, content: Any, memo: dict[int, Any], contents: dict[int, Any]) -> Any:
        if isinstance(content, list):
            return [self._twin(value, memo, contents) for value in content]
        return {key: self._twin(value, memo, contents) for key, value in content.items()}

    def _twin(self, value: Any, memo: dict[int, Any], contents: dict[int, Any]) -> Any:
        """What stands for a value in the copy's graph. Handles are shared: `restore` gives out fresh ones."""
        if id(value) in memo:
            return memo[id(value)]
        if isinstance(value, tuple):
            return tuple(self._twin(item, memo, contents) for item in value)
        if id(value) in contents:
            memo[id(value)] = type(value)()
        elif id(getattr(value, "__dict__", None)) in contents:
            memo[id(value)] = object.__new__(type(value))
            memo[id(value.__dict__)] = memo[id(value)].__dict__
        else:
            return value
        return memo[id(value)]

    def _capture(self, value: Any) -> Any:
        if id(value) in self._memo:
            return self._memo[id(value)]
        if isinstance(value, mx.array):
            handle = copy.copy(value)
            self._arrays.append(handle)
            self._memo[id(value)] = handle
            return handle
        if isinstance(value, tuple):
            return tuple(self._capture(item) for item in value)
        self._memo[id(value)] = value
        if isinstance(value, list):
            self._owners.append((value, [self._capture(item) for item in value]))
        elif isinstance(value, dict) and not isinstance(value, nn.Module):
            self._owners.append((value, {key: self._capture(item) for key, item in value.items()}))
        elif hasattr(value, "__dict__") and not isinstance(value, _FOREIGN):
            self._capture(value.__dict__)
        return value


def _fresh(value: Any, handles: dict[int, mx.array]) -> Any:
    """The value with a new handle for each array, the same one wherever the array occurs."""
    if isinstance(value, tuple):
        return tuple(_fresh(item, handles) for item in value)
    if not isinstance(value, mx.array):
        return value
    if id(value) not in handles:
        handles[id(value)] = copy.copy(value)
    return handles[id(value)]


def fingerprint(root: Any) -> list[Any]:
    """The scalars of an object graph and the identities of its arrays, in order."""
    found: list[Any] = []
    pending = [root]
    while pending:
        value = pending.pop()
        if isinstance(value, mx.array):
            found.append(_Same(value))
        elif isinstance(value, int | float | str | None):
            found.append(value)
        elif isinstance(value, list | tuple):
            pending.extend(value)
        elif isinstance(value, dict) and not isinstance(value, nn.Module):
            pending.extend(value.values())
        elif hasattr(value, "__dict__") and not isinstance(value, _FOREIGN):
            pending.append(value.__dict__)
    return found


class _Same:
    """Equal to what holds the same Python object. Holding the object makes no second handle on its buffer."""

    def __init__(self, array: mx.array) -> None:
        self._array = array

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other._array is self._array

    __hash__ = None  # type: ignore[assignment]


class StepwiseJournal(Journal):
    """Keeps one snapshot per step; a prefix can be kept only if it ends at a marked step.

    Attributes:
        _steps: tokens appended -> the state at that moment. Position 0 is there from the start.
    """

    wants_positions = True

    def __init__(self, cache: Any, width: int) -> None:
        super().__init__(cache, width)
        self._steps = {0: Snapshot(cache)}
        self._standing: list[Any] = []

    def feed(self, mixer: int, tokens: int) -> None:
        super().feed(mixer, tokens)
        if tokens and not self.counts:
            self.counted = self._fed[mixer]

    def mark(self, position: int) -> None:
        self.marked = self.begun = position
        self._fed.clear()
        if not self.counts:
            self.counted = None
        self._take(position)
        self._standing = self._now()

    def begin(self, position: int) -> None:
        super().begin(position)
        self._take(position)

    def _take(self, position: int) -> None:
        # The last step needs no handle: keeping the whole round leaves the cache as it stands.
        if position < self.width:
            self._steps[position] = Snapshot(self._cache)

    def before_position(self, position: int) -> None:
        if position:
            self._take(self.begun + position)

    def plan(self, retained: Sequence[int]) -> Apply:
        count = uniform(retained, f"{type(self._cache).__name__} inside a transaction")
        self.require_untouched()
        if count and count == self.appended:
            return kept_whole
        if count not in self._steps:
            raise TransactionError(
                f"{type(self._cache).__name__} can keep {sorted(self._steps)} or all {self.appended} tokens "
                f"of this round, not {count}: its state is known only where a forward ended. "
                "Abort, then call mlx_spec.attach(model) before the round, or feed the block one token at a time."
            )
        return self._steps[count].restore

    def restore(self) -> None:
        self._steps[0].restore()

    def onto(self, twin: Any) -> Journal:
        journal = super().onto(twin)
        steps = {step: snapshot.onto(self._cache, twin) for step, snapshot in self._steps.items()}
        vars(journal).update(_steps=steps, _standing=[])
        return journal

    def close(self) -> None:
        super().close()
        self._steps = {}
        self._standing = []

    def require_untouched(self) -> None:
        """What stands now must be what stood at the last mark; a round that marks nothing is taken at its word."""
        if self.changed:
            raise changed_outside("its fields are not those of the last marked step")

    @property
    def changed(self) -> bool:
        return bool(self._standing) and not self._fed and self._now() != self._standing

    def _now(self) -> list[Any]:
        return fingerprint(self._cache)

    @property
    def nbytes(self) -> int:
        return sum(step.nbytes for step in self._steps.values())
