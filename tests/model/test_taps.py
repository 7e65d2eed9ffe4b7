"""Taps record what layers put out, and change nothing else about the model."""

from __future__ import annotations

import threading
import weakref
from contextvars import copy_context
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.cache import make_prompt_cache

from mlx_spec.model.swap import swap_of
from mlx_spec.model.taps import attach, recording
from mlx_spec.model.target import Target
from mlx_spec.verify.record import detach
from tests.bits import assert_same_bits
from tests.model.architectures import BUILDERS, LAYERS, model, spying
from tests.oracle import assert_same_output, run_stock
from tests.tiny import MIXES, PROMPT, Mix

IDS = mx.array([[5, 17, 42, 8, 61]])
OTHER_IDS = mx.array([[3, 88, 2, 90, 14, 7, 7]])

EVERY_ARCHITECTURE = pytest.mark.parametrize("name", BUILDERS)


def forward(stock: Any, ids: mx.array = IDS) -> mx.array:
    return stock(ids, cache=make_prompt_cache(stock))


def recorded(stock: Any, taps: tuple[int, ...], ids: mx.array = IDS) -> list[mx.array]:
    with recording([stock.layers[tap] for tap in taps]) as outputs:
        forward(stock, ids)
    return outputs


# What is recorded


def test_recorded_outputs_are_those_of_the_layers_run_by_hand() -> None:
    stock = model("llama_untied")
    cache = make_prompt_cache(stock)
    hidden = stock.model.embed_tokens(IDS)
    mask = create_attention_mask(hidden, cache[0])
    by_hand = []
    for layer, layer_cache in zip(stock.layers, cache, strict=True):
        hidden = layer(hidden, mask, cache=layer_cache)
        by_hand.append(hidden)
    attach(stock.layers)
    outputs = recorded(stock, tuple(range(LAYERS)))
    assert len(outputs) == LAYERS
    for index, (got, want) in enumerate(zip(outputs, by_hand, strict=True)):
        assert_same_bits(got, want, f"output of layer {index}")


@EVERY_ARCHITECTURE
@pytest.mark.parametrize("taps", [(0,), (1, 3), (0, 1, 2)], ids=str)
def test_taps_come_side_by_side_in_ascending_order(name: str, taps: tuple[int, ...]) -> None:
    stock = model(name)
    with spying(stock.layers) as seen:
        forward(stock)
    target = Target(stock)
    target.attach_taps(taps)
    output = target.forward(IDS, make_prompt_cache(stock), taps)
    want = mx.concatenate([seen[tap][1] for tap in taps], axis=-1)
    assert output.hidden is not None
    assert_same_bits(output.hidden, want, "tapped states")


def test_nothing_is_recorded_when_nothing_is_tapped() -> None:
    stock = model("llama_tied")
    assert Target(stock).forward(IDS, make_prompt_cache(stock)).hidden is None


def test_only_the_wanted_layers_are_recorded_though_more_are_attached() -> None:
    stock = model("llama_tied")
    attach(stock.layers)
    with spying(stock.layers) as seen:
        forward(stock)
    (output,) = recorded(stock, (2,))
    assert_same_bits(output, seen[2][1], "output of layer 2")


def test_the_first_of_several_outputs_is_taken() -> None:
    class TwoOutputs:
        def __call__(self, x: mx.array) -> tuple[mx.array, str]:
            return x + 1, "something else"

    layer = TwoOutputs()
    attach([layer])
    with recording([layer]) as outputs:
        assert layer(mx.zeros(2))[1] == "something else"
    assert outputs[0].tolist() == [1.0, 1.0]


def test_the_list_is_filled_when_the_block_is_left_and_not_before() -> None:
    stock = model("llama_tied")
    attach(stock.layers)
    with recording(stock.layers[:1]) as outputs:
        forward(stock)
        assert outputs == []
    assert len(outputs) == 1


def test_each_forward_records_afresh() -> None:
    stock = model("llama_tied")
    attach(stock.layers)
    first, second = recorded(stock, (1,), IDS), recorded(stock, (1,), OTHER_IDS)
    assert first[0].shape[1] == IDS.size
    assert second[0].shape[1] == OTHER_IDS.size


# What does not change


@EVERY_ARCHITECTURE
def test_parameters_attributes_and_quantization_stay_as_they_are(name: str) -> None:
    stock = model(name, "4bit")
    names = [path for path, _ in tree_flatten(stock.parameters())]
    arrays = [id(array) for _, array in tree_flatten(stock.parameters())]
    attributes = [list(vars(layer)) for layer in stock.layers]
    modules = [(path, type(module).__name__) for path, module in stock.named_modules()]
    attach(stock.layers)
    assert [path for path, _ in tree_flatten(stock.parameters())] == names
    assert [id(array) for _, array in tree_flatten(stock.parameters())] == arrays
    assert [list(vars(layer)) for layer in stock.layers] == attributes
    assert [(path, type(module).__name__) for path, module in stock.named_modules()] == modules


def test_a_tapped_layer_is_an_instance_of_its_own_class_under_its_own_name() -> None:
    stock = model("qwen3_tied")
    own = type(stock.layers[0])
    attach(stock.layers)
    tapped = type(stock.layers[0])
    assert isinstance(stock.layers[0], own)
    assert (tapped.__name__, tapped.__module__) == (own.__name__, own.__module__)


def test_attaching_twice_is_attaching_once() -> None:
    stock = model("llama_tied")
    own = type(stock.layers[0])
    attach(stock.layers)
    once = type(stock.layers[0])
    attach(stock.layers[:2])
    attach(stock.layers)
    assert {type(layer) for layer in stock.layers} == {once}
    detach(stock)
    assert {type(layer) for layer in stock.layers} == {own}


def test_detaching_gives_every_layer_its_own_class_back_and_may_be_repeated() -> None:
    stock = model("gemma3_text")
    own = [type(layer) for layer in stock.layers]
    attach(stock.layers[1:3])
    for _ in range(2):
        detach(stock)
        assert [type(layer) for layer in stock.layers] == own


@pytest.mark.parametrize("name", ["dense", "sliding", "hybrid", "mla_moe", "quantized_from_20"])
def test_plain_mlx_lm_gives_the_same_ids_and_logprobs_with_taps_and_after_them(name: str) -> None:
    mix: Mix = MIXES[name]
    stock, oracle = mix.model(), mix.oracle()
    emitted = 12
    attach(stock.layers)
    try:
        tapped = run_stock(stock, PROMPT, emitted, **mix.kv)
    finally:
        detach(stock)
    after = run_stock(stock, PROMPT, emitted, **mix.kv)
    for run in (tapped, after):
        assert_same_output(list(zip(run.ids, run.logprobs, strict=True)), oracle, emitted)


def test_a_forward_outside_recording_records_nothing() -> None:
    stock = model("llama_tied")
    attach(stock.layers)
    outputs = recorded(stock, (0,))
    kept = outputs[0]
    forward(stock, OTHER_IDS)
    assert outputs == [kept]
    assert kept.shape[1] == IDS.size


# Contexts


def test_an_exception_inside_a_forward_ends_the_recording() -> None:
    stock = model("llama_tied")
    attach(stock.layers)
    outputs: list[mx.array] = []

    def fail() -> None:
        nonlocal outputs
        with recording(stock.layers[:1]) as outputs:
            forward(stock)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert outputs == []
    forward(stock, OTHER_IDS)
    assert outputs == []
    (again,) = recorded(stock, (0,), OTHER_IDS)
    assert again.shape[1] == OTHER_IDS.size


def test_nothing_is_held_after_a_recording_that_ended_with_an_exception() -> None:
    class Plain:
        def __call__(self, x: mx.array) -> mx.array:
            return x + 1

    layer = Plain()
    attach([layer])

    def fail() -> None:
        with recording([layer]):
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    output = layer(mx.zeros(3))
    held = weakref.ref(output)
    del output
    assert held() is None


def test_recordings_nest_and_the_inner_one_does_not_feed_the_outer() -> None:
    stock = model("llama_tied")
    attach(stock.layers)
    with recording(stock.layers[:1]) as outer:
        with recording(stock.layers[1:2]) as inner:
            forward(stock, OTHER_IDS)
        forward(stock)
    assert [array.shape[1] for array in inner] == [OTHER_IDS.size]
    assert [array.shape[1] for array in outer] == [IDS.size]


def test_two_contexts_record_separately() -> None:
    stock = model("llama_tied")
    attach(stock.layers)
    want = recorded(stock, (1,))[0]
    with recording(stock.layers[1:2]) as outer:
        forward(stock)
        other = copy_context().run(recorded, stock, (1,), OTHER_IDS)[0]
    assert_same_bits(outer[0], want, "the outer context's record")
    assert other.shape[1] == OTHER_IDS.size


def test_two_threads_record_separately_on_one_model() -> None:
    stock = model("llama_tied")
    attach(stock.layers)
    wanted = {length: mx.array([list(range(1, length + 1))]) for length in (3, 4, 5, 6)}
    alone = {length: recorded(stock, (0, 2), ids) for length, ids in wanted.items()}
    mx.eval(list(alone.values()))
    got: dict[int, list[mx.array]] = {}
    barrier = threading.Barrier(len(wanted))

    def work(length: int) -> None:
        with mx.stream(mx.new_stream(mx.default_device())):
            for _ in range(5):
                barrier.wait()
                got[length] = recorded(stock, (0, 2), wanted[length])
            mx.eval(got[length])
        mx.clear_streams()

    threads = [threading.Thread(target=work, args=(length,)) for length in wanted]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for length, outputs in alone.items():
        for mine, want in zip(got[length], outputs, strict=True):
            assert_same_bits(mine, want, f"thread with {length} ids")


def test_two_models_are_tapped_separately() -> None:
    first, second = model("llama_tied"), model("llama_untied")
    attach(first.layers)
    assert swap_of(second.layers[0], "tap") is None
    attach(second.layers)
    detach(first)
    (output,) = recorded(second, (0,))
    assert output.shape[1] == IDS.size
    assert swap_of(first.layers[0], "tap") is None
