"""The table's parts, put together by hand, are the model: same bits, whatever the architecture and the weights."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.cache import make_prompt_cache

from mlx_spec.errors import IncompatiblePair, UnknownAnatomy
from mlx_spec.model.anatomy import ANATOMY_BY_MODULE, anatomy_of, architecture
from mlx_spec.model.swap import swap_of
from mlx_spec.model.target import Target
from tests.bits import assert_same_bits
from tests.model.architectures import BUILDERS, HIDDEN, LAYERS, PARTS, VOCAB, model, shared_model, spying
from tests.tiny import MIXES

IDS = mx.array([[5, 17, 99, 42, 0, 100, 61, 3, 29, 77, 8, 64]])
"""Past the sliding window of the one model that has one."""

EVERY_FORM = pytest.mark.parametrize(("name", "form"), PARTS)


def test_the_architectures_here_have_rows() -> None:
    """The zoo tries the others."""
    assert {architecture(shared_model(name)) for name in BUILDERS} <= set(ANATOMY_BY_MODULE)


@EVERY_FORM
def test_last_layers_output_normed_and_projected_is_the_models_logits(name: str, form: str) -> None:
    stock = model(name, form)
    want = stock(IDS, cache=make_prompt_cache(stock))
    target = Target(stock)
    target.attach_taps((LAYERS - 1,))
    output = target.forward(IDS, make_prompt_cache(stock), (LAYERS - 1,))
    assert output.hidden is not None
    assert_same_bits(output.logits, want, "logits with taps")
    assert_same_bits(target.head(target.final_norm(output.hidden)), want, "logits put together by hand")


@EVERY_FORM
def test_embedding_a_token_gives_what_layer_0_reads(name: str, form: str) -> None:
    stock = shared_model(name, form)
    with spying(stock.layers[:1]) as seen:
        stock(IDS, cache=make_prompt_cache(stock))
    assert_same_bits(Target(stock).embed(IDS), seen[0][0], "input of layer 0")


@EVERY_FORM
def test_sizes_and_dtype_are_those_of_the_activations(name: str, form: str) -> None:
    stock = shared_model(name, form)
    target = Target(stock)
    with spying(stock.layers[:1]) as seen:
        stock(IDS, cache=make_prompt_cache(stock))
    assert target.dtype == seen[0][0].dtype
    assert target.hidden_size == seen[0][0].shape[-1] == HIDDEN
    assert target.vocab_size == VOCAB
    assert target.layer_count == LAYERS
    assert target.raw_embed(IDS).shape == (1, IDS.size, HIDDEN)


def test_only_gemma_scales_the_embedding_and_by_a_bfloat16_factor() -> None:
    for name in BUILDERS:
        target = Target(shared_model(name))
        raw, scaled = target.raw_embed(IDS), target.embed(IDS)
        if name == "gemma3_text":
            factor = mx.array(HIDDEN**0.5, mx.bfloat16).astype(mx.float32)
            assert_same_bits(scaled, raw * factor, "scaled embedding")
        else:
            assert_same_bits(scaled, raw, f"embedding of {name}")


def test_the_factor_is_rounded_where_the_square_root_of_the_hidden_size_is_no_bfloat16() -> None:
    """It is one for the models above: hidden size 64. Here it is 40."""
    stock = MIXES["sliding"].model()
    with spying(stock.layers[:1]) as seen:
        stock(IDS % 97, cache=make_prompt_cache(stock))
    assert_same_bits(Target(stock).embed(IDS % 97), seen[0][0], "input of layer 0")


@pytest.mark.parametrize(("name", "own"), [("llama_untied", True), ("llama_tied", False), ("qwen3_5_tied", False)])
def test_the_head_is_the_models_own_module_or_the_embedding(name: str, own: bool) -> None:
    stock = shared_model(name)
    head = anatomy_of(stock).head_module(stock)
    assert (head is not None) == own


def test_parts_are_the_models_own_arrays_and_no_copies() -> None:
    stock = shared_model("llama_tied")
    anatomy = anatomy_of(stock)
    assert anatomy.part(stock, anatomy.embedding) is stock.model.embed_tokens
    assert anatomy.part(stock, anatomy.norm) is stock.model.norm
    assert anatomy.text_model(stock) is stock


def test_an_unknown_architecture_is_refused_with_the_list_of_known_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(ANATOMY_BY_MODULE, "mamba")
    target = Target(MIXES["mamba"].model())
    with pytest.raises(UnknownAnatomy) as caught:
        target.embed(IDS)
    message = str(caught.value)
    assert "'mamba'" in message
    assert ", ".join(sorted(ANATOMY_BY_MODULE)) in message
    assert "n-gram" in message
    for use in (lambda: target.hidden_size, lambda: target.vocab_size, lambda: target.dtype):
        with pytest.raises(UnknownAnatomy):
            use()


def test_an_unknown_architecture_still_runs_and_can_be_tapped() -> None:
    stock = MIXES["mamba"].model()
    target = Target(stock)
    ids = mx.array([[5, 17, 42]])
    assert_same_bits(target.forward(ids, make_prompt_cache(stock)).logits, stock(ids, cache=make_prompt_cache(stock)))


def test_a_model_that_is_no_mlx_lm_model_is_named_by_its_class() -> None:
    class Homemade(nn.Module):
        layers: list[Any] = []

    assert architecture(Homemade()) == "Homemade"
    with pytest.raises(UnknownAnatomy, match="'Homemade'"):
        anatomy_of(Homemade())


def test_a_subclass_of_an_mlx_lm_model_is_its_parents_architecture() -> None:
    base = type(shared_model("llama_tied"))

    class Finetuned(base):  # type: ignore[misc, valid-type]
        pass

    stock = model("llama_tied")
    stock.__class__ = Finetuned
    assert architecture(stock) == "llama"


@pytest.mark.parametrize("tap", [-1, LAYERS, 99])
def test_a_layer_that_does_not_exist_cannot_be_tapped(tap: int) -> None:
    target = Target(shared_model("llama_tied"))
    with pytest.raises(IncompatiblePair, match=rf"layer {tap}, but llama has layers 0\.\.{LAYERS - 1}"):
        target.attach_taps((0, tap))
    assert not any(swap_of(layer, "tap") is not None for layer in target.model.layers)
