"""`python -m mlx_spec.split_mtp` writes a folder that drafts as the checkpoint it came from."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from mlx_spec.drafters.mtp.model import MtpDrafter
from mlx_spec.errors import CheckpointError, InvalidRequest, MlxSpecError, UnsupportedOption
from mlx_spec.pairing import load_drafter
from mlx_spec.split_mtp import main, split
from tests.tiny_mtp import FAMILIES, checkpoint, target, write

# transformers keeps what mlx-lm wants beside it in an object of its own.
LOADABLE = [family for family in FAMILIES if family not in ("glm4_moe", "qwen3_next")]

Format = dict[str, Any]

FORMATS: list[Format] = [
    {"group_size": 32, "bits": 4, "mode": "affine"},
    {"group_size": 32, "bits": 8, "mode": "affine"},
    {"group_size": 32, "bits": 4, "mode": "mxfp4"},
    {"group_size": 32, "bits": 8, "mode": "mxfp8"},
    {"group_size": 16, "bits": 4, "mode": "nvfp4"},
]

pytestmark = pytest.mark.filterwarnings("ignore:.*not quantized, their rows are no whole groups")


def drafter(folder: Path, family: str, quantize: Format | None = None) -> MtpDrafter:
    loaded = load_drafter(folder, target(family), quantize=quantize)
    assert isinstance(loaded, MtpDrafter)
    return loaded


def assert_same(one: MtpDrafter, other: MtpDrafter) -> None:
    ours, theirs = (dict(tree_flatten(each.network.predictor.parameters())) for each in (one, other))
    assert ours.keys() == theirs.keys()
    for name, array in ours.items():
        assert array.dtype == theirs[name].dtype
        assert mx.array_equal(array, theirs[name])


@pytest.mark.parametrize("family", LOADABLE)
def test_the_folder_drafts_as_the_checkpoint_does(family: str, tmp_path: Path) -> None:
    source = write(tmp_path / "source", family)
    out = split(source, tmp_path / "out")
    assert_same(drafter(out, family), drafter(source, family))
    assert drafter(out, family).default_width == drafter(source, family).default_width
    assert sorted(path.name for path in out.iterdir()) == ["config.json", "model.safetensors"]
    size = (out / "model.safetensors").stat().st_size
    assert size < (source / "model.safetensors").stat().st_size / 2


@pytest.mark.parametrize("quantize", FORMATS, ids=lambda quantize: f"{quantize['mode']}{quantize['bits']}")
@pytest.mark.parametrize("family", ["qwen35_moe_real", "deepseek_v3"])
def test_a_quantized_folder_drafts_as_the_checkpoint_quantized_when_loaded(
    family: str, quantize: Format, tmp_path: Path
) -> None:
    source = write(tmp_path / "source", family)
    out = split(source, tmp_path / "out", quantize)
    loaded, expected = drafter(out, family), drafter(source, family, quantize)
    assert_same(loaded, expected)
    tensors = dict(tree_flatten(loaded.network.predictor.parameters()))
    assert sum(name.endswith(".scales") for name in tensors) >= 6
    assert not any("mlp.gate.scales" in name or "shared_expert_gate.scales" in name for name in tensors)
    states = mx.random.normal((1, 4, 32))
    network = loaded.network
    logits = network.logits(
        network.run(mx.array([[1, 2, 3, 4]]), states, network.new_caches(), 0, target(family)), target(family)
    )
    assert mx.isfinite(logits).all().item()


def test_a_checkpoint_of_8_bit_floats_is_split_loaded_and_drafts(tmp_path: Path) -> None:
    family, name = "deepseek_v3", "model.layers.3.mlp.experts.2.up_proj.weight"

    def pack(tensors: dict[str, mx.array]) -> None:
        tensors[name], tensors[f"{name}_scale_inv"] = mx.to_fp8(tensors[name] * 4), mx.array([[0.25]])

    source = write(tmp_path / "source", family, edit_tensors=pack)
    out = split(source, tmp_path / "out")
    assert_same(drafter(out, family), drafter(source, family))
    state = drafter(out, family).open(target(family))
    state.read_prompt([[1, 2, 3]], mx.random.normal((1, 3, 32)))
    assert state.propose([4], 2).ids.shape == (1, 2)


def test_each_damaged_tensor_of_a_quantized_folder_is_named(tmp_path: Path) -> None:
    family = "qwen35_moe_real"
    out = split(write(tmp_path / "source", family), tmp_path / "out", FORMATS[0])
    tensors = dict(mx.load(str(out / "model.safetensors")))
    mx.eval(tensors)
    for name, array in tensors.items():
        for damaged in ({}, {name: array[:-1]}):
            rest = {other: value for other, value in tensors.items() if other != name}
            mx.save_safetensors(str(out / "model.safetensors"), {**rest, **damaged}, {"format": "mlx"})
            with pytest.raises(CheckpointError) as refused:
                drafter(out, family)
            assert name.removesuffix(".scales").removesuffix(".weight") in str(refused.value)


@pytest.mark.slow
def test_the_command_writes_says_where_and_refuses_in_one_line(tmp_path: Path) -> None:
    source = write(tmp_path / "source", "mimo")
    command = [sys.executable, "-m", "mlx_spec.split_mtp", str(source), str(tmp_path / "out")]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    assert ran.stdout == f"wrote {tmp_path / 'out'}. Use it with --draft-model {tmp_path / 'out'}\n"
    again = subprocess.run(command, capture_output=True, text=True, check=False)
    assert again.returncode == 2
    assert again.stderr.startswith("error: ")
    assert "is not an empty folder" in again.stderr
    assert again.stderr.count("\n") == 1


def test_the_commands_flags_reach_the_weights(tmp_path: Path) -> None:
    source = write(tmp_path / "source", "qwen35_dense_real")
    assert main([str(source), str(tmp_path / "a"), "--bits", "8", "--group-size", "32"]) == 0
    assert main([str(source), str(tmp_path / "b"), "--mode", "mxfp4"]) == 0
    written = [json.loads((tmp_path / name / "config.json").read_text())["quantization"] for name in ("a", "b")]
    assert written == [
        {"bits": 8, "group_size": 32, "mode": "affine"},
        {"bits": 4, "group_size": 32, "mode": "mxfp4"},
    ]
    assert main([str(source), str(tmp_path / "c"), "--bits", "7"]) == 2
    assert not (tmp_path / "c").exists()


def test_what_cannot_be_split_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    def without(tensors: dict[str, mx.array]) -> None:
        for name in [name for name in tensors if name.startswith("model.layers.3.")]:
            del tensors[name]

    unknown = write(tmp_path / "unknown", "mimo", lambda config: config.update(model_type="not/a/model"))
    bare = write(tmp_path / "bare", "deepseek_v3", edit_tensors=without)
    cases: list[tuple[Path, type[MlxSpecError], str]] = [
        (unknown, UnsupportedOption, "'not/a/model', for which mlx-lm has no module"),
        (bare, CheckpointError, "holds no prediction layer"),
    ]
    for source, error, words in cases:
        with pytest.raises(error, match=words):
            split(source, tmp_path / "out")
        assert not (tmp_path / "out").exists()
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidRequest, match="is not an empty folder"):
        split(bare, tmp_path / "file")


def test_nothing_to_quantize_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedOption, match="rows that are a multiple of 128"):
        split(write(tmp_path / "source", "mimo"), tmp_path / "out", {"group_size": 128, "bits": 4})


def test_matrices_left_as_they_are_and_routers_are_told(tmp_path: Path) -> None:
    source = write(tmp_path / "source", "deepseek_v3")
    with pytest.warns(UserWarning, match=r"not quantized.*model\.layers\.3\.self_attn\.q_b_proj") as warned:
        load_drafter(source, target("deepseek_v3"), quantize=FORMATS[0])
    assert "mlp.gate" not in str(warned[0].message)


def test_the_settings_written_are_the_text_models(tmp_path: Path) -> None:
    out = split(write(tmp_path / "source", "qwen35_moe_real"), tmp_path / "out")
    config = json.loads((out / "config.json").read_text())
    assert config["model_type"] == "qwen3_5_mtp"
    assert config["block_size"] == 3
    source = checkpoint("qwen35_moe_real")[0]["text_config"]
    assert config["text_config"] == {key: value for key, value in source.items() if key != "architectures"}
