"""Ids that a model has no embedding for are refused before any forward, wherever they come from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest
from mlx import nn
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.tuner.utils import linear_to_lora_layers

from mlx_spec import Statistics, generate, generate_step, speculative_generate_step, stream_generate, verify_forward
from mlx_spec.errors import InvalidRequest
from mlx_spec.model.anatomy import ANATOMY_BY_MODULE
from tests.checkpoints import ascii_tokenizer, byte_tokenizer, tiny_model
from tests.host_reads import count_host_reads
from tests.tiny import MIXES, PROMPT, VOCAB

pytestmark = pytest.mark.faults

OUTSIDE = ([10**6, 1], [VOCAB, 5], [5, VOCAB], [-1, 5], [5, -7], [2**40, 3], [-(2**70)])


@pytest.mark.parametrize("ids", OUTSIDE, ids=str)
def test_ids_outside_the_vocabulary_are_refused_with_the_id_and_the_range(ids: list[int]) -> None:
    mix = MIXES["dense"]
    cache = mix.new_cache()
    for draft in (None, "ngram"):
        with pytest.raises(InvalidRequest) as caught:
            generate_step(ids, mix.model(), draft_model=draft, prompt_cache=cache)
        assert "\n" not in str(caught.value)
    if abs(ids[0]) < 2**31:
        assert f"0 to {VOCAB - 1}" in str(caught.value)
    assert all(leaf.empty() for leaf in cache)


@pytest.mark.parametrize("dtype", [mx.int32, mx.uint32, mx.int64], ids=str)
def test_arrays_of_ids_are_looked_at_too(dtype: mx.Dtype) -> None:
    for token in (VOCAB, -1):
        with pytest.raises(InvalidRequest, match="prompt's token 1"):
            generate_step(mx.array([3, token]).astype(dtype), MIXES["hybrid"].model())


@pytest.mark.parametrize("mix", ["dense_4bit_weights", "sliding", "hybrid_moe", "mla_moe", "mamba", "chunked"])
def test_the_table_decides_whatever_holds_it(mix: str) -> None:
    model = MIXES[mix].model()
    with pytest.raises(InvalidRequest, match=f"0 to {VOCAB - 1}"):
        generate_step([VOCAB], model)
    assert len(list(generate_step([VOCAB - 1, 0], model, max_tokens=1))) == 1


def test_a_padded_table_may_be_read_to_its_end() -> None:
    model = tiny_model(num_hidden_layers=1, vocab_size=128)
    model.args.vocab_size = 96
    assert len(list(generate_step([127, 4], model, max_tokens=1))) == 1
    with pytest.raises(InvalidRequest, match="0 to 127"):
        generate_step([128], model)


def test_a_table_smaller_than_the_config_says_ends_where_it_ends() -> None:
    model = tiny_model(num_hidden_layers=1, vocab_size=64)
    model.args.vocab_size = 96
    with pytest.raises(InvalidRequest, match="0 to 63"):
        generate_step([64], model)


def test_a_target_nothing_is_known_about_has_a_table_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(ANATOMY_BY_MODULE, "qwen3")
    model = MIXES["dense_qk_norm"].model()
    with pytest.raises(InvalidRequest, match=f"0 to {VOCAB - 1}"):
        generate_step([VOCAB], model)
    assert len(list(generate_step(mx.array(PROMPT), model, max_tokens=2))) == 2


def test_a_table_inside_an_adapter_is_found() -> None:
    model = tiny_model(num_hidden_layers=2)
    model.freeze()
    linear_to_lora_layers(model, 1, {"rank": 2, "scale": 1.0, "dropout": 0.0, "keys": {"self_attn.q_proj"}})
    model.model.embed_tokens = _lora_embedding(model.model.embed_tokens)
    with pytest.raises(InvalidRequest, match="0 to 95"):
        generate_step([96], model)


def _lora_embedding(table: nn.Embedding) -> nn.Module:
    from mlx_lm.tuner.lora import LoRAEmbedding

    return LoRAEmbedding.from_base(table, r=2)


TEXTS: dict[str, Callable[..., Any]] = {
    "stream_generate": lambda *given, **more: stream_generate(*given, **more),
    "generate": lambda *given, **more: generate(*given, **more),
}


@pytest.mark.parametrize("function", TEXTS)
def test_a_tokenizer_with_more_ids_than_the_model_is_refused_where_its_text_needs_them(function: str) -> None:
    model = tiny_model(num_hidden_layers=1)  # 96 ids, where the bytes' tokenizer has 266
    with pytest.raises(InvalidRequest, match="Encode the prompt with the tokenizer"):
        TEXTS[function](model, byte_tokenizer(), "été", max_tokens=3)
    with pytest.raises(InvalidRequest, match="0 to 95"):
        TEXTS[function](model, ascii_tokenizer(), [1, 96], max_tokens=3)


@pytest.mark.parametrize(
    "given", ["text", [True, False], [[1], [2, 3]], {"a": 1}, pytest.param(object(), id="object")], ids=str
)
def test_a_prompt_that_is_no_sequence_of_ids_is_one_line(given: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        speculative_generate_step(given, MIXES["dense"].model(), "ngram")
    assert "\n" not in str(caught.value)
    assert "one sequence of token ids" in str(caught.value)


@pytest.mark.parametrize("ids", [[[10**6, 1]], [[VOCAB, 1]], [[1, 2], [3, VOCAB]], [[-1, 1]], [[3, 2**31]]], ids=str)
def test_a_block_of_ids_outside_the_vocabulary_is_refused_before_anything_is_opened(ids: list[list[int]]) -> None:
    mix = MIXES["dense"]
    caches = mix.new_cache()
    with pytest.raises(InvalidRequest, match=f"embeds ids 0 to {VOCAB - 1}") as caught:
        verify_forward(mix.model(), mx.array(ids), caches)
    assert ("row 1's token 1" if len(ids) > 1 else "the block's token") in str(caught.value)
    assert all(leaf.empty() for leaf in caches)
    verify_forward(mix.model(), mx.array([[VOCAB - 1, 0]]), caches).transaction.abort()


def test_the_ids_of_a_block_are_read_once() -> None:
    mix = MIXES["dense"]
    caches = mix.new_cache()
    verify_forward(mix.model(), mx.array([[1, 2]]), caches).transaction.abort()
    with count_host_reads() as reads:
        verify_forward(mix.model(), mx.array([[1, 2]]), caches).transaction.abort()
    assert reads.count == 1


@pytest.mark.parametrize("ends", [[10**9], [5, VOCAB]], ids=str)
@pytest.mark.parametrize("draft", [None, "ngram"])
def test_an_end_id_that_can_never_come_is_refused(ends: list[int], draft: str | None) -> None:
    mix = MIXES["dense"]
    cache = mix.new_cache()
    with pytest.raises(InvalidRequest, match=rf"eos_token_ids names id {ends[-1]}, .* 0 to {VOCAB - 1}"):
        generate_step(PROMPT, mix.model(), draft_model=draft, prompt_cache=cache, eos_token_ids=ends)
    assert all(leaf.empty() for leaf in cache)
    assert list(generate_step(PROMPT, mix.model(), draft_model=draft, eos_token_ids=[VOCAB - 1], max_tokens=1))


def test_an_end_id_of_a_tokenizer_that_can_never_come_is_told() -> None:
    model, statistics = tiny_model(num_hidden_layers=1), Statistics()
    tokenizer = TokenizerWrapper(byte_tokenizer(), eos_token_ids=[3, 200])
    assert list(stream_generate(model, tokenizer, [1, 2], 2, statistics=statistics))
    assert [note for note in statistics.notes if "200" in note and "0 to 95" in note]
    with pytest.raises(InvalidRequest, match="eos_token_ids names id 96"):
        stream_generate(model, tokenizer, [1, 2], 2, eos_token_ids=[96])


def test_a_head_wider_than_the_table_has_ends_of_its_own() -> None:
    model = tiny_model(num_hidden_layers=1, vocab_size=96)
    model.lm_head = nn.Linear(32, 128, bias=False)
    assert list(generate_step([1, 2], model, max_tokens=1, eos_token_ids=[127]))
    with pytest.raises(InvalidRequest, match="0 to 127"):
        generate_step([1, 2], model, eos_token_ids=[128])


def test_a_prompt_is_read_once_and_no_round_reads_it_again() -> None:
    model, ids = MIXES["dense"].model(), mx.array(PROMPT)
    cache = make_prompt_cache(model)
    with count_host_reads() as reads:
        steps = generate_step(ids, model, max_tokens=5, prompt_cache=cache)
    assert reads.count == 1
    with count_host_reads() as reads:
        assert len(list(steps)) == 5
    assert reads.count == 5
