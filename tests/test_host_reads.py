"""The counter of host reads counts each of them and leaves no trace."""

import math
from collections.abc import Callable

import mlx.core as mx
import numpy as np
import pytest

from tests.host_reads import READERS, count_host_reads


@pytest.mark.parametrize(
    ("read", "counted"),
    [
        (lambda a: a.item(), "item"),
        (lambda a: a.tolist(), "tolist"),
        (bool, "__bool__"),
        (lambda a: 1 if a else 0, "__bool__"),
        (lambda a: a in [mx.array(8)], "__bool__"),
        (int, "__int__"),
        (float, "__float__"),
        (math.floor, "__float__"),
        (lambda a: list(range(a)), "__index__"),
        (lambda a: "abcd"[a], "__index__"),
        (lambda a: f"{a}", "__format__"),
        (repr, "__repr__"),
    ],
)
def test_every_way_to_read_is_counted_once(read: Callable[[mx.array], object], counted: str) -> None:
    array = mx.array(3)
    want = read(array)
    with count_host_reads() as reads:
        got = read(array)
    assert got == want
    assert reads == {counted: 1}
    assert reads.count == 1


def test_computing_waiting_and_numpy_are_not_counted() -> None:
    with count_host_reads() as reads:
        doubled = mx.arange(4) * 2
        mx.eval(doubled)
        np.array(doubled)
        assert doubled.shape == (4,)
    assert reads.count == 0


def test_methods_are_put_back_after_an_error() -> None:
    before = {name: getattr(mx.array, name) for name in READERS}
    with pytest.raises(KeyError), count_host_reads():
        raise KeyError
    assert {name: getattr(mx.array, name) for name in READERS} == before


def test_contexts_nest() -> None:
    with count_host_reads() as outer:
        mx.array(1).item()
        with count_host_reads() as inner:
            mx.array(1).item()
    assert (outer.count, inner.count) == (2, 1)
