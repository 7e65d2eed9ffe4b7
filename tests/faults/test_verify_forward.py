"""`verify_forward` gives a block's tokens the bits of one-token decode, and keeps its word for every prefix of it."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from mlx_spec import Statistics, VerifiedBlock, verify_forward
from mlx_spec.errors import InvalidRequest, TransactionError
from mlx_spec.schedule.policy import MAX_WIDTH
from tests.bits import assert_same_bits, bit_difference
from tests.double import PATTERNS, double
from tests.oracle import OracleRun, independent_copy
from tests.same_cache import assert_same_cache
from tests.tiny import MIXES, PROMPT, VOCAB, Mix, randomise

pytestmark = pytest.mark.faults

WIDTH = 4
START = 8
"""Tokens emitted before the block: it begins where every window and chunk is full, and ends before quantization."""


def stock_run(mix: Mix) -> OracleRun:
    return mix.oracle(START + WIDTH + 1)


def verified(mix: Mix, caches: list[Any], **options: Any) -> VerifiedBlock:
    """The block that the stock loop goes on with."""
    return verify_forward(mix.model(), mx.array([stock_run(mix).ids[START : START + WIDTH]]), caches, **options)


def assert_rows_are_stocks(block: VerifiedBlock, mix: Mix) -> None:
    for position in range(WIDTH):
        row = block.logits[:, position]
        logprobs = (row - mx.logsumexp(row, keepdims=True))[0]
        want = stock_run(mix).logprobs[START + position + 1]
        assert_same_bits(logprobs, want, f"log-probabilities after token {position} of the block")


SOON = ("dense_qk_norm", "ring_with_keep", "mamba", "quantized_from_0")
"""Mixes whose certificates take less than a second."""


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in SOON else pytest.mark.deep) for n in MIXES])
def test_every_row_and_every_kept_prefix_is_that_of_stock_steps(name: str, thorough: bool) -> None:
    mix = MIXES[name]
    for kept in range(WIDTH + 1) if thorough else (0, 1, WIDTH - 1, WIDTH):
        caches = stock_run(mix).cache_after(START)
        block = verified(mix, caches)
        assert_rows_are_stocks(block, mix)
        block.transaction.commit(kept)
        assert_same_cache(caches, stock_run(mix).cache_after(START + kept))


@pytest.mark.parametrize("name", ["dense_qk_norm", pytest.param("hybrid", marks=pytest.mark.deep)])
def test_a_block_wider_than_a_verify_call_is_one_round(name: str, thorough: bool) -> None:
    mix, start = MIXES[name], 3
    width = MAX_WIDTH + 2
    run = mix.oracle()
    for kept in (1, MAX_WIDTH - 1, MAX_WIDTH, MAX_WIDTH + 1, width) if thorough else (MAX_WIDTH - 1, MAX_WIDTH + 1):
        caches, statistics = run.cache_after(start), Statistics()
        tokens = mx.array([run.ids[start : start + width]])
        logits, _, tx = verify_forward(mix.model(), tokens, caches, statistics=statistics)
        assert logits.shape == (1, width, VOCAB)
        choices = mx.argmax(logits[0], axis=-1).tolist()
        assert choices == list(run.ids[start + 1 : start + width + 1])
        assert "step-through" not in statistics.verify_route
        tx.commit(kept)
        assert_same_cache(caches, run.cache_after(start + kept))


@pytest.mark.part(1)
@pytest.mark.parametrize("pattern", ["gen15", "gen13"])
@pytest.mark.parametrize("name", ["dense_qk_norm", pytest.param("hybrid", marks=pytest.mark.deep)])
def test_rows_are_those_of_steps_where_several_rows_round_differently(name: str, pattern: str) -> None:
    with double(PATTERNS[pattern]):
        mix = MIXES[name]
        model = randomise(mix.build, 5)
        warm = mix.new_cache()
        mx.eval(model(mx.array([PROMPT]), cache=warm))
        tokens = mx.array([[7, 50, 3, 88]])
        steps, want = stepped(model, tokens, warm)
        plain = model(tokens, cache=independent_copy(warm))
        assert bit_difference(plain, steps) is not None, "the double does not bite"
        for kept in (2, 4):
            caches = independent_copy(warm)
            block = verify_forward(model, tokens, caches)
            assert_same_bits(block.logits, steps)
            block.transaction.commit(kept)
            assert_same_cache(caches, want[kept])


def stepped(model: nn.Module, tokens: mx.array, warm: list[Any]) -> tuple[mx.array, list[list[Any]]]:
    """What as many one-token forwards of mlx-lm's model give, and the caches after none of them, one, two, ..."""
    caches, rows = independent_copy(warm), []
    after = [independent_copy(caches)]
    for position in range(tokens.shape[1]):
        rows.append(model(tokens[:, position : position + 1], cache=caches))
        mx.eval(rows[-1], [cache.state for cache in caches])
        after.append(independent_copy(caches))
    return mx.concatenate(rows, axis=1), after


def batch_of(mix: Mix) -> list[Any]:
    """Caches of two rows that have read texts of different lengths."""
    rows = [mix.new_cache(), mix.new_cache()]
    for row, caches in enumerate(rows):
        mx.eval(mix.model()(mx.array([PROMPT[row * 3 :]]), cache=caches))
    return [type(alone).merge([alone, other]) for alone, other in zip(*rows, strict=True)]


@pytest.mark.part(3)
@pytest.mark.parametrize("name", ["dense_qk_norm", "sliding", "hybrid", "mamba2", "cache_list", "ring_with_keep"])
def test_rows_of_a_batch_are_those_of_its_steps_and_keep_counts_of_their_own(name: str) -> None:
    mix = MIXES[name]
    warm, tokens = batch_of(mix), mx.array([[7, 50, 3], [88, 9, 21]])
    steps, after = stepped(mix.model(), tokens, warm)
    caches = independent_copy(warm)
    block = verify_forward(mix.model(), tokens, caches)
    assert_same_bits(block.logits, steps)
    block.transaction.commit(mx.array([1, 3]))
    for layer, cache in enumerate(caches):
        for row, kept in enumerate((1, 3)):
            assert_same_cache(cache.extract(row), independent_copy(after[kept][layer].extract(row)))


def test_rows_in_ordinary_caches_keep_one_count() -> None:
    mix = MIXES["dense_qk_norm"]
    caches = mix.new_cache()
    mx.eval(mix.model()(mx.array([PROMPT, PROMPT[::-1]]), cache=caches))
    tokens = mx.array([[7, 50, 3], [88, 9, 21]])
    steps, after = stepped(mix.model(), tokens, caches)
    statistics = Statistics()
    block = verify_forward(mix.model(), tokens, caches, statistics=statistics)
    assert_same_bits(block.logits, steps)
    assert "no route is certified for 2 rows" in statistics.notes[0]
    with pytest.raises(TransactionError, match="same count for every row"):
        block.transaction.commit([1, 3])
    block.transaction.commit([2, 2])
    assert_same_cache(caches, after[2])


@pytest.mark.part(2)
@pytest.mark.parametrize("capture", [(0,), (1,), (0, 1), (1, 0)], ids=str)
def test_captured_layers_come_in_the_order_asked_for(capture: tuple[int, ...]) -> None:
    mix = MIXES["dense_qk_norm"]
    model: Any = mix.model()
    block = verified(mix, stock_run(mix).cache_after(START), capture=capture)
    block.transaction.abort()
    last = mx.split(block.hidden, len(capture), axis=-1)[capture.index(1)] if 1 in capture else None
    assert block.hidden.shape == (1, WIDTH, 52 * len(capture))
    if last is not None:
        for position in range(WIDTH):
            head = model.lm_head(model.model.norm(last[:, position : position + 1]))
            assert_same_bits(head[:, 0], block.logits[:, position])


WRONG = {
    "no rows": (mx.array([1, 2]), (), r"shape \[B, W\].* got shape \(2,\)"),
    "no tokens": (mx.zeros((1, 0), mx.int32), (), r"got shape \(1, 0\)"),
    "no ids": (mx.zeros((1, 2)), (), "float32"),
    "too many rows": (mx.array([[1], [2]]), (), "tokens have 2 rows, the caches hold 1"),
    "no such layer": (mx.array([[1, 2]]), (2,), r"layers 0\.\.1 of qwen3, got \[2\]"),
    "a negative layer": (mx.array([[1, 2]]), (-1,), r"got \[-1\]"),
    "a layer twice": (mx.array([[1, 2]]), (1, 1), "each layer once"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_does_not_fit_is_refused_before_anything_is_opened(wrong: str) -> None:
    tokens, capture, message = WRONG[wrong]
    mix = MIXES["dense_qk_norm"]
    caches = stock_run(mix).cache_after(START)
    with pytest.raises(InvalidRequest, match=message):
        verify_forward(mix.model(), tokens, caches, capture=capture)
    assert_same_cache(caches, stock_run(mix).cache_after(START))
    verified(mix, caches).transaction.abort()


class Failing(nn.Module):
    """A model of which some forward raises in its last layer, when the others have written."""

    def __init__(self, model: Any, error: BaseException) -> None:
        super().__init__()
        self.inner, self.error, self.armed = model, error, False

    @property
    def layers(self) -> list[nn.Module]:
        return self.inner.layers

    def __call__(self, tokens: mx.array, cache: Any = None) -> mx.array:
        logits = self.inner(tokens, cache=cache)
        if self.armed:
            raise self.error
        return logits


@pytest.mark.part(3)
@pytest.mark.parametrize("error", [KeyError("told to"), KeyboardInterrupt(), MemoryError()], ids=repr)
@pytest.mark.parametrize("rows", [1, 2])
def test_any_exception_puts_the_caches_back_and_passes_through(error: BaseException, rows: int) -> None:
    mix = MIXES["ring_with_keep"]
    model = Failing(mix.model(), error)
    caches = mix.new_cache()
    tokens = mx.array([[7, 50, 3]] * rows)
    mx.eval(model(mx.array([PROMPT] * rows), cache=caches))
    before = independent_copy(caches)
    verify_forward(model, tokens, caches).transaction.abort()
    model.armed = True
    with pytest.raises(type(error)):
        verify_forward(model, tokens, caches)
    assert_same_cache(caches, before)
    model.armed = False
    verify_forward(model, tokens, caches).transaction.abort()


def test_caches_in_an_open_round_are_refused_and_the_round_stays() -> None:
    mix = MIXES["dense_qk_norm"]
    caches = stock_run(mix).cache_after(START)
    first = verified(mix, caches)
    with pytest.raises(TransactionError, match="in an open transaction already"):
        verified(mix, caches)
    first.transaction.commit(2)
    assert_same_cache(caches, stock_run(mix).cache_after(START + 2))
