"""What becomes certain only with the last token is in the last response: reason, text, counters, caches."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.tokenizer_utils import BPEStreamingDetokenizer, NaiveStreamingDetokenizer, TokenizerWrapper

from mlx_spec import Statistics, stream_generate
from tests.checkpoints import BYTE_VOCAB, byte_tokenizer, tiny_model
from tests.oracle import run_stock
from tests.same_cache import assert_same_cache
from tests.scripted import CyclingDrafter

pytestmark = pytest.mark.faults

TOKENIZER = byte_tokenizer()
DETOKENIZERS = {"bpe": BPEStreamingDetokenizer, "naive": NaiveStreamingDetokenizer}
MODEL = tiny_model(num_hidden_layers=2, vocab_size=BYTE_VOCAB)
PROMPT = [1, 40, 41]


def ids_of(text: str) -> list[int]:
    return list(TOKENIZER.encode(text, add_special_tokens=False))


class Saying:
    """A sampler that says these ids, one after another."""

    def __init__(self, ids: list[int]) -> None:
        self.left = list(ids)

    def __call__(self, logprobs: Any) -> Any:
        return mx.array([self.left.pop(0) if self.left else 5])


def said(ids: list[int], stop: Any, kind: str = "bpe", draft: bool = False, **more: Any) -> list[Any]:
    tokenizer = TokenizerWrapper(TOKENIZER, DETOKENIZERS[kind])
    drafter = CyclingDrafter(ids, BYTE_VOCAB, (3, 1)) if draft else None
    keywords: dict[str, Any] = {"max_tokens": len(ids), "sampler": Saying(ids), **more}
    return list(stream_generate(MODEL, tokenizer, PROMPT, draft_model=drafter, stop=stop, **keywords))


@pytest.mark.parametrize("draft", [False, True], ids=["plain", "drafted"])
@pytest.mark.parametrize(
    ("text", "stop", "left"),
    [
        ("ab ", "b ", "a"),
        ("ab ", ["x", " "], "ab"),
        ("a b ", ["b ", "a"], ""),
        ("END ", "END ", ""),
    ],
)
def test_a_stop_string_completed_by_the_last_flush_is_the_reason(text: str, stop: Any, left: str, draft: bool) -> None:
    responses = said(ids_of(text), stop, draft=draft)
    assert responses[-1].finish_reason == "stop"
    assert "".join(each.text for each in responses) == left
    assert all(each.finish_reason is None for each in responses[:-1])


@pytest.mark.parametrize("kind", DETOKENIZERS)
@pytest.mark.parametrize("stop", [(), "zz", " z"], ids=str)
def test_without_a_stop_string_the_budget_is_the_reason_and_held_text_is_shown(kind: str, stop: Any) -> None:
    responses = said(ids_of("ab z"), stop if stop != " z" else "zq", kind)
    assert responses[-1].finish_reason == "length"
    assert "".join(each.text for each in responses) == "ab z"


@pytest.mark.parametrize("raw", ["é", "€"], ids=["two_bytes", "three_bytes"])
def test_a_stop_string_made_by_flushed_half_characters_counts(raw: str) -> None:
    ids = [*ids_of("a"), TOKENIZER.convert_tokens_to_ids("Ã")]
    assert raw not in TOKENIZER.decode(ids)
    responses = said(ids, "\ufffd")
    assert responses[-1].finish_reason == "stop"
    assert "".join(each.text for each in responses) == "a"


@pytest.mark.parametrize("end", range(1, 8))
@pytest.mark.parametrize("by", ["budget", "id"])
def test_the_last_response_has_the_final_counters_and_the_final_cache(by: str, end: int) -> None:
    """An id that ends the text may stand anywhere in a block."""
    run = run_stock(MODEL, PROMPT, 12)
    assert run.ids.index(run.ids[end]) == end
    statistics, cache = Statistics(), make_prompt_cache(MODEL)
    keywords: dict[str, Any] = {"eos_token_ids": [run.ids[end]]} if by == "id" else {"max_tokens": end + 1}
    final: dict[str, Any] = {}
    for response in stream_generate(
        MODEL,
        TOKENIZER,
        PROMPT,
        draft_model=CyclingDrafter(run.ids, BYTE_VOCAB, (3,)),
        statistics=statistics,
        prompt_cache=cache,
        **keywords,
    ):
        if response.finish_reason is not None:
            assert response.generation_tokens == end + 1
            assert_same_cache(cache, run.cache_after(end + 1))
            final = counters(statistics)
    assert final == counters(statistics)


def counters(statistics: Statistics) -> dict[str, Any]:
    names = "rounds accepted_tokens emitted_tokens proposed_tokens accepted_by_depth verify_route"
    return {**{name: statistics.as_dict()[name] for name in names.split()}, "last_round": statistics.last_round}
