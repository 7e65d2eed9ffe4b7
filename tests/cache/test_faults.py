"""A fault at any point of a round leaves the caches as they were before it or as its commit leaves them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import BatchKVCache, BatchRotatingKVCache

from mlx_spec import SpeculativeCacheTransaction
from mlx_spec.cache.base import Drive, journals_of
from mlx_spec.verify import mixers, routes
from mlx_spec.verify.record import detach
from tests.cache import kinds
from tests.cache.interrupting import Fault, Interrupt, Interrupter, mlx_functions, stand_in
from tests.cache.kinds import CHUNK, KINDS, Kind, append, arrays_of
from tests.oracle import independent_copy
from tests.same_cache import assert_same_cache, cache_difference
from tests.tiny import MIXES

WIDTH = 3
BLOCK = [90, 91, 92]
FURTHER = [93, 94, 95, 96]
"""One more than the width: a buffer that grew in the round that was undone grows again."""

RAGGED = {"batch_kv": ([1, 0, 3], [2, 1, 2]), "batch_ring": ([1, 3], [2, 0]), "arrays_padded": ([1, 3], [2, 1])}
"""Counts that differ from row to row, per kind that can keep them."""

UNDONE = None
Ending = int | list[int] | None
"""What a commit keeps; `UNDONE` aborts."""


EVERY_KIND = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())


@pytest.fixture(autouse=True)
def _mlx_calls_are_points(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in mlx_functions():
        monkeypatch.setattr(mx, name, stand_in(getattr(mx, name)))


@dataclass(frozen=True)
class Scene:
    """One round over some caches, to be played again and again.

    Attributes:
        caches: what the round finds.
        feed: appends `WIDTH` tokens to an open round and marks them.
        go_on: plain steps afterwards.
    """

    caches: list[Any]
    feed: Callable[[SpeculativeCacheTransaction], None]
    go_on: Callable[[list[Any]], None]
    drive: Drive = Drive.BLOCK

    def outcome(self, ending: Ending) -> list[list[Any]]:
        """The caches after an undisturbed round, and after plain steps from there."""
        caches = independent_copy(self.caches)
        self.play(caches, ending, Interrupter())
        after = independent_copy(caches)
        self.go_on(caches)
        return [after, caches]

    def play(
        self, caches: list[Any], ending: Ending, interrupter: Interrupter
    ) -> tuple[int, SpeculativeCacheTransaction | None]:
        """One round. Returns the points passed before its end began, and the round if it could be opened."""
        tx, fed = None, 0
        with suppress(Fault, Interrupt), interrupter.watching():
            tx = SpeculativeCacheTransaction(caches, WIDTH, drive=self.drive)
            with tx:
                self.feed(tx)
                fed = interrupter.passed
                if ending is not UNDONE:
                    tx.commit(ending)
        return fed, tx

    def points(self, ending: Ending) -> tuple[int, int]:
        """Points passed before the round's end begins, and in all."""
        interrupter = Interrupter()
        self.play(independent_copy(self.caches), ending, interrupter)
        again = Interrupter()
        fed, _ = self.play(independent_copy(self.caches), ending, again)
        return fed, again.passed


def assert_nothing_between(scene: Scene, endings: Sequence[Ending], step: int = 1) -> int:
    """Raise at every `step`-th point of the round, and of each way to end it. Returns the faults raised."""
    undone = scene.outcome(UNDONE)
    raised = 0
    for ending in endings:
        fed, points = scene.points(ending)
        outcomes = [undone] if ending is UNDONE else [undone, scene.outcome(ending)]
        for at in range(0 if ending is UNDONE else fed, points, step):
            interrupter = Interrupter(at, Interrupt() if at % 2 else Fault())
            caches = independent_copy(scene.caches)
            _, tx = scene.play(caches, ending, interrupter)
            assert interrupter.raised_at is not None
            try:
                assert_settled(scene, caches, tx, outcomes)
            except Exception as error:
                error.add_note(f"the fault was raised at {interrupter.raised_at}, point {at} of {points}, {ending=}")
                raise
            raised += 1
    return raised


def assert_settled(
    scene: Scene, caches: list[Any], tx: SpeculativeCacheTransaction | None, outcomes: list[list[Any]]
) -> None:
    """The round is closed or can be, the caches are as one of the outcomes, and they are free and can be used."""
    if tx is not None:
        tx.abort()
        assert not tx.active
        assert tx.caches == []
        assert tx.nbytes == 0
    SpeculativeCacheTransaction(caches, 1).abort()
    differences = [cache_difference(caches, after) for after, _ in outcomes]
    assert None in differences, f"neither undone nor committed: {differences}"
    scene.go_on(caches)
    assert_same_cache(caches, outcomes[differences.index(None)][1])


def scene_of(kind: Kind, start: int) -> Scene:
    def feed(tx: SpeculativeCacheTransaction) -> None:
        for token in BLOCK:
            append(tx.caches[0], [token], kind.batch)
            tx.mark(1)

    def go_on(caches: list[Any]) -> None:
        if isinstance(caches[0], BatchKVCache | BatchRotatingKVCache):
            # A half-done commit may have left padding behind that the next one to finalize would apply.
            caches[0].finalize()
        for token in FURTHER:
            append(caches[0], [token], kind.batch)
        mx.eval(arrays_of(caches[0]))

    return Scene([kind.filled_at_once(range(start))], feed, go_on)


def endings_of(kind: Kind, start: int) -> list[Ending]:
    """An abort, every count, and counts that differ from row to row where the kind keeps such."""
    ragged = RAGGED.get(kind.name, [])
    if kind.name == "batch_ring" and not start:
        # mlx-lm cannot extract a row of a batched ring that holds nothing.
        ragged = [counts for counts in ragged if 0 not in counts]
    return [UNDONE, *range(WIDTH + 1), *ragged]


@pytest.mark.part(4)
@pytest.mark.slow
@EVERY_KIND
def test_a_fault_at_any_point_of_a_round_leaves_it_undone_or_committed(kind: Kind) -> None:
    start = kind.edge - 2
    step = 1 if kind.name in ("kv", "concatenate", "ring") else 3 if kind.by_length else 5
    assert assert_nothing_between(scene_of(kind, start), endings_of(kind, start), step) > 80


@pytest.mark.deep
@EVERY_KIND
@pytest.mark.parametrize("before_edge", [None, 2, 1, 0, -WIDTH], ids=str)
def test_the_same_at_every_point_from_every_start(kind: Kind, before_edge: int | None) -> None:
    start = 0 if before_edge is None else kind.edge - before_edge
    assert assert_nothing_between(scene_of(kind, start), endings_of(kind, start)) > 200


# Models with their token mixers


@contextmanager
def mixing_scene(mix: str, drive: Drive, batch: int = 1) -> Iterator[Scene]:
    """A round of a tiny model whose mixers are attached, past every boundary of its caches."""
    model = MIXES[mix].model()

    def forward(caches: list[Any], tokens: list[int]) -> None:
        ids = mx.array([[token + row for token in tokens] for row in range(batch)])
        mx.eval(model(ids, cache=caches))

    def feed(tx: SpeculativeCacheTransaction) -> None:
        forward(tx.caches, [5, 6, 7])
        tx.mark(WIDTH)

    def go_on(caches: list[Any]) -> None:
        for token in (8, 9):
            forward(caches, [token])

    caches = MIXES[mix].new_cache()
    forward(caches, list(range(CHUNK + 1)))
    mixers.attach(model)
    routes.remember(model)
    try:
        yield Scene(independent_copy(caches), feed, go_on, drive)
    finally:
        detach(model)


@pytest.mark.part(2)
@pytest.mark.slow
@pytest.mark.parametrize("mix", ["hybrid", "sliding", "chunked", "cache_list", "mamba2"])
def test_a_fault_at_any_point_of_a_models_round_leaves_it_undone_or_committed(mix: str) -> None:
    with mixing_scene(mix, Drive.POSITIONS if mix == "mamba2" else Drive.BLOCK) as scene:
        assert assert_nothing_between(scene, [UNDONE, 1], step=31) > 30


@pytest.mark.slow
def test_a_fault_while_rows_of_a_recurrent_state_are_kept_apart_leaves_it_undone_or_committed() -> None:
    with mixing_scene("mamba", Drive.BLOCK, batch=2) as scene:
        assert assert_nothing_between(scene, [[1, 2], [0, 3]], step=13) > 50


@pytest.mark.deep
@pytest.mark.parametrize("drive", [Drive.BLOCK, Drive.POSITIONS], ids=lambda drive: drive.value)
@pytest.mark.parametrize("mix", [mix for mix in MIXES if not mix.startswith("quantized")])
def test_the_same_of_every_mix(mix: str, drive: Drive) -> None:
    with mixing_scene(mix, drive) as scene:
        assert assert_nothing_between(scene, [UNDONE, *range(WIDTH + 1)], step=3) > 100


# Faults of the undoing itself


@pytest.mark.part(4)
@pytest.mark.parametrize("name", ["kv", "ring", "nested", "arrays_padded", "chunked", "batch_kv", "batch_ring"])
def test_an_undoing_that_is_interrupted_is_completed_by_the_next(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first fault is raised while a commit is applied, the second while that is undone."""
    scene = scene_of(KINDS[name], KINDS[name].edge - 2)
    ending: Ending = RAGGED.get(name, [2])[0]
    outcomes = [scene.outcome(UNDONE), scene.outcome(ending)]
    fed, points = scene.points(ending)
    plainly, second = SpeculativeCacheTransaction.abort, Interrupter()

    def abort(tx: SpeculativeCacheTransaction) -> None:
        if tx.active and not second.passed:
            second.start()
        plainly(tx)

    raised = 0
    for first in range(fed, points, 17):
        for at in itertools.count(1, 11):
            second = Interrupter(at, Fault())
            caches = independent_copy(scene.caches)
            with monkeypatch.context() as patch:
                patch.setattr(SpeculativeCacheTransaction, "abort", abort)
                _, tx = scene.play(caches, ending, Interrupter(first, Interrupt()))
            assert_settled(scene, caches, tx, outcomes)
            if second.raised_at is None:
                break
            raised += 1
    assert raised > 5


@pytest.mark.parametrize("place", range(3))
def test_every_layer_is_restored_though_one_cannot_be(place: int, monkeypatch: pytest.MonkeyPatch) -> None:
    caches = [KINDS[name].filled(range(7)) for name in ("ring", "kv", "chunked")]
    want = independent_copy(caches)
    tx = SpeculativeCacheTransaction(caches, WIDTH)
    for leaf in tx.caches:
        append(leaf, BLOCK[:1])
    tx.mark(1)
    (journal,) = journals_of(tx.caches[place])

    def fails() -> None:
        raise Fault("told to")

    with monkeypatch.context() as stuck:
        stuck.setattr(journal, "restore", fails)
        with pytest.raises(Fault):
            tx.abort()
    assert tx.active
    others = [layer for layer in range(3) if layer != place]
    assert_same_cache([caches[layer] for layer in others], [want[layer] for layer in others])
    tx.abort()
    assert not tx.active
    assert_same_cache(caches, want)


@pytest.mark.part(9)
@EVERY_KIND
def test_a_commit_that_began_and_failed_closes_the_round_by_itself(kind: Kind) -> None:
    """Without a `with` block: whoever called it need not know that there is something left to undo."""
    scene = scene_of(kind, kind.edge - 2)
    undone, committed = scene.outcome(UNDONE)[0], scene.outcome(2)[0]
    for at in itertools.count(1, 2):
        caches = independent_copy(scene.caches)
        tx = SpeculativeCacheTransaction(caches, WIDTH)
        scene.feed(tx)
        appended = independent_copy(caches)
        interrupter = Interrupter(at, Interrupt())
        with suppress(Interrupt), interrupter.watching():
            tx.commit(2)
        if interrupter.raised_at is None:
            break
        allowed = [appended] if tx.active else [undone, committed]
        differences = [cache_difference(caches, state) for state in allowed]
        assert None in differences, f"{interrupter.raised_at}: {differences}"
        tx.abort()
        SpeculativeCacheTransaction(caches, 1).abort()
    assert at > 30


# What fails only when it is evaluated


def cannot_be_evaluated(like: mx.array) -> mx.array:
    """An array of this shape whose evaluation raises: mlx's CPU gather matmul takes float32 only."""
    half, index = mx.ones((1, 2, 2), mx.bfloat16), mx.array([0], mx.uint32)
    return like + mx.gather_mm(half, half, index, index).sum().astype(like.dtype)


@EVERY_KIND
def test_a_write_that_cannot_be_evaluated_is_undone_where_the_state_before_it_has_a_handle(
    kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where old rows share a buffer with the new ones, that write stands between any reader and the old rows."""
    cache = kind.filled(range(kind.edge - 2))
    want = independent_copy(cache)
    plain_rows = kinds.vectors
    tx = SpeculativeCacheTransaction([cache], WIDTH)
    monkeypatch.setattr(kinds, "vectors", lambda *args: cannot_be_evaluated(plain_rows(*args)))
    append(tx.caches[0], BLOCK[:1], kind.batch)
    with pytest.raises(RuntimeError, match="GatherMM"):
        mx.eval(arrays_of(cache))
    tx.abort()
    if kind.stepwise and kind.name != "list_mixed":
        SpeculativeCacheTransaction([cache], 1).abort()
        assert_same_cache(cache, want)
    else:
        with pytest.raises(RuntimeError, match="GatherMM"):
            cache_difference(cache, want)
