"""A transaction over ordinary forwards keeps its word, or refuses what it cannot promise before anything changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

import mlx_spec
from mlx_spec import SpeculativeCacheTransaction
from mlx_spec.cache.base import Drive
from mlx_spec.errors import TransactionError
from tests.cache.kinds import KINDS, Kind, append
from tests.cache.models import MODELS
from tests.cache.subjects import TinyModel
from tests.oracle import independent_copy
from tests.same_cache import assert_same_cache
from tests.tiny import from_mlx_lm, randomise

pytestmark = pytest.mark.faults

BLOCK = [90, 4, 31, 62]
WIDTH = len(BLOCK)

CUT_BY_MIXERS = ("ring_with_keep", "sliding", "gated_delta", "mamba2", "short_convolution", "cache_list")
"""Models that keep a part of a block only with the help of their mixers."""

EVERY_MODEL = pytest.mark.parametrize("subject", MODELS.values(), ids=MODELS.keys())
EVERY_KIND = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())


class Warm:
    """A tiny model whose caches have read enough to stand at their edge."""

    def __init__(self, subject: TinyModel, attached: bool) -> None:
        self.caches = subject.make()
        self.model: Any = subject.model
        mlx_spec.detach(self.model)
        mx.eval(self.model(mx.array([[(7 * place) % 97 for place in range(subject.edge - 1)]]), cache=self.caches))
        if attached:
            mlx_spec.attach(self.model)
        self.before = independent_copy(self.caches)

    def feed(self, tx: SpeculativeCacheTransaction, tokens: list[int]) -> None:
        mx.eval(self.model(mx.array([tokens]), cache=tx.caches))

    def after(self, tokens: list[int]) -> list[Any]:
        """The caches after one-token forwards of mlx-lm's own."""
        caches = independent_copy(self.before)
        for token in tokens:
            mx.eval(self.model(mx.array([[token]]), cache=caches))
        return caches


# A model to which nothing is attached


@pytest.mark.part(3)
@pytest.mark.parametrize("name", CUT_BY_MIXERS)
def test_a_block_that_could_not_be_cut_is_refused_before_any_layer_has_written(name: str) -> None:
    warm = Warm(MODELS[name], attached=False)
    with SpeculativeCacheTransaction(warm.caches, WIDTH) as tx:
        with pytest.raises(TransactionError, match=r"mlx_spec\.attach\(model\)"):
            warm.feed(tx, BLOCK)
        assert_same_cache(warm.caches, warm.before)
        assert tx.active
    assert_same_cache(warm.caches, warm.before)


@pytest.mark.part(3)
@pytest.mark.parametrize("name", MODELS)
def test_single_tokens_are_kept_without_anything_attached(name: str) -> None:
    warm = Warm(MODELS[name], attached=False)
    with SpeculativeCacheTransaction(warm.caches, WIDTH) as tx:
        for token in BLOCK[:3]:
            warm.feed(tx, [token])
            tx.mark(1)
        tx.commit(2)
    assert_same_cache(warm.caches, warm.after(BLOCK[:2]))


@pytest.mark.part(3)
@pytest.mark.parametrize("name", [name for name in MODELS if name != "chunked"])
def test_a_forward_kept_whole_by_choice_is_the_models_own(name: str) -> None:
    """Chunks apart, whose front is cut as single tokens cut it."""
    warm = Warm(MODELS[name], attached=False)
    with SpeculativeCacheTransaction(warm.caches, WIDTH, drive=Drive.WHOLE) as tx:
        warm.feed(tx, BLOCK)
        tx.mark(WIDTH)
        tx.commit(WIDTH)
    want = independent_copy(warm.before)
    mx.eval(warm.model(mx.array([BLOCK]), cache=want))
    assert_same_cache(warm.caches, want)


@pytest.mark.parametrize("name", ["mamba", "rwkv7"])
def test_a_part_of_a_state_that_nothing_tells_of_is_refused_and_can_be_undone(name: str) -> None:
    """These models ask their caches for nothing, so no one sees how many tokens come."""
    model, caches = RECURRENT[name]()
    before = independent_copy(caches)
    with SpeculativeCacheTransaction(caches, WIDTH) as tx:
        mx.eval(model(mx.array([BLOCK]), cache=tx.caches))
        for kept in (1, WIDTH):
            with pytest.raises(TransactionError, match=r"does not count .* Call mark\(tokens\)"):
                tx.commit(kept)
        tx.mark(WIDTH)
        with pytest.raises(TransactionError, match=r"mlx_spec\.attach\(model\)"):
            tx.commit(2)
    assert_same_cache(caches, before)


def test_nothing_unmarked_is_kept_of_more_tokens_than_a_state_was_opened_for() -> None:
    model, caches = RECURRENT["mamba"]()
    before = independent_copy(caches)
    for attached in (False, True):
        if attached:
            mlx_spec.attach(model)
        with SpeculativeCacheTransaction(caches, 3) as tx:
            with pytest.raises(TransactionError):  # noqa: PT012  attached, the forward is refused; else its end
                mx.eval(model(mx.array([[1, 2, 3, 4, 5]]), cache=tx.caches))
                tx.mark(5)
            with pytest.raises(TransactionError):
                tx.commit(3)
        assert_same_cache(caches, before)


# A model that is attached


@pytest.mark.part(5)
@EVERY_MODEL
@pytest.mark.parametrize("split", [(4,), (2, 2), (1, 3)], ids=str)
def test_any_prefix_of_a_block_is_that_of_single_tokens_however_it_is_split(
    subject: TinyModel, split: tuple[int, ...], thorough: bool
) -> None:
    for kept in range(WIDTH + 1) if thorough else (1, 3):
        warm = Warm(subject, attached=True)
        with SpeculativeCacheTransaction(warm.caches, WIDTH) as tx:
            for count in split:
                warm.feed(tx, BLOCK[tx.position : tx.position + count])
                tx.mark(count)
            tx.commit(kept)
        assert_same_cache(warm.caches, warm.after(BLOCK[:kept]))


@pytest.mark.slow
@pytest.mark.part(1)
@pytest.mark.parametrize("name", ["gated_delta", "mamba2", "ring_with_keep"])
def test_two_blocks_of_eight_are_sixteen_single_tokens(name: str, thorough: bool) -> None:
    tokens = [(11 * place + 2) % 97 for place in range(16)]
    for kept in (3, 8, 11, 16) if thorough else (3, 11):
        warm = Warm(MODELS[name], attached=True)
        with SpeculativeCacheTransaction(warm.caches, 16) as tx:
            for start in (0, 8):
                warm.feed(tx, tokens[start : start + 8])
                tx.mark(8)
            tx.commit(kept)
        assert_same_cache(warm.caches, warm.after(tokens[:kept]))


@pytest.mark.part(3)
@pytest.mark.parametrize("name", MODELS)
def test_more_tokens_than_the_width_are_refused_before_any_layer_has_written(name: str, thorough: bool) -> None:
    for fed in ([], BLOCK[:1], BLOCK[:3]) if thorough else (BLOCK[:1],):
        warm = Warm(MODELS[name], attached=True)
        with SpeculativeCacheTransaction(warm.caches, WIDTH) as tx:
            for token in fed:
                warm.feed(tx, [token])
                tx.mark(1)
            before = independent_copy(warm.caches)
            with pytest.raises(TransactionError, match=f"holds {len(fed)}; {WIDTH - len(fed) + 1} more do not fit"):
                warm.feed(tx, [1] * (WIDTH - len(fed) + 1))
            assert_same_cache(without_cuts(warm.caches), without_cuts(before))
            tx.commit(len(fed))
        assert_same_cache(warm.caches, warm.after(fed))


def without_cuts(caches: list[Any]) -> list[Any]:
    """Chunks apart: a model cuts their front before it writes, refused or not."""
    return [cache for cache in caches if not hasattr(cache, "maybe_trim_front")]


@pytest.mark.part(3)
@pytest.mark.parametrize("name", ["gated_delta", "mamba2", "short_convolution", "cache_list", "sliding"])
def test_forwards_without_marks_are_counted_and_cut_all_the_same(name: str, thorough: bool) -> None:
    for kept in (1, 2, 3, 4) if thorough else (1, 3):
        warm = Warm(MODELS[name], attached=True)
        with SpeculativeCacheTransaction(warm.caches, WIDTH) as tx:
            warm.feed(tx, BLOCK[:2])
            warm.feed(tx, BLOCK[2:])
            with pytest.raises(TransactionError, match="do not fit"):
                warm.feed(tx, [1])
            tx.commit(kept)
        assert_same_cache(warm.caches, warm.after(BLOCK[:kept]))


@pytest.mark.part(3)
@pytest.mark.parametrize("name", ["dense_qk_norm", "gated_delta", "mamba2", "sliding"])
def test_a_mark_of_another_number_than_was_read_is_refused(name: str) -> None:
    warm = Warm(MODELS[name], attached=True)
    with SpeculativeCacheTransaction(warm.caches, WIDTH) as tx:
        warm.feed(tx, BLOCK[:2])
        for wrong in (1, 3, 4):
            with pytest.raises(TransactionError, match=rf"mark\({wrong}\) says .* has read 2"):
                tx.mark(wrong)
        tx.mark(2)
        tx.commit(1)
    assert_same_cache(warm.caches, warm.after(BLOCK[:1]))


@pytest.mark.part(3)
@pytest.mark.parametrize("name", MODELS)
def test_more_than_was_read_is_never_kept(name: str) -> None:
    for fed in ([], BLOCK[:2]):
        warm = Warm(MODELS[name], attached=True)
        with SpeculativeCacheTransaction(warm.caches, WIDTH) as tx:
            if fed:
                warm.feed(tx, fed)
            for kept in range(len(fed) + 1, WIDTH + 1):
                with pytest.raises(TransactionError):
                    tx.commit(kept)
                assert tx.active
            tx.commit(len(fed))
        assert_same_cache(warm.caches, warm.after(fed))


@pytest.mark.part(3)
@pytest.mark.parametrize("name", MODELS)
def test_attaching_and_detaching_leave_the_model_as_it_was(name: str) -> None:
    warm = Warm(MODELS[name], attached=False)
    classes = [type(module) for module in warm.model.modules()]
    want = warm.model(mx.array([BLOCK]), cache=independent_copy(warm.caches))
    mlx_spec.attach(warm.model)
    mlx_spec.attach(warm.model)
    assert [type(module) for module in warm.model.modules()] != classes
    got = warm.model(mx.array([BLOCK]), cache=independent_copy(warm.caches))
    assert mx.array_equal(got, want)
    mlx_spec.detach(warm.model)
    mlx_spec.detach(warm.model)
    assert [type(module) for module in warm.model.modules()] == classes


# Caches of every kind, written by hand


@EVERY_KIND
def test_a_cache_that_read_nothing_keeps_nothing(kind: Kind) -> None:
    cache = kind.filled(range(7))
    before = independent_copy(cache)
    with SpeculativeCacheTransaction([cache], WIDTH) as tx:
        for kept in (1, WIDTH, [1] * kind.batch):
            with pytest.raises(TransactionError, match=r"appended 0|Call mark\(tokens\)"):
                tx.commit(kept)
        tx.commit(0)
    assert_same_cache(cache, before)


@pytest.mark.part(40)
@EVERY_KIND
@pytest.mark.parametrize(
    "wrong",
    [-1, WIDTH + 1, 1.0, None, True, "2", [[1]], np.float32(1), mx.array([[1]]), mx.array(1.0)],
    ids=repr,
)
def test_a_count_that_is_none_is_refused_and_the_round_can_be_undone(kind: Kind, wrong: Any) -> None:
    cache = kind.filled(range(7))
    before = independent_copy(cache)
    with SpeculativeCacheTransaction([cache], WIDTH) as tx:
        for token in BLOCK[:2]:
            append(tx.caches[0], [token], kind.batch)
            tx.mark(1)
        with pytest.raises(TransactionError):
            tx.commit(wrong)
        assert tx.active
    assert_same_cache(cache, before)


@pytest.mark.part(12)
@EVERY_KIND
@pytest.mark.parametrize("form", [list, tuple, mx.array], ids=["list", "tuple", "array"])
def test_one_count_per_row_is_taken_in_every_form(kind: Kind, form: Callable[[list[int]], Any]) -> None:
    cache = kind.filled(range(7))
    want = independent_copy(cache)
    with SpeculativeCacheTransaction([cache], WIDTH) as tx:
        for token in BLOCK[:3]:
            append(tx.caches[0], [token], kind.batch)
            tx.mark(1)
        with pytest.raises(TransactionError, match="one count per row"):
            tx.commit(form([2] * (kind.batch + 1)))
        tx.commit(form([2] * kind.batch))
    kind.step(want, BLOCK[:2])
    assert_same_cache(cache, want)


@pytest.mark.parametrize("name", ["ring", "ring_without_keep", "ring_narrow", "batch_ring", "batch_ring_narrow"])
def test_a_window_takes_no_two_tokens_at_once(name: str) -> None:
    kind = KINDS[name]
    cache = kind.filled(range(7))
    before = independent_copy(cache)
    with SpeculativeCacheTransaction([cache], WIDTH) as tx:
        for tokens in (BLOCK, BLOCK[:2]):
            with pytest.raises(TransactionError, match="feed the block one token at a time"):
                append(tx.caches[0], tokens, kind.batch)
            assert_same_cache(cache, before)
        append(tx.caches[0], BLOCK[:1], kind.batch)
        tx.commit(1)
    kind.step(before, BLOCK[:1])
    assert_same_cache(cache, before)


def _recurrent(module: str, **config: Any) -> tuple[Any, list[Any]]:
    model = randomise(lambda: from_mlx_lm(module, **config), seed=3)
    caches = make_prompt_cache(model)
    mx.eval(model(mx.array([[5, 6, 7, 8, 9]]), cache=caches))
    return model, caches


RECURRENT: dict[str, Callable[[], tuple[Any, list[Any]]]] = {
    "mamba": lambda: _recurrent(
        "mamba",
        hidden_size=40,
        intermediate_size=72,
        state_size=14,
        num_hidden_layers=2,
        conv_kernel=4,
        use_bias=False,
        use_conv_bias=True,
        time_step_rank=5,
        tie_word_embeddings=False,
    ),
    "rwkv7": lambda: _recurrent(
        "rwkv7",
        hidden_size=64,
        intermediate_size=72,
        norm_eps=1e-5,
        head_dim=32,
        num_hidden_layers=2,
        a_low_rank_dim=8,
        v_low_rank_dim=8,
        gate_low_rank_dim=8,
        decay_low_rank_dim=8,
    ),
}
