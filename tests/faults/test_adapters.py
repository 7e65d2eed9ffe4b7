"""Adapters on linears, experts and embeddings have routes of their own, and hide no part of a target from a drafter."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.tuner.dora import DoRAEmbedding
from mlx_lm.tuner.lora import LoRAEmbedding

from mlx_spec.model.target import Target
from mlx_spec.ops.base import ROWS, STOCK
from mlx_spec.ops.choose import kinds_of_data
from mlx_spec.verify.subjects import find_subjects
from tests.bits import assert_same_bits
from tests.double import PATTERNS, double
from tests.faults.edits import RANK, adapt, assert_blocks, assert_exact, built, fill_adapters, quantize
from tests.tiny import MIXES, VOCAB, from_mlx_lm, randomise
from tests.tiny_eagle import random_drafter

pytestmark = pytest.mark.faults

ALIGNED = "dense_4bit_weights"
EVERY_LINEAR = {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.down_proj"}


@pytest.fixture(autouse=True)
def rounding() -> Iterator[None]:
    """Calls of several rows round differently, so that nothing passes without a route."""
    with double(PATTERNS["gen15"]):
        yield


def tied(hidden: int = 44) -> Any:
    """A llama whose embedding is its head."""
    config = {"intermediate_size": 76, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 10}
    model = randomise(
        lambda: from_mlx_lm(
            "llama", hidden_size=hidden, num_hidden_layers=2, rms_norm_eps=1e-5, tie_word_embeddings=True, **config
        ),
        3,
    )
    return model


@pytest.mark.slow
@pytest.mark.part(1)
@pytest.mark.parametrize("packed", [False, True], ids=["float", "4 bits"])
@pytest.mark.parametrize("dora", [False, True], ids=["LoRA", "DoRA"])
def test_a_target_with_an_adapter_on_its_linears_takes_blocks(dora: bool, packed: bool) -> None:
    model = built(ALIGNED)
    if packed:
        quantize(model)
    # mlx-lm's DoRA takes 4 bits for 8 columns to a word, which is what they are.
    adapt(model, dora=dora, keys=EVERY_LINEAR)
    assert_blocks(assert_exact(model))


@pytest.mark.deep
@pytest.mark.parametrize("mix", ["hybrid_moe", "mla_moe"])
def test_a_target_with_an_adapter_on_its_experts_takes_blocks(mix: str) -> None:
    model = built(mix, seed=MIXES[mix].seed)
    adapt(model, keys={"mlp.switch_mlp.gate_proj", "mlp.switch_mlp.down_proj"})
    assert {type(module).__name__ for module in model.modules()} >= {"LoRASwitchLinear"}
    assert_blocks(assert_exact(model))


@pytest.mark.part(2)
@pytest.mark.parametrize("adapted", [LoRAEmbedding, DoRAEmbedding])
@pytest.mark.parametrize("head", ["tied", "apart"])
def test_a_target_with_an_adapter_on_its_embedding_takes_blocks(adapted: Any, head: str) -> None:
    model = tied() if head == "tied" else built("dense")
    model.model.embed_tokens = adapted.from_base(model.model.embed_tokens, r=RANK, scale=4.0)
    fill_adapters(model)
    model.eval()
    assert_blocks(assert_exact(model))


class Gated(nn.Module):
    """An adapter of nobody's library: its matrices lie in a list, its inner module is called by another name."""

    def __init__(self, inner: nn.Module, inputs: int, outputs: int) -> None:
        super().__init__()
        self.frozen = inner
        self.factors = [mx.random.normal((inputs, RANK)) * 0.2, mx.random.normal((RANK, outputs)) * 0.2]

    def __call__(self, x: mx.array) -> mx.array:
        return self.frozen(x) + mx.tanh(x @ self.factors[0]) @ self.factors[1]


def test_a_module_with_matrices_of_its_own_beside_an_inner_one_goes_row_by_row() -> None:
    model = built("dense")
    for layer in model.layers:
        layer.mlp.down_proj = Gated(layer.mlp.down_proj, 76, 44)
    statistics = assert_exact(model)
    assert_blocks(statistics)
    assert f"module {ROWS}" in statistics.verify_route


@pytest.mark.part(1)
@pytest.mark.parametrize(("adapted", "packed"), [(LoRAEmbedding, False), (LoRAEmbedding, True), (DoRAEmbedding, False)])
def test_a_drafter_that_reads_hidden_states_drafts_for_a_target_with_an_adapted_embedding(
    adapted: Any, packed: bool
) -> None:
    # mlx-lm's DoRA takes no quantized embedding. 44 columns are no multiple of any group, 64 are.
    mix = ALIGNED if packed else "dense"
    model: Any = copy.deepcopy(MIXES[mix].model())
    table = model.model.embed_tokens
    assert isinstance(table, nn.QuantizedEmbedding if packed else nn.Embedding)
    model.model.embed_tokens = adapted.from_base(table, r=RANK, scale=4.0)
    fill_adapters(model)
    model.eval()
    target = Target(model)
    assert (target.vocab_size, target.head_size) == (VOCAB, VOCAB)
    statistics = assert_exact(model, drafter=random_drafter(mix))
    assert not any("failed" in note for note in statistics.notes)


def test_every_way_of_an_adapter_gives_what_the_adapter_gives() -> None:
    model = tied()
    model.model.embed_tokens = DoRAEmbedding.from_base(model.model.embed_tokens, r=RANK, scale=4.0)
    adapt(model, keys={"self_attn.q_proj"})
    adapt(model, dora=True, keys={"mlp.up_proj"})
    found = [each for each in find_subjects(model).values() if each.op.kind == "adapter"]
    assert {type(each.op.module).__name__ for each in found} == {"LoRALinear", "DoRALinear", "DoRAEmbedding"}
    for subject in found:
        rows = subject.rows(3, next(kinds_of_data()))
        want = subject.op.run(ROWS, rows)
        exact = [way for way in subject.op.routes[:-1] if mx.array_equal(subject.op.run(way, rows), want)]
        assert exact
        assert STOCK not in exact
        for way in subject.op.routes:
            got = subject.op.run(way, rows)
            assert mx.allclose(got, want, rtol=1e-3, atol=1e-3), way
        assert_same_bits(subject.op.run(exact[0], rows), want, exact[0])
