"""Damaged checkpoints of prediction layers are refused by name; what is left out is the target's; norms shift once."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from mlx_spec.drafters.mtp.model import MtpDrafter
from mlx_spec.errors import CheckpointError, IncompatiblePair, UnknownDrafter
from mlx_spec.pairing import load_drafter
from tests.drafters.native import FIXTURES, build_target
from tests.tiny_mtp import FAMILIES, checkpoint, names_of, target, write

Tensors = dict[str, mx.array]

RECENT = (
    "nemotron_h",
    "exaone_moe",
    "longcat_flash",
    "mimo_v2_flash",
    "ernie4_5_moe",
    "bailing_hybrid",
    "bailing_moe_v3",
)

COPIES = re.compile(r".*\.(embed_tokens|tok_embeddings|shared_head\.head)\.weight")
"""Repeat the target's, which serve in any case."""


def load(folder: Path, family: str) -> MtpDrafter:
    loaded = load_drafter(folder, target(family))
    assert isinstance(loaded, MtpDrafter)
    return loaded


def refusal(folder: Path, family: str, error: type[Exception] = CheckpointError) -> str:
    with pytest.raises(error) as refused:
        load(folder, family)
    message = str(refused.value)
    assert "\n" not in message
    return message


def parameters(drafter: MtpDrafter) -> Mapping[str, mx.array]:
    return dict(tree_flatten(drafter.network.predictor.parameters()))


def prediction_names(family: str) -> list[str]:
    place = names_of(family).place
    return [name for name in checkpoint(family)[1] if name.startswith(place) and not COPIES.fullmatch(name)]


def each_tensor(family: str, damage: Callable[[Tensors, str], str], tmp_path: Path) -> None:
    """Damage each tensor in turn; `damage` returns what the refusal must hold, or "" where nothing was done."""
    for index, name in enumerate(prediction_names(family)):
        words: list[str] = []
        folder = write(
            tmp_path / str(index),
            family,
            edit_tensors=lambda tensors, name=name, words=words: words.append(damage(tensors, name)),  # type: ignore[misc]
        )
        if words[0]:
            message = refusal(folder, family)
            assert name in message, f"{name} is not named: {message}"
            assert words[0] in message


@pytest.mark.part(6)
@pytest.mark.parametrize("family", FAMILIES)
def test_each_missing_tensor_is_named(family: str, tmp_path: Path) -> None:
    def delete(tensors: Tensors, name: str) -> str:
        del tensors[name]
        return "is missing, wanted ["

    each_tensor(family, delete, tmp_path)


@pytest.mark.part(6)
@pytest.mark.parametrize("family", FAMILIES)
def test_each_renamed_tensor_is_named_as_missing_and_under_its_new_name(family: str, tmp_path: Path) -> None:
    def rename(tensors: Tensors, name: str) -> str:
        tensors[f"{name}.renamed"] = tensors.pop(name)
        return f"not known in such a layer: {name}.renamed"

    each_tensor(family, rename, tmp_path)


@pytest.mark.part(6)
@pytest.mark.parametrize("family", FAMILIES)
def test_each_transposed_tensor_is_named(family: str, tmp_path: Path) -> None:
    def transpose(tensors: Tensors, name: str) -> str:
        array = tensors[name]
        if array.ndim < 2 or array.shape[-1] == array.shape[-2]:
            return ""  # nothing tells a square matrix from its transpose
        tensors[name] = mx.contiguous(array.swapaxes(-1, -2))
        return f"has shape {list(tensors[name].shape)}, wanted {list(array.shape)}"

    each_tensor(family, transpose, tmp_path)


@pytest.mark.part(3)
@pytest.mark.parametrize(
    "family", ["deepseek_v3", "qwen35_moe_real", "qwen3_next", "deepseek_v32", "mimo", "step3p5", *RECENT]
)
def test_each_truncated_tensor_and_each_that_is_not_finite_or_of_a_wrong_dtype_is_named(
    family: str, tmp_path: Path
) -> None:
    def truncate(tensors: Tensors, name: str) -> str:
        tensors[name] = mx.contiguous(tensors[name][:-1])
        return "has shape"

    def poison(tensors: Tensors, name: str) -> str:
        tensors[name] = mx.where(mx.arange(tensors[name].shape[-1]) == 1, float("nan"), tensors[name])
        return "holds NaN or infinity"

    def recast(tensors: Tensors, name: str) -> str:
        tensors[name] = tensors[name].astype(mx.int32)
        return "has dtype int32, wanted bfloat16 or float16 or float32"

    for number, damage in enumerate((truncate, poison, recast)):
        (tmp_path / str(number)).mkdir()
        each_tensor(family, damage, tmp_path / str(number))


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe_lite"])
def test_copies_of_the_targets_embedding_and_head_are_not_needed(family: str, tmp_path: Path) -> None:
    def without(tensors: Tensors) -> None:
        for name in [name for name in tensors if name.startswith(names_of(family).place) and COPIES.fullmatch(name)]:
            del tensors[name]

    plain, bare = (
        load(write(tmp_path / "a", family), family),
        load(write(tmp_path / "b", family, edit_tensors=without), family),
    )
    assert all(mx.array_equal(array, parameters(bare)[name]) for name, array in parameters(plain).items())


def test_a_second_prediction_layer_is_named(tmp_path: Path) -> None:
    def doubled(tensors: Tensors) -> None:
        tensors["mtp.layers.1.input_layernorm.weight"] = mx.zeros((32,))

    folder = write(tmp_path / "a", "qwen35_dense_real", edit_tensors=doubled)
    assert "mtp.layers.1.input_layernorm.weight" in refusal(folder, "qwen35_dense_real")


def test_long_lists_of_faults_are_cut(tmp_path: Path) -> None:
    def emptied(tensors: Tensors) -> None:
        for name in prediction_names("deepseek_v3"):
            if "shared_head" not in name:
                del tensors[name]

    message = refusal(write(tmp_path / "a", "deepseek_v3", edit_tensors=emptied), "deepseek_v3")
    assert re.search(r"and \d+ more", message)
    assert len(message) < 2000


# Settings


def text_of(config: dict[str, Any]) -> dict[str, Any]:
    text: dict[str, Any] = config.get("text_config", config)
    return text


@pytest.mark.part(3)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_setting_that_is_left_out_is_the_targets(family: str, tmp_path: Path) -> None:
    expected = parameters(load(write(tmp_path / "whole", family), family))
    config = checkpoint(family)[0]
    for key in text_of(config):
        if key == "model_type" and "text_config" not in config:
            continue  # it says which family this is
        folder = write(tmp_path / key, family, lambda config, key=key: text_of(config).pop(key))  # type: ignore[misc]
        got = parameters(load(folder, family))
        assert all(mx.array_equal(array, got[name]) for name, array in expected.items()), key


def test_a_missing_model_type_is_named(tmp_path: Path) -> None:
    folder = write(tmp_path / "a", "glm4_moe", lambda config: config.pop("model_type"))
    assert "model_type None" in refusal(folder, "glm4_moe", UnknownDrafter)


WITHOUT_MEANING_HERE = frozenset(
    [
        "model_type",
        "architectures",
        "dtype",
        "transformers_version",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "attention_dropout",
        "initializer_range",
        "output_router_logits",
        "pretraining_tp",
        "use_cache",
        "max_position_embeddings",
        "tie_word_embeddings",
        "router_aux_loss_coef",
        "qk_head_dim",
        "rope_interleave",
        "hidden_act",
        "attn_output_gate",
        "mtp_use_dedicated_embeddings",
        "layer_types",
    ]
)
"""Settings that say nothing about the prediction layer, or that mlx-lm does not read of its target either."""

FREE = (("deepseek_v3", "head_dim"), ("deepseek_v3", "rope_parameters"), ("step3p5", "num_nextn_predict_layers"))
"""Settings with a meaning in one family alone, where they may differ, or that mlx-lm does not read in one alone."""


@pytest.mark.part(6)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_setting_that_is_not_the_targets_is_refused_with_both_values(family: str, tmp_path: Path) -> None:
    checked = 0
    for key, value in text_of(checkpoint(family)[0]).items():
        other = _another(value)
        if key in WITHOUT_MEANING_HERE or other is None or (family, key) in FREE:
            continue
        folder = write(
            tmp_path / key, family, lambda config, key=key, other=other: text_of(config).update({key: other})
        )  # type: ignore[misc]
        message = refusal(folder, family, (CheckpointError, IncompatiblePair))  # type: ignore[arg-type]
        named = key if key != "rope_parameters" else "rope_theta"
        assert f"{named}=" in message, f"{key}: {message}"
        checked += 1
    assert checked >= 8


@pytest.mark.parametrize("family", ["qwen3_next", "deepseek_v32", "glm4_moe"])
def test_a_scaled_rotation_that_the_target_does_not_have_is_refused(family: str, tmp_path: Path) -> None:
    scaling = {"type": "yarn", "factor": 4.0}
    folder = write(tmp_path / "a", family, lambda config: config.update(rope_scaling=scaling))
    assert f"rope_scaling={scaling} against None" in refusal(folder, family, IncompatiblePair)


def _another(value: object) -> object:
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    if isinstance(value, dict):
        key = "num_attention_heads" if "num_attention_heads" in value else "rope_theta"
        return {**value, key: 12345}
    if isinstance(value, list) and value:
        return [*value, value[0]]
    return None


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ({"num_nextn_predict_layers": 2}, "num_nextn_predict_layers=2: one prediction layer"),
        ({"mtp_num_hidden_layers": "one"}, "mtp_num_hidden_layers='one'"),
        ({"mtp_use_dedicated_embeddings": True}, "mtp_use_dedicated_embeddings=True"),
        ({"mtp_layer_types": ["linear_attention"]}, "mtp_layer_types=['linear_attention']"),
        ({"rope_parameters": 3}, "rope_parameters is 3"),
        ({"block_size": 1}, "block_size is 1"),
        ({"block_size": "3"}, "block_size is '3'"),
    ],
)
def test_what_is_not_known_of_prediction_layers_is_refused(tmp_path: Path, setting: dict[str, Any], words: str) -> None:
    folder = write(tmp_path / "a", "qwen3_next", lambda config: config.update(setting))
    assert words in refusal(folder, "qwen3_next")


def test_the_width_is_the_checkpoints_or_the_familys(tmp_path: Path) -> None:
    assert load(write(tmp_path / "a", "qwen3_next"), "qwen3_next").default_width == 3
    assert load(write(tmp_path / "b", "mimo"), "mimo").default_width == 2
    folder = write(tmp_path / "c", "mimo", lambda config: config.update(block_size=5))
    assert load(folder, "mimo").default_width == 5


# Norms kept as w - 1

QWEN = ("qwen35_dense_real", "qwen35_moe_real", "qwen3_next")


def norms(drafter: MtpDrafter) -> list[mx.array]:
    found = [array for name, array in parameters(drafter).items() if "norm" in name]
    assert len(found) == 7
    return found


def converted(tensors: Tensors, family: str) -> None:
    """As a converter writes them for MLX: norms shifted, convolutions moved."""
    for name, array in tensors.items():
        if "conv1d" in name:
            tensors[name] = mx.contiguous(array.moveaxis(2, 1))
        elif name.startswith("mtp.") and "norm" in name:
            tensors[name] = array + 1


@pytest.mark.parametrize("family", QWEN)
def test_norms_of_published_files_are_shifted_once(family: str, tmp_path: Path) -> None:
    stored = checkpoint(family)[1]
    loaded = load(write(tmp_path / "a", family), family)
    raw = [array for name, array in stored.items() if name.startswith("mtp.") and "norm" in name]
    assert sorted(float(array[0]) + 1 for array in raw) == pytest.approx(
        sorted(float(norm[0]) for norm in norms(loaded))
    )


@pytest.mark.parametrize("family", QWEN)
@pytest.mark.parametrize("told_by", ["convolutions", "metadata", "both"])
def test_norms_of_files_written_for_mlx_are_not_shifted_again(family: str, told_by: str, tmp_path: Path) -> None:
    expected = norms(load(write(tmp_path / "raw", family), family))
    folder = write(tmp_path / "a", family)
    tensors = dict(mx.load(str(folder / "model.safetensors")))
    converted(tensors, family)
    if told_by == "metadata":
        tensors = {name: array for name, array in tensors.items() if name.startswith("mtp.")}
    mx.save_safetensors(
        str(folder / "model.safetensors"), tensors, {"format": "pt" if told_by == "convolutions" else "mlx"}
    )
    assert all(mx.array_equal(a, b) for a, b in zip(norms(load(folder, family)), expected, strict=True))


def test_a_side_file_without_a_word_on_its_format_is_as_published(tmp_path: Path) -> None:
    # The target beside it was written for MLX.
    family = "qwen35_dense_real"
    expected = norms(load(write(tmp_path / "raw", family), family))
    folder = write(tmp_path / "a", family)
    tensors = dict(mx.load(str(folder / "model.safetensors")))
    own = {name: tensors.pop(name) for name in list(tensors) if name.startswith("mtp.")}
    mx.eval(own)  # its file is about to be written again
    converted(tensors, family)
    mx.save_safetensors(str(folder / "model.safetensors"), tensors, {"format": "mlx"})
    mx.save_safetensors(str(folder / "mtp.safetensors"), own)
    assert all(mx.array_equal(a, b) for a, b in zip(norms(load(folder, family)), expected, strict=True))


def test_norms_of_families_that_keep_them_as_they_are_stay(tmp_path: Path) -> None:
    stored = checkpoint("deepseek_v3")[1]["model.layers.3.enorm.weight"]
    got = parameters(load(write(tmp_path / "a", "deepseek_v3"), "deepseek_v3"))["embedding_norm.weight"]
    assert mx.array_equal(got, stored)


def test_the_targets_logits_do_not_change_with_the_prediction_layers_presence() -> None:
    folder = FIXTURES / "qwen35_dense_real"
    config = json.loads((folder / "config.json").read_text())
    tensors = mx.load(str(folder / "model.safetensors"))
    bare = {name: array for name, array in tensors.items() if not name.startswith("mtp.")}
    ids = mx.array([[3, 1, 4, 1, 5]])
    assert mx.array_equal(build_target(config, tensors).model(ids), build_target(config, bare).model(ids))
