"""One record owns what is attached to a model and known of it, and gives the model back as it was."""

from __future__ import annotations

import gc
import itertools
import sys
import weakref
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest

from mlx_spec import generate_step
from mlx_spec.cache.adopt import Likeness, new_caches
from mlx_spec.model import taps
from mlx_spec.model.swap import own_class, stack, swap_class, swap_of, unswap
from mlx_spec.verify import bindings, mixers, routes
from mlx_spec.verify.record import detach, forget, record_of
from mlx_spec.verify.trial import Situation
from tests.recalled import remembered_maps
from tests.tiny import MIXES, PROMPT

ATTACH: dict[str, Callable[[Any], Any]] = {
    "taps": lambda model: taps.attach(model.layers),
    "mixers": mixers.attach,
    "linear maps that remember": routes.remember,
    "names": lambda model: record_of(model).bindings.attach(model),
}
ORDERS = list(itertools.permutations(ATTACH))


def built(mix: str) -> Any:
    model = MIXES[mix].build()
    mx.eval(model.parameters())
    return model


@pytest.mark.parametrize("order", ORDERS, ids=["-".join(order) for order in ORDERS])
def test_a_model_is_given_back_whatever_the_order(order: tuple[str, ...]) -> None:
    model = built("hybrid")
    classes = [type(module) for module in model.modules()]
    for name in order:
        ATTACH[name](model)
    assert [type(module) for module in model.modules()] != classes
    assert [own_class(type(module)) for module in model.modules()] == classes
    detach(model)
    assert [type(module) for module in model.modules()] == classes
    assert remembered_maps(model) == []


@pytest.mark.parametrize("mix", ["dense", "hybrid", "sliding"])
def test_a_run_after_detaching_attaches_what_it_needs_and_is_exact(mix: str) -> None:
    model, run = built(mix), None
    for _ in range(2):
        out = list(generate_step(mx.array(PROMPT), model, draft_model="ngram", draft_block_size=4, max_tokens=20))
        run = run or [pair[0] for pair in out]
        assert [pair[0] for pair in out] == run
        detach(model)
    plain = list(generate_step(mx.array(PROMPT), model, max_tokens=20))
    assert [pair[0] for pair in plain] == run


def test_a_kind_is_found_wherever_it_stands_and_taken_off_with_the_rest() -> None:
    model = built("dense")
    layer, own = model.layers[0], type(model.layers[0])
    for kind in ("lowest", "middle", "top"):
        layer.__class__ = swap_class(type(layer), kind)
    assert [vars(each)["__swap_kind__"] for each in stack(type(layer))] == ["top", "middle", "lowest"]
    assert swap_of(layer, "lowest") is not None
    assert swap_of(layer, "another") is None
    assert (type(layer).__name__, type(layer).__module__) == (own.__name__, own.__module__)
    unswap([layer])
    assert type(layer) is own


def test_a_record_goes_with_its_model_and_serves_no_other() -> None:
    model = built("dense")
    record = record_of(model)
    assert record_of(model) is record
    assert record_of(built("dense")) is not record
    gone = weakref.ref(record)
    del model, record
    gc.collect()
    assert gone() is None


def test_what_is_forgotten_is_found_out_again() -> None:
    model = built("dense")
    situation = Situation(Likeness(new_caches(model)))
    certificate = record_of(model).certificate(situation)
    forget(model)
    assert record_of(model).certificate(situation) is not certificate


def test_names_stay_bound_for_the_other_model() -> None:
    first, second = built("dense"), built("dense")
    bound = [record_of(model).bindings.attach(model) for model in (first, second)]
    assert bound[0] == bound[1]
    file, named = sys.modules[type(first).__module__], bindings.NAMES[bindings.NAME]
    detach(first)
    assert vars(file)[bindings.NAME] is named.ours
    for owner in bindings.owners():
        owner.release()
    assert vars(file)[bindings.NAME] is named.stock
