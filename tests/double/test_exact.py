"""With the double on, exact decoding still hands out what the one-token loop does, and a block is still one forward."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.deepseek_v3 import DeepseekV3Attention

from mlx_spec.ops.attention import AttentionCall, QueryBlock
from mlx_spec.ops.base import Op, Rows
from mlx_spec.ops.linear import BATCH_AXIS, DenseLinear
from mlx_spec.ops.packed import PackedLinear
from mlx_spec.verify.routes import STEP_THROUGH
from tests.double import PATTERNS, double
from tests.mixer_calls import refuse_positions
from tests.zoo.menagerie import Specimen, whole_zoo
from tests.zoo.trial import Subject, pattern_named

WIDTHS = (2, 3, 5, 8, 16)
FORMATS = [("affine", bits, group) for bits in (2, 3, 4, 5, 6, 8) for group in (32, 64, 128)]
FORMATS += [("mxfp4", 4, 32), ("mxfp8", 8, 32), ("nvfp4", 4, 16)]
SOON = [FORMATS[index] for index in (2, 3, 7, 11, 12, 16, 18, 19, 20)]
"""Every number of bits and every mode once, every group size."""

FLOATS = (("float32", "gen13"), ("bfloat16", "gen15"), ("float16", "max"), ("float32", "gen17"))
"""Precisions dealt to patterns."""

DENSE = {
    "vocab_size": 101,
    "hidden_size": 128,
    "num_hidden_layers": 3,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
    "max_position_embeddings": 512,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {**DENSE, "model_type": "llama", "tie_word_embeddings": True},
    "qwen3": {**DENSE, "model_type": "qwen3", "tie_word_embeddings": False},
    "gemma": {
        **DENSE,
        "model_type": "gemma3_text",
        "query_pre_attn_scalar": 64,
        "sliding_window": 12,
        "sliding_window_pattern": 3,
    },
    "hybrid": {
        **DENSE,
        "model_type": "qwen3_next",
        "full_attention_interval": 3,
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "linear_conv_kernel_dim": 4,
        "partial_rotary_factor": 0.5,
        "num_experts": 0,
        "num_experts_per_tok": 0,
        "decoder_sparse_step": 1,
        "shared_expert_intermediate_size": 48,
        "moe_intermediate_size": 56,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
    },
}


def check(specimen: Specimen, chip: str, widths: tuple[int, ...], dtype: str = "float32", tokens: int = 20) -> set[str]:
    """Compare ids, log-probabilities and caches with the stock loop; returns the routes taken."""
    taken = set()
    with double(PATTERNS[chip]):
        subject = Subject(specimen, dtype, tokens)
        for index, width in enumerate(widths):
            statistics, difference = subject.speculate(index % 2, width, pattern_named("cycling", width), tokens)
            assert difference is None, f"width {width}: {difference}"
            taken.add(statistics.verify_route)
    return taken


@dataclass(frozen=True)
class Quantized(Specimen):
    """One whose weights are rounded from random ones: not every pattern of bits is a number in every format."""

    mode: str = "affine"
    bits: int = 4
    group: int = 32

    def build(self, dtype: str) -> nn.Module:
        model = super().build(dtype)
        nn.quantize(model, group_size=self.group, bits=self.bits, mode=self.mode, class_predicate=self._fits)
        mx.eval(model.parameters())
        return model

    def _fits(self, path: str, part: Any) -> bool:
        del path
        return hasattr(part, "to_quantized") and part.weight.shape[-1] % self.group == 0


def quantized(model: str, mode: str, bits: int, group: int) -> Specimen:
    return Quantized(f"{model} {mode} {bits} {group}", MODELS[model], mode=mode, bits=bits, group=group)


def named(name: str) -> Specimen:
    return next(specimen for specimen in whole_zoo() if specimen.name == name)


@pytest.mark.part(3)
@pytest.mark.parametrize("scheme", SOON, ids=str)
@pytest.mark.parametrize("model", MODELS)
def test_every_format_of_weights_stays_exact(model: str, scheme: tuple[str, int, int]) -> None:
    chips = itertools.cycle(PATTERNS)
    chip = next(itertools.islice(chips, SOON.index(scheme), None))
    taken = check(quantized(model, *scheme), chip, (5,))
    assert STEP_THROUGH.name not in "".join(taken)


@pytest.mark.double
@pytest.mark.parametrize("chip", PATTERNS)
@pytest.mark.parametrize("scheme", FORMATS, ids=str)
@pytest.mark.parametrize("model", MODELS)
def test_every_format_stays_exact_on_every_chip(model: str, scheme: tuple[str, int, int], chip: str) -> None:
    check(quantized(model, *scheme), chip, tuple(range(2, 17)))


@pytest.mark.part(1)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "dtype", "chip"),
    [
        *(("llama", dtype, chip) for dtype, chip in FLOATS),
        ("qwen3", "float16", "max"),
        ("gemma", "bfloat16", "gen15"),
        ("hybrid", "float32", "gen17"),
    ],
)
def test_float_weights_stay_exact_at_every_width(model: str, dtype: str, chip: str) -> None:
    check_floats(model, dtype, chip)


@pytest.mark.double
@pytest.mark.parametrize(("dtype", "chip"), FLOATS)
@pytest.mark.parametrize("model", MODELS)
def test_float_weights_of_every_model_stay_exact_at_every_width(model: str, dtype: str, chip: str) -> None:
    check_floats(model, dtype, chip)


def check_floats(model: str, dtype: str, chip: str) -> None:
    taken = check(Specimen(model, MODELS[model]), chip, WIDTHS, dtype)
    assert STEP_THROUGH.name not in "".join(taken)
    assert any("batch axis" in route for route in taken)


@pytest.mark.part(2)
@pytest.mark.parametrize("name", ["deepseek_v3, dense", "gemma4_text", "qwen3_moe", "mamba2", "olmo", "gpt_oss"])
def test_models_with_forks_of_their_own_stay_exact(name: str) -> None:
    taken = check(named(name), "gen15", (3, 8))
    assert STEP_THROUGH.name not in "".join(taken)


@pytest.mark.slow
@pytest.mark.parametrize("chip", ["gen13", "gen15"])
def test_a_model_that_chooses_among_its_keys_goes_by_position_once_it_has_to_choose(chip: str) -> None:
    # Scores in half precision lie close, and the choice hangs on the last bit of a product the model makes itself.
    taken = check(named("minimax_m3_vl, dense"), chip, (3, 8), "bfloat16")
    assert any("mixers by position" in route for route in taken)
    assert STEP_THROUGH.name not in "".join(taken)


GROUPED = {**DENSE, "model_type": "llama", "num_attention_heads": 8, "num_key_value_heads": 1, "tie_word_embeddings": 1}
"""Eight queries share a key head, so that the kernel for single queries takes four positions at a time."""


@pytest.mark.part(2)
@pytest.mark.slow
@pytest.mark.parametrize(("width", "chunk"), [(5, 3), (8, 4), (16, 4)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_grouped_heads_attend_in_chunks_of_queries(width: int, chunk: int, dtype: str) -> None:
    for chip in ("gen13", "gen15"):
        (route,) = check(Specimen("grouped", GROUPED), chip, (width,), dtype)
        assert route.startswith(f"block, attention in chunks of {chunk}, linear")


BY_THEMSELVES = {
    "minicpm, tied": "linear",
    "seed_oss, tied": "linear",
    "talkie": "linear",
    "afm7": "module row by row",
}
"""Models that multiply by a matrix themselves, or whose linear splits what it gives; and what of it goes by its row."""


@pytest.mark.part(2)
@pytest.mark.parametrize("chip", ["gen13", "gen17"])
@pytest.mark.parametrize("name", BY_THEMSELVES)
def test_models_that_multiply_by_themselves_are_verified_in_blocks(name: str, chip: str) -> None:
    taken = check(named(name), chip, (3, 8))
    assert all(route.startswith("block, attention") and BY_THEMSELVES[name] in route for route in taken)


def test_a_tied_head_of_llama4_is_verified_in_blocks() -> None:
    tied = Specimen("tied", {**named("llama4_text").config, "tie_word_embeddings": True})
    assert STEP_THROUGH.name not in "".join(check(tied, "gen15", (3, 8)))


# Routes that break


def an_ulp_off(out: mx.array) -> mx.array:
    raw = out.view({4: mx.uint32, 2: mx.uint16}[out.dtype.size])
    raw[..., 0] += 1
    return raw.view(out.dtype)


def fails(out: mx.array) -> mx.array:
    raise RuntimeError("no such kernel on this device")


BROKEN = {"an ulp off": an_ulp_off, "raises": fails}


def spoil(monkeypatch: pytest.MonkeyPatch, op: type[Op], name: str, broken: Callable[[mx.array], mx.array]) -> None:
    """Let one way of a kind of op pass its result through `broken`."""
    sound = op.ways

    def ways(self: Op) -> dict[str, Callable[[Rows], Any]]:
        found = sound(self)
        way = found[name]
        return found | {name: lambda rows: broken(way(rows))}

    monkeypatch.setattr(op, "ways", ways)


@pytest.mark.parametrize("broken", BROKEN)
@pytest.mark.parametrize("model", ["llama", "hybrid"])
def test_a_broken_route_of_linears_costs_the_route_and_no_token(
    model: str, broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil(monkeypatch, DenseLinear, BATCH_AXIS, BROKEN[broken])
    taken = check(Specimen(model, MODELS[model]), "gen15", (5,))
    assert all("linear row by row" in route and "batch axis" not in route for route in taken)


@pytest.mark.parametrize("broken", BROKEN)
def test_broken_chunks_of_queries_cost_the_route_and_no_token(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sound = QueryBlock.in_chunks

    def spoiled(self: QueryBlock, size: int) -> mx.array:
        out = sound(self, size)
        return out if size == 1 else BROKEN[broken](out)

    monkeypatch.setattr(QueryBlock, "in_chunks", spoiled)
    (route,) = check(Specimen("grouped", GROUPED), "gen13", (5,))
    assert route.startswith("block, attention by position, linear")


@pytest.mark.slow
def test_chunks_that_only_the_model_shows_to_be_unequal_cost_the_route_and_no_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(AttentionCall, "route_over", lambda self, stretch: self.ways[-2])
    with double(PATTERNS["gen13"]):
        subject = Subject(Specimen("ungrouped", {**GROUPED, "head_dim": 20}), "float32", 20)
        statistics, difference = subject.speculate(0, 8, pattern_named("cycling"), 20)
    assert difference is None
    assert statistics.verify_route.startswith("block, mixers by position")


def test_a_broken_route_of_quantized_linears_costs_the_route_and_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    spoil(monkeypatch, PackedLinear, BATCH_AXIS, an_ulp_off)
    taken = check(quantized("llama", "affine", 4, 32), "gen15", (5,))
    assert all("quantized linear row by row" in route for route in taken)


def test_a_broken_way_of_mixers_costs_the_block_and_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_positions(monkeypatch, DeepseekV3Attention)
    with double(PATTERNS["gen15"]):
        subject = Subject(named("deepseek_v3, dense"), "float32", 20)
        statistics, difference = subject.speculate(0, 5, pattern_named("full"), 20)
    assert difference is None
    assert statistics.verify_route == STEP_THROUGH.name
    assert "shapes do not fit" in statistics.notes[0]


def test_nothing_of_the_double_is_left_behind() -> None:
    specimen = Specimen("llama", MODELS["llama"])
    check(specimen, "gen15", (3,))
    assert mx.default_device() == mx.Device(mx.cpu)
    subject = Subject(specimen, "float32", 12)
    statistics, difference = subject.speculate(0, 3, pattern_named("full"), 12)
    assert (statistics.verify_route, difference) == ("block", None)
