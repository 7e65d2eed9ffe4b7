"""A digest of the code that a model's classes are made of: another edition of a file may round differently."""

from __future__ import annotations

import functools
import hashlib
import sys
from collections.abc import Iterable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

from mlx import nn

from mlx_spec.model.swap import own_class

_OWN = Path(__file__).parent.parent
_DECIDING = ("cache", "model", "ops", "verify")
"""Our folders on which it hangs what is found, and what a finding means."""


def sources_of(model: nn.Module) -> str:
    """A digest of the source files behind a model's classes, and of the methods these classes have in this process.

    The files are those of the modules that define the classes and their bases, and what those modules take from others
    of their packages. A file may have been edited after it was imported, and a method replaced: so the compiled
    methods count as well.

    Cost:
        Each edition of a file is read once in a process.
    """
    found = {base for module in model.modules() for base in own_class(type(module)).__mro__} - {object, dict}
    classes = sorted(found, key=lambda each: (each.__module__, each.__qualname__))
    digest = hashlib.sha256()
    for name in _reached(each.__module__ for each in classes):
        digest.update(f"{name} {_file_digest(name)}\n".encode())
    for each in classes:
        digest.update(f"{each.__module__} {each.__qualname__}\n".encode())
        for name, value in sorted(vars(each).items()):
            function = value.fget if isinstance(value, property) else value
            if isinstance(function, FunctionType):
                digest.update(f"{name} {_text(function.__code__)}\n".encode())
    return digest.hexdigest()[:32]


@functools.cache
def own_edition() -> str:
    """The version of mlx_spec, and a digest of those of its files that decide what is found."""
    digest = hashlib.sha256()
    for path in sorted(path for folder in _DECIDING for path in (_OWN / folder).glob("*.py")):
        digest.update(path.name.encode() + path.read_bytes())
    try:
        named = version("mlx_spec")
    except PackageNotFoundError:
        named = "not installed"
    return f"{named} {digest.hexdigest()[:16]}"


def _reached(names: Iterable[str]) -> list[str]:
    """Modules, and those of the same packages that they take something from, in order of their names."""
    waiting, reached = set(names), set()
    while waiting:
        name = waiting.pop()
        if name in sys.modules and name not in reached:
            reached.add(name)
            waiting.update(_taken_from(sys.modules[name]) - reached)
    return sorted(reached)


@functools.cache
def _taken_from(module: ModuleType) -> frozenset[str]:
    package = module.__name__.partition(".")[0]
    homes = (_home(value) for value in list(vars(module).values()))
    return frozenset(home for home in homes if home.partition(".")[0] == package)


def _home(value: Any) -> str:
    home = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
    return home if isinstance(home, str) else ""


def _file_digest(name: str) -> str:
    path = vars(sys.modules[name]).get("__file__")
    if path is None or Path(path).suffix != ".py":
        return ""
    try:
        edition = Path(path).stat()
        return _digest_of(path, edition.st_mtime_ns, edition.st_size)
    except OSError:
        return ""


@functools.cache
def _digest_of(path: str, changed_ns: int, size: int) -> str:
    del changed_ns, size  # another edition is another file
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


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
