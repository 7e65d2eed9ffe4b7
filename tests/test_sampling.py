"""The target's choice is computed as mlx-lm's loop computes it, and the random state can be put back to any of them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm import sample_utils
from mlx_lm.sample_utils import greedy_sampler, make_logits_processors, make_sampler

from mlx_spec.generate import is_pure, name_of
from mlx_spec.sampling import Sampling, holds_nan, random_key, rewind_random_state
from tests.bits import assert_same_bits
from tests.host_reads import count_host_reads
from tests.oracle import rng_key

VOCAB = 97
DTYPES = pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=str)

SAMPLERS: dict[str, dict[str, Any]] = {
    "temperature": {"temp": 0.8},
    "top_p": {"temp": 0.8, "top_p": 0.9},
    "min_p": {"temp": 1.0, "min_p": 0.05, "min_tokens_to_keep": 2},
    "top_k": {"temp": 0.7, "top_k": 12},
    "xtc": {"temp": 1.0, "xtc_probability": 0.5, "xtc_threshold": 0.05, "xtc_special_tokens": [3, 8]},
    "all": {"temp": 0.9, "top_p": 0.95, "min_p": 0.02, "top_k": 30, "xtc_probability": 0.3},
}
PROCESSORS: dict[str, dict[str, Any]] = {
    "bias": {"logit_bias": {5: 2.0, 42: -1.0}},
    "repetition": {"repetition_penalty": 1.3, "repetition_context_size": 4},
    "presence": {"presence_penalty": 0.5},
    "frequency": {"frequency_penalty": 0.4, "frequency_context_size": 6},
}


def logits_of(seed: int, dtype: mx.Dtype = mx.float32) -> mx.array:
    """[1, V], the same for the same seed, in memory of its own."""
    return mx.array(np.random.default_rng(seed).normal(0, 3, (1, VOCAB)).astype(np.float32)).astype(dtype)


def stock_choice(
    logits: mx.array, sampler: Callable[..., mx.array], processors: Sequence[Callable[..., mx.array]], ids: mx.array
) -> tuple[mx.array, mx.array]:
    """The lines of `mlx_lm.generate.generate_step`."""
    for processor in processors:
        logits = processor(ids, logits)
    logprobs = logits - mx.logsumexp(logits, keepdims=True)
    return sampler(logprobs), logprobs


# Choosing


@pytest.mark.part(7)
@DTYPES
@pytest.mark.parametrize("name", ["greedy", *SAMPLERS])
def test_tokens_and_logprobs_have_the_bits_of_the_stock_expression(name: str, dtype: mx.Dtype) -> None:
    sampler = greedy_sampler if name == "greedy" else make_sampler(**SAMPLERS[name])
    processors = make_logits_processors(repetition_penalty=1.2, frequency_penalty=0.3)
    ids = mx.array([5, 17, 42, 5])
    for seed in range(12):
        mx.random.seed(seed)
        want_token, want = stock_choice(logits_of(seed, dtype), sampler, processors, ids)
        after = rng_key()
        mx.random.seed(seed)
        token, logprobs = Sampling(sampler, tuple(processors)).choose(logits_of(seed, dtype), ids)
        assert token.tolist() == want_token.tolist()
        assert logprobs.dtype == dtype
        assert_same_bits(logprobs, want, f"logprobs of seed {seed}")
        assert rng_key() == after


def test_in_bfloat16_the_choice_is_the_argmax_of_the_rounded_logprobs() -> None:
    """Two logits that differ may round to one log-probability; then the first of them is the stock choice."""
    logits = mx.zeros((1, VOCAB), mx.bfloat16)
    logits[:, 40] = 0.0078125
    token, logprobs = Sampling(greedy_sampler).choose(logits, None)
    assert logits.argmax().item() == 40
    assert logprobs[0, 40].item() == logprobs[0, 0].item()
    assert token.tolist() == [0]


def test_processors_are_called_in_order_each_on_what_the_one_before_returned() -> None:
    seen: list[tuple[str, list[int], float]] = []

    def processor(name: str) -> Callable[..., mx.array]:
        def process(ids: mx.array, logits: mx.array) -> mx.array:
            seen.append((name, ids.tolist(), logits[0, 0].item()))
            return logits + 1

        return process

    sampled = []

    def sampler(logprobs: mx.array) -> mx.array:
        sampled.append(logprobs)
        return mx.array([7])

    token, logprobs = Sampling(sampler, (processor("first"), processor("second"))).choose(
        mx.zeros((1, VOCAB)), mx.array([3, 1, 4])
    )
    assert seen == [("first", [3, 1, 4], 0.0), ("second", [3, 1, 4], 1.0)]
    assert token.tolist() == [7]
    assert sampled[0] is logprobs
    assert logprobs.shape == (1, VOCAB)


def test_choosing_reads_nothing_on_the_host() -> None:
    for options in SAMPLERS.values():
        sampling = Sampling(make_sampler(**options), tuple(make_logits_processors(presence_penalty=0.5)))
        logits, ids = logits_of(1), mx.array([5])
        with count_host_reads() as reads:
            sampling.choose(logits, ids)
        assert reads.count == 0


def test_a_position_holds_nan_when_any_of_its_logits_is_one() -> None:
    logits = mx.zeros((2, 3, VOCAB))
    logits[0, 1, 50] = float("nan")
    logits[1, 2, 0] = float("nan")
    logits[1, 0, 5] = float("inf")
    assert holds_nan(logits).tolist() == [[False, True, False], [False, False, True]]


# The random state


@pytest.mark.parametrize("name", SAMPLERS)
def test_drawing_from_a_noted_key_gives_what_was_drawn_after_it(name: str) -> None:
    sampling = Sampling(make_sampler(**SAMPLERS[name]), draws=True)
    mx.random.seed(2**40 + 3)
    keys, tokens = [], []
    for position in range(6):
        keys.append(random_key())
        tokens.append(sampling.choose(logits_of(position), None)[0].item())
    end = rng_key()
    for position in reversed(range(6)):
        rewind_random_state(keys[position].tolist())
        again = [sampling.choose(logits_of(later), None)[0].item() for later in range(position, 6)]
        assert again == tokens[position:]
        assert rng_key() == end


@pytest.mark.parametrize("key", [(0, 0), (0, 1), (1, 0), (2**32 - 1, 2**32 - 1), (2**31, 2**31 + 1)])
def test_every_key_can_be_put_back(key: tuple[int, int]) -> None:
    rewind_random_state(key)
    assert rng_key() == key


def test_noting_a_key_reads_nothing_and_draws_nothing() -> None:
    before = rng_key()
    with count_host_reads() as reads:
        key = random_key()
    assert reads.count == 0
    assert tuple(key.tolist()) == before == rng_key()


# Which callables may be called ahead


@pytest.mark.parametrize("options", SAMPLERS.values(), ids=SAMPLERS.keys())
def test_every_sampler_that_mlx_lm_makes_is_pure(options: dict[str, Any]) -> None:
    assert is_pure(make_sampler(**options))


@pytest.mark.parametrize("options", PROCESSORS.values(), ids=PROCESSORS.keys())
def test_every_processor_that_mlx_lm_makes_is_pure(options: dict[str, Any]) -> None:
    made = make_logits_processors(**options)
    assert len(made) == 1
    assert all(map(is_pure, made))


def test_greedy_sampling_is_pure_by_either_name() -> None:
    assert is_pure(greedy_sampler)
    assert is_pure(make_sampler(temp=0.0))
    assert make_sampler(temp=0.0) is greedy_sampler


class _Counting:
    """A sampler with a memory."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, logprobs: mx.array) -> mx.array:
        self.calls += 1
        return greedy_sampler(logprobs)

    def method(self, logprobs: mx.array) -> mx.array:
        return self(logprobs)


def _by_hand(logprobs: mx.array) -> mx.array:
    return greedy_sampler(logprobs)


OPAQUE: dict[str, Callable[..., Any]] = {
    "_by_hand": _by_hand,
    "<lambda>": lambda logprobs: greedy_sampler(logprobs),
    "_Counting": _Counting(),
    "method": _Counting().method,
    "partial": functools.partial(_by_hand),
    "argmax": mx.argmax,
}


@pytest.mark.parametrize("name", OPAQUE)
def test_any_other_callable_may_hide_state(name: str) -> None:
    assert not is_pure(OPAQUE[name])


@pytest.mark.parametrize("name", OPAQUE)
def test_a_callable_is_called_in_a_sentence_what_its_author_calls_it(name: str) -> None:
    assert name_of(OPAQUE[name]) == name


def test_a_wrapper_around_a_pure_sampler_may_hide_state_though_it_carries_its_name() -> None:
    """`functools.wraps` copies the module's name too."""
    calls = []

    @functools.wraps(make_sampler(temp=0.8))
    def wrapper(logprobs: mx.array) -> mx.array:
        calls.append(logprobs.shape)
        return greedy_sampler(logprobs)

    assert wrapper.__module__ == sample_utils.__name__
    assert not is_pure(wrapper)
