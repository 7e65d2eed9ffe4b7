"""Kinds of fault with quantized K/V: triples taken for arrays, dense caches in secret, blocks that cross the start."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.cache import ArraysCache, KVCache, QuantizedKVCache

from mlx_spec import SpeculativeCacheTransaction
from tests.cache.kinds import GROWTH, Kind, append
from tests.oracle import OracleRun
from tests.rounds.runs import DRAFTERS, SPARE, assert_counts_add_up, assert_equals_stock, record_stock, speculate
from tests.same_cache import assert_same_cache
from tests.scripted import CyclingDrafter, RightDrafter
from tests.tiny import MIXES, PROMPT, VOCAB, Mix, from_mlx_lm, randomise

WIDTH = 5
EMITTED = 22
BITS_AND_GROUPS = [(bits, group) for bits in (4, 8) for group in (32, 64)]

EVERY_SETTING = pytest.mark.parametrize(("bits", "group"), BITS_AND_GROUPS)


def quantized(bits: int, group: int, start: int, mix: str = "quantized_from_0") -> Mix:
    kv = {"kv_bits": bits, "kv_group_size": group, "quantized_kv_start": start}
    return dataclasses.replace(MIXES[mix], kv=kv)


@functools.cache
def stock(bits: int, group: int, start: int, emitted: int = EMITTED) -> OracleRun:
    return record_stock(quantized(bits, group, start), emitted + SPARE, {emitted})


@pytest.mark.parametrize("start", [0, 9, 18])
@EVERY_SETTING
def test_every_setting_equals_stock_from_the_first_token_or_from_the_middle_of_the_run(
    bits: int, group: int, start: int
) -> None:
    run, mix = stock(bits, group, start), quantized(bits, group, start)
    for pattern in ((7,), (2, 0, 4, 1)):
        got = speculate(mix, CyclingDrafter(run.ids, VOCAB, pattern), max_tokens=EMITTED, draft_block_size=WIDTH)
        assert_equals_stock(got, run, EMITTED)
        assert_counts_add_up(got)
        assert got.drafted > 0
        assert {type(cache) for cache in got.cache} == {QuantizedKVCache}
        assert {(cache.bits, cache.group_size) for cache in got.cache} == {(bits, group)}


@pytest.mark.slow
def test_conversion_at_every_place_of_a_block_equals_stock() -> None:
    """What follows the start of quantization is read from converted caches, so no block may cross it."""
    for start in range(len(PROMPT) - 1, len(PROMPT) + 2 * WIDTH + 1):
        run, mix = stock(8, 32, start, 16), quantized(8, 32, start)
        for accepted in (WIDTH, 2):
            drafter = CyclingDrafter(run.ids, VOCAB, (accepted,))
            got = speculate(mix, drafter, max_tokens=16, draft_block_size=WIDTH)
            assert_equals_stock(got, run, 16)
            assert got.drafted > 0


@pytest.mark.parametrize("drafter", ["none", "right", "ngram", "eagle3"])
@EVERY_SETTING
def test_caches_are_quantized_once_the_prompt_is_read_whoever_drafts(bits: int, group: int, drafter: str) -> None:
    """Class and bytes, not only the text: a dense cache would give nearly the same one."""
    mix = quantized(bits, group, 0)
    proposing = None if drafter == "none" else DRAFTERS[drafter](mix.name, stock(bits, group, 0).ids, mx.float32)
    width = {} if drafter == "none" else {"draft_block_size": WIDTH}
    got = speculate(mix, proposing, max_tokens=0, **width)
    want = record_stock(mix, 0, {0})
    dense = mix.new_cache()
    mx.eval(mix.model()(mx.array([PROMPT]), cache=dense), [cache.state for cache in dense])
    assert [type(cache) for cache in got.cache] == [QuantizedKVCache] * len(dense)
    rows = GROWTH * 2 * 2 * 64  # of keys and of values, over heads and their size
    bytes_held = rows * bits // 8 + rows // group * 2 * 4
    assert [cache.nbytes for cache in got.cache] == [bytes_held] * len(dense)
    assert bytes_held < dense[0].nbytes == rows * 4
    assert want.ids == ()


# Several rows, several kinds


@pytest.mark.parametrize("rows", [1, 2])
@EVERY_SETTING
def test_any_prefix_of_a_block_is_kept_for_one_row_and_for_two(bits: int, group: int, rows: int) -> None:
    kind = Kind("quantized", lambda: QuantizedKVCache(32, bits), GROWTH, batch=rows, by_length=True)
    block = [90, 91, 92, 93, 94]
    for start in (0, 7, GROWTH - 3):
        for kept in range(len(block) + 1):
            mine, want = kind.filled_at_once(range(start)), kind.filled_at_once(range(start))
            with SpeculativeCacheTransaction([mine], len(block)) as tx:
                append(tx.caches[0], block, rows)
                tx.commit([kept] * rows if start else kept)
            kind.step(want, block[:kept])
            assert_same_cache(mine, want)
            assert isinstance(mine, QuantizedKVCache)


@functools.cache
def hybrid() -> nn.Module:
    """Full attention with heads large enough to be quantized, between recurrent layers."""
    return randomise(
        lambda: from_mlx_lm(
            "qwen3_next",
            hidden_size=48,
            num_hidden_layers=4,
            intermediate_size=80,
            full_attention_interval=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=64,
            linear_num_value_heads=6,
            linear_num_key_heads=3,
            linear_key_head_dim=12,
            linear_value_head_dim=20,
            linear_conv_kernel_dim=4,
            num_experts=0,
            num_experts_per_tok=0,
            decoder_sparse_step=1,
            shared_expert_intermediate_size=36,
            mlp_only_layers=[],
            moe_intermediate_size=28,
            norm_topk_prob=True,
            rms_norm_eps=1e-6,
            rope_theta=1e4,
            partial_rotary_factor=0.25,
            max_position_embeddings=2048,
        ),
        0,
    )


class Hybrid(Mix):
    def model(self, dtype: mx.Dtype = mx.float32) -> nn.Module:
        return hybrid()


@pytest.mark.slow
@pytest.mark.parametrize("start", [0, 14])
def test_quantized_rows_beside_recurrent_states_are_each_kept_their_own_way(start: int) -> None:
    """A cache that cannot be trimmed is no recurrent state for that, and a triple is no list of states."""
    kv = {"kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": start}
    mix = Hybrid("quantized hybrid", hybrid, frozenset(), kv)
    run = record_stock(mix, EMITTED + SPARE, {EMITTED})
    for accepted in range(WIDTH):
        got = speculate(
            mix, CyclingDrafter(run.ids, VOCAB, (accepted, WIDTH)), max_tokens=EMITTED, draft_block_size=WIDTH
        )
        assert_equals_stock(got, run, EMITTED)
        assert {type(cache) for cache in got.cache} == {QuantizedKVCache, ArraysCache}


def test_a_dense_cache_would_be_told_apart() -> None:
    run = stock(8, 64, 0)
    dense: Sequence[Any] = speculate(
        quantized(8, 64, 10**6), RightDrafter(run.ids, VOCAB), max_tokens=EMITTED, draft_block_size=WIDTH
    ).cache
    assert {type(cache) for cache in dense} == {KVCache}
    with pytest.raises(AssertionError, match="QuantizedKVCache"):
        assert_same_cache(dense, run.cache_after(EMITTED))
