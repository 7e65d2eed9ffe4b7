"""Caches that are not the model's are refused before anything is changed; what may be its own is taken."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest
from mlx import nn
from mlx_lm.generate import generate_step as stock_generate_step
from mlx_lm.models.cache import CacheList, ConcatenateKVCache, KVCache, QuantizedKVCache, RotatingKVCache

from mlx_spec import generate_step, verify_forward
from mlx_spec.cache.adopt import new_caches
from mlx_spec.errors import InvalidRequest
from mlx_spec.verify.record import record_of
from tests.checkpoints import tiny_model
from tests.faults.mixes import WITH_BATCH
from tests.forwards import Forwards
from tests.oracle import independent_copy
from tests.same_cache import assert_same_cache
from tests.tiny import MIXES, PROMPT, falcon_h1, randomise
from tests.zoo.menagerie import Specimen, whole_zoo

pytestmark = pytest.mark.faults

Caches = list[Any]


def read_by(model: Any, caches: Caches, tokens: int = 5) -> Caches:
    mx.eval(model(mx.arange(3, 3 + tokens)[None], cache=caches))
    return caches


def warm(mix: str) -> Caches:
    return read_by(MIXES[mix].model(), MIXES[mix].new_cache())


class Callers(KVCache):
    """A class of the caller's own."""


class Bare:
    """Nothing of mlx-lm's, with the least that a cache of rows needs, and rows that are laid out in another way."""

    def __init__(self) -> None:
        self.rows = ConcatenateKVCache()

    offset = property(lambda self: self.rows.offset)
    state = property(lambda self: self.rows.state)
    keys = property(lambda self: None if self.rows.keys is None else self.rows.keys.swapaxes(1, 3))
    values = property(lambda self: None if self.rows.values is None else self.rows.values.swapaxes(1, 3))

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:
        return self.rows.update_and_fetch(keys, values)

    def make_mask(self, *given: Any, **named: Any) -> Any:
        return self.rows.make_mask(*given, **named)


def quantized(caches: Caches) -> Caches:
    return [cache.to_quantized(group_size=64, bits=8) for cache in caches]


def batched(caches: Caches) -> Caches:
    return [type(cache).merge([cache]) for cache in caches]


FOREIGN: dict[str, tuple[str, Callable[[], Any], str]] = {
    "one too few": ("dense", lambda: MIXES["dense"].new_cache()[:1], "holds 1 caches, this model has 3"),
    "one too many": ("dense", lambda: [*MIXES["dense"].new_cache(), KVCache()], "holds 4 caches, this model has 3"),
    "none at all": ("dense", lambda: [], "holds 0 caches"),
    "None": ("dense", lambda: [None] * 3, "cache 0 .* is None"),
    "one None": ("hybrid", lambda: [*MIXES["hybrid"].new_cache()[:-1], None], "cache 4 .* is None"),
    "numbers": ("dense", lambda: [1, 2, 3], "cache 0 .* is a int, which has no state"),
    "classes": ("dense", lambda: [KVCache] * 3, "cache 0 .* is a type"),
    "other heads": (
        "dense",
        lambda: read_by(qwen3(heads=4), new_caches(qwen3(heads=4))),
        "keys of 4 heads of 10, .* 2 ",
    ),
    "other sizes": ("dense", lambda: read_by(qwen3(size=12), new_caches(qwen3(size=12))), "heads of 12, .* of 10"),
    "other heads, a batch": ("dense", lambda: batched(read_by(qwen3(heads=4), new_caches(qwen3(heads=4)))), "4 heads"),
    "packed for another": (
        "dense",
        lambda: quantized(read_by(MIXES["quantized_from_0"].model(), MIXES["quantized_from_0"].new_cache())),
        "keys of 2 heads of 64, .* 2 heads of 10",
    ),
    "one layer's": (
        "dense",
        lambda: [*warm("dense")[:2], *warm("dense_4bit_weights")[2:]],
        "cache 2 .*KVCache.* of 16",
    ),
    "rows for states": ("mamba", lambda: MIXES["dense"].new_cache(), "keys and values, the model wants states"),
    "states for rows": ("dense", lambda: MIXES["mamba"].new_cache(), "states of fixed size, the model wants keys"),
    "rows for states beside rows": ("hybrid", lambda: [KVCache() for _ in range(5)], "cache 0 .* is for keys"),
    "other states": ("mamba2", lambda: warm("mamba"), "1|state 0|2 states"),
    "no list": ("cache_list", lambda: MIXES["dense"].new_cache(), "the model wants several caches in one"),
    "a list": ("dense", lambda: MIXES["cache_list"].new_cache(), "several caches in one, the model wants keys"),
    "a longer list": (
        "cache_list",
        lambda: [CacheList(*each.caches, KVCache()) for each in warm("cache_list")],
        "3 caches",
    ),
    "a list of other sizes": (
        "cache_list",
        lambda: read_by(other_falcon(), new_caches(other_falcon())),
        "keys of 3 heads of 10, .* 2 heads of 10",
    ),
    "a window's of other sizes": ("sliding", lambda: warm("sliding")[:4] + warm("dense")[:1], "cache 4 .* heads of 10"),
}


def qwen3(heads: int = 2, size: int = 10) -> nn.Module:
    return tiny_model(num_hidden_layers=3, num_key_value_heads=heads, num_attention_heads=4, head_dim=size)


def other_falcon() -> nn.Module:
    model: Any = falcon_h1()
    for layer in model.layers:
        layer.self_attn.num_kv_heads = 3
        layer.self_attn.k_proj, layer.self_attn.v_proj = (nn.Linear(44, 30, bias=False) for _ in range(2))
    return model


@pytest.mark.every_case
@pytest.mark.parametrize("what", FOREIGN)
def test_caches_that_cannot_be_the_models_are_refused_and_left_alone(what: str) -> None:
    mix, make, message = FOREIGN[what]
    model, caches = MIXES[mix].model(), make()
    before = independent_copy(caches) if "numbers" not in what and "classes" not in what else caches
    calls: dict[str, Callable[[], Any]] = {
        "prompt_cache": lambda: generate_step(mx.array(PROMPT), model, prompt_cache=caches),
        "prompt_cache ": lambda: generate_step(mx.array(PROMPT), model, prompt_cache=caches, draft_model="ngram"),
        "caches": lambda: verify_forward(model, mx.array([[1, 2]]), caches),
    }
    for name, call in calls.items():
        with pytest.raises(InvalidRequest, match=message) as caught:
            call()
        said = str(caught.value)
        assert name.strip() in said
        assert said.count("Give ") == 1
        assert "\n" not in said
    if before is not caches:
        assert_same_cache(caches, before)


TAKEN: dict[str, tuple[str, Callable[[], Caches]]] = {
    **{f"its own, {mix}": (mix, lambda mix=mix: WITH_BATCH[mix].new_cache()) for mix in WITH_BATCH},
    **{f"its own, warm, {mix}": (mix, lambda mix=mix: warm(mix)) for mix in MIXES},
    "packed": ("quantized_from_0", lambda: quantized(warm("quantized_from_0"))),
    "empty packed": ("quantized_from_0", lambda: [QuantizedKVCache(64, 8) for _ in range(3)]),
    "a batch": ("dense", lambda: batched(warm("dense"))),
    "a caller's class": ("dense", lambda: read_by(MIXES["dense"].model(), [Callers() for _ in range(3)])),
    "no class of mlx-lm's": ("dense", lambda: read_by(MIXES["dense"].model(), [Bare() for _ in range(3)])),
    "full attention for windows": ("sliding", lambda: [KVCache() for _ in range(5)]),
    "windows for full attention": ("dense", lambda: [RotatingKVCache(64) for _ in range(3)]),
}


@pytest.mark.every_case
@pytest.mark.parametrize("what", TAKEN)
def test_caches_that_serve_the_stock_loop_are_taken(what: str) -> None:
    mix, make = TAKEN[what]
    name = "dense" if mix == "batch" else mix
    model, mine, stocks = MIXES[name].model(), make(), make()
    kv = {} if "packed" in what else MIXES[name].warm_kv
    got = generate_step(mx.array(PROMPT), model, prompt_cache=mine, max_tokens=2, **kv)
    want = stock_generate_step(mx.array(PROMPT), model, prompt_cache=stocks, max_tokens=2, **kv)
    assert [token for token, _ in got] == [token for token, _ in want]
    verify_forward(model, mx.array([[1]]), make()).transaction.abort()


def test_a_batch_of_several_rows_is_no_prompt_cache_of_one() -> None:
    model, mix = MIXES["dense"].model(), MIXES["dense"]
    two = mix.new_cache()
    mx.eval(model(mx.array([[1, 2], [3, 4]]), cache=two))
    merged = [type(cache).merge([cache, cache]) for cache in warm("dense")]
    for caches in (two, merged):
        for draft in (None, "ngram"):
            with pytest.raises(InvalidRequest, match="holds 2 rows, a run reads one"):
                generate_step(mx.array(PROMPT), model, prompt_cache=caches, draft_model=draft)
        verify_forward(model, mx.array([[1], [2]]), caches).transaction.abort()


class Wrapper(nn.Module):
    """Of a model whose caches are no row of `layers` each; it says nothing of caches itself."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    @property
    def layers(self) -> list[nn.Module]:
        layers: list[nn.Module] = self.inner.layers
        return layers

    def __call__(self, tokens: mx.array, cache: Any = None) -> Any:
        return self.inner(tokens, cache=cache)


def specimen(name: str) -> Specimen:
    return next(each for each in whole_zoo() if each.name == name)


def test_a_model_with_two_caches_for_each_layer_has_its_own_count() -> None:
    model = specimen("iquestloopcoder").build("float32")
    caches = new_caches(model)
    assert len(caches) == 2 * len(model.layers)
    for own in (new_caches(model), read_by(model, new_caches(model))):
        verify_forward(model, mx.array([[1]]), own).transaction.abort()
        assert list(generate_step(mx.array(PROMPT), model, prompt_cache=own, max_tokens=1))
    for name, call in {
        "caches": lambda given: verify_forward(model, mx.array([[1]]), given),
        "prompt_cache": lambda given: generate_step(mx.array(PROMPT), model, prompt_cache=given),
    }.items():
        with pytest.raises(InvalidRequest, match=f"{name} holds {len(model.layers)} caches"):
            call(caches[: len(model.layers)])


@pytest.mark.parametrize("mix", ["hybrid", "cache_list"])
def test_caches_of_the_model_in_a_wrapper_are_taken(mix: str) -> None:
    model, token = Wrapper(MIXES[mix].model()), mx.array([[1]])
    for new in (MIXES[mix].new_cache, lambda: warm(mix)):
        want = MIXES[mix].model()(token, cache=new())
        verified = verify_forward(model, token, new())
        assert mx.array_equal(verified.logits, want)
        verified.transaction.abort()


def test_a_model_that_was_given_other_layers_has_other_caches() -> None:
    first, second = randomise(lambda: qwen3(), 1), randomise(lambda: qwen3(heads=4), 2)
    of_first, of_second = read_by(first, new_caches(first)), read_by(second, new_caches(second))
    verify_forward(first, mx.array([[1]]), of_first).transaction.abort()
    first.model.layers = second.model.layers
    verify_forward(first, mx.array([[1]]), of_second).transaction.abort()
    with pytest.raises(InvalidRequest, match="keys of 2 heads"):
        verify_forward(first, mx.array([[1]]), of_first)


def test_what_caches_are_like_is_found_once_for_a_model(forwards: Forwards) -> None:
    model = tiny_model(num_hidden_layers=1)
    caches = read_by(model, new_caches(model))
    fed = forwards.widths(model)
    list(generate_step([1, 2], model, prompt_cache=new_caches(model), max_tokens=1))
    assert fed == [1, 1, 1]
    fed.clear()
    for extra in ([1, 1], []):
        steps = generate_step([1, 2], model, prompt_cache=copy.deepcopy(caches), max_tokens=1)
        assert fed == extra
        steps.close()
        fed.clear()
    record_of(model).own_caches.require(caches, new_caches(model), "caches")
    assert fed == []
