"""A block is taken only where it was seen to equal one-token decode, on this machine and for this model."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import pytest

from mlx_spec import generate_step
from mlx_spec.cache.adopt import Likeness
from mlx_spec.errors import CannotMix
from mlx_spec.model.target import Target
from mlx_spec.stats import Statistics
from mlx_spec.verify.certified_routes import CertifiedRoutes
from mlx_spec.verify.record import ModelRecord, record_of
from mlx_spec.verify.routes import BLOCK, STEP_THROUGH
from mlx_spec.verify.trial import PROBES, Situation
from tests.oracle import rng_key
from tests.scripted import RightDrafter
from tests.tiny import MIXES, PROMPT, VOCAB

ON_CPU = mx.default_device().type == mx.cpu
on_cpu = pytest.mark.skipif(not ON_CPU, reason="only the CPU is certified")

WIDTHS = (2, 3, 5, 8)


@contextmanager
def acting(model: Any, act: Callable[[mx.array, mx.array], mx.array]) -> Iterator[None]:
    """Let `act(tokens, logits)` change what every forward of the model puts out."""
    own = type(model)

    def call(self: Any, tokens: mx.array, cache: Any = None) -> mx.array:
        return act(tokens, own.__call__(self, tokens, cache=cache))

    model.__class__ = type(own.__name__, (own,), {"__call__": call, "__module__": own.__module__})
    try:
        yield
    finally:
        model.__class__ = own


class Forwards:
    """Widths of the forwards made, in order."""

    def __init__(self) -> None:
        self.widths: list[int] = []

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        self.widths.append(tokens.shape[1])
        return logits


def fresh_model(name: str = "dense") -> Any:
    """A model that no other test has had certified."""
    model = MIXES[name].build()
    mx.eval(model.parameters())
    return model


def position_by_position(model: Any) -> Callable[..., mx.array]:
    """A forward whose blocks equal single steps by the way it is made."""

    def forward(tokens: mx.array, cache: Any) -> mx.array:
        steps = [model(tokens[:, i : i + 1], cache=cache) for i in range(tokens.shape[1])]
        return mx.concatenate(steps, axis=1)

    return forward


class Stepping:
    """A model that reads every block one token at a time, plus a change to one logit of chosen blocks."""

    def __init__(self, changes: Callable[[int], int | None] = lambda width: None) -> None:
        self.inner = fresh_model()
        self.layers = self.inner.layers
        self.changes = changes

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def __call__(self, tokens: mx.array, cache: Any) -> mx.array:
        logits = position_by_position(self.inner)(tokens, cache)
        position = self.changes(tokens.shape[1])
        if position is not None:
            raw = logits.view(mx.uint32)
            raw[:, position, 50] += 1
            logits = raw.view(mx.float32)
        return logits


def situation(name: str = "dense", entry: tuple[int, int] | None = None) -> Situation:
    """Short texts on the caches of a mix, quantized to (bits, group size) where that is asked."""
    caches = MIXES[name].new_cache()
    if entry is not None:
        bits, group_size = entry
        caches = [cache.to_quantized(group_size=group_size, bits=bits) for cache in caches]
    return Situation(Likeness(caches))


def routes(model: Any, verify: Any = "exact") -> tuple[CertifiedRoutes, Statistics]:
    statistics = Statistics()
    return CertifiedRoutes(Target(model), verify, statistics), statistics


# What is certified


@on_cpu
@pytest.mark.parametrize("name", ["dense", "dense_qk_norm", "dense_4bit_weights"])
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=str)
def test_dense_models_are_certified_on_this_backend(name: str, dtype: mx.Dtype) -> None:
    certificate = record_of(MIXES[name].model(dtype)).certificate(situation(name))
    assert [width for width in WIDTHS if not certificate.holds(width)] == []


@on_cpu
@pytest.mark.parametrize("entry", [(8, 64), (4, 32)], ids=str)
def test_dense_models_are_certified_with_quantized_caches_too(entry: tuple[int, int]) -> None:
    certificate = record_of(MIXES["quantized_from_0"].model()).certificate(situation("quantized_from_0", entry))
    assert [width for width in WIDTHS if not certificate.holds(width)] == []


@on_cpu
def test_a_model_with_another_formula_for_one_token_is_not_certified() -> None:
    """Multi-head latent attention has a branch of its own for a single token."""
    certificate = record_of(MIXES["mla_moe"].model()).certificate(situation("mla_moe"))
    assert [width for width in WIDTHS if certificate.holds(width)] == []


def test_a_model_whose_blocks_are_steps_by_construction_is_certified() -> None:
    model = Stepping()
    certificate = ModelRecord(model).certificate(situation())
    assert all(certificate.holds(width) for width in (2, 3, 8))


@pytest.mark.parametrize("position", range(4))
def test_one_bit_at_one_position_is_enough_to_refuse_a_width(position: int) -> None:
    model = Stepping(lambda width: position if width == 4 else None)
    certificate = ModelRecord(model).certificate(situation())
    assert {width: certificate.holds(width) for width in (2, 3, 4, 5)} == {2: True, 3: True, 4: False, 5: True}


@pytest.mark.parametrize("order", [(2, 8, 5), (8, 5, 2), (5, 5, 2, 8)], ids=str)
def test_widths_may_be_asked_for_in_any_order(order: tuple[int, ...]) -> None:
    model = Stepping(lambda width: 1 if width == 5 else None)
    certificate = ModelRecord(model).certificate(situation())
    for width in order:
        assert certificate.holds(width) == (width != 5)


# What it costs


def test_a_width_is_tried_once_and_each_against_steps_of_its_own() -> None:
    model, forwards = fresh_model(), Forwards()
    with acting(model, forwards):
        certificate = ModelRecord(model).certificate(situation())
        for width in (3, 3, 5, 3, 2):
            certificate.holds(width)
    traced, rest = forwards.widths[:2], forwards.widths[2:]
    assert traced == [1, 3]
    read = [width for width in rest if width > max(5, 3, 2)]
    assert read == [probe.tokens for probe in PROBES] * 3
    assert sorted(width for width in rest if 1 < width <= 5) == [2, 2, 3, 3, 5, 5]
    assert rest.count(1) == (3 + 5 + 2) * len(PROBES)


def test_the_second_request_makes_no_forward_more_than_it_needs() -> None:
    mix = MIXES["dense"]
    ids = mix.oracle().ids
    model, forwards = mix.model(), Forwards()
    counts = []
    with acting(model, forwards):
        for _ in range(3):
            forwards.widths.clear()
            statistics = Statistics()
            steps = generate_step(
                mx.array(PROMPT),
                model,
                draft_model=RightDrafter(ids, VOCAB),
                draft_block_size=7,
                max_tokens=15,
                statistics=statistics,
            )
            assert [token for token, _ in steps] == list(ids[:15])
            counts.append((len(forwards.widths), statistics.rounds))
    prefill = 1
    assert counts[1] == counts[2] == (prefill + counts[1][1], counts[1][1])


def test_trying_moves_neither_the_random_state_nor_the_models_classes() -> None:
    model = fresh_model()
    before, classes = rng_key(), [type(module) for module in model.modules()]
    record_of(model).certificate(situation()).holds(4)
    assert rng_key() == before
    assert [type(module) for module in model.modules()] == classes


def test_threads_that_ask_at_once_get_one_trial() -> None:
    model, forwards, got = fresh_model(), Forwards(), []
    barrier = threading.Barrier(4)

    def ask() -> None:
        with mx.stream(mx.new_stream(mx.default_device())):
            barrier.wait()
            got.append(record_of(model).certificate(situation()).holds(4))
        mx.clear_streams()

    with acting(model, forwards):
        threads = [threading.Thread(target=ask) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(got) == 4
    assert len(set(got)) == 1
    assert forwards.widths.count(4) == len(PROBES)


@pytest.mark.part(6)
@pytest.mark.parametrize("at", range(14))
def test_a_trial_that_was_interrupted_is_begun_again(at: int) -> None:
    """Forwards 0 and 1 are traced, 2 and 3 read the probes; then for each come four single steps and the block."""
    model = fresh_model()
    left = [at]

    def interrupt(tokens: mx.array, logits: mx.array) -> mx.array:
        left[0] -= 1
        if left[0] == -1:
            raise KeyboardInterrupt
        return logits

    want = ModelRecord(model).certificate(situation()).holds(4)
    certificate = ModelRecord(model).certificate(situation())
    with acting(model, interrupt):
        with pytest.raises(KeyboardInterrupt):
            certificate.holds(4)
        assert certificate.holds(4) == want


# Whose it is


def test_a_model_has_one_certificate_per_kind_of_cache() -> None:
    first, second = fresh_model(), fresh_model()
    kinds = [situation(), situation(entry=(8, 64)), situation(entry=(4, 64))]
    different = [record_of(first).certificate(kind) for kind in kinds]
    assert all(record_of(first).certificate(kind) is known for kind, known in zip(kinds, different, strict=True))
    different.append(record_of(second).certificate(situation()))
    assert len(set(map(id, different))) == 4


def test_a_certificate_dies_with_its_model_and_keeps_it_alive_no_longer() -> None:
    model = fresh_model()
    certificate = record_of(model).certificate(situation())
    certificate.holds(3)
    alive = weakref.ref(model)
    held = weakref.ref(certificate)
    del model, certificate
    gc.collect()
    assert alive() is None
    assert held() is None


# Which way a request goes


@on_cpu
def test_a_certified_width_is_verified_as_a_block_without_a_word() -> None:
    chosen, statistics = routes(MIXES["dense"].model())
    assert chosen.route(4, MIXES["dense"].new_cache()) == BLOCK
    assert statistics.notes == []


def test_a_width_that_differs_is_stepped_through_and_said_so() -> None:
    model = Stepping(lambda width: 0 if width == 3 else None)
    chosen, statistics = routes(model)
    caches = MIXES["dense"].new_cache()
    if ON_CPU:
        assert chosen.route(2, caches) == BLOCK
    assert chosen.route(3, caches) == STEP_THROUGH
    (note,) = statistics.notes
    assert note.startswith("verified one token at a time, which cannot be faster than plain decoding: ")
    assert "a block rounds differently from one-token decode" in note or not ON_CPU


ROUTE_OF_MIX = {
    "dense": "block",
    "quantized_from_0": "block",
    "sliding": "block",
    "ring_with_keep": "block",
    "hybrid": "block",
    "chunked": "block",
    "mla_moe": "block, mixers by position",
    "mamba2": "block, state updates by position",
    "cache_list": "block, state updates by position",
}
"""On a CPU. Windows go position by position in a block in any case."""


@pytest.mark.skipif(not ON_CPU, reason="the routes are those of the CPU backend")
@pytest.mark.parametrize("name", ROUTE_OF_MIX)
def test_the_cheapest_equal_route_is_taken_without_a_word(name: str) -> None:
    chosen, statistics = routes(MIXES[name].model())
    assert chosen.route(4, MIXES[name].new_cache()).name == ROUTE_OF_MIX[name]
    assert statistics.notes == []


def test_a_route_that_fails_in_a_round_is_not_taken_again() -> None:
    chosen, statistics = routes(MIXES["sliding"].model())
    caches = MIXES["sliding"].new_cache()
    chosen.demote(4, caches, CannotMix("position 2 of a block: shapes do not fit"))
    assert chosen.route(4, caches) == STEP_THROUGH
    assert "position 2 of a block" in statistics.notes[0]


def test_bits_hidden_by_half_precision_are_found_in_the_caches() -> None:
    model = MIXES["mamba2"].model(mx.bfloat16)
    assert not ModelRecord(model).certificate(situation("mamba2")).holds(5)


def test_the_fast_way_takes_any_block_that_can_be_cut_and_says_what_that_means() -> None:
    model, forwards = MIXES["mla_moe"].model(), Forwards()
    chosen, statistics = routes(model, "fast")
    with acting(model, forwards):
        assert [chosen.route(width, MIXES["mla_moe"].new_cache()) for width in (2, 5, 2)] == [BLOCK] * 3
    assert forwards.widths == [2, 5]
    (note,) = statistics.notes
    assert "may differ from plain decoding where two tokens nearly tie" in note


def test_one_token_needs_no_certificate() -> None:
    for name in ("mla_moe", "sliding"):
        model, forwards = MIXES[name].model(), Forwards()
        chosen, statistics = routes(model)
        with acting(model, forwards):
            assert chosen.route(1, MIXES[name].new_cache()) == BLOCK
        assert (forwards.widths, statistics.notes) == ([], [])


@on_cpu
def test_time_spent_on_trials_is_counted_once() -> None:
    model = fresh_model()
    chosen, statistics = routes(model)
    chosen.route(6, MIXES["dense"].new_cache())
    spent = statistics.certify_ms
    assert spent > 0 == statistics.decode_certify_ms
    chosen.route(6, MIXES["dense"].new_cache())
    assert statistics.certify_ms == spent


@on_cpu
def test_a_cache_that_becomes_quantized_is_judged_anew() -> None:
    model = MIXES["quantized_from_0"].model()
    chosen, _ = routes(model)
    caches = MIXES["quantized_from_0"].new_cache()
    chosen.route(4, caches)
    assert chosen.route(4, [cache.to_quantized(64, 8) for cache in caches]) == BLOCK
    assert record_of(model).certificate(situation("quantized_from_0", (8, 64))).holds(4)
