"""Everything that a model's code comes to: functions, what they close over, and what their names stand for.

A method computes what it computes by more than its bytecode: defaults, cells, the functions and numbers its module
holds under the names it uses, and theirs in turn. Any of that may be replaced while the program runs.
"""

from __future__ import annotations

import builtins
import functools
import hashlib
import sys
import sysconfig
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from operator import attrgetter, is_
from types import CodeType, ModuleType, SimpleNamespace
from typing import Any
from weakref import ref

import mlx.core as mx
from mlx import nn

from mlx_spec.model.swap import own_class
from mlx_spec.verify.bindings import NAMES

PLAIN = frozenset((bool, int, float, str, type(None)))

_STOCK = {id(named.ours): named.stock for named in NAMES.values()}
"""What stood where we have bound something of ours."""

_DATA = PLAIN | {list, tuple, dict, set, frozenset}
"""Of such, what a class holds under a name like `__slotnames__` is Python's own; some is written at the first copy."""

_INSTALLED = tuple({sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")})
_VERSIONED = frozenset(("mlx", "mlx_lm")) | sys.stdlib_module_names
"""Packages whose compiled functions are told by a version that findings depend on anyway."""

_BUILT_IN = type(len), type(mx.exp)

_MOST_HELD = 64
"""Of a list, so many members are written down."""

_PARTS = ("fget", "fset", "func", "args", "keywords", "__func__", "__self__", "__wrapped__")
"""Of properties, partial functions, bound and static methods, and functions that remember results."""

_ABSENT = object()

_MOST_RECENT = 8
"""Sets of classes that are remembered: other models of the same make need no walk."""

_first_seen: dict[tuple[str, str], Any] = {}
"""(module or class, name) -> what was first seen there, unless it has bytecode. Of a kernel that a module built when it
was imported the module's source tells everything; of what came in its place, nothing does."""


def callable_code(value: Any) -> CodeType | None:
    """The bytecode of a function, also of one that `mx.compile` and its like have wrapped."""
    if isinstance(value, ModuleType | type | nn.Module):
        return None
    code = getattr(value, "__code__", None)
    return code if isinstance(code, CodeType) else None


class Reach:
    """What some classes and functions come to at one moment, by identity.

    Nothing is kept alive that can be told by a weak reference; of compiled functions, tuples, numbers and bytecode the
    last one seen is held.

    Args:
        roots: classes, and functions that modules hold.

    Cost:
        Making one takes some milliseconds; `stands` a hundredth of that.
    """

    def __init__(self, roots: Sequence[Any]) -> None:
        walk = Walk(roots)
        self._lines = walk.lines
        self._whole = walk.whole
        self._roots = list(map(_mark, roots))
        self._functions = list(map(_mark, walk.functions))
        self._states = [part for function in walk.functions for part in _state(function)]
        self._reads = [read for read, _ in walk.watched]
        self._marks = [_mark(value) for _, values in walk.watched for value in values]

    def stands(self, roots: Sequence[Any]) -> bool:
        """Whether these are the roots, and come to what they came to."""
        return self._marked(roots, self._roots) and self._functions_stand() and self._marked(self._now(), self._marks)

    @functools.cached_property
    def digest(self) -> str | None:
        """A digest, the same in every process that runs the same code; None where something has no readable code."""
        if not self._whole:
            return None
        digest = hashlib.sha256()
        for line in self._lines:
            digest.update(f"{line if isinstance(line, str) else _text(line)}\n".encode())
        return digest.hexdigest()

    def agrees(self, other: Reach) -> bool:
        """Whether everything was the same at both moments."""
        return self is other or _all_same(
            [*self._roots, *self._functions, *self._states, *self._marks],
            [*other._roots, *other._functions, *other._states, *other._marks],
        )

    def _now(self) -> list[Any]:
        now: list[Any] = []
        for read in self._reads:
            now += read()
        return now

    def _functions_stand(self) -> bool:
        now: list[Any] = []
        for mark in self._functions:
            function = mark() if type(mark) is ref else mark
            if function is None:
                return False
            now += _state(function)
        return _all_same(now, self._states)

    @staticmethod
    def _marked(values: Sequence[Any], marks: list[Any]) -> bool:
        # One loop without calls where nothing has changed: this runs at the start of every request.
        if len(values) != len(marks):
            return False
        for value, mark in zip(values, marks, strict=True):
            if mark is value:
                continue
            if type(mark) is not ref:
                return False
            found = mark()
            if value is None or (found is not value and found is not _as_found(value)):
                return False
        return True


_recent: tuple[Reach, ...] = ()


def reach_of(roots: Sequence[Any]) -> Reach:
    """What some classes and functions come to now; the same object as long as that is the same."""
    global _recent
    found = next((known for known in _recent if known.stands(roots)), None)
    if found is None:
        found = Reach(roots)
        _recent = (found, *_recent)[:_MOST_RECENT]
    return found


class Walk:
    """One walk from some roots to everything they come to.

    What is found inside the packages of the roots and outside installed ones is gone into; the rest is noted only.

    Attributes:
        functions: that were met.
        watched: functions that read another part of what was met, with what they read.
        lines: the same in words and bytecode, equal in every process that runs the same code.
        whole: whether the lines tell everything. Not where something callable has no readable code.
    """

    def __init__(self, roots: Iterable[Any]) -> None:
        self.functions: list[Any] = []
        self.watched: list[tuple[Callable[[], Iterable[Any]], list[Any]]] = []
        self.lines: list[str | CodeType] = []
        self.whole = True
        self._numbers: dict[int, int] = {}
        self._alive: list[Any] = []
        self._waiting: deque[tuple[Any, tuple[str, str]]] = deque()
        self._used: dict[int, tuple[Callable[[], Mapping[str, Any]], dict[str, None]]] = {}
        self._inside: dict[str, bool] = {}
        roots = list(roots)
        self._packages = {_package(_home(root)) for root in roots}
        for root in roots:
            self._tell("root", root)
        while self._waiting:
            self._open(*self._waiting.popleft())
        for scope, used in self._used.values():
            self._watch(partial(_under, scope, tuple(used)))

    def _tell(self, label: str, value: Any, where: str = "") -> None:
        """Write down what stands under a name; go into it later, if it is new."""
        value = _as_found(value)
        if type(value) in PLAIN:
            self.lines.append(f"{where} {label} {value!r}")
            return
        if where and (where, label) not in _first_seen:
            _first_seen[where, label] = None if callable_code(value) else _mark(value)
        number = self._numbers.get(id(value))
        if number is None:
            number = self._numbers[id(value)] = len(self._numbers)
            self._alive.append(value)
            self._waiting.append((value, (where, label)))
        self.lines.append(f"{where} {label} #{number}")

    def _open(self, value: Any, place: tuple[str, str]) -> None:
        made = type(value)
        self.lines.append(f"#{self._numbers[id(value)]} {made.__module__} {made.__qualname__}")
        code = callable_code(value)
        if code is not None:
            self._open_function(value, code)
        elif isinstance(value, type):
            self._open_class(value)
        elif isinstance(value, ModuleType):
            self.lines.append(value.__name__)
        elif isinstance(value, list | tuple):
            self._open_row(value)
        elif isinstance(value, set | frozenset):
            # Its order is another one in each process.
            self.lines += sorted(repr(held) for held in value if type(held) in PLAIN)
        elif isinstance(value, dict) and not isinstance(value, nn.Module):
            self._open_names(value, sorted(name for name in value if isinstance(name, str)))
        elif isinstance(value, mx.array):
            self.lines.append(f"{value.shape} {value.dtype}")
        else:
            self._open_object(value, place)

    def _open_function(self, value: Any, code: CodeType) -> None:
        scope = value.__globals__
        home = str(scope.get("__name__"))
        self.lines += [f"{home} {value.__qualname__}", code]
        self.functions.append(value)
        for default in value.__defaults__ or ():
            self._tell("default", default)
        keywords, cells = value.__kwdefaults__, value.__closure__
        if keywords:
            self._open_names(keywords, sorted(keywords))
        if cells:
            self._watch(partial(_contents, _mark(value)))
            for content in map(_content, cells):
                self._tell("cell", content)
        if self._is_inside(home):
            names = sorted(set(_names(code)))
            self._open_names(scope, [name for name in names if name in scope or hasattr(builtins, name)])
            for module in [scope[name] for name in names if issubclass(type(scope.get(name)), ModuleType)]:
                self._open_module(module, names)

    def _open_module(self, module: ModuleType, names: list[str]) -> None:
        """What a function may take from a module it names."""
        if not self._is_inside(module.__name__):
            return
        scope = vars(module)
        held = [name for name in names if name in scope]
        self._open_names(scope, held)
        for inner in [scope[name] for name in held if issubclass(type(scope[name]), ModuleType)]:
            if inner is not module and inner.__name__.startswith(module.__name__):
                self._open_module(inner, names)

    def _open_names(self, scope: Mapping[str, Any], names: list[str], owner: Any = None) -> None:
        if id(scope) not in self._used:
            self._alive.append(scope)
            self._used[id(scope)] = (lambda: scope) if owner is None else partial(_vars, ref(owner)), {}
        used = self._used[id(scope)][1]
        where = str(scope.get("__name__", ""))
        for name in names:
            if name not in used:
                used[name] = None
                if name in scope:
                    self._tell(name, scope[name], where)

    def _open_row(self, value: Sequence[Any]) -> None:
        self.lines.append(f"{len(value)} values")
        for held in value[:_MOST_HELD]:
            self._tell("held", held)

    def _open_class(self, value: type[Any]) -> None:
        self.lines.append(f"{value.__module__} {value.__qualname__}")
        if value is nn.Module or isinstance(value, type(mx.array)) or not self._is_inside(value.__module__):
            return
        self._watch(partial(_members, ref(value)))
        for base in value.__bases__:
            self._tell("base", base)
        for name, member in sorted(vars(value).items()):
            if name[:2] != "__" or type(member) not in _DATA:
                self._tell(name, member, f"{value.__module__}.{value.__qualname__}")

    def _open_object(self, value: Any, place: tuple[str, str]) -> None:
        if isinstance(value, nn.Module):
            # Those of the model are looked at one by one; another one is what it is.
            return
        made, built_in = type(value), isinstance(value, _BUILT_IN)
        parts = {} if built_in else {name: getattr(value, name, None) for name in _PARTS}
        if any(part is not None for part in parts.values()):
            for name, part in parts.items():
                self._tell(name, part, place[0])
        elif hasattr(value, "__dict__") and (made is SimpleNamespace or self._is_inside(made.__module__)):
            self._tell("class", made)
            self._open_names(vars(value), sorted(vars(value)), value)
        elif built_in and _package(_home(value)) in _VERSIONED:
            self.lines.append(f"{_home(value)} {value.__name__}")
        elif callable(value) and _first_seen.get(place) is not _mark(value):
            self.whole = False

    def _is_inside(self, home: str) -> bool:
        if home not in self._inside:
            self._inside[home] = _package(home) in self._packages or not _is_installed(home)
        return self._inside[home]

    def _watch(self, read: Callable[[], Iterable[Any]]) -> None:
        self.watched.append((read, list(read())))


def _mark(value: Any) -> Any:
    """A weak reference; of what has none, itself."""
    value = _as_found(value)
    try:
        return value if value is None else ref(value)
    except TypeError:
        return value


def _as_found(value: Any) -> Any:
    """What was there before anything of ours was attached."""
    return own_class(value) if issubclass(type(value), type) else _STOCK.get(id(value), value)


_state = attrgetter("__code__", "__defaults__", "__kwdefaults__")
"""What may be assigned to a function; its cells are its own for ever, but not what they hold."""


def _all_same(some: Sequence[Any], others: Sequence[Any]) -> bool:
    return len(some) == len(others) and all(map(is_, some, others))


def _contents(mark: Any) -> list[Any]:
    function = mark() if type(mark) is ref else mark
    return [] if function is None else list(map(_content, function.__closure__))


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return _ABSENT


def _members(owner: ref[Any]) -> list[Any]:
    return [held for name, held in _vars(owner).items() if name[:2] != "__" or type(held) not in _DATA]


def _vars(owner: ref[Any]) -> Mapping[str, Any]:
    found = owner()
    return {} if found is None else vars(found)


def _under(scope: Callable[[], Mapping[str, Any]], names: Sequence[str]) -> list[Any]:
    found = scope().get
    return [found(name, _ABSENT) for name in names]


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for held in code.co_consts:
        if isinstance(held, CodeType):
            yield from _names(held)


def _home(value: Any) -> str:
    home = getattr(value, "__module__", None)
    return home if isinstance(home, str) else ""


def _package(home: str) -> str:
    return home.partition(".")[0]


def _is_installed(home: str) -> bool:
    """Whether a module came with the system or another package, whose functions are taken as they are."""
    if _package(home) in sys.stdlib_module_names:
        return True
    path = getattr(sys.modules.get(home), "__file__", None)
    return path is not None and path.startswith(_INSTALLED)


def _text(code: CodeType) -> str:
    return "|".join((code.co_code.hex(), repr(code.co_names), *map(str, _constants(code.co_consts))))


def _constants(values: Iterable[Any]) -> Iterator[str]:
    for value in values:
        if isinstance(value, CodeType):
            yield _text(value)
        elif isinstance(value, frozenset):
            # Its order is another one in each process.
            yield repr(sorted(map(repr, value)))
        else:
            yield repr(value)
