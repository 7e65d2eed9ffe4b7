"""What becomes certain only with the last token is in the last response: reason, text, counters, caches."""

from __future__ import annotations

from typing import Any

import pytest
from mlx_lm.generate import generate_step as stock_generate_step
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.tokenizer_utils import BPEStreamingDetokenizer, NaiveStreamingDetokenizer, TokenizerWrapper

from mlx_spec import Statistics, settled_cache, stream_generate
from tests.checkpoints import BYTE_VOCAB, byte_tokenizer, tiny_model
from tests.oracle import run_stock
from tests.same_cache import assert_same_cache
from tests.scripted import CyclingDrafter
from tests.tiny import randomise

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
        import mlx.core as mx

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


@pytest.mark.part(8)
@pytest.mark.parametrize("count", range(2, 9))
@pytest.mark.parametrize("accepted", [(3,), (0, 2), (1,)], ids=str)
def test_the_last_response_has_the_final_counters_and_the_final_cache(count: int, accepted: tuple[int, ...]) -> None:
    run = run_stock(MODEL, PROMPT, count)
    statistics, cache = Statistics(), make_prompt_cache(MODEL)
    drafter = CyclingDrafter(run.ids, BYTE_VOCAB, accepted)
    responses = stream_generate(
        MODEL, TOKENIZER, PROMPT, count, drafter, statistics=statistics, prompt_cache=cache, eos_token_ids=()
    )
    last: dict[str, Any] = {}
    for response in responses:
        if response.finish_reason is not None:
            assert_same_cache(cache, run.cache_after(response.generation_tokens))
            last = {**statistics.as_dict(), "last_round": statistics.last_round}
            assert response.from_draft == (last["last_round"].accepted > 0 and accepted_last(last))
    after = {**statistics.as_dict(), "last_round": statistics.last_round}
    for name in ("rounds", "accepted_tokens", "emitted_tokens", "proposed_tokens", "accepted_by_depth", "last_round"):
        assert last[name] == after[name], name


@pytest.mark.parametrize("end", range(2, 9))
def test_a_text_that_ends_inside_a_block_is_settled_when_its_run_ends(end: int) -> None:
    run = run_stock(MODEL, PROMPT, 12)
    stop = run.ids[end]
    count = run.ids.index(stop) + 1
    statistics, cache = Statistics(), make_prompt_cache(MODEL)
    drafter = CyclingDrafter(run.ids, BYTE_VOCAB, (3,))
    keywords: dict[str, Any] = {"statistics": statistics, "prompt_cache": cache, "eos_token_ids": [stop]}
    for response in stream_generate(MODEL, TOKENIZER, PROMPT, 12, drafter, **keywords):
        if response.finish_reason is not None:
            # The block may be open still: nothing comes between a token's becoming certain and the caller.
            assert statistics.emitted_tokens == response.generation_tokens == count
            assert_same_cache(settled_cache(cache), run.cache_after(count))
    assert_same_cache(cache, run.cache_after(count))
    assert statistics.emitted_tokens - statistics.accepted_tokens in (statistics.rounds, statistics.rounds - 1)


def accepted_last(last: dict[str, Any]) -> bool:
    """Whether the last round ended on a proposal: it handed out no more than it accepted."""
    return bool(last["emitted_tokens"] == last["rounds"] - 1 + last["accepted_tokens"])


def test_the_oracle_says_what_the_model_says() -> None:
    import mlx.core as mx

    model = randomise(lambda: MODEL, 5)
    steps = stock_generate_step(mx.array(PROMPT), model, max_tokens=3)
    assert len(list(steps)) == 3
