"""Attention of a block is judged anew as a text grows, and what is handed out is stock's whichever way it goes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models import base

from mlx_spec import Statistics, generate_step
from mlx_spec.verify import mixers
from mlx_spec.verify.bindings import NAME
from mlx_spec.verify.lengths import block_limit
from tests.double import PATTERNS, double
from tests.oracle import assert_same_output, run_stock
from tests.scripted import AlternatingDrafter
from tests.tiny import VOCAB
from tests.verify.test_bindings import BY_POSITION, llama_file, release_all
from tests.zoo.menagerie import Specimen, whole_zoo


@pytest.fixture(autouse=True)
def nothing_is_bound() -> Iterator[None]:
    release_all()
    yield
    release_all()


LONG_DENSE = {
    "model_type": "llama",
    "vocab_size": 101,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}


def routes_over(model: Any, prompt: int, width: int, tokens: int) -> str:
    """Routes of a run after a long prompt; all it hands out is stock's."""
    run = run_stock(model, [(7 * place * place + 3) % VOCAB for place in range(prompt)], tokens)
    statistics = Statistics()
    drafter = AlternatingDrafter([*run.ids, *[0] * 9], 101, width)
    out = list(
        generate_step(
            mx.array(run.prompt),
            model,
            max_tokens=tokens,
            draft_model=drafter,
            draft_block_size=width,
            statistics=statistics,
        )
    )
    assert_same_output(out, run, tokens)
    return statistics.verify_route


def test_a_model_that_chooses_among_its_keys_has_a_limit_with_and_without_what_is_attached() -> None:
    # 5 blocks of 6 keys, and 4 of 7.
    for name, limit in (("minimax_m3_vl, dense", 30), ("minimax_m3_vl", 28), ("llama", None)):
        model = next(each for each in whole_zoo() if each.name == name).build("float32")
        assert block_limit(model) == limit
        mixers.attach(model)
        assert block_limit(model) == limit


@pytest.mark.slow
def test_a_text_that_grows_to_where_attention_takes_another_kernel_stays_exact() -> None:
    with double(PATTERNS["max"]):
        model = Specimen("long", LONG_DENSE).build("float32")
        assert "attention" not in routes_over(model, 1000, 3, 6)
        # Across the edge no chunk fits at every place.
        assert BY_POSITION in routes_over(model, 1010, 3, 24)
        assert routes_over(model, 1100, 3, 6).startswith("block, attention in chunks of 2")


@pytest.mark.slow
def test_a_long_text_keeps_to_blocks_where_attention_keeps_to_its_bits() -> None:
    model = Specimen("long", LONG_DENSE).build("float32")
    assert routes_over(model, 300, 5, 9) == "block"
    # Nothing is bound for a text that the model's own probe speaks for.
    assert vars(llama_file())[NAME] is base.scaled_dot_product_attention
    for prompt in (505, 1020):
        assert routes_over(model, prompt, 5, 16) == "block"


@pytest.mark.slow
def test_a_long_text_takes_mixers_by_position_where_attention_cannot_be_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llama_file(), NAME, lambda *args, **given: base.scaled_dot_product_attention(*args, **given))
    model = Specimen("long", LONG_DENSE).build("float32")
    assert routes_over(model, 300, 5, 9) == "block"
    assert routes_over(model, 505, 5, 16) == "block and block, mixers by position"
