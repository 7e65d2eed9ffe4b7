"""Undoing what is attached to a model: modules whose class was swapped get their own back."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def put_back(modules: Iterable[Any], marker: str) -> None:
    """Give the modules whose class carries `marker`, under which it names the class it stands for, that class back."""
    for module in modules:
        base = vars(type(module)).get(marker)
        if base is not None:
            module.__class__ = base
