"""The double: a context in which calls of several rows round differently from calls of one row, as on Metal.

    with double(PATTERNS["gen15"]):
        ...

A call of one row has the stock bits. mlx functions are replaced for the whole process: other threads see them too, so
nothing that is to stay stock may compute meanwhile, and the context cannot be nested. Work that is lazy when the
context ends keeps the rounding it was built with. Inside, `mx.compile` is off: a compiled function remembers the graph
of its first call, so one traced before would stay stock within, and one traced within different afterwards.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import mlx.core as mx

from tests.double import branches
from tests.double.attention import BlockedAttention
from tests.double.orders import Matmuls, Stock
from tests.double.patterns import Pattern

_in_use = threading.Lock()


@contextlib.contextmanager
def double(pattern: Pattern) -> Iterator[Pattern]:
    """Round as `pattern` says inside the `with` block; everything is put back however it ends.

    Raises:
        RuntimeError: the double is on already, in this thread or another.
    """
    if not _in_use.acquire(blocking=False):
        raise RuntimeError("the double is on already: it replaces functions of the whole process and cannot be nested")
    try:
        with _replaced(replacements(pattern)), _uncompiled():
            yield pattern
    finally:
        _in_use.release()


def replacements(pattern: Pattern) -> list[tuple[Any, str, Any]]:
    """(owner, attribute, value) of everything that is replaced."""
    stock = Stock.now()
    matmuls = Matmuls(pattern, stock)

    def operator(a: mx.array, b: Any) -> Any:
        return matmuls.operator(a, b)

    def in_place(a: mx.array, b: Any) -> Any:
        return matmuls.in_place(a, b)

    return [
        (mx, "matmul", matmuls.matmul),
        (mx, "addmm", matmuls.addmm),
        (mx, "quantized_matmul", matmuls.quantized_matmul),
        (mx, "gather_mm", matmuls.gather_mm),
        (mx, "gather_qmm", matmuls.gather_qmm),
        (mx.array, "__matmul__", operator),
        (mx.array, "__imatmul__", in_place),
        (mx.fast, "scaled_dot_product_attention", BlockedAttention(pattern.attention, stock).attention),
        *branches.forced(),
    ]


@contextlib.contextmanager
def _replaced(wanted: list[tuple[Any, str, Any]]) -> Iterator[None]:
    before = [(owner, name, vars(owner)[name]) for owner, name, _ in wanted]
    try:
        for owner, name, value in wanted:
            setattr(owner, name, value)
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)


@contextlib.contextmanager
def _uncompiled() -> Iterator[None]:
    compiling = compiles()
    mx.disable_compile()
    try:
        yield
    finally:
        if compiling:
            mx.enable_compile()


def compiles() -> bool:
    """Whether `mx.compile` is in force: then a function's body runs once for two equal calls."""
    calls: list[None] = []

    def body(x: mx.array) -> mx.array:
        calls.append(None)
        return x + 1

    compiled = mx.compile(body)
    for _ in range(2):
        compiled(mx.zeros(1))
    return len(calls) == 1
