"""An option that cannot be honoured is an error before the first token, with a sentence, and nothing has changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import KVCache, make_prompt_cache

from mlx_spec import SpeculativeConfig, Statistics, VerifyWidthRange, generate_step, stream_generate
from mlx_spec.config import SpeculativeMethod
from mlx_spec.drafters import KNOWN_DRAFTER_KINDS, NgramDrafter
from mlx_spec.errors import (
    IncompatiblePair,
    InvalidRequest,
    MlxSpecError,
    ModelNotFound,
    UnknownAnatomy,
    UnsupportedOption,
)
from mlx_spec.model.anatomy import ANATOMY_BY_MODULE
from tests.checkpoints import ascii_tokenizer, tiny_model
from tests.drafters import eagle3_files
from tests.oracle import rng_key
from tests.scripted import TappingDrafter
from tests.tiny import MIXES, PROMPT, VOCAB

MODEL = tiny_model(num_hidden_layers=2)
EAGLE = SpeculativeConfig(speculative_method="eagle")


def refuse(error: type[MlxSpecError], *words: str, model: Any = MODEL, prompt: Any = PROMPT, **keywords: Any) -> None:
    """The call itself is refused, before any step is asked for, and leaves cache and random state alone."""
    keywords.setdefault("prompt_cache", make_prompt_cache(model))
    before = rng_key()
    with pytest.raises(error) as caught:
        generate_step(prompt if isinstance(prompt, mx.array) else mx.array(prompt), model, **keywords)
    for word in words:
        assert word in str(caught.value)
    assert "\n" not in str(caught.value)
    assert all(cache.empty() for cache in keywords["prompt_cache"])
    assert rng_key() == before


# mlx-lm's options


@pytest.mark.parametrize(
    ("keywords", "words"),
    [
        ({"input_embeddings": mx.zeros((6, 32))}, ("input_embeddings", "6 rows", "7 ids")),
        ({"max_tokens": -2}, ("max_tokens", "-1 for no limit", "got -2")),
        ({"prefill_step_size": 0}, ("prefill_step_size", "got 0")),
        ({"kv_bits": 7}, ("kv_bits", "got 7")),
        ({"kv_bits": 8, "kv_group_size": 48}, ("kv_group_size", "got 48")),
        ({"verify": "quickly"}, ('"exact" or "fast"', "'quickly'")),
    ],
    ids=lambda value: next(iter(value), "") if isinstance(value, dict) else "",
)
def test_options_out_of_range_are_named(keywords: dict[str, Any], words: tuple[str, ...]) -> None:
    refuse(MlxSpecError, *words, **keywords)


def test_a_ring_cannot_be_quantized() -> None:
    ring = MIXES["ring_with_keep"]
    words = ("kv_bits=8", "RotatingKVCache", "mlx-lm cannot quantize")
    refuse(UnsupportedOption, *words, model=ring.model(), prompt_cache=ring.new_cache(), kv_bits=8)
    sliding = MIXES["sliding"]
    refuse(UnsupportedOption, *words, model=sliding.model(), kv_bits=8, draft_model="ngram")


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ([], ("empty",)),
        (mx.array([], mx.int32), ("empty",)),
        (mx.array([[1, 2]]), ("one sequence", "(1, 2)")),
        (mx.array(5), ("one sequence", "()")),
        (mx.array([1.0, 2.0]), ("token ids", "float32")),
    ],
    ids=["list", "array", "batch", "number", "floats"],
)
def test_a_prompt_that_is_no_sequence_of_ids_is_refused(prompt: Any, words: tuple[str, ...]) -> None:
    refuse(InvalidRequest, *words, prompt=prompt)


@pytest.mark.parametrize("count", [0, 1, 5])
def test_a_cache_with_another_number_of_layers_is_refused(count: int) -> None:
    caches = [KVCache() for _ in range(count)]
    refuse(InvalidRequest, f"holds {count} caches", "this model has 2", prompt_cache=caches)


def test_a_text_without_a_token_is_refused_where_text_is_wanted() -> None:
    with pytest.raises(InvalidRequest, match="max_tokens must not be 0"):
        stream_generate(MODEL, ascii_tokenizer(), "sea", max_tokens=0)
    with pytest.raises(InvalidRequest, match="list of non-empty strings"):
        stream_generate(MODEL, ascii_tokenizer(), "sea", stop=[""])


# Drafters and widths


def test_a_language_model_with_another_vocabulary_is_refused_with_both_sizes() -> None:
    refuse(IncompatiblePair, "vocabulary of 41", "96", draft_model=tiny_model(1, vocab_size=41))


def test_a_method_that_no_speculator_of_the_target_runs_lists_those_that_are_declared() -> None:
    drafter = TappingDrafter((1, 2, 3), VOCAB, (0,))
    drafter.architecture = "LlamaForCausalLMEagle3"
    refuse(
        IncompatiblePair,
        "mtp with draft LlamaForCausalLMEagle3",
        "eagle with draft LlamaForCausalLMEagle3, mtp with no draft model",
        model=MIXES["mla_moe"].model(),
        draft_model=drafter,
        speculative=SpeculativeConfig(speculative_method="mtp"),
    )


def test_a_language_model_is_of_its_own_kind() -> None:
    refuse(InvalidRequest, "'eagle3'", "'standalone'", draft_model=tiny_model(1), draft_kind="eagle3")


def test_something_that_is_no_drafter_at_all_is_named_by_its_type() -> None:
    refuse(UnsupportedOption, "draft_model is a function", draft_model=lambda ids, count: [])


def test_a_path_that_leads_nowhere_is_named() -> None:
    refuse(ModelNotFound, "'/no/such/drafter'", draft_model="/no/such/drafter")


@pytest.mark.parametrize("kind", ["eagle3", "mtp", "dflash", "medusa"])
def test_a_kind_needs_a_drafter_unless_it_is_ngram(kind: str) -> None:
    refuse(InvalidRequest, f"draft_kind={kind!r} needs a draft_model", draft_kind=kind)


def test_ngram_needs_no_drafter() -> None:
    statistics = Statistics()
    list(generate_step(mx.array(PROMPT), MODEL, draft_kind="ngram", max_tokens=3, statistics=statistics))
    assert statistics.loop == "ngram"


def test_a_kind_that_contradicts_the_drafter_is_refused() -> None:
    refuse(InvalidRequest, "'eagle3' contradicts", "'ngram'", draft_model=NgramDrafter(), draft_kind="eagle3")


@pytest.mark.parametrize("width", [{}, {"draft_block_size": 3}], ids=["left_open", "named"])
def test_a_drafter_that_reads_states_needs_a_target_that_is_known(
    width: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the cache would leave it idle."""
    monkeypatch.delitem(ANATOMY_BY_MODULE, "mamba")
    mamba = MIXES["mamba"].model()
    refuse(UnknownAnatomy, "'mamba'", "llama", model=mamba, draft_model=eagle3_files.drafter(), **width)


@pytest.mark.parametrize("width", [{}, {"draft_block_size": 3}], ids=["left_open", "named"])
@pytest.mark.parametrize(("name", "hidden"), [("dense", 44), ("hybrid", 48), ("sliding", 40)])
def test_a_drafter_for_another_target_is_refused_with_both_sizes(name: str, hidden: int, width: dict[str, int]) -> None:
    model = MIXES[name].model()
    refuse(IncompatiblePair, "32", str(hidden), model=model, draft_model=eagle3_files.drafter(), **width)


@pytest.mark.parametrize(
    ("keywords", "words"),
    [
        ({"draft_block_size": 0}, ("draft_block_size", "width of 0", "1 (plain) to 32")),
        ({"draft_block_size": -3}, ("draft_block_size", "width of -3")),
        ({"draft_block_size": 33}, ("draft_block_size", "width of 33")),
        ({"num_draft_tokens": -1}, ("num_draft_tokens", "width of 0")),
        ({"num_draft_tokens": 32}, ("num_draft_tokens", "width of 33")),
        ({"draft_block_size": 4, "num_draft_tokens": 3}, ("draft_block_size and num_draft_tokens", "one of them")),
    ],
    ids=str,
)
def test_widths_out_of_range_or_given_twice_are_refused(keywords: dict[str, int], words: tuple[str, ...]) -> None:
    refuse(InvalidRequest, *words, draft_model="ngram", **keywords)


@pytest.mark.parametrize("keywords", [{"draft_block_size": 2}, {"num_draft_tokens": 3}], ids=str)
def test_a_width_without_a_drafter_is_refused(keywords: dict[str, int]) -> None:
    refuse(InvalidRequest, "no drafter", **keywords)


@pytest.mark.parametrize("keywords", [{"draft_block_size": 1}, {"num_draft_tokens": 0}], ids=str)
def test_a_width_of_1_is_plain_decoding_and_says_that_the_drafter_is_idle(keywords: dict[str, int]) -> None:
    statistics = Statistics()
    steps = generate_step(mx.array(PROMPT), MODEL, draft_model="ngram", max_tokens=3, statistics=statistics, **keywords)
    assert len(list(steps)) == 3
    assert (statistics.loop, statistics.drafter) == ("plain", "none")
    assert any("ngram is idle" in note for note in statistics.notes)


def test_statistics_of_another_run_are_refused() -> None:
    statistics = Statistics()
    list(generate_step(mx.array(PROMPT), MODEL, max_tokens=2, statistics=statistics))
    refuse(InvalidRequest, "belong to a run already", statistics=statistics)
    assert statistics.emitted_tokens == 2


# SpeculativeConfig

UNBUILT: dict[str, Any] = {
    "num_speculative_tokens_per_batch_size": [VerifyWidthRange(batch_start=1, batch_end=4, num_tokens=2)],
    "num_speculative_tokens_mixed_batch": 1,
    "synthetic_acceptance_rate": 0.5,
    "use_relaxed_acceptance_for_thinking": True,
    "relaxed_topk": 3,
    "relaxed_delta": 0.1,
    "use_greedy_acceptance": True,
    "draft_proposal": "sampled",
}


@pytest.mark.parametrize("field", UNBUILT)
def test_a_field_that_is_not_built_is_refused_by_name(field: str) -> None:
    config = SpeculativeConfig(speculative_method="eagle", **{field: UNBUILT[field]})
    refuse(UnsupportedOption, f"sets {field}, which", speculative=config, draft_model="ngram")


def test_every_field_is_either_built_or_refused() -> None:
    built = {"speculative_method", "num_speculative_tokens", "rejection_sampling_strategy"}
    assert set(SpeculativeConfig.model_fields) == built | set(UNBUILT)


@pytest.mark.parametrize("method", get_args(SpeculativeMethod))
def test_every_method_is_a_kind_of_drafter(method: SpeculativeMethod) -> None:
    config = SpeculativeConfig(speculative_method=method)
    with pytest.raises(InvalidRequest, match=f"speculative_method='{method}' means draft_kind='") as caught:
        generate_step(mx.array(PROMPT), MODEL, draft_model="ngram", draft_kind="none of them", speculative=config)
    assert str(caught.value).split("draft_kind='")[1].split("'")[0] in KNOWN_DRAFTER_KINDS


CONFLICTS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "off_with_a_drafter": (
        {"speculative": SpeculativeConfig(), "draft_model": "ngram"},
        ("turns speculation off", "drafter was given"),
    ),
    "off_with_a_kind": ({"speculative": SpeculativeConfig(), "draft_kind": "ngram"}, ("turns speculation off",)),
    "method_without_a_drafter": ({"speculative": EAGLE}, ("'eagle' needs a draft_model",)),
    "another_kind": (
        {"speculative": EAGLE, "draft_model": "ngram", "draft_kind": "ngram"},
        ("means draft_kind='eagle3'", "'ngram'"),
    ),
    "two_widths": (
        {"speculative": EAGLE, "draft_model": "ngram", "draft_block_size": 3},
        ("draft_block_size and num_speculative_tokens",),
    ),
    "another_drafter": ({"speculative": EAGLE, "draft_model": NgramDrafter()}, ("eagle", "ngram")),
    "another_drafter_by_name": ({"speculative": EAGLE, "draft_model": "ngram"}, ("eagle", "ngram")),
}


@pytest.mark.parametrize("name", CONFLICTS)
def test_a_config_that_contradicts_the_arguments_is_refused(name: str) -> None:
    keywords, words = CONFLICTS[name]
    refuse(InvalidRequest, *words, **keywords)


@pytest.mark.parametrize(("count", "width"), [(None, 3), (1, 2), (4, 5)])
def test_a_config_sets_the_width(count: int | None, width: int) -> None:
    config = SpeculativeConfig(speculative_method="eagle", num_speculative_tokens=count)
    statistics = Statistics()
    model = eagle3_files.target().model
    keywords = {"draft_model": eagle3_files.drafter(), "speculative": config, "statistics": statistics}
    list(generate_step(mx.array(PROMPT), model, max_tokens=4, **keywords))
    assert statistics.width_policy == f"fixed {width} (num_speculative_tokens)"
    assert statistics.loop == "eagle3"


def test_a_config_that_turns_speculation_off_decodes_plainly() -> None:
    statistics = Statistics()
    list(generate_step(mx.array(PROMPT), MODEL, speculative=SpeculativeConfig(), max_tokens=4, statistics=statistics))
    assert statistics.loop == "plain"


# Kinds of numbers


@pytest.mark.parametrize("make", [list, tuple, np.array], ids=["list", "tuple", "numpy"])
def test_ids_may_come_in_any_sequence(make: Callable[[Any], Any]) -> None:
    want = [token for token, _ in generate_step(mx.array(PROMPT), MODEL, max_tokens=4)]
    assert [token for token, _ in generate_step(make(PROMPT), MODEL, max_tokens=4)] == want
