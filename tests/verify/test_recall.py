"""Keeping a part of a block runs recurrent mixers again: their linear maps answer from the first run, bit for bit."""

from __future__ import annotations

import threading
from typing import Any

import mlx.core as mx
import pytest
from mlx import nn

from mlx_spec.cache.adopt import new_caches
from mlx_spec.cache.base import Drive
from mlx_spec.cache.contents import cache_arrays
from mlx_spec.cache.transaction import SpeculativeCacheTransaction
from mlx_spec.verify import mixers, routes
from mlx_spec.verify.recall import Recall, recalled
from mlx_spec.verify.record import detach
from tests.recalled import inner_maps, remembered_maps
from tests.same_cache import assert_same_cache
from tests.tiny import MIXES, VOCAB, randomise

WIDTH = 5
# The updates of Mamba-2 have other bits for a block than for single tokens.
DRIVEN = [(mix, drive) for mix in ("hybrid", "mamba", "mamba2") for drive in (Drive.BLOCK, Drive.POSITIONS)]
PROMPT = [[(7 * place + 3) % VOCAB for place in range(9)], [(5 * place + 2) % VOCAB for place in range(9)]]
BLOCK = [[4, 9, 2, 7, 1], [3, 3, 8, 0, 6]]


def fresh(mix: str) -> nn.Module:
    """A model of its own with everything attached."""
    model = randomise(MIXES[mix].build, MIXES[mix].seed)
    mixers.attach(model)
    routes.remember(model)
    return model


def prefilled(model: nn.Module, rows: int) -> list[Any]:
    caches = new_caches(model)
    mx.eval(model(mx.array(PROMPT[:rows]), cache=caches), cache_arrays(caches))
    return caches


class Round:
    """A block read inside an open transaction."""

    def __init__(self, model: nn.Module, drive: Drive, rows: int) -> None:
        self.caches = prefilled(model, rows)
        self.tx = SpeculativeCacheTransaction(self.caches, WIDTH, drive=drive)
        mx.eval(model(mx.array(BLOCK[:rows]), cache=self.tx.caches), cache_arrays(self.caches))
        self.tx.mark(WIDTH)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[nn.Linear]:
    """Linear maps in the order they are computed."""
    computed: list[nn.Linear] = []
    stock = nn.Linear.__call__

    def call(self: nn.Linear, x: mx.array) -> mx.array:
        computed.append(self)
        return stock(self, x)

    monkeypatch.setattr(nn.Linear, "__call__", call)
    return computed


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize(("mix", "drive"), DRIVEN)
def test_a_part_that_is_kept_reads_no_weights_of_linear_maps(
    mix: str, drive: Drive, rows: int, counted: list[nn.Linear]
) -> None:
    model = fresh(mix)
    for retained in range(1, WIDTH):
        opened = Round(model, drive, rows)
        assert counted
        counted.clear()
        opened.tx.commit(retained)
        assert remembered_maps(model)
        assert not {id(part) for part in counted} & {id(part) for part in remembered_maps(model)}
        counted.clear()


@pytest.mark.part(5)
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize(("mix", "drive"), [pair for pair in DRIVEN if pair != ("mamba2", Drive.BLOCK)])
def test_what_is_kept_is_what_single_tokens_leave_and_stays_so_when_it_goes_on(
    mix: str, drive: Drive, rows: int
) -> None:
    model, block = fresh(mix), mx.array(BLOCK[:rows])
    for retained in range(WIDTH + 1):
        opened, expected = Round(model, drive, rows), prefilled(model, rows)
        opened.tx.commit(retained)
        for position in range(retained):
            mx.eval(model(block[:, position : position + 1], cache=expected), cache_arrays(expected))
        assert_same_cache(opened.caches, expected)
        for caches in (opened.caches, expected):
            mx.eval(model(block[:, :1], cache=caches), cache_arrays(caches))
        assert_same_cache(opened.caches, expected)


def test_weights_that_change_after_the_block_do_not_reach_what_is_kept() -> None:
    model = fresh("hybrid")
    opened, expected = Round(model, Drive.BLOCK, 1), Round(model, Drive.BLOCK, 1)
    expected.tx.commit(3)
    mx.eval(cache_arrays(expected.caches))
    for part in inner_maps(model):
        part.weight = part.weight * float("nan")
    opened.tx.commit(3)
    assert_same_cache(opened.caches, expected.caches)


def test_outside_a_round_nothing_is_remembered() -> None:
    model = fresh("hybrid")
    plain = randomise(MIXES["hybrid"].build, MIXES["hybrid"].seed)
    opened = Round(model, Drive.BLOCK, 1)
    other, caches = prefilled(model, 1), prefilled(plain, 1)
    # With a round of the same model open, and in another thread.
    given: list[mx.array] = []

    def read() -> None:
        given.append(model(mx.array(BLOCK[:1]), cache=other))
        mx.eval(given)
        mx.clear_streams()

    thread = threading.Thread(target=read)
    thread.start()
    thread.join()
    assert mx.array_equal(given[0], plain(mx.array(BLOCK[:1]), cache=caches))
    opened.tx.abort()


def test_detaching_gives_the_linear_maps_their_class_back() -> None:
    model = fresh("hybrid")
    assert all(type(part) is not nn.Linear for part in inner_maps(model))
    parts = inner_maps(model)
    detach(model)
    assert all(type(part) is nn.Linear for part in parts)


def test_mixers_that_only_attend_are_not_remembered() -> None:
    model = fresh("dense")
    assert not inner_maps(model)
    assert all(type(part) is nn.Linear for part in model.modules() if isinstance(part, nn.Linear))


# One map


def given(start: int, stop: int, features: int = 3) -> mx.array:
    """[2, stop - start, features] rows that tell their position."""
    return mx.broadcast_to(mx.arange(start, stop)[None, :, None], (2, stop - start, features))


@pytest.mark.parametrize("parts", [[(0, 5)], [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5)], [(0, 2), (2, 5)]])
@pytest.mark.parametrize(("start", "stop"), [(0, 3), (2, 3), (1, 5), (0, 5), (4, 5)])
def test_rows_are_found_however_they_were_computed(parts: list[tuple[int, int]], start: int, stop: int) -> None:
    recall, module = Recall(2), object()
    for part in parts:
        with recall.running(*part, again=False):
            recalled(module, lambda part=part: given(*part))  # type: ignore[misc]
    with recall.running(start, stop, again=True):
        assert recalled(module, lambda: pytest.fail("computed again")).tolist() == given(start, stop).tolist()


def test_calls_of_one_map_are_told_apart_by_their_order() -> None:
    recall, module, other = Recall(2), object(), object()
    with recall.running(0, 4, again=False):
        recalled(module, lambda: given(0, 4))
        recalled(module, lambda: given(0, 4) + 10)
    with recall.running(0, 2, again=True):
        assert recalled(module, lambda: None).tolist() == given(0, 2).tolist()
        assert recalled(module, lambda: None).tolist() == (given(0, 2) + 10).tolist()
        assert recalled(module, lambda: "a third call") == "a third call"
        assert recalled(other, lambda: "another map") == "another map"


@pytest.mark.parametrize(
    "output",
    [mx.zeros((2, 4)), mx.zeros((8, 4, 3)), mx.zeros((2, 4, 3, 1)), mx.zeros((2, 5, 3)), (mx.zeros((2, 4, 3)),)],
)
def test_what_does_not_count_positions_is_computed_again(output: Any) -> None:
    recall, module = Recall(2), object()
    with recall.running(0, 4, again=False):
        assert recalled(module, lambda: output) is output
    assert recall.nbytes == 0
    with recall.running(0, 2, again=True):
        assert recalled(module, lambda: "again") == "again"


def test_positions_beyond_what_was_computed_are_computed() -> None:
    recall, module = Recall(2), object()
    with recall.running(0, 2, again=False):
        recalled(module, lambda: given(0, 2))
    assert recall.nbytes == given(0, 2).nbytes
    with recall.running(1, 3, again=True):
        assert recalled(module, lambda: "computed") == "computed"
