"""Token mixers are found where the cache goes, go position by position only inside a round, and can be let go."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm.generate import generate_step as stock_generate_step
from mlx_lm.models import gemma3_text
from mlx_lm.models.cache import RotatingKVCache

from mlx_spec import Statistics, generate_step
from mlx_spec.cache.base import Drive
from mlx_spec.cache.transaction import SpeculativeCacheTransaction
from mlx_spec.model.swap import swap_of
from mlx_spec.verify import mixers
from mlx_spec.verify.record import detach
from mlx_spec.verify.routes import STEP_THROUGH
from tests.bits import assert_same_bits
from tests.mixer_calls import MixerCall, before_each_call, refuse_positions
from tests.oracle import assert_same_output, independent_copy
from tests.same_cache import assert_same_cache
from tests.scripted import AlternatingDrafter
from tests.tiny import MIXES, PROMPT, VOCAB
from tests.zoo.menagerie import whole_zoo

MIXERS = {
    "dense": {"self_attn"},
    "sliding": {"self_attn"},
    "hybrid": {"self_attn", "linear_attn"},
    "mla_moe": {"self_attn"},
    "mamba": {"mixer"},
    "cache_list": {"self_attn", "mamba"},
    "chunked": {"self_attn"},
}
"""The attribute of a decoder layer that holds its mixer."""

BLOCK = (11, 2, 7, 30, 5)


def attached(model: Any) -> set[str]:
    return {name.split(".")[-1] for name, part in model.named_modules() if swap_of(part, "mix") is not None}


@pytest.mark.parametrize("name", MIXERS)
def test_the_mixers_are_the_modules_of_a_layer_that_are_handed_its_cache(name: str) -> None:
    model = MIXES[name].model()
    detach(model)
    found = mixers.attach(model)
    assert attached(model) == MIXERS[name]
    assert mixers.attach(model) == found
    detach(model)
    assert attached(model) == set()


@pytest.mark.part(4)
@pytest.mark.parametrize("name", MIXERS)
def test_attaching_changes_no_parameter_and_no_plain_token(name: str) -> None:
    mix = MIXES[name]
    model, run = mix.model(), mix.oracle(20)
    detach(model)
    before = {path: id(value) for path, value in tree_flatten(model.parameters())}
    classes = [type(module) for module in model.modules()]
    for prepare in (mixers.attach, detach):
        prepare(model)
        plain = list(stock_generate_step(mx.array(PROMPT), model, max_tokens=20, **mix.kv))
        assert_same_output(plain, run, 20)
        assert {path: id(value) for path, value in tree_flatten(model.parameters())} == before
    assert [type(module) for module in model.modules()] == classes


@pytest.mark.parametrize("name", ["sliding", "ring_with_keep", "hybrid", "mamba2", "cache_list", "mla_moe", "chunked"])
@pytest.mark.parametrize("kept", [0, 1, 2, 4, 5])
def test_keeping_part_of_a_block_leaves_the_caches_of_single_steps(name: str, kept: int) -> None:
    mix = MIXES[name]
    model, mine = mix.model(), mix.oracle(20).cache_after(12)
    want = independent_copy(mine)
    mixers.attach(model)
    with SpeculativeCacheTransaction(mine, len(BLOCK), drive=Drive.POSITIONS) as tx:
        block = model(mx.array([BLOCK]), cache=tx.caches)
        tx.mark(len(BLOCK))
        tx.commit(kept)
    for position, token in enumerate(BLOCK[:kept]):
        step = model(mx.array([[token]]), cache=want)
        assert_same_bits(block[:, position], step[:, 0])
    mx.eval([cache.state for cache in mine], [cache.state for cache in want])
    assert_same_cache(mine, want)


@pytest.mark.part(7)
@pytest.mark.parametrize("name", ["sliding", "hybrid", "mamba2", "cache_list", "chunked"])
@pytest.mark.parametrize("split", [(2, 3), (1, 4), (3, 1, 1)], ids=str)
def test_a_block_read_in_several_forwards_can_be_cut_inside_each_of_them(name: str, split: tuple[int, ...]) -> None:
    mix = MIXES[name]
    model, warm = mix.model(), mix.oracle(20).cache_after(12)
    mixers.attach(model)
    for kept in range(len(BLOCK) + 1):
        mine, want = independent_copy(warm), independent_copy(warm)
        with SpeculativeCacheTransaction(mine, len(BLOCK), drive=Drive.POSITIONS) as tx:
            for count in split:
                model(mx.array([BLOCK[tx.position : tx.position + count]]), cache=tx.caches)
                tx.mark(count)
            tx.commit(kept)
        for token in BLOCK[:kept]:
            mx.eval(model(mx.array([[token]]), cache=want))
        assert_same_cache(mine, want)


def test_a_mixer_that_refuses_a_position_costs_speed_and_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    mix = MIXES["sliding"]
    model, run = mix.model(), mix.oracle(30)
    drafter = AlternatingDrafter([*run.ids, *[0] * 9], VOCAB, 5)
    warm = list(generate_step(mx.array(PROMPT), model, max_tokens=9, draft_model=drafter, draft_block_size=5))
    assert_same_output(warm, run, 9)

    refuse_positions(monkeypatch, gemma3_text.Attention)
    statistics, caches = Statistics(), mix.new_cache()
    out = list(
        generate_step(
            mx.array(PROMPT),
            model,
            max_tokens=20,
            draft_model=drafter,
            draft_block_size=5,
            prompt_cache=caches,
            statistics=statistics,
        )
    )
    assert_same_output(out, run, 20)
    assert_same_cache(caches, run.cache_after(20))
    assert statistics.verify_route == STEP_THROUGH.name
    assert "shapes do not fit" in statistics.notes[0]


def test_an_interrupted_attach_leaves_no_mixer_that_would_pass_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    model = MIXES["hybrid"].build()
    classes = [type(module) for module in model.modules()]
    swapped, swap = itertools.count(), mixers.mixing_class

    def interrupted(base: type[Any], runs_again: bool) -> type[Any]:
        if next(swapped) == 2:
            raise KeyboardInterrupt
        return swap(base, runs_again)

    with monkeypatch.context() as patched:
        patched.setattr(mixers, "mixing_class", interrupted)
        with pytest.raises(KeyboardInterrupt):
            mixers.attach(model)
    assert [type(module) for module in model.modules()] == classes
    assert mixers.attach(model) == len(model.layers)


def test_a_prompt_chunk_is_read_as_mlx_lm_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    mix = MIXES["sliding"]
    model = mix.model()
    mixers.attach(model)
    prompt = [(5 * position + 2) % VOCAB for position in range(40)]
    calls: list[MixerCall] = []
    before_each_call(monkeypatch, gemma3_text.Attention, calls.append)
    caches, stock = mix.new_cache(), copy.deepcopy(mix.new_cache())
    list(generate_step(mx.array(prompt), model, max_tokens=0, prompt_cache=caches, prefill_step_size=16))
    ours, calls[:] = list(calls), []
    list(stock_generate_step(mx.array(prompt), model, max_tokens=0, prompt_cache=stock, prefill_step_size=16))
    assert_same_cache(caches, stock)
    assert len(calls) > len(model.layers)
    assert ours == calls


@pytest.mark.part(6)
@pytest.mark.parametrize("split", [(2, 3), (1, 4), (3, 1, 1)], ids=str)
@pytest.mark.parametrize("name", ["hybrid", "mamba", "chunked", "sliding"])
def test_a_block_fed_in_several_forwards_is_kept_where_one_of_them_ended(name: str, split: tuple[int, ...]) -> None:
    """Against rounds of those forwards alone."""
    mix, block = MIXES[name], [[5, 6, 7, 8, 9]]
    model = mix.model()
    mixers.attach(model)
    for forwards in range(len(split) + 1):
        kept = sum(split[:forwards])
        got, want = mix.new_cache(), mix.new_cache()
        for caches in (got, want):
            mx.eval(model(mx.array([PROMPT * 2]), cache=caches))
        with SpeculativeCacheTransaction(got, sum(split)) as tx:
            feed_in_parts(model, tx, block, split)
            tx.commit(kept)
        for start, count in zip(itertools.accumulate((0, *split)), split[:forwards], strict=False):
            with SpeculativeCacheTransaction(want, count) as tx:
                feed_in_parts(model, tx, [block[0][start:]], (count,))
                tx.commit(count)
        assert_same_cache(got, want)


def feed_in_parts(model: Any, tx: SpeculativeCacheTransaction, block: list[list[int]], split: tuple[int, ...]) -> None:
    """One forward for each number of tokens, each marked."""
    done = 0
    for count in split:
        mx.eval(model(mx.array([block[0][done : done + count]]), cache=tx.caches))
        tx.mark(count)
        done += count


ZOO = {specimen.name: specimen for specimen in whole_zoo()}


@pytest.mark.parametrize("name", ["gemma4_text", "gemma3n"])
def test_layers_that_read_the_keys_of_another_have_mixers_too(name: str) -> None:
    model = ZOO[name].build("float32")
    mixers.attach(model)
    mixing = [any(swap_of(part, "mix") is not None for part in layer.modules()) for layer in model.layers]
    assert all(mixing)
    assert len(model.make_cache()) < len(mixing), "some layers have no cache of their own"


def test_the_first_position_of_a_part_is_told_as_the_model_would_tell_it() -> None:
    seen: list[tuple[int, int, tuple[int, ...]]] = []

    def call(x: mx.array, cache: Any, offset: int, start_pos: Any = None, scale: Any = None) -> mx.array:
        seen.append((offset, int(start_pos.item()), scale.shape))
        keys = x[:, None]
        cache.update_and_fetch(keys, keys)
        return x

    cache = RotatingKVCache(8)
    with SpeculativeCacheTransaction([cache], 3) as tx:
        given = {"x": mx.zeros((1, 3, 4)), "cache": tx.caches[0], "offset": 20}
        mix = mixers.Mix(call, given, {"start_pos": mx.array(7), "scale": mx.ones((3, 1))})
        assert mix.run().shape == (1, 3, 4)
        tx.abort()
    assert seen == [(20 + place, 7 + place, (1, 1)) for place in range(3)]


def test_what_a_mixer_returns_beside_its_output_keeps_its_value_per_position() -> None:
    """A ring hands out its own buffer, which the next position writes to."""

    def write(x: mx.array, cache: Any) -> tuple[mx.array, Any]:
        keys = x[:, None]
        return x, cache.update_and_fetch(keys, keys)

    def read(x: mx.array, shared: Any) -> mx.array:
        return x + shared[0].sum()

    cache = RotatingKVCache(2)
    x = mx.arange(1.0, 5.0).reshape(1, 4, 1)
    with SpeculativeCacheTransaction([cache], 4) as tx:
        _, shared = mixers.Mix(write, {"x": x, "cache": tx.caches[0]}, {}).run()
        out = mixers.Mix(read, {"x": x, "shared": shared}, {}).run()
        tx.abort()
    assert out.flatten().tolist() == [1 + 1, 2 + 3, 3 + 5, 4 + 7]


def test_a_value_per_position_is_nothing_to_compute_with() -> None:
    cache = RotatingKVCache(2)
    with SpeculativeCacheTransaction([cache], 2) as tx:
        given = {"x": mx.zeros((1, 2, 1)), "cache": tx.caches[0]}
        _, passed_on = mixers.Mix(lambda x, cache: (x, cache.update_and_fetch(x[:, None], x[:, None])), given, {}).run()
        with pytest.raises(TypeError):
            _ = passed_on[0] + 1
        tx.abort()
