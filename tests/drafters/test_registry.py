"""Which kind a checkpoint is: declared, never guessed."""

from __future__ import annotations

import subprocess
import sys
import warnings
from types import SimpleNamespace
from typing import Any

import pytest

import mlx_spec.drafters
from mlx_spec.drafters import (
    DRAFTER_KIND_BY_MODEL_TYPE,
    KNOWN_DRAFTER_KINDS,
    CallableDrafter,
    resolve_drafter_kind,
    validate_drafter_compatibility,
)
from mlx_spec.drafters.registry import open_family
from mlx_spec.drafters.table import known_families
from mlx_spec.errors import CheckpointError, IncompatiblePair, UnknownDrafter, UnsupportedOption
from tests.drafters.eagle3_files import config, drafter, target

PLAIN = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}


def test_the_public_names_are_there() -> None:
    assert {
        "Drafter",
        "NgramDrafter",
        "CallableDrafter",
        "DRAFTER_KIND_BY_MODEL_TYPE",
        "KNOWN_DRAFTER_KINDS",
        "resolve_drafter_kind",
        "validate_drafter_compatibility",
    } <= set(mlx_spec.drafters.__all__)
    assert KNOWN_DRAFTER_KINDS == ("dflash", "mtp", "eagle3", "ngram", "standalone")
    assert set(DRAFTER_KIND_BY_MODEL_TYPE.values()) <= set(KNOWN_DRAFTER_KINDS)


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (config(), "eagle3"),
        ({"architectures": ["Eagle3LlamaForCausalLM"]}, "eagle3"),
        ({"speculators_model_type": "eagle3", "architectures": ["Eagle3DraftModel"]}, "eagle3"),
        ({"speculators_model_type": "dspark"}, "dflash"),
        ({**PLAIN, "draft_vocab_size": 32000}, "eagle3"),
        ({**PLAIN, "eagle_config": {"use_aux_hidden_state": True}}, "eagle3"),
        ({"architectures": ["DFlashDraftModel"], "model_type": "qwen3"}, "dflash"),
        ({"model_type": "qwen3", "dflash_config": {"mask_token_id": 4}}, "dflash"),
        ({"architectures": ["DFlashDraftModel"], "dflash_config": {"a": 1}, "draft_vocab_size": 5}, "dflash"),
        ({"model_type": "qwen3_5_mtp"}, "mtp"),
        ({"architectures": ["Qwen3NextForCausalLM"], "mtp_num_hidden_layers": 1}, "mtp"),
        ({"architectures": ["DeepseekV3ForCausalLM"], "num_nextn_predict_layers": 1}, "mtp"),
    ],
)
def test_the_config_says_which_kind_it_is(content: dict[str, Any], kind: str) -> None:
    assert resolve_drafter_kind(content, None) == kind
    assert resolve_drafter_kind(content, kind) == kind


@pytest.mark.parametrize("tensor", ["midlayer.hidden_norm.weight", "layers.0.hidden_norm.weight"])
@pytest.mark.parametrize("prefix", ["", "model."])
def test_tensor_names_say_it_where_the_config_looks_like_a_language_model(tensor: str, prefix: str) -> None:
    assert resolve_drafter_kind(PLAIN, None, {prefix + tensor: 0}) == "eagle3"
    assert resolve_drafter_kind({}, None, [prefix + tensor]) == "eagle3"


def test_a_contradicting_kind_is_overridden_with_one_warning() -> None:
    with pytest.warns(UserWarning, match="'dflash' was asked for, but the checkpoint is 'eagle3'") as warned:
        assert resolve_drafter_kind(config(), "dflash") == "eagle3"
    assert len(warned) == 1


def test_the_asked_kind_decides_where_the_checkpoint_says_nothing() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert resolve_drafter_kind({"model_type": "llama"}, "eagle3") == "eagle3"


@pytest.mark.parametrize("wanted", [None, "standalone"])
def test_an_ordinary_language_model_drafts_as_such(wanted: str | None) -> None:
    for content in (PLAIN, {**PLAIN, "num_nextn_predict_layers": 0, "eagle_config": None}):
        assert resolve_drafter_kind(content, wanted, ["model.layers.0.mlp.up_proj.weight"]) == "standalone"


@pytest.mark.parametrize("content", [{}, {"architectures": []}, {"architectures": ["Novel"], "model_type": "novel"}])
def test_an_unknown_checkpoint_is_an_error_that_lists_what_is_known(content: dict[str, Any]) -> None:
    with pytest.raises(UnknownDrafter) as unknown:
        resolve_drafter_kind(content)
    for known in (*KNOWN_DRAFTER_KINDS, "LlamaForCausalLMEagle3", "DFlashDraftModel"):
        assert known in str(unknown.value)


@pytest.mark.parametrize("wanted", ["eagle", "EAGLE3", ""])
def test_an_unknown_kind_is_an_error_that_lists_the_kinds(wanted: str) -> None:
    with pytest.raises(UnknownDrafter, match="dflash, mtp, eagle3, ngram, standalone"):
        resolve_drafter_kind(config(), wanted)


@pytest.mark.parametrize("speculator", ["medusa", 3, ["eagle3"]])
def test_an_unknown_speculator_is_an_error(speculator: object) -> None:
    with pytest.raises(UnknownDrafter, match="speculators_model_type"):
        resolve_drafter_kind({"speculators_model_type": speculator, "architectures": ["LlamaForCausalLMEagle3"]})


@pytest.mark.parametrize("architectures", ["LlamaForCausalLMEagle3", [3], {"a": 1}])
def test_architectures_of_a_wrong_type_are_an_error(architectures: object) -> None:
    with pytest.raises(CheckpointError, match="architectures"):
        resolve_drafter_kind({"architectures": architectures})


@pytest.mark.parametrize("name", ["eagle", "other_native_mtp"])
def test_a_family_that_is_not_built_names_itself_and_what_works(name: str) -> None:
    with pytest.raises(UnsupportedOption, match=f"'{name}' .*cannot be loaded yet.*eagle3, .*ngram"):
        open_family(known_families().by_name[name])


@pytest.mark.slow
def test_a_family_is_imported_when_it_is_first_asked_for() -> None:
    code = (
        "import sys, mlx_spec.drafters.registry as r; before = 'mlx_spec.drafters.eagle3' in sys.modules;"
        "r.open_family(r.known_families().by_name['eagle3']); print(before, 'mlx_spec.drafters.eagle3' in sys.modules)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.split() == ["False", "True"]


def test_a_good_pair_is_let_through() -> None:
    validate_drafter_compatibility(drafter(), target())


@pytest.mark.parametrize("taps", [(8,), (3, 1), (2, 2), (-1, 2)])
def test_any_drafter_is_held_to_layers_that_exist(taps: tuple[int, ...]) -> None:
    own = CallableDrafter(lambda ids, count: [])
    own.taps = taps
    with pytest.raises(IncompatiblePair, match="the 8 that target 'llama' has") as refused:
        validate_drafter_compatibility(own, target())
    assert str(list(taps)) in str(refused.value)


def test_the_drafters_own_check_speaks_first() -> None:
    small: Any = SimpleNamespace(name="small", hidden_size=32, vocab_size=96, layer_count=4)
    with pytest.raises(IncompatiblePair, match="counts hidden states"):
        validate_drafter_compatibility(drafter(), small)
