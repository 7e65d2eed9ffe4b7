"""The table of families: every name that drafters go by leads to a row, and a row says truly what can be loaded."""

from __future__ import annotations

import importlib
import importlib.util
import subprocess
import sys
import warnings
from collections import Counter
from typing import Any

import pytest

from mlx_spec.drafters import KNOWN_DRAFTER_KINDS, resolve_drafter_kind
from mlx_spec.drafters.__main__ import table
from mlx_spec.drafters.families import ANY_TARGET, FAMILIES, Family
from mlx_spec.drafters.registry import check_target, open_family, resolve_family
from mlx_spec.drafters.speculators import SPECULATORS, meant_architecture, select_speculator
from mlx_spec.drafters.table import known_families
from mlx_spec.errors import CheckpointError, IncompatiblePair, MlxSpecError, UnknownDrafter, UnsupportedOption
from mlx_spec.model.target import Target
from tests.tiny import MIXES

BUILT = tuple(row for row in FAMILIES if row.loadable)

BY_MODEL_TYPE = {
    "qwen3_dflash": "dflash",
    "gemma4_dflash": "dflash",
    "laguna_dflash": "laguna_dflash",
    "dflash2": "dflash2",
    "dspark": "dspark",
    "qwen3_dspark": "dspark",
    "gemma4_dspark": "gemma4_dspark",
    "deepseek_v4_dspark": "deepseek_v4_dspark",
    "muse_glimmer_assistant": "muse_glimmer_assistant",
    "eagle3": "eagle3",
    "qwen3_5_mtp": "qwen3_5_mtp",
    "deepseek_v4_mtp": "deepseek_v4_mtp",
    "nemotron_h_mtp": "nemotron_h_mtp",
    "step3p5_mtp": "step3p5_mtp",
    "exaone_moe_mtp": "exaone_moe_mtp",
    "longcat_flash_mtp": "longcat_flash_mtp",
    "glm5_next_mtp": "glm5_next_mtp",
    "glm_moe_dsa_mtp": "glm_nextn",
    "glm4_moe_lite_mtp": "glm_nextn",
    "hy_v4_mtp": "hy_v4_mtp",
    "inkling_mtp": "inkling_mtp",
    "qwen4_exp_mtp": "qwen4_exp_mtp",
    "gemma4_assistant": "gemma4_assistant",
    "gemma4_unified_assistant": "gemma4_assistant",
}
"""`model_type` of drafters' checkpoints -> family."""

BY_ARCHITECTURE = {
    "LlamaForCausalLMEagle3": "eagle3",
    "Eagle3LlamaForCausalLM": "eagle3",
    "Eagle3Speculator": "eagle3",
    "Eagle3DraftModel": "eagle3",
    "Qwen3Eagle3Model": "eagle3",
    "Eagle3DeepseekV2ForCausalLM": "eagle3_mla",
    "LlamaForCausalLMEagle": "eagle",
    "DFlashDraftModel": "dflash",
    "DFlash2DraftModel": "dflash2",
    "DFlashLagunaForCausalLM": "laguna_dflash",
    "DSparkDraftModel": "dspark",
    "Qwen3DSparkModel": "dspark",
    "Gemma4DSparkModel": "gemma4_dspark",
    "MuseGlimmerAssistantModel": "muse_glimmer_assistant",
    "Gemma4AssistantForCausalLM": "gemma4_assistant",
    "MTPDraftModel": "qwen3_5_mtp",
}
"""`architectures[0]` of drafters' checkpoints -> family."""

WITHOUT_TARGET = {
    "deepseek_v4_mtp": "deepseek_v4",
    "deepseek_v4_dspark": "deepseek_v4",
    "glm5_next_mtp": "glm5_next",
    "hy_v4_mtp": "hy_v4",
    "inkling_mtp": "inkling",
    "qwen4_exp_mtp": "qwen4_exp",
}
"""Families whose target mlx-lm has no module for -> that target."""


@pytest.mark.parametrize(("model_type", "name"), BY_MODEL_TYPE.items())
def test_every_model_type_of_a_drafter_leads_to_its_family(model_type: str, name: str) -> None:
    assert resolve_family({"model_type": model_type}).name == name
    assert resolve_drafter_kind({"model_type": model_type}) == known_families().by_name[name].kind


@pytest.mark.parametrize(("architecture", "name"), BY_ARCHITECTURE.items())
def test_every_architecture_of_a_drafter_leads_to_its_family(architecture: str, name: str) -> None:
    for model_type in ("llama", "qwen3", None):
        config = {"architectures": [architecture], "model_type": model_type}
        assert resolve_family(config).name == name
        assert resolve_drafter_kind(config) == known_families().by_name[name].kind


@pytest.mark.parametrize(
    ("config", "name"),
    [
        ({"model_type": "qwen3", "dflash_config": {"mask_token_id": 4}}, "dflash"),
        ({"model_type": "gemma4", "dflash_config": {"mask_token_id": 4}}, "dflash"),
        ({"model_type": "laguna", "dflash_config": {"mask_token_id": 4}}, "laguna_dflash"),
        ({"model_type": "qwen3", "dflash_config": {"projector_type": "dspark"}}, "dspark"),
        ({"model_type": "qwen3", "dflash_config": {"markov_rank": 256}}, "dspark"),
        ({"model_type": "qwen3", "dflash_config": {"markov_rank": 0, "mask_token_id": 4}}, "dflash"),
        ({"architectures": ["DFlashDraftModel"], "dflash_config": {"projector_type": "dspark"}}, "dspark"),
        ({"speculators_model_type": "eagle3", "architectures": ["Eagle3Speculator"]}, "eagle3"),
        ({"speculators_model_type": "dspark", "architectures": ["DSparkSpeculator"]}, "dspark"),
        ({"speculators_model_type": "mtp", "architectures": ["MTPDraftModel"]}, "qwen3_5_mtp"),
        ({"speculators_model_type": "dflash", "architectures": ["DFlash2DraftModel"]}, "dflash2"),
    ],
)
def test_a_config_says_which_of_several_families_it_is(config: dict[str, Any], name: str) -> None:
    assert resolve_family(config).name == name


# Layers for drafting that come with a target's own checkpoint

MTP_TENSORS = {
    "qwen3_5": "mtp.fc.weight",
    "qwen3_5_moe": "model.language_model.mtp.fc.weight",
    "qwen3_next": "mtp.pre_fc_norm_hidden.weight",
    "deepseek_v3": "model.layers.61.eh_proj.weight",
    "kimi_k2": "model.layers.61.eh_proj.weight",
    "glm4_moe": "model.layers.46.eh_proj.weight",
    "glm4_moe_lite": "model.layers.47.eh_proj.weight",
    "mimo": "model.mtp_layers.0.input_proj.weight",
    "mimo_v2_flash": "model.mtp.layers.0.eh_proj.weight",
    "ernie4_5_moe": "model.mtp_block.0.mlp.up_proj.weight",
    "bailing_hybrid": "model.layers.32.eh_proj.weight",
    "nemotron_h": "mtp.layers.0.eh_proj.weight",
    "step3p5": "model.layers.45.eh_proj.weight",
    "exaone_moe": "mtp.pre_fc_norm_embedding.weight",
    "longcat_flash": "model.mtp.layers.0.eh_proj.weight",
    "glm5_next": "model.layers.78.eh_proj.weight",
}
"""`model_type` of a target -> the name of a tensor by which its drafting layers are known."""


@pytest.mark.parametrize(("model_type", "tensor"), MTP_TENSORS.items())
def test_layers_in_the_targets_own_checkpoint_are_known_by_their_tensors(model_type: str, tensor: str) -> None:
    names = ["model.layers.0.self_attn.q_proj.weight", tensor]
    for nested in (False, True):
        config: dict[str, Any] = {"architectures": ["WholeModelForCausalLM"], "model_type": model_type}
        if nested:
            config = {**config, "model_type": "wrapper", "text_config": {"model_type": model_type}}
        family = resolve_family(config, None, names)
        assert family.kind == "mtp"
        assert model_type in family.natives


PROMISING = {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "num_nextn_predict_layers": 1}
CARRIED = ("model.embed_tokens.weight", "model.layers.61.eh_proj.weight")
DROPPED = ("model.embed_tokens.weight", "model.layers.60.mlp.up_proj.weight")


def test_a_promise_of_layers_counts_while_the_tensors_are_not_known() -> None:
    assert resolve_drafter_kind(PROMISING) == "mtp"
    assert resolve_drafter_kind(PROMISING, None, CARRIED) == "mtp"
    nested = {"architectures": ["Qwen3_5ForConditionalGeneration"], "text_config": {"mtp_num_hidden_layers": 1}}
    assert resolve_drafter_kind(nested) == "mtp"


def test_a_conversion_that_dropped_the_layers_is_an_ordinary_language_model() -> None:
    assert resolve_family(PROMISING, None, DROPPED).name == "standalone"
    # Asked for, it is the family's to say that they are missing.
    assert resolve_family(PROMISING, "mtp", DROPPED).name == "deepseek_nextn"


def test_a_model_that_carries_drafting_layers_may_draft_as_a_whole() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert resolve_family(PROMISING, "standalone", CARRIED).name == "standalone"
    with pytest.warns(UserWarning, match="'eagle3' was asked for, but the checkpoint is 'mtp'"):
        assert resolve_drafter_kind(PROMISING, "eagle3", CARRIED) == "mtp"


def test_layers_of_an_unknown_model_are_named_with_the_known_ones() -> None:
    config = {"architectures": ["NovelForCausalLM"], "model_type": "novel", "num_nextn_predict_layers": 1}
    assert resolve_drafter_kind(config) == "mtp"
    with pytest.raises(UnknownDrafter, match="'novel'.*qwen3_next.*deepseek_v3"):
        resolve_family(config)


# What can be loaded


@pytest.mark.parametrize(("name", "missing"), WITHOUT_TARGET.items())
def test_a_family_whose_target_mlx_lm_lacks_says_which_one(name: str, missing: str) -> None:
    with pytest.raises(UnsupportedOption, match=f"'{name}'.*'{missing}', which this mlx-lm has no module for"):
        open_family(resolve_family({"model_type": name}))


@pytest.mark.parametrize("row", FAMILIES, ids=lambda row: row.name)
def test_a_row_is_true_of_this_mlx_lm_and_of_this_package(row: Family) -> None:
    assert row.kind in KNOWN_DRAFTER_KINDS
    assert row.layouts
    for target in row.targets if row.targets != ANY_TARGET else ():
        found = importlib.util.find_spec(f"mlx_lm.models.{target}") is not None
        assert found == (row.absent_target is None), f"mlx-lm {'has' if found else 'lacks'} {target}"
    if row.loadable:
        assert row.module is not None
        assert importlib.util.find_spec(row.module) is not None
    else:
        with pytest.raises(UnsupportedOption) as refused:
            open_family(row)
        assert row.name in str(refused.value)
        assert all(built.name in str(refused.value) for built in BUILT)


def test_names_belong_to_one_row_each() -> None:
    for named in ("architectures", "model_types", "natives"):
        counted = Counter(name for row in FAMILIES for name in getattr(row, named))
        assert [name for name, count in counted.items() if count > 1] == []
    assert len(known_families().by_name) == len(FAMILIES)
    assert not {name for row in FAMILIES for name in row.natives} & {n for row in FAMILIES for n in row.model_types}


@pytest.mark.parametrize("row", [row for row in BUILT if row.kind != "ngram"], ids=lambda row: row.name)
def test_a_built_family_offers_what_loading_asks_of_it(row: Family) -> None:
    assert callable(open_family(row).load)


def test_a_target_that_a_family_is_not_made_for_is_refused_with_both_names() -> None:
    target = Target(MIXES["dense"].model())
    with pytest.raises(IncompatiblePair, match="'laguna_dflash' are made for laguna, the target is 'llama'"):
        check_target(known_families().by_name["laguna_dflash"], target)
    check_target(known_families().by_name["dflash"], target)
    check_target(known_families().by_name["qwen3_5_mtp"], Target(MIXES["hybrid"].model()))


# The printed table


@pytest.mark.slow
def test_the_command_prints_a_line_for_every_family() -> None:
    ran = subprocess.run([sys.executable, "-m", "mlx_spec.drafters"], capture_output=True, text=True, check=True)
    assert ran.stdout == table() + "\n"
    heading, *lines = ran.stdout.splitlines()
    assert heading.split() == ["family", "kind", "targets", "layouts", "loads"]
    assert [line.split()[0] for line in lines] == [row.name for row in FAMILIES]
    for line, row in zip(lines, FAMILIES, strict=True):
        assert line.endswith("yes" if row.loadable else row.standing)
        assert line.split()[1] == row.kind
        assert all(word in line for word in (*row.targets, *row.layouts))
    assert {len(line) - len(line.rstrip()) for line in lines} == {0}


# Methods


@pytest.mark.parametrize(
    ("target", "method", "draft", "name"),
    [
        ("deepseek_v3", "eagle", "Eagle3DeepseekV2ForCausalLM", "Eagle3DeepseekV3ForCausalLM"),
        ("DeepseekV3ForCausalLM", "eagle", "LlamaForCausalLMEagle3", "Eagle3MHADeepseekV3ForCausalLM"),
        ("deepseek_v3", "mtp", None, "MTPDeepseekV3ForCausalLM"),
        ("kimi_k25", "eagle", "LlamaForCausalLMEagle3", "Eagle3MHAKimiK25ForConditionalGeneration"),
        ("KimiK25ForConditionalGeneration", "dflash", "DFlashDraftModel", "DFlashKimiK25ForConditionalGeneration"),
    ],
)
def test_a_speculator_is_found_by_method_and_draft(target: str, method: str, draft: str | None, name: str) -> None:
    found = select_speculator(target, method, draft)
    assert found is not None
    assert found.name == name


@pytest.mark.parametrize(
    ("method", "draft", "asked"),
    [
        ("mtp", "LlamaForCausalLMEagle3", "mtp with draft LlamaForCausalLMEagle3"),
        ("eagle", None, "eagle with no draft model"),
        ("eagle", "LlamaForCausalLM", "eagle with draft LlamaForCausalLM"),
        ("dflash2", "DFlash2DraftModel", "dflash2 with draft DFlash2DraftModel"),
    ],
)
def test_a_pair_that_is_not_declared_lists_those_that_are(method: str, draft: str | None, asked: str) -> None:
    with pytest.raises(IncompatiblePair) as refused:
        select_speculator("deepseek_v3", method, draft)
    for words in (
        "'deepseek_v3'",
        asked,
        "eagle with draft Eagle3DeepseekV2ForCausalLM",
        "eagle with draft LlamaForCausalLMEagle3",
        "mtp with no draft model",
    ):
        assert words in str(refused.value)
    assert isinstance(refused.value, MlxSpecError)


def test_a_target_of_which_nothing_is_declared_takes_any_method() -> None:
    assert select_speculator("llama", "eagle", "LlamaForCausalLMEagle3") is None
    assert {each.draft_architecture for each in SPECULATORS} <= {row.architecture for row in FAMILIES}


def test_an_ordinary_architecture_under_eagle_means_the_drafter_of_that_name() -> None:
    listed = ["LlamaForCausalLM"]
    assert meant_architecture("eagle", listed) == "LlamaForCausalLMEagle"
    assert meant_architecture("mtp", listed) == "LlamaForCausalLM"
    assert meant_architecture("eagle", ["LlamaForCausalLMEagle3"]) == "LlamaForCausalLMEagle3"
    assert listed == ["LlamaForCausalLM"]
    for several in ([], ["LlamaForCausalLM", "Other"]):
        with pytest.raises(CheckpointError, match=f"exactly one architecture, this one names {len(several)}"):
            meant_architecture("eagle", several)
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    before = {**config, "architectures": list(config["architectures"])}
    assert resolve_family(config, "eagle3").name == "eagle"
    assert resolve_family(config).name == "standalone"
    assert config == before
    # What its tensors say comes first.
    assert resolve_family(config, "eagle3", ["midlayer.hidden_norm.weight"]).name == "eagle3"


# Ordinary language models


@pytest.mark.parametrize(
    "config",
    [
        {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"},
        {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3"},
        {"architectures": ["LagunaForCausalLM"], "model_type": "laguna"},
        {"model_type": "mamba2"},
        {"model_type": "kimi_k2"},
    ],
)
def test_a_language_model_that_mlx_lm_loads_drafts_as_such(config: dict[str, Any]) -> None:
    assert resolve_family(config).name == "standalone"


@pytest.mark.parametrize("model_type", ["novel", "../cache", "models.llama", "", 3, None, ["llama"]])
def test_a_type_that_mlx_lm_has_no_module_for_is_unknown(model_type: object) -> None:
    with pytest.raises(UnknownDrafter):
        resolve_family({"model_type": model_type})


@pytest.mark.parametrize("wanted", ["mtp", "dflash", "ngram"])
def test_another_kind_asked_of_a_language_model_is_overridden_with_one_warning(wanted: str) -> None:
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    with pytest.warns(UserWarning, match=f"{wanted!r} was asked for, but the checkpoint is 'standalone'") as warned:
        assert resolve_drafter_kind(config, wanted, ["model.norm.weight"]) == "standalone"
    assert len(warned) == 1
