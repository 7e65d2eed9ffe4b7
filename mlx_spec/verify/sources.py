"""A digest of the code that a model's classes are made of: another edition of a file may round differently."""

from __future__ import annotations

import functools
import hashlib
import itertools
import sys
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType
from typing import Any

from mlx import nn

from mlx_spec.model.swap import own_class
from mlx_spec.verify.look import Look

_OWN = Path(__file__).parent.parent
_DECIDING = ("cache", "model", "ops", "verify")
"""Our folders on which it hangs what is found, and what a finding means."""

OF_THIS_PROCESS = "of this process alone"
"""How a fact begins that no other process can have."""

_unread = itertools.count()


def sources_of(model: nn.Module) -> str:
    """A digest of the source files behind a model's classes, and of what these classes' methods come to (`Reach`).

    The files are those of the modules that define the classes and their bases, and what those modules take from others
    of their packages. A file may have been edited after it was imported, and a method replaced: so the
    functions in this process count as well. Where one of them cannot be read, it is `OF_THIS_PROCESS`.

    Cost:
        Each edition of a file is read once in a process.
    """
    found = {base for module in model.modules() for base in own_class(type(module)).__mro__} - {object, dict}
    classes = sorted(found, key=lambda each: (each.__module__, each.__qualname__))
    code = Look(model).reach.digest
    if code is None:
        return f"{OF_THIS_PROCESS} {next(_unread)}"
    digest = hashlib.sha256(code.encode())
    for name in _reached(each.__module__ for each in classes):
        digest.update(f"{name} {_file_digest(name)}\n".encode())
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
