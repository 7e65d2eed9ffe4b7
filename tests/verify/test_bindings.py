"""Attention is bound where mlx-lm's models find it, goes query by query only in a verify call, and can be let go."""

from __future__ import annotations

import gc
import importlib
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models import base
from mlx_lm.models.cache import ConcatenateKVCache, KVCache, QuantizedKVCache, make_prompt_cache

from mlx_spec import Statistics, generate_step
from mlx_spec.cache.adopt import Likeness, new_caches
from mlx_spec.cache.base import Drive
from mlx_spec.cache.transaction import SpeculativeCacheTransaction
from mlx_spec.ops.attention import in_chunks_of
from mlx_spec.ops.base import STOCK
from mlx_spec.verify import bindings, mixers
from mlx_spec.verify.bindings import NAME
from mlx_spec.verify.record import detach, record_of
from mlx_spec.verify.routes import BLOCK, POSITIONS, Plan, Routed, verifying
from mlx_spec.verify.trial import attention_calls
from tests.bits import assert_same_bits, bit_difference
from tests.double import PATTERNS, double
from tests.oracle import assert_same_output, independent_copy, run_stock
from tests.same_cache import assert_same_cache
from tests.scripted import AlternatingDrafter
from tests.tiny import MIXES, PROMPT, VOCAB, randomise
from tests.zoo.menagerie import Specimen, whole_zoo
from tests.zoo.trial import Subject, pattern_named

BY_POSITION = "block, attention by position"

HEADS, KEY_HEADS, SIZE, VALUES = 6, 2, 32, 64
"""No vector kernel takes heads of this size, so that with the double on every query of a block rounds differently."""

SCALE = 0.17


def llama_file() -> ModuleType:
    return importlib.import_module("mlx_lm.models.llama")


@pytest.fixture(autouse=True)
def nothing_is_bound() -> Iterator[None]:
    """Neither before a test nor after it: models of other tests may live on."""
    release_all()
    yield
    release_all()


def release_all() -> None:
    for owner in bindings.owners():
        owner.release()


# Binding


def test_attaching_binds_the_files_of_a_models_classes_and_detaching_gives_the_function_back() -> None:
    file, model = llama_file(), MIXES["dense"].model()
    stock = base.scaled_dot_product_attention
    assert vars(file)[NAME] is stock
    bound = record_of(model).bindings.attach(model)
    assert bound.refused == ()
    assert vars(file)[NAME] is not stock
    assert base.scaled_dot_product_attention is stock
    assert record_of(model).bindings.attach(model) == bound
    detach(model)
    assert vars(file)[NAME] is stock
    detach(model)
    assert vars(file)[NAME] is stock


def test_a_class_derived_from_another_files_class_has_both_files_bound() -> None:
    specimen = next(specimen for specimen in whole_zoo() if specimen.name == "qwen3_5")
    model = specimen.build("float32")
    assert "mlx_lm.models.qwen3_next" in record_of(model).bindings.attach(model).names


def test_a_file_stays_bound_until_the_last_of_its_models_is_gone() -> None:
    file = llama_file()
    specimen = next(specimen for specimen in whole_zoo() if specimen.name == "llama")
    first, second = specimen.build("float32"), specimen.build("float32")
    record_of(first).bindings.attach(first)
    record_of(second).bindings.attach(second)
    detach(first)
    assert vars(file)[NAME] is not base.scaled_dot_product_attention
    del second
    gc.collect()
    assert vars(file)[NAME] is base.scaled_dot_product_attention


def test_attaching_and_detaching_in_many_threads_leaves_the_function_of_mlx_lm() -> None:
    specimen = next(specimen for specimen in whole_zoo() if specimen.name == "llama")
    models = [specimen.build("float32") for _ in range(4)]
    seen: list[bool] = []

    def work(model: Any) -> None:
        for _ in range(50):
            record_of(model).bindings.attach(model)
            seen.append(vars(llama_file())[NAME] is bindings.attention)
            detach(model)

    workers = [threading.Thread(target=work, args=(model,)) for model in models]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert all(seen)
    assert len(seen) == 200
    assert vars(llama_file())[NAME] is base.scaled_dot_product_attention


def test_a_function_replaced_by_another_library_is_left_alone_and_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def theirs(*args: Any, **keywords: Any) -> Any:
        return base.scaled_dot_product_attention(*args, **keywords)

    monkeypatch.setattr(llama_file(), NAME, theirs)
    bound = record_of(MIXES["dense"].model()).bindings.attach(MIXES["dense"].model())
    assert bound.names == ()
    assert bound.refused == (
        f"attention cannot go by position: another library has replaced {NAME} in mlx_lm.models.llama",
    )
    assert vars(llama_file())[NAME] is theirs


def test_a_function_replaced_while_bound_stays_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    model = MIXES["dense"].model()
    record_of(model).bindings.attach(model)
    monkeypatch.setattr(llama_file(), NAME, lambda *args, **keywords: None)
    theirs = vars(llama_file())[NAME]
    detach(model)
    assert vars(llama_file())[NAME] is theirs
    monkeypatch.undo()
    # What was put back is ours; it computes what stock does.
    setattr(llama_file(), NAME, base.scaled_dot_product_attention)


def test_a_function_replaced_before_anything_was_imported_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def theirs(*args: Any, **keywords: Any) -> Any:
        return None

    monkeypatch.setitem(bindings.NAMES, NAME, bindings.NAMES[NAME]._replace(stock=theirs))
    monkeypatch.setattr(llama_file(), NAME, theirs)
    assert record_of(MIXES["dense"].model()).bindings.attach(MIXES["dense"].model()).refused


def test_a_models_own_attention_is_not_reached() -> None:
    assert record_of(MIXES["mamba"].model()).bindings.attach(MIXES["mamba"].model()) == ((), (), ())


def test_plain_tokens_and_probabilities_are_stocks_while_bound() -> None:
    mix = MIXES["dense"]
    model, run = mix.model(), mix.oracle(20)
    record_of(model).bindings.attach(model)
    bound = run_stock(model, run.prompt, 20)
    detach(model)
    unbound = run_stock(model, run.prompt, 20)
    for got in (bound, unbound):
        assert_same_output(list(zip(got.ids, got.logprobs, strict=True)), run)


# What stock is called with


class Text:
    """Random queries, keys and values of a text, and a cache that has read all but its last tokens."""

    def __init__(self, cache: Any, before: int, width: int, dtype: mx.Dtype = mx.float32) -> None:
        total = before + width
        # mlx-lm's attention over quantized keys knows one size for both.
        values = SIZE if hasattr(cache, "bits") else VALUES
        shapes = ((HEADS, total, SIZE), (KEY_HEADS, total, SIZE), (KEY_HEADS, total, values))
        draw = mx.random.split(mx.random.key(total), 3)
        self._sides = [
            mx.random.normal((1, *shape), key=key).astype(dtype) for shape, key in zip(shapes, draw, strict=True)
        ]
        self.before, self.width = before, width
        self.cache = cache
        if before:
            cache.update_and_fetch(*(side[:, :, :before] for side in self._sides[1:]))
            mx.eval(cache.state)

    def attend(self, cache: Any, start: int, stop: int, sinks: mx.array | None = None, **asked: Any) -> mx.array:
        """Positions of the block as a model attends to them, its mask asked of the cache."""
        queries, keys, values = (side[:, :, self.before + start : self.before + stop] for side in self._sides)
        mask = base.create_attention_mask(mx.zeros((1, stop - start, 1)), cache, **asked)
        keys, values = cache.update_and_fetch(keys, values)
        out: mx.array = bindings.attention(
            queries, keys, values, cache=cache, scale=SCALE, mask=mask, **({} if sinks is None else {"sinks": sinks})
        )
        return out

    def alone(self, **given: Any) -> mx.array:
        """One token after the other."""
        cache = independent_copy([self.cache])[0]
        return mx.concatenate([self.attend(cache, at, at + 1, **given) for at in range(self.width)], axis=2)

    def block(self, plan: Plan | None, **given: Any) -> mx.array:
        """All at once, in a round."""
        caches = independent_copy([self.cache])
        with SpeculativeCacheTransaction(caches, self.width, drive=Drive.QUERIES) as tx, verifying(plan):
            out = self.attend(tx.caches[0], 0, self.width, **given)
            assert caches[0].offset == self.before + self.width
            mx.eval(out)
            return out


def by_position(width: int) -> Plan:
    return Plan(width, by_position=("attention",))


@contextmanager
def calls_of_stock(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[Any, ...]]]:
    """What mlx is asked to attend with, call by call."""
    seen: list[tuple[Any, ...]] = []
    stock = mx.fast.scaled_dot_product_attention

    def noted(*arrays: mx.array, mask: Any = None, sinks: Any = None, **given: Any) -> mx.array:
        seen.append((*arrays, mask, sinks))
        return stock(*arrays, mask=mask, sinks=sinks, **given)

    with monkeypatch.context() as patched:
        patched.setattr(mx.fast, "scaled_dot_product_attention", noted)
        yield seen


CACHES: dict[str, Callable[[], Any]] = {
    "plain": KVCache,
    "concatenating": ConcatenateKVCache,
    "quantized": lambda: QuantizedKVCache(group_size=32, bits=8),
}
ASKED: dict[str, dict[str, Any]] = {
    "causal": {},
    "array": {"return_array": True},
    "window": {"window_size": 5},
    "window as an array": {"window_size": 2, "return_array": True},
}


@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("before", [0, 1, 17])
@pytest.mark.parametrize("kind", ["plain", "concatenating"])
def test_stock_is_called_for_each_query_as_by_a_decode_of_its_token(
    kind: str, before: int, asked: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    width, sinks = 5, mx.random.normal((HEADS,))
    text = Text(CACHES[kind](), before, width)
    with calls_of_stock(monkeypatch) as want:
        text.alone(sinks=sinks, **ASKED[asked])
    with calls_of_stock(monkeypatch) as got:
        text.block(by_position(width), sinks=sinks, **ASKED[asked])
    assert len(got) == len(want) == width
    for one, other in zip(got, want, strict=True):
        for mine, theirs in zip(one, other, strict=True):
            if theirs is None:
                assert mine is None
            else:
                assert_same_bits(mine, theirs)
        assert one[-1] is sinks


@pytest.mark.part(18)
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("kind", CACHES)
def test_every_query_has_the_bits_of_its_own_decode_where_a_block_has_not(
    kind: str, asked: str, dtype: mx.Dtype
) -> None:
    with double(PATTERNS["gen15"]):
        for before, width in ((0, 2), (9, 3), (30, 5), (7, 8), (254, 16)):
            text = Text(CACHES[kind](), before, width, dtype)
            want = text.alone(**ASKED[asked])
            assert_same_bits(text.block(by_position(width), **ASKED[asked]), want, f"{before} + {width}")
        assert bit_difference(text.block(None, **ASKED[asked]), want) is not None


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=str)
@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("kind", CACHES)
def test_chunks_of_queries_have_the_bits_of_decodes(kind: str, asked: str, dtype: mx.Dtype) -> None:
    for before, width, size in ((0, 3, 2), (9, 5, 3), (30, 5, 2), (254, 16, 8)):
        text = Text(CACHES[kind](), before, width, dtype)
        want = text.alone(**ASKED[asked])
        assert_same_bits(text.block(in_chunks(width, size), **ASKED[asked]), want, f"{before} + {width} by {size}")


def in_chunks(width: int, size: int) -> Plan:
    return Plan(width, by_position=("attention",), attention=lambda call, stretch: in_chunks_of(size))


def all_at_once(width: int) -> Plan:
    return Plan(width, by_position=("attention",), attention=lambda call, stretch: STOCK)


def test_chunks_attend_over_the_keys_up_to_their_last_query(monkeypatch: pytest.MonkeyPatch) -> None:
    text = Text(KVCache(), 7, 5)
    with calls_of_stock(monkeypatch) as calls:
        text.block(in_chunks(5, 2))
    assert [(call[0].shape[2], call[1].shape[2], call[3]) for call in calls] == [
        (2, 9, "causal"),
        (2, 11, "causal"),
        (1, 12, None),
    ]


def test_a_round_fed_in_two_forwards_asks_for_masks_where_the_second_begins() -> None:
    text = Text(KVCache(), 9, 6)
    want = text.alone(window_size=4)
    with SpeculativeCacheTransaction([text.cache], 6, drive=Drive.QUERIES) as tx:
        parts = []
        for start in (0, 3):
            with verifying(by_position(3)):
                parts.append(text.attend(tx.caches[0], start, start + 3, window_size=4))
            tx.mark(3)
        mx.eval(parts)
        assert_same_bits(mx.concatenate(parts, axis=2), want)


def test_only_the_plans_width_is_taken_by_position(monkeypatch: pytest.MonkeyPatch) -> None:
    text = Text(KVCache(), 7, 4)
    routed = Plan(4, {0: Routed(None, "", 1)})  # type: ignore[arg-type]
    for plan in (None, Plan(4), routed, by_position(3), by_position(5)):
        with calls_of_stock(monkeypatch) as calls:
            text.block(plan)
        assert [call[0].shape[2] for call in calls] == [4]
        assert calls[0][3] == "causal"


def test_another_thread_does_not_see_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    text = Text(KVCache(), 7, 4)
    with calls_of_stock(monkeypatch) as calls, verifying(by_position(4)):
        thread = threading.Thread(target=lambda: (text.attend(text.cache, 0, 4), mx.clear_streams()))
        thread.start()
        thread.join()
    assert [call[0].shape[2] for call in calls] == [4]


# Masks that a model makes itself


def alone_and_together(
    mask: Any, masks: list[Any], width: int = 3, before: int = 4, plan: Plan | None = None
) -> tuple[mx.array, mx.array]:
    """A block with a mask of the model's own, by position; and each of its queries with the mask given for it."""
    keys = before + width
    shapes = ((HEADS, width, SIZE), (KEY_HEADS, keys, SIZE), (KEY_HEADS, keys, VALUES))
    q, k, v = (mx.random.normal((2, *shape), key=mx.random.key(at)) for at, shape in enumerate(shapes))
    with verifying(plan or by_position(width)):
        together: mx.array = bindings.attention(q, k, v, None, SCALE, mask)
    parts = [
        base.scaled_dot_product_attention(
            q[:, :, at : at + 1], k[:, :, : before + at + 1], v[:, :, : before + at + 1], None, SCALE, masks[at]
        )
        for at in range(width)
    ]
    return together, mx.concatenate(parts, axis=2)


@pytest.mark.parametrize("shape", [(3, 7), (1, 1, 3, 7), (2, 1, 3, 7), (2, HEADS, 3, 7), (1, 7), (7,), (2, 1, 3, 1)])
def test_a_mask_made_by_the_model_is_cut_to_the_querys_row_and_its_keys(shape: tuple[int, ...]) -> None:
    added = mx.random.normal(shape)
    rows = [added if added.ndim == 1 or shape[-2] == 1 else added[..., at : at + 1, :] for at in range(3)]
    rows = [row if shape[-1] == 1 else row[..., : 5 + at] for at, row in enumerate(rows)]
    together, alone = alone_and_together(added, rows)
    assert_same_bits(together, alone)
    # What the mask has for later keys is hidden from a chunk's earlier queries.
    for plan in (in_chunks(3, 2), all_at_once(3)):
        together, _ = alone_and_together(added, rows, plan=plan)
        assert_same_bits(together, alone)
    shown = mx.random.randint(0, 2, shape).astype(mx.bool_)
    shown[..., 0] = True
    rows = [shown if shown.ndim == 1 or shape[-2] == 1 else shown[..., at : at + 1, :] for at in range(3)]
    rows = [row if shape[-1] == 1 else row[..., : 5 + at] for at, row in enumerate(rows)]
    for plan in (None, in_chunks(3, 2), all_at_once(3)):
        assert_same_bits(*alone_and_together(shown, rows, plan=plan))


def test_a_single_number_and_no_mask_serve_every_query() -> None:
    for mask in (mx.array(0.25), None):
        together, alone = alone_and_together(mask, [mask] * 3)
        assert_same_bits(together, alone)
    for mask, alone in ((mx.array(0.25), mx.array(0.25)), (None, None), ("causal", None)):
        assert_same_bits(*alone_and_together(mask, [alone] * 3, plan=in_chunks(3, 2)))
    assert_same_bits(*alone_and_together("causal", [None] * 3))


@pytest.mark.parametrize("shape", [(2, 7), (3, 6), (1, 1, 4, 7)])
def test_a_call_that_is_not_understood_is_stocks(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    with calls_of_stock(monkeypatch) as calls, pytest.raises(ValueError, match="broadcast"):
        alone_and_together(mx.zeros(shape), [])
    assert [call[0].shape[2] for call in calls] == [3]


def test_fewer_keys_than_queries_are_stocks(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k = mx.zeros((1, HEADS, 3, SIZE)), mx.zeros((1, KEY_HEADS, 2, SIZE))
    with calls_of_stock(monkeypatch) as calls, verifying(by_position(3)):
        bindings.attention(q, k, k, None, SCALE, None)
    assert [call[0].shape[2] for call in calls] == [3]


# Whole models


def subject_named(name: str, tokens: int = 20) -> Subject:
    specimen: Specimen = next(specimen for specimen in whole_zoo() if specimen.name == name)
    return Subject(specimen, "float32", tokens)


def test_a_model_whose_attention_another_library_replaced_takes_its_mixers_by_position(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(llama_file(), NAME, lambda *args, **given: base.scaled_dot_product_attention(*args, **given))
    with double(PATTERNS["gen15"]):
        statistics, difference = subject_named("llama").speculate(0, 3, pattern_named("full"), 20)
    assert difference is None
    assert "mixers by position" in statistics.verify_route
    assert any("another library has replaced" in note for note in statistics.notes)


@pytest.mark.part(1)
@pytest.mark.parametrize(
    "name", ["llama", "qwen3", "gemma3_text", "qwen3_5", "qwen3_next", "gpt_oss", "gemma4_text", "gemma3n"]
)
def test_models_whose_attention_alone_differs_are_exact_with_it_by_position(name: str) -> None:
    with double(PATTERNS["gen15"]):
        subject = subject_named(name)
        for prompt, width, pattern in ((0, 3, "cycling"), (1, 8, "partial"), (1, 5, "full")):
            statistics, difference = subject.speculate(prompt, width, pattern_named(pattern), 20)
            assert difference is None
            assert statistics.verify_route.startswith(BY_POSITION)


@pytest.mark.parametrize("name", ["quantized_from_0", "quantized_from_20"])
def test_a_text_with_quantized_keys_is_exact_with_attention_in_chunks(name: str) -> None:
    mix = MIXES[name]
    with double(PATTERNS["gen15"]):
        # A model of its own: what is found out about one under the double must not answer for another test.
        model = randomise(mix.build, mix.seed)
        run = run_stock(model, PROMPT, 30, **mix.kv)
        statistics, caches = Statistics(), make_prompt_cache(model)
        out = list(
            generate_step(
                mx.array(PROMPT),
                model,
                max_tokens=30,
                draft_model=AlternatingDrafter([*run.ids, *[0] * 9], VOCAB, 5),
                draft_block_size=5,
                prompt_cache=caches,
                statistics=statistics,
                **mix.warm_kv,
            )
        )
        assert_same_output(out, run, 30)
        assert_same_cache(caches, run.cache_after(30))
    # The values of a packed cache keep their bits for up to three queries at a time.
    assert "block, attention in chunks of 3" in statistics.verify_route


def test_attention_is_noted_as_the_model_calls_it_and_each_kind_once() -> None:
    model = subject_named("gpt_oss").model
    mixers.attach(model)
    record_of(model).bindings.attach(model)
    likeness = Likeness(new_caches(model))
    calls = attention_calls(model, likeness, 4, BLOCK)
    # Its sliding layers go by position, so only those that see everything attend with a block.
    assert [(call.width, call.mask, call.sinks, call.packing) for call in calls] == [(4, "causal", True, None)]
    assert attention_calls(model, likeness, 4, POSITIONS) == []
