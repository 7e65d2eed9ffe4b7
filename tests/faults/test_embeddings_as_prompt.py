"""A prompt of embeddings is read as the one-token loop reads it, and speculation begins with the first token."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from mlx_lm import stream_generate as stock_stream_generate
from mlx_lm.sample_utils import make_logits_processors, make_sampler

from mlx_spec import Statistics, generate, generate_step, speculative_generate_step, stream_generate
from mlx_spec.drafters import CallableDrafter
from mlx_spec.errors import InvalidRequest, UnsupportedOption
from tests.checkpoints import ascii_tokenizer, tiny_model
from tests.drafters import eagle3_files
from tests.oracle import assert_same_output, rng_key, run_stock
from tests.same_cache import assert_same_cache
from tests.scripted import CyclingDrafter, TappingDrafter
from tests.tiny import MIXES, PROMPT, VOCAB

pytestmark = pytest.mark.faults

TAKES_EMBEDDINGS = ("dense", "hybrid", "sliding", "ring_with_keep", "quantized_from_20", "dense_qk_norm")
COUNT = 9


def embedded(model: Any, ids: tuple[int, ...] = PROMPT) -> mx.array:
    """Rows that are nobody's: the prompt's own, bent a little, so that no id has them."""
    text = getattr(model, "language_model", model)
    rows = text.model.embed_tokens(mx.array(ids))
    return rows * 0.9 + 0.05


@pytest.mark.slow
@pytest.mark.part(2)
@pytest.mark.parametrize("chunk", [3, 2048])
@pytest.mark.parametrize("ids", [(), PROMPT], ids=["alone", "with_ids"])
@pytest.mark.parametrize("mix", TAKES_EMBEDDINGS)
def test_tokens_and_caches_are_those_of_the_one_token_loop(mix: str, ids: tuple[int, ...], chunk: int) -> None:
    kind = MIXES[mix]
    model, rows = kind.model(), embedded(kind.model())
    options = {"input_embeddings": rows, "prefill_step_size": chunk}
    run = run_stock(model, ids, COUNT, **options, **kind.kv)
    for draft in (None, CyclingDrafter(run.ids, VOCAB, (2, 0, 3, 1))):
        cache = kind.new_cache()
        got = list(
            generate_step(
                mx.array(ids),
                model,
                draft_model=draft,
                draft_block_size=None if draft is None else 4,
                max_tokens=COUNT,
                prompt_cache=cache,
                **options,
                **kind.warm_kv,
            )
        )
        assert_same_output(got, run)
        assert_same_cache(cache, run.cache_after(COUNT))


@pytest.mark.parametrize("ids", [(), PROMPT], ids=["alone", "with_ids"])
@pytest.mark.parametrize("draft", [None, "ngram"])
def test_processors_and_draws_are_those_of_the_one_token_loop(draft: str | None, ids: tuple[int, ...]) -> None:
    model = MIXES["dense"].model()
    options: dict[str, Any] = {
        "input_embeddings": embedded(model),
        "sampler": make_sampler(0.8, top_p=0.9),
        "logits_processors": make_logits_processors({3: 2.0}, 1.3, 5),
        "prefill_step_size": 3,
    }
    run = run_stock(model, ids, COUNT, seed=4, **options)
    mx.random.seed(4)
    got = list(generate_step(mx.array(ids), model, draft_model=draft, max_tokens=COUNT, **options))
    assert_same_output(got, run)
    assert rng_key() == run.rng[COUNT]


def test_a_warm_cache_is_continued_with_embeddings() -> None:
    kind = MIXES["dense"]
    model, cache = kind.model(), kind.new_cache()
    list(generate_step(mx.array(PROMPT), model, max_tokens=5, prompt_cache=cache))
    rows = embedded(model, PROMPT[:4])
    run = run_stock(model, (), COUNT, prompt_cache=cache, input_embeddings=rows)
    got = list(generate_step([], model, max_tokens=COUNT, prompt_cache=cache, input_embeddings=rows))
    assert_same_output(got, run)
    assert_same_cache(cache, run.cache_after(COUNT))


@pytest.mark.parametrize("ids", [(), PROMPT], ids=["alone", "with_ids"])
def test_a_drafter_that_reads_states_speculates_from_the_first_token_on(ids: tuple[int, ...]) -> None:
    model = eagle3_files.target().model
    rows, statistics = embedded(model), Statistics()
    run = run_stock(model, ids, COUNT, input_embeddings=rows)
    got = list(
        generate_step(
            list(ids),
            model,
            draft_model=eagle3_files.drafter(),
            draft_block_size=3,
            max_tokens=COUNT,
            input_embeddings=rows,
            statistics=statistics,
        )
    )
    assert_same_output(got, run)
    assert statistics.drafter_failures == 0
    assert statistics.proposed_tokens >= 2 * (statistics.rounds - 3) > 0
    said = " ".join(statistics.notes)
    assert ("input_embeddings without ids" in said) == (not ids)
    assert ("not the input_embeddings" in said) == bool(ids)


@pytest.mark.parametrize("draft", ["ngram", "callable", "language_model"])
def test_a_drafter_that_reads_ids_says_what_it_cannot_see(draft: str) -> None:
    model = tiny_model(num_hidden_layers=2)
    drafter: Any = {
        "ngram": "ngram",
        "callable": CallableDrafter(lambda ids, count: [ids[-1]] * count),
        "language_model": tiny_model(seed=6, num_hidden_layers=1),
    }[draft]
    rows = embedded(model)
    run = run_stock(model, (), COUNT, input_embeddings=rows)
    for ids, said in (((), "has not seen 7 of the prompt's 7 positions"), (PROMPT, "reads the prompt's ids")):
        statistics = Statistics()
        keywords: dict[str, Any] = {"input_embeddings": rows, "statistics": statistics, "max_tokens": COUNT}
        got = list(speculative_generate_step(list(ids), model, drafter, draft_block_size=3, **keywords))
        assert any(said in note for note in statistics.notes)
        assert statistics.drafter_failures == 0
        assert [token for token, _, _ in got] == list(run.ids)


def test_a_drafter_that_reads_states_alone_is_shown_every_position() -> None:
    model = MIXES["dense"].model()
    rows = embedded(model)
    run = run_stock(model, (), COUNT, input_embeddings=rows)
    drafter = TappingDrafter(run.ids, VOCAB, (0, 2))
    drafter.reads_ids = False
    statistics = Statistics()
    got = list(
        generate_step([], model, draft_model=drafter, max_tokens=COUNT, input_embeddings=rows, statistics=statistics)
    )
    assert_same_output(got, run)
    assert not [note for note in statistics.notes if "seen" in note]


def test_the_text_and_the_callbacks_are_mlx_lms() -> None:
    model, tokenizer = tiny_model(num_hidden_layers=2), ascii_tokenizer()
    rows = embedded(model, (5, 9, 33, 4, 18))
    told: dict[str, list[tuple[int, int]]] = {"stock": [], "ours": []}
    keywords: dict[str, Any] = {"input_embeddings": rows, "prefill_step_size": 2, "max_tokens": 9}
    want = "".join(
        each.text
        for each in stock_stream_generate(
            model, tokenizer, [], prompt_progress_callback=lambda *at: told["stock"].append(at), **keywords
        )
    )
    assert (
        generate(model, tokenizer, [], prompt_progress_callback=lambda *at: told["ours"].append(at), **keywords) == want
    )
    assert told["ours"] == told["stock"]
    last = list(stream_generate(model, tokenizer, [], draft_model="ngram", **keywords))[-1]
    assert last.prompt_tokens == 5
    assert last.speculation.prompt_tokens == 5


def test_only_a_model_that_takes_none_refuses_embeddings() -> None:
    model = MIXES["mamba2"].model()
    with pytest.raises(UnsupportedOption, match="mamba2"):
        generate_step([], model, input_embeddings=mx.zeros((3, 40)))


WRONG = {
    "other_length": (mx.zeros((6, 44)), "6 rows"),
    "other_size": (mx.zeros((7, 40)), "40 columns"),
    "a_batch": (mx.zeros((1, 7, 44)), r"\[n, H\]"),
    "whole_numbers": (mx.zeros((7, 44), mx.int32), r"\[n, H\]"),
    "nothing": (mx.zeros((0, 44)), r"\[n, H\]"),
}


@pytest.mark.parametrize("name", WRONG)
def test_embeddings_that_do_not_fit_are_refused_before_any_forward(name: str) -> None:
    rows, said = WRONG[name]
    with pytest.raises(InvalidRequest, match=said):
        generate_step(mx.array(PROMPT), MIXES["dense"].model(), input_embeddings=rows)


@pytest.mark.part(2)
@pytest.mark.parametrize("stop_after", [1, 2, 5])
def test_a_closed_run_leaves_embeddings_and_handed_out_tokens(stop_after: int) -> None:
    kind = MIXES["hybrid"]
    model, cache = kind.model(), kind.new_cache()
    rows = embedded(model)
    run = run_stock(model, (), COUNT, input_embeddings=rows)
    drafter = CyclingDrafter(run.ids, VOCAB, (3, 1))
    steps = generate_step([], model, draft_model=drafter, draft_block_size=4, prompt_cache=cache, input_embeddings=rows)
    for _ in range(stop_after):
        next(steps)
    steps.close()
    assert_same_cache(cache, run.cache_after(stop_after))
