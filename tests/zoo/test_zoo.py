"""Every architecture of mlx-lm decodes exactly under speculation."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache

from mlx_spec.verify.certificate import Certificate
from tests.zoo.choice import ONE_CACHE_OF_EACH_KIND, ONE_OF_EACH_KIND
from tests.zoo.menagerie import Specimen, bare_model, missing_architectures, whole_zoo
from tests.zoo.trial import Plan, examine, kind_of

ZOO = {specimen.name: specimen for specimen in whole_zoo()}

IN_HALF = ("deepseek_v3, dense", "gear", "gemma4_text", "llama", "llama, sliding layers", "mamba2", "qwen3_5")

STEPPED_THROUGH = {
    "deepseek_v41": "a cache class of its own, and indices into it made for the whole block",
    "deepseek_v41, nothing pooled": "the same",
    "iquestloopcoder": "it attends in the body of the model, where no mixer is called",
}
"""Architectures whose blocks are verified by one-token forwards, and why."""

SOON = Plan(widths=(3, 5), patterns=("cycling", "random"), dtypes=("float32",), tokens=24)


def check(specimen: Specimen, plan: Plan) -> None:
    finding = examine(specimen, plan)
    assert finding.differences == []
    if finding.runs:
        assert finding.steps_through == (specimen.name in STEPPED_THROUGH), finding.stepping
    else:
        reasons = {outcome.reason for outcome in finding.outcomes.values()}
        assert all("Metal" in str(reason) for reason in reasons), reasons
        pytest.skip(f"{specimen.name}: {reasons}")


def test_no_architecture_of_the_installed_mlx_lm_is_missing() -> None:
    assert missing_architectures(list(ZOO.values())) == []


def test_those_that_stand_for_all_have_every_kind_of_cache() -> None:
    def kinds(names: tuple[str, ...]) -> set[str]:
        found = set()
        for name in names:
            caches = make_prompt_cache(bare_model(ZOO[name].config), max_kv_size=ZOO[name].max_kv_size)
            found |= set(map(kind_of, caches))
        return found

    assert len({ZOO[name].module for name in ONE_OF_EACH_KIND}) >= 20
    assert kinds(tuple(ZOO)) == kinds(ONE_OF_EACH_KIND) == kinds(ONE_CACHE_OF_EACH_KIND)


@pytest.mark.slow
@pytest.mark.parametrize("name", ONE_CACHE_OF_EACH_KIND)
def test_an_architecture_of_each_kind_is_exact(name: str, thorough: bool) -> None:
    check(ZOO[name], SOON if thorough else replace(SOON, widths=(5,), patterns=("cycling",)))


@pytest.mark.part(1)
@pytest.mark.slow
@pytest.mark.parametrize("name", IN_HALF)
def test_some_are_exact_in_half_precision_too(name: str) -> None:
    check(ZOO[name], replace(SOON, dtypes=("bfloat16",)))


@pytest.mark.deep
@pytest.mark.parametrize("name", ZOO)
def test_every_architecture_is_exact(name: str) -> None:
    check(ZOO[name], Plan())


def test_the_zoo_notices_a_block_that_rounds_differently(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Certificate, "holds", lambda self, width, drive: True)
    finding = examine(ZOO["deepseek_v3, dense"], SOON)
    assert finding.runs
    assert not finding.exact


def test_the_compatibility_page_names_every_specimen() -> None:
    page = (Path(__file__).parents[2] / "docs" / "compatibility.md").read_text(encoding="utf-8")
    assert [name for name in ZOO if f"\n| {name} " not in page] == [], "run `make zoo`"


def test_a_broken_config_is_a_finding_and_no_crash() -> None:
    config = {**ZOO["llama"].config, "num_key_value_heads": 0}
    finding = examine(Specimen("broken", config), SOON)
    assert not finding.runs
    assert finding.differences == []
    unknown = examine(Specimen("unknown", {"model_type": "no such thing"}), SOON)
    assert {outcome.reason for outcome in unknown.outcomes.values()} == {"Model type no such thing not supported."}


def test_what_is_stepped_through_is_in_the_zoo() -> None:
    assert set(STEPPED_THROUGH) <= set(ZOO)


def test_weights_depend_on_the_seed_alone() -> None:
    first, second, third = (Specimen("llama", ZOO["llama"].config, seed).build("float32") for seed in (0, 0, 1))
    heads = [model.lm_head.weight for model in (first, second, third)]
    assert mx.array_equal(heads[0], heads[1]).item()
    assert not mx.array_equal(heads[0], heads[2]).item()
