"""A window that keeps every row for good: mlx-lm writes what comes later to nowhere, and so must a speculative run."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import RotatingKVCache

from mlx_spec import SpeculativeCacheTransaction, Statistics, generate_step
from mlx_spec.cache.base import Drive
from mlx_spec.errors import TransactionError
from tests.cache.kinds import append
from tests.oracle import assert_same_output, independent_copy, run_stock
from tests.same_cache import assert_same_cache
from tests.scripted import AlternatingDrafter
from tests.tiny import MIXES, PROMPT, VOCAB

pytestmark = pytest.mark.faults

KEEP = 4
"""What mlx-lm gives every window it makes for `max_kv_size`."""

SIZES = (1, 2, 3, 4, 5, 6)
EMITTED = 14
MIX = MIXES["ring_with_keep"]


@pytest.mark.part(3)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("prompt", [PROMPT, PROMPT[:1], PROMPT[:3]], ids=len)
@pytest.mark.parametrize("width", [2, 5])
def test_tokens_and_cache_are_stocks_for_every_size(size: int, prompt: tuple[int, ...], width: int) -> None:
    run = run_stock(MIX.model(), prompt, EMITTED, max_kv_size=size)
    drafter = AlternatingDrafter([*run.ids, *[0] * width], VOCAB, width)
    caches = [RotatingKVCache(size, keep=KEEP) for _ in MIX.model().layers]
    statistics = Statistics()
    out = list(
        generate_step(
            mx.array(prompt),
            MIX.model(),
            max_tokens=EMITTED,
            prompt_cache=caches,
            draft_model=drafter,
            draft_block_size=width,
            statistics=statistics,
        )
    )
    assert_same_output(out, run)
    assert_same_cache(caches, run.cache_after(EMITTED))
    told = f"max_size={size}, keep=4), a window without a row to overwrite" in str(statistics.notes)
    assert told == (size <= KEEP)
    assert (statistics.verify_route == "step-through") == (size <= KEEP)


@pytest.mark.part(1)
@pytest.mark.parametrize("size", SIZES[:4])
def test_without_a_width_it_is_decoded_plainly_and_says_why(size: int) -> None:
    statistics = Statistics()
    run = run_stock(MIX.model(), PROMPT, EMITTED, max_kv_size=size)
    drafter = AlternatingDrafter([*run.ids, 0, 0, 0], VOCAB, 4)
    step = generate_step(
        mx.array(PROMPT),
        MIX.model(),
        max_tokens=EMITTED,
        max_kv_size=size,
        draft_model=drafter,
        statistics=statistics,
    )
    assert_same_output(list(step), run)
    assert statistics.proposed_tokens == 0
    assert "a window without a row to overwrite" in statistics.notes[0]
    assert "decoded plainly" in statistics.notes[1]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("start", [0, 1, 3, 9])
def test_every_prefix_of_a_round_is_that_of_single_writes(size: int, start: int) -> None:
    for kept in range(4):
        cache = filled(size, start)
        want = independent_copy(cache)
        with SpeculativeCacheTransaction([cache], 3) as tx:
            for token in range(3):
                append(tx.caches[0], [50 + token])
                tx.mark(1)
            with pytest.raises(TransactionError, match="3 tokens and holds 3; 1 more do not fit"):
                append(tx.caches[0], [60])
            tx.commit(kept)
        for token in range(kept):
            append(want, [50 + token])
        assert_same_cache(cache, want)


@pytest.mark.parametrize("size", SIZES[:4])
def test_several_rows_at_once_are_refused_but_in_a_round_kept_whole(size: int) -> None:
    cache = filled(size, 6)
    want = independent_copy(cache)
    with SpeculativeCacheTransaction([cache], 3) as tx:
        with pytest.raises(TransactionError, match="one token at a time"):
            append(tx.caches[0], [50, 51, 52])
        assert_same_cache(cache, want)
    with SpeculativeCacheTransaction([cache], 3, drive=Drive.WHOLE) as tx:
        append(tx.caches[0], [50, 51, 52])
        tx.mark(3)
        tx.commit(3)
    append(want, [50, 51, 52])
    assert_same_cache(cache, want)


def filled(size: int, tokens: int) -> Any:
    cache = RotatingKVCache(size, keep=KEEP)
    if tokens:
        append(cache, range(tokens))
    return cache
