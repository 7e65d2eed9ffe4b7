"""Stepping through a block is decoding: the bits of as many one-token forwards, and any prefix of it can be kept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import pytest

from mlx_spec import SpeculativeCacheTransaction
from mlx_spec.model.target import Target
from mlx_spec.verify.block import step_through, verify
from mlx_spec.verify.record import detach
from tests.bits import assert_same_bits
from tests.model.architectures import spying
from tests.oracle import independent_copy
from tests.same_cache import assert_same_cache
from tests.tiny import MIXES, Mix

EVERY_MIX = pytest.mark.parametrize("mix", MIXES.values(), ids=MIXES.keys())

WIDTH = 5
STARTS = (3, 7, 14)
"""Emitted tokens before the round, after a prompt of 7: the first crosses a window of 11 and a chunk of 13, the second
a ring of 15, and before the last a cache is quantized that will be from 20 on."""


def starts(mix: Mix) -> list[int]:
    """Rounds never cross the point where mlx-lm converts a cache; see `KVQuantization.room`."""
    prompt = len(mix.oracle().prompt)
    converts = mix.kv.get("quantized_kv_start", 0)
    return [start for start in STARTS if not prompt + start < converts < prompt + start + WIDTH]


def stock_steps(model: Any, tokens: Sequence[int], caches: list[Any], taps: Sequence[int]) -> list[Any]:
    """Per token: logits and the tapped layers' outputs side by side, as one-token forwards give them."""
    steps = []
    for token in tokens:
        with spying([model.layers[tap] for tap in taps]) as seen:
            logits = model(mx.array([[token]]), cache=caches)
        outputs = [output[0] if isinstance(output, tuple) else output for _, output in seen]
        steps.append((logits, mx.concatenate(outputs, axis=-1)))
        mx.eval(steps[-1])
    return steps


@pytest.mark.part(7)
@EVERY_MIX
def test_every_position_has_the_bits_of_a_one_token_forward_hidden_rows_too(mix: Mix) -> None:
    model, oracle = mix.model(), mix.oracle()
    taps = (0, len(model.layers) - 1)
    target = Target(model)
    for start in starts(mix):
        tokens = oracle.ids[start : start + WIDTH]
        want = stock_steps(model, tokens, oracle.cache_after(start), taps)
        target.attach_taps(taps)
        caches = oracle.cache_after(start)
        with SpeculativeCacheTransaction(caches, WIDTH) as tx:
            output = step_through(target, mx.array([tokens]), tx, taps)
            tx.commit(WIDTH)
        detach(model)
        assert output.hidden is not None
        assert output.logits.shape[1] == output.hidden.shape[1] == WIDTH
        for position, (logits, hidden) in enumerate(want):
            where = f"position {position} from {start}"
            assert_same_bits(output.logits[:, position : position + 1], logits, f"logits at {where}")
            assert_same_bits(output.hidden[:, position : position + 1], hidden, f"hidden states at {where}")


@pytest.mark.part(4)
@EVERY_MIX
def test_keeping_n_tokens_leaves_the_cache_of_the_stock_loop(mix: Mix) -> None:
    oracle = mix.oracle()
    target = Target(mix.model())
    for start in starts(mix):
        for kept in (0, 1, 4, 5):
            caches = oracle.cache_after(start)
            with SpeculativeCacheTransaction(caches, WIDTH) as tx:
                step_through(target, mx.array([oracle.ids[start : start + WIDTH]]), tx)
                tx.commit(kept)
            assert_same_cache(caches, oracle.cache_after(start + kept))


@EVERY_MIX
def test_a_wrong_block_leaves_no_trace_when_nothing_of_it_is_kept(mix: Mix) -> None:
    oracle = mix.oracle()
    target = Target(mix.model())
    for start in starts(mix):
        caches = oracle.cache_after(start)
        with SpeculativeCacheTransaction(caches, WIDTH) as tx:
            step_through(target, mx.array([[1, 2, 3, 4, 5]]), tx)
        assert_same_cache(caches, oracle.cache_after(start))


@pytest.mark.parametrize(
    "mix", [mix for mix in MIXES.values() if mix.caches <= {"KVCache", "QuantizedKVCache"}], ids=lambda mix: mix.name
)
def test_a_block_keeps_any_prefix_where_caches_keep_by_length(mix: Mix) -> None:
    """Its length and scalars; that its rows have the bits of single steps is what certification finds out."""
    oracle = mix.oracle()
    target = Target(mix.model())
    for start in starts(mix):
        for kept in range(WIDTH + 1):
            caches = oracle.cache_after(start)
            with SpeculativeCacheTransaction(caches, WIDTH) as tx:
                verify(target, mx.array([oracle.ids[start : start + WIDTH]]), tx)
                tx.commit(kept)
            want = oracle.cache_after(start + kept)
            assert [cache.offset for cache in caches] == [cache.offset for cache in want]


def test_a_step_of_one_token_is_the_ordinary_forward() -> None:
    mix = MIXES["dense"]
    oracle = mix.oracle()
    (want,) = stock_steps(mix.model(), oracle.ids[4:5], oracle.cache_after(4), (0,))
    caches = oracle.cache_after(4)
    with SpeculativeCacheTransaction(caches, 1) as tx:
        output = step_through(Target(mix.model()), mx.array([oracle.ids[4:5]]), tx)
        tx.commit(1)
    assert output.hidden is None
    assert_same_bits(output.logits, want[0], "logits")
    assert_same_cache(caches, oracle.cache_after(5))


def test_an_exception_at_any_step_leaves_the_round_to_be_undone() -> None:
    """The caches are put back whichever of the one-token forwards fails."""
    mix = MIXES["hybrid"]
    oracle = mix.oracle()
    model = mix.model()

    class Failing:
        layers = model.layers

        def __init__(self, at: int) -> None:
            self.left = at

        def __call__(self, tokens: mx.array, cache: Any) -> mx.array:
            logits = model(tokens, cache=cache)
            if self.left == 0:
                raise KeyError("told to fail")
            self.left -= 1
            return logits

    for at in range(WIDTH):
        caches = oracle.cache_after(3)
        before = independent_copy(caches)
        with pytest.raises(KeyError), SpeculativeCacheTransaction(caches, WIDTH) as tx:
            step_through(Target(Failing(at)), mx.array([oracle.ids[3 : 3 + WIDTH]]), tx)
        assert_same_cache(caches, before)
