"""Prediction layers in the target's own repository: which files hold them, which are fetched, how they are packed."""

from __future__ import annotations

import fnmatch
import json
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from mlx_spec import pairing
from mlx_spec.drafters.mtp.model import MtpDrafter
from mlx_spec.errors import CheckpointError
from mlx_spec.pairing import load_drafter
from tests.tiny_mtp import checkpoint, names_of, target, write

FAMILY = "deepseek_v3"
INDEX = "model.safetensors.index.json"


def parameters(folder: Path | str, family: str = FAMILY, **options: Any) -> dict[str, mx.array]:
    loaded = load_drafter(folder, target(family), **options)
    assert isinstance(loaded, MtpDrafter)
    return dict(tree_flatten(loaded.network.predictor.parameters()))


def assert_same(got: dict[str, mx.array], want: dict[str, mx.array]) -> None:
    assert got.keys() == want.keys()
    assert all(mx.array_equal(array, want[name]) for name, array in got.items())


@pytest.fixture
def expected(tmp_path: Path) -> dict[str, mx.array]:
    return parameters(write(tmp_path / "whole", FAMILY))


def sharded(folder: Path, family: str = FAMILY, indexed: bool = True) -> Path:
    """The checkpoint in three shards; the prediction layer is in the last two, the second of which has more."""
    folder.mkdir()
    config, tensors = checkpoint(family)
    place = names_of(family).place
    own = [name for name in tensors if name.startswith(place)]
    others = [name for name in tensors if not name.startswith(place)]
    shards = {
        "model-1.safetensors": others[:40],
        "model-2.safetensors": [*others[40:], *own[:9]],
        "model-3.safetensors": own[9:],
    }
    for shard, names in shards.items():
        mx.save_safetensors(str(folder / shard), {name: tensors[name] for name in names}, {"format": "pt"})
    weight_map = {name: shard for shard, names in shards.items() for name in names if indexed or name in others}
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("indexed", [True, False])
def test_the_layer_is_read_from_its_shards_whether_or_not_the_index_names_it(
    tmp_path: Path, expected: dict[str, mx.array], indexed: bool
) -> None:
    assert_same(parameters(sharded(tmp_path / "shards", indexed=indexed)), expected)


def test_shards_without_a_tensor_of_the_layer_may_be_absent(tmp_path: Path, expected: dict[str, mx.array]) -> None:
    folder = sharded(tmp_path / "shards")
    (folder / "model-1.safetensors").unlink()
    assert_same(parameters(folder), expected)


def test_a_shard_of_the_layer_that_is_absent_is_named(tmp_path: Path) -> None:
    folder = sharded(tmp_path / "shards")
    (folder / "model-3.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"names 'model-3\.safetensors' for model\.layers\.3\..*incomplete"):
        parameters(folder)


@pytest.mark.parametrize("name", ["../outside.safetensors", "/etc/x.safetensors", "C:\\x.safetensors", "weights.bin"])
def test_an_index_cannot_lead_out_of_its_folder(tmp_path: Path, name: str) -> None:
    folder = write(tmp_path / "inside", FAMILY)
    (folder / INDEX).write_text(json.dumps({"weight_map": {"model.layers.3.enorm.weight": name}}))
    with pytest.raises(CheckpointError, match="only safetensors files inside the folder"):
        parameters(folder)


def test_a_side_file_is_read(tmp_path: Path, expected: dict[str, mx.array]) -> None:
    folder = write(tmp_path / "a", FAMILY)
    tensors = dict(mx.load(str(folder / "model.safetensors")))
    mx.eval(tensors)
    own = {name: tensors.pop(name) for name in list(tensors) if name.startswith(names_of(FAMILY).place)}
    mx.save_safetensors(str(folder / "model.safetensors"), tensors)
    mx.save_safetensors(str(folder / "mtp.safetensors"), own)
    (folder / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(tensors, "model.safetensors")}))
    assert_same(parameters(folder), expected)


def test_a_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    folder = write(tmp_path / "a", FAMILY)
    shutil.copy(folder / "model.safetensors", folder / "again.safetensors")
    with pytest.raises(CheckpointError, match="keep one of the files"):
        parameters(folder)


def test_layers_under_two_names_are_refused(tmp_path: Path) -> None:
    def twice(tensors: dict[str, mx.array]) -> None:
        tensors["language_model.model.layers.3.enorm.weight"] = tensors["model.layers.3.enorm.weight"]

    with pytest.raises(CheckpointError, match=r"under several names: language_model\.model\.layers\.3\., model\."):
        parameters(write(tmp_path / "a", FAMILY, edit_tensors=twice))


@pytest.mark.parametrize("family", ["deepseek_v3", "qwen35_dense_real"])
def test_a_checkpoint_that_lost_the_layer_its_config_declares_says_so_and_the_way_out(
    tmp_path: Path, family: str
) -> None:
    def converted(tensors: dict[str, mx.array]) -> None:
        for name in [name for name in tensors if name.startswith(names_of(family).place)]:
            del tensors[name]

    folder = write(tmp_path / "a", family, edit_tensors=converted)
    with pytest.raises(CheckpointError) as refused:
        parameters(folder, family, kind="mtp")
    message = str(refused.value)
    declared = "num_nextn_predict_layers=1" if family == "deepseek_v3" else "mtp_num_hidden_layers=1"
    assert f"no prediction layer although config.json says {declared}" in message
    assert names_of(family).place in message
    assert "Conversions made by mlx-lm leave these tensors out" in message
    assert "python -m mlx_spec.split_mtp" in message


@pytest.mark.parametrize("prefix", ["language_model.", "model.language_model.", "model."])
def test_other_places_of_the_same_names_are_read(tmp_path: Path, prefix: str) -> None:
    family = "qwen35_moe_real"

    def moved(tensors: dict[str, mx.array]) -> None:
        for name in [name for name in tensors if name.startswith("mtp.")]:
            tensors[prefix + name] = tensors.pop(name)

    plain = parameters(write(tmp_path / "a", family), family)
    assert_same(parameters(write(tmp_path / "b", family, edit_tensors=moved), family), plain)


@pytest.mark.parametrize("family", ["qwen35_moe_real", "qwen3_next"])
def test_experts_one_by_one_and_side_by_side_are_the_same(tmp_path: Path, family: str) -> None:
    def other_form(tensors: dict[str, mx.array]) -> None:
        experts = "mtp.layers.0.mlp.experts."
        if f"{experts}gate_up_proj" in tensors:
            both, down = tensors.pop(f"{experts}gate_up_proj"), tensors.pop(f"{experts}down_proj")
            for each in range(4):
                gate, up = mx.split(both[each], 2)
                tensors[f"{experts}{each}.gate_proj.weight"] = gate
                tensors[f"{experts}{each}.up_proj.weight"] = up
                tensors[f"{experts}{each}.down_proj.weight"] = down[each]
            return

        def stack(part: str) -> mx.array:
            return mx.stack([tensors.pop(f"{experts}{each}.{part}.weight") for each in range(4)])

        tensors[f"{experts}gate_up_proj"] = mx.concatenate([stack("gate_proj"), stack("up_proj")], axis=1)
        tensors[f"{experts}down_proj"] = stack("down_proj")

    plain = parameters(write(tmp_path / "a", family), family)
    assert_same(parameters(write(tmp_path / "b", family, edit_tensors=other_form), family), plain)


# The hub


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[Path], list[str]]:
    """Stand in for downloads out of a folder: `hub(folder)` returns the names fetched, as they come."""

    def serve(repository: Path) -> list[str]:
        fetched: list[str] = []
        local = tmp_path / "downloaded"
        local.mkdir()

        def snapshot_download(name: str, revision: str | None, allow_patterns: Iterable[str]) -> str:
            for file in sorted(repository.iterdir()):
                wanted = any(fnmatch.fnmatch(file.name, pattern) for pattern in allow_patterns)
                if wanted and not (local / file.name).exists():
                    shutil.copy(file, local)
                    fetched.append(file.name)
            return str(local)

        monkeypatch.setattr(pairing, "snapshot_download", snapshot_download)
        return fetched

    return serve


def test_of_a_targets_repository_only_the_shards_with_the_layer_are_downloaded(
    tmp_path: Path, expected: dict[str, mx.array], hub: Callable[[Path], list[str]]
) -> None:
    fetched = hub(sharded(tmp_path / "repository"))
    assert_same(parameters("owner/target"), expected)
    assert fetched == ["config.json", INDEX, "model-2.safetensors", "model-3.safetensors"]


def test_a_side_file_in_the_repository_is_downloaded_without_the_shards(
    tmp_path: Path, expected: dict[str, mx.array], hub: Callable[[Path], list[str]]
) -> None:
    repository = sharded(tmp_path / "repository", indexed=False)
    tensors = checkpoint(FAMILY)[1]
    for shard in ("model-2.safetensors", "model-3.safetensors"):
        mx.save_safetensors(str(repository / shard), {f"other_{shard}": mx.zeros((1,))})
    own = {name: array for name, array in tensors.items() if name.startswith(names_of(FAMILY).place)}
    mx.save_safetensors(str(repository / "model-mtp.safetensors"), own)
    fetched = hub(repository)
    assert_same(parameters("owner/target", kind="mtp"), expected)
    assert fetched == ["config.json", INDEX, "model-mtp.safetensors"]


def test_a_converted_repository_is_refused_before_its_weights_are_downloaded(
    tmp_path: Path, hub: Callable[[Path], list[str]]
) -> None:
    repository = sharded(tmp_path / "repository", indexed=False)
    fetched = hub(repository)
    with pytest.raises(CheckpointError, match="Give the original repository"):
        parameters("owner/target", kind="mtp")
    assert fetched == ["config.json", INDEX]


# 8-bit floats


def packed(weight: mx.array, block: tuple[int, int]) -> tuple[mx.array, mx.array]:
    """8-bit floats and the scale of each block, as published."""
    rows, columns = weight.shape
    height, width = -(-rows // block[0]), -(-columns // block[1])
    scales = mx.array([[0.5 + 0.25 * (row + 2 * column) for column in range(width)] for row in range(height)])
    spread = mx.repeat(mx.repeat(scales, block[0], axis=0)[:rows], block[1], axis=1)[:, :columns]
    return mx.to_fp8(weight / spread), scales


def test_scales_kept_as_exponents_are_powers_of_two(tmp_path: Path) -> None:
    name = "model.layers.3.self_attn.o_proj.weight"

    def pack(exponents: bool) -> Callable[[dict[str, mx.array]], None]:
        def edit(tensors: dict[str, mx.array]) -> None:
            tensors[name] = mx.to_fp8(tensors[name] * 4)
            tensors[f"{name}_scale_inv"] = mx.array([[125]], mx.uint8) if exponents else mx.array([[0.25]])

        return edit

    plain = parameters(write(tmp_path / "a", FAMILY, edit_tensors=pack(False)))
    assert_same(parameters(write(tmp_path / "b", FAMILY, edit_tensors=pack(True))), plain)


@pytest.mark.parametrize("stated", [True, False])
def test_8_bit_floats_with_a_scale_per_block_are_unpacked(tmp_path: Path, stated: bool) -> None:
    block = (16, 24) if stated else (128, 128)
    originals: dict[str, mx.array] = {}

    def pack(tensors: dict[str, mx.array]) -> None:
        for name in [name for name in tensors if name.startswith("model.layers.3.") and "proj.weight" in name]:
            if "eh_proj" in name:
                continue
            originals[name] = tensors[name]
            tensors[name], tensors[f"{name}_scale_inv"] = packed(tensors[name], block)

    settings = {"quantization_config": {"quant_method": "fp8", "weight_block_size": list(block)}} if stated else {}
    folder = write(tmp_path / "a", FAMILY, lambda config: config.update(settings), pack)
    got = parameters(folder)
    assert len(originals) == 19
    projection = got["body.layers.0.self_attn.o_proj.weight"]
    original = originals["model.layers.3.self_attn.o_proj.weight"]
    assert projection.dtype == mx.bfloat16
    # 3 bits after the leading one, of the largest of a block or of the smallest step.
    assert mx.abs(projection - original).max().item() <= mx.abs(original).max().item() / 16 + 2**-9
    experts = got["body.layers.0.mlp.switch_mlp.up_proj.weight"]
    wanted = mx.stack([originals[f"model.layers.3.mlp.experts.{each}.up_proj.weight"] for each in range(4)])
    assert mx.abs(experts - wanted).max().item() <= mx.abs(wanted).max().item() / 16 + 2**-9


def test_8_bit_floats_with_a_scale_per_row_are_unpacked(tmp_path: Path) -> None:
    name = "model.layers.3.self_attn.o_proj.weight"
    original = checkpoint(FAMILY)[1][name]

    def pack(tensors: dict[str, mx.array]) -> None:
        scales = mx.abs(original).max(axis=1, keepdims=True) / 8
        tensors[name], tensors[f"{name}_scale"] = mx.to_fp8(original / scales), scales

    got = parameters(write(tmp_path / "a", FAMILY, edit_tensors=pack))["body.layers.0.self_attn.o_proj.weight"]
    assert mx.abs(got - original).max().item() <= mx.abs(original).max().item() / 16


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda t, n: t.update({f"{n}_scale_inv": mx.ones((2, 1))}), "has shape [2, 1], wanted [1, 1]"),
        (lambda t, n: t.pop(n), "scales an 8-bit float matrix self_attn.o_proj.weight, got none"),
        (lambda t, n: t.pop(f"{n}_scale_inv"), "has dtype uint8, wanted bfloat16"),
        (lambda t, n: t.update({f"{n}_scale_inv": mx.array([[float("nan")]])}), "holds NaN"),
    ],
)
def test_damaged_scales_are_named(tmp_path: Path, damage: Callable[[Any, str], object], words: str) -> None:
    name = "model.layers.3.self_attn.o_proj.weight"

    def pack(tensors: dict[str, mx.array]) -> None:
        tensors[name], tensors[f"{name}_scale_inv"] = packed(tensors[name], (128, 128))
        damage(tensors, name)

    with pytest.raises(CheckpointError) as refused:
        parameters(write(tmp_path / "a", FAMILY, edit_tensors=pack))
    assert words in str(refused.value)
    assert name in str(refused.value)
