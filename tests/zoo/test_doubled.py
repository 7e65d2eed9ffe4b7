"""Exact speculation stays exact where a block rounds differently from single tokens."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.cache import make_prompt_cache

from mlx_spec import generate_step
from mlx_spec.drafters import CallableDrafter
from mlx_spec.verify.certificate import Certificate
from mlx_spec.verify.certified_routes import Verify
from tests.double import PATTERNS, double
from tests.oracle import assert_same_output, run_stock
from tests.same_cache import cache_difference
from tests.zoo.doubled import QUICK, DoublePlan, diverging, examine_doubled
from tests.zoo.menagerie import Specimen, whole_zoo
from tests.zoo.trial import PROMPTS, pattern_named, scripted

ZOO = {specimen.name: specimen for specimen in whole_zoo()}

SOON = {
    "gen13": ("llama", "gpt2", "qwen3, ring that keeps its first tokens"),
    "gen15": ("qwen2", "mamba2", "lfm2"),
    "gen17": ("gemma", "qwen3_moe"),
    "max": ("qwen3", "olmo2"),
    "ultra": ("phi3", "starcoder2"),
}
"""Quick architectures, dealt to the patterns."""

FORMATS = (
    *(("affine", bits, group_size) for bits in (2, 3, 4, 5, 6, 8) for group_size in (32, 64, 128)),
    ("mxfp4", 4, 32),
    ("mxfp8", 8, 32),
    ("nvfp4", 4, 16),
)
WIDE = {"hidden_size": 256, "intermediate_size": 384}
"""Sizes that every group size divides, and at which no quantized kernel spares blocks."""


@dataclass(frozen=True)
class Quantized(Specimen):
    """A model whose weights are quantized after it was built: bits drawn at random are not numbers in every format."""

    scheme: tuple[str, int, int] = FORMATS[0]

    def build(self, dtype: str) -> nn.Module:
        model = super().build(dtype)
        mode, bits, group_size = self.scheme

        def fits(_: str, part: Any) -> bool:
            return hasattr(part, "to_quantized") and part.weight.shape[-1] % group_size == 0

        nn.quantize(model, group_size=group_size, bits=bits, mode=mode, class_predicate=fits)
        assert any(hasattr(part, "scales") for part in model.modules())
        return model


def check_quantized(name: str, scheme: tuple[str, int, int], chip: str) -> None:
    specimen = Quantized(name, {**ZOO[name].config, **WIDE}, scheme=scheme)
    check(specimen, replace(QUICK, chips=(chip,), widths=(3, 16), tokens=12))


def check(specimen: Specimen, plan: DoublePlan) -> None:
    """Exact everywhere; a stock block verify nowhere."""
    finding = examine_doubled(specimen, plan)
    assert finding.differences == []
    assert finding.runs
    assert diverging(finding) == list(finding.outcomes)


@pytest.mark.part(2)
@pytest.mark.slow
@pytest.mark.parametrize(("chip", "name"), [(chip, name) for chip, names in SOON.items() for name in names])
def test_exact_equals_the_stock_loop_where_stock_blocks_do_not(chip: str, name: str) -> None:
    check(ZOO[name], replace(QUICK, chips=(chip,)))


@pytest.mark.part(3)
@pytest.mark.slow
@pytest.mark.parametrize("scheme", FORMATS, ids=str)
def test_exact_equals_the_stock_loop_in_every_quantized_format(scheme: tuple[str, int, int]) -> None:
    check_quantized("llama", scheme, "gen15")


@pytest.mark.slow
@pytest.mark.parametrize("chip", ["gen13", "max"])
@pytest.mark.parametrize("width", [3, 5])
def test_exact_equals_the_stock_loop_with_quantized_keys_and_values(width: int, chip: str) -> None:
    options: dict[str, Any] = {"kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": 0}
    model = Specimen("llama", {**ZOO["llama"].config, "head_dim": 32}).build("float32")

    def difference(verify: Verify) -> str | None:
        caches = make_prompt_cache(model)
        draft = CallableDrafter(scripted(run, 97, pattern_named("full")))
        steps = generate_step(
            mx.array(run.prompt),
            model,
            draft_model=draft,
            draft_block_size=width,
            verify=verify,
            max_tokens=len(run.ids),
            prompt_cache=caches,
            **options,
        )
        try:
            assert_same_output(list(steps), run)
        except AssertionError as error:
            return str(error)
        return cache_difference(caches, run.cache_after(len(run.ids)))

    with double(PATTERNS[chip]):
        run = run_stock(model, PROMPTS[0], 16, **options)
        assert difference("exact") is None
        assert difference("fast") is not None


def test_a_verify_route_that_is_not_equal_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Certificate, "holds", lambda self, width, route: True)
    finding = examine_doubled(ZOO["llama"], replace(QUICK, chips=("gen13",), widths=(3,)))
    assert finding.runs
    assert not finding.exact


def test_every_width_is_tried_with_an_acceptance_pattern_and_a_prompt() -> None:
    trials = list(DoublePlan().trials())
    assert [width for width, *_ in trials] == list(range(2, 17))
    assert {pattern for _, pattern, *_ in trials} == set(DoublePlan().patterns)
    assert {prompt for _, _, prompt, _ in trials} == {0, 1}
