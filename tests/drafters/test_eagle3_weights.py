"""EAGLE-3 tensors: whatever is wrong with one is an error that names it."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from mlx_spec.errors import CheckpointError
from tests.drafters.eagle3_files import FLAT, Tensors, config, drafter, load, target, tensors, write

USED = tuple(sorted(name for name in tensors() if name != "t2d"))
MATRICES = tuple(
    name for name in USED if tensors()[name].ndim == 2 and tensors()[name].shape[0] != tensors()[name].shape[1]
)
FLOATING = tuple(name for name in USED if name != "d2t")


def refusal(folder: Path) -> str:
    with pytest.raises(CheckpointError) as refused:
        load(folder)
    assert str(folder) in str(refused.value)
    return str(refused.value)


def test_the_fixture_has_every_tensor_of_the_family() -> None:
    assert len(USED) == 14
    assert len(MATRICES) == 8


@pytest.mark.parametrize("name", USED)
def test_a_missing_tensor_is_named_with_its_shape(tmp_path: Path, name: str) -> None:
    message = refusal(write(tmp_path, edit_tensors=lambda content: content.pop(name)))
    assert f"{name} is missing, wanted {list(tensors()[name].shape)}" in message


@pytest.mark.parametrize("name", USED)
def test_a_renamed_tensor_is_named_under_both_names(tmp_path: Path, name: str) -> None:
    message = refusal(write(tmp_path, edit_tensors=lambda content: content.update({f"x_{name}": content.pop(name)})))
    assert f"{name} is missing" in message
    assert f"x_{name}" in message.replace(f"{name} is missing", "")


@pytest.mark.parametrize("name", MATRICES)
def test_a_transposed_tensor_is_named_with_both_shapes(tmp_path: Path, name: str) -> None:
    shape = list(tensors()[name].shape)
    message = refusal(write(tmp_path, edit_tensors=lambda content: content.update({name: content[name].T})))
    assert f"{name} has shape {shape[::-1]}, wanted {shape}" in message


@pytest.mark.parametrize("name", USED)
def test_a_truncated_tensor_is_named_with_both_shapes(tmp_path: Path, name: str) -> None:
    shape = list(tensors()[name].shape)
    message = refusal(write(tmp_path, edit_tensors=lambda content: content.update({name: content[name][:-1]})))
    assert f"{name} has shape {[shape[0] - 1, *shape[1:]]}, wanted {shape}" in message


@pytest.mark.parametrize("name", FLOATING)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_number_that_is_not_finite_is_named(tmp_path: Path, name: str, bad: float) -> None:
    def poisoned(content: Tensors) -> None:
        content[name] = mx.where(mx.arange(content[name].size).reshape(content[name].shape) == 5, bad, content[name])

    assert f"{name} holds NaN or infinity" in refusal(write(tmp_path, edit_tensors=poisoned))


@pytest.mark.parametrize(("name", "dtype"), [("norm.weight", mx.int32), ("fc.weight", mx.uint32), ("d2t", mx.float32)])
def test_a_wrong_dtype_is_named(tmp_path: Path, name: str, dtype: mx.Dtype) -> None:
    message = refusal(write(tmp_path, edit_tensors=lambda content: content.update({name: content[name].astype(dtype)})))
    assert f"{name} has dtype {str(dtype).removeprefix('mlx.core.')}" in message


def test_everything_that_is_wrong_is_named_at_once(tmp_path: Path) -> None:
    def damaged(content: Tensors) -> None:
        del content["norm.weight"]
        content["fc.weight"] = content["fc.weight"][:, :64]
        content["lm_head.weight"] = content["lm_head.weight"][:30]
        content["surprise"] = mx.zeros((2,))

    message = refusal(write(tmp_path, edit_tensors=damaged))
    for words in (
        "norm.weight",
        "fc.weight",
        "lm_head.weight",
        "surprise",
        "number of tapped layers",
        "draft_vocab_size",
    ):
        assert words in message


def test_a_missing_tensor_is_spelled_as_the_file_spells_the_others(tmp_path: Path) -> None:
    def renamed(content: Tensors) -> None:
        for name in list(content):
            content[name.replace("midlayer.", "layers.0.")] = content.pop(name)
        del content["layers.0.hidden_norm.weight"]

    assert "layers.0.hidden_norm.weight is missing" in refusal(write(tmp_path, edit_tensors=renamed))


def test_one_tensor_under_two_names_is_refused(tmp_path: Path) -> None:
    message = refusal(
        write(tmp_path, edit_tensors=lambda content: content.update({"model.norm.weight": content["norm.weight"]}))
    )
    assert "model.norm.weight" in message


@pytest.mark.parametrize(
    "name",
    [
        "midlayer.self_attn.kv_b_proj.weight",
        "layers.1.mlp.up_proj.weight",
        "midlayer.mlp.experts.0.up_proj.weight",
        "midlayer.mlp.up_proj.weight_scale",
        "midlayer.self_attn.q_proj.bias",
        "lm_head.bias",
        "mask_hidden",
    ],
)
def test_a_tensor_of_an_unsupported_variant_is_refused_by_name(tmp_path: Path, name: str) -> None:
    message = refusal(write(tmp_path, edit_tensors=lambda content: content.update({name: mx.zeros((8,))})))
    assert f"{name} belongs to an unsupported variant" in message
    assert "Supported are EAGLE-3 drafters with" in message


def test_tensors_that_are_not_used_are_named_in_one_warning(tmp_path: Path) -> None:
    folder = write(
        tmp_path, edit_tensors=lambda content: content.update(surprise=mx.zeros((2,)), another=mx.zeros((3,)))
    )
    with pytest.warns(UserWarning, match=r"ignored: (surprise, another|another, surprise)") as warned:
        load(folder)
    assert len(warned) == 1


def test_training_leftovers_are_ignored_silently(tmp_path: Path) -> None:
    name = "midlayer.self_attn.rotary_emb.inv_freq"
    folder = write(tmp_path, edit_tensors=lambda content: content.update({name: mx.zeros((4,))}))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load(folder)


@pytest.mark.parametrize("entry", [-1000, 96, 2**62, -(2**63)])
def test_an_offset_that_leaves_the_vocabulary_is_named(tmp_path: Path, entry: int) -> None:
    def shifted(content: Tensors) -> None:
        content["d2t"] = mx.where(mx.arange(40) == 7, mx.array(entry, mx.int64), content["d2t"])

    assert "d2t[7] maps draft id 7 to" in refusal(write(tmp_path, edit_tensors=shifted))


def test_offsets_are_added_to_the_draft_id(tmp_path: Path) -> None:
    def wrong_once(content: Tensors) -> None:
        content["d2t"] = mx.where(mx.arange(40) == 7, mx.array(88, mx.int64), content["d2t"])

    ids = load(write(tmp_path, edit_tensors=wrong_once)).network.target_ids.tolist()
    right = drafter().network.target_ids.tolist()
    assert right == [index + offset for index, offset in enumerate(tensors()["d2t"].tolist())]
    assert [index for index in range(40) if ids[index] != right[index]] == [7]
    assert ids[7] == 95


def test_biases_are_used_where_the_config_asks_for_them(tmp_path: Path) -> None:
    sizes = {
        "fc": 32,
        **{f"midlayer.self_attn.{name}": size for name, size in (("q_proj", 32), ("k_proj", 16), ("v_proj", 16))},
        **{f"midlayer.{name}": size for name, size in (("self_attn.o_proj", 32), ("mlp.down_proj", 32))},
        **{f"midlayer.mlp.{name}": 48 for name in ("gate_proj", "up_proj")},
    }
    flags = {"attention_bias": True, "mlp_bias": True, "bias": True}
    message = refusal(write(tmp_path, lambda content: content.update(flags)))
    assert all(f"{name}.bias is missing, wanted [{size}]" in message for name, size in sizes.items())
    biases = {f"{name}.bias": mx.full((size,), 0.5) for name, size in sizes.items()}
    biased = load(write(tmp_path, lambda content: content.update(flags), lambda content: content.update(biases)))
    tapped = mx.random.normal((1, 2, 96))
    assert mx.allclose(
        biased.network.fuse(tapped, target()), drafter().network.fuse(tapped, target()) + 0.5, atol=1e-5
    ).item()


# Files


def test_shards_named_by_an_index_are_read(tmp_path: Path) -> None:
    content, names = tensors(), sorted(tensors())
    shards = {"one.safetensors": names[:5], "two.safetensors": names[5:]}
    for shard, members in shards.items():
        mx.save_safetensors(str(tmp_path / shard), {name: content[name] for name in members})
    mx.save_safetensors(str(tmp_path / "stray.safetensors"), {"stray": mx.zeros((2,))})
    weight_map = {name: shard for shard, members in shards.items() for name in members}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (tmp_path / "config.json").write_text(json.dumps(config()))
    loaded = dict(tree_flatten(load(tmp_path).network.modules.parameters()))
    expected = dict(tree_flatten(drafter().network.modules.parameters()))
    assert loaded.keys() == expected.keys()
    assert all(mx.array_equal(array, expected[name]) for name, array in loaded.items())


@pytest.mark.parametrize(
    "name",
    ["../outside.safetensors", "/etc/outside.safetensors", "a/../../b.safetensors", "C:\\x.safetensors", "weights.bin"],
)
def test_an_index_cannot_lead_out_of_its_folder(tmp_path: Path, name: str) -> None:
    folder = write(tmp_path / "inside")
    mx.save_safetensors(str(tmp_path / "outside.safetensors"), tensors())
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"norm.weight": name}}))
    message = refusal(folder)
    assert repr(name) in message
    assert "only safetensors files inside the folder" in message


@pytest.mark.parametrize(
    "content", ["{}", "[]", '{"weight_map": 3}', '{"weight_map": {"a": 1}}', "not json", "[" * 10**5]
)
def test_a_damaged_index_is_named(tmp_path: Path, content: str) -> None:
    folder = write(tmp_path)
    (folder / "model.safetensors.index.json").write_text(content)
    assert "model.safetensors.index.json" in refusal(folder)


def test_a_shard_that_is_not_there_is_named(tmp_path: Path) -> None:
    folder = write(tmp_path)
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"norm.weight": "gone.safetensors"}}')
    assert "'gone.safetensors', which is not in the folder" in refusal(folder)


def test_a_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    folder = write(tmp_path)
    mx.save_safetensors(str(folder / "model-2.safetensors"), {"norm.weight": mx.zeros((32,))})
    assert "norm.weight" in refusal(folder)


def header(text: bytes, data: bytes = b"", length: int | None = None) -> bytes:
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x01\x02",
        b"\x80\x04\x95" + b"pickled" * 30,
        header(b"{}", length=2**63),
        header(b"not json"),
        header(b"[1]"),
        header(b'{"a": 3}'),
        header(b"[" * 100_000),
        header(b'{"a":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}}', b"\0" * 8),
        header(b'{"a":{"dtype":"F32","shape":[-4],"data_offsets":[0,16]}}', b"\0" * 16),
        header(b'{"a":{"dtype":"F32","shape":[2147483647,2147483647],"data_offsets":[0,16]}}', b"\0" * 16),
        header(b'{"a":{"dtype":"F32","shape":[4],"data_offsets":[-16,0]}}', b"\0" * 16),
        header(b'{"a":{"dtype":"F64","shape":[2],"data_offsets":[0,16]}}', b"\0" * 16),
        header(b'{"a":{"dtype":"F32"}}'),
        (FLAT / "model.safetensors").read_bytes()[:-100],
        (FLAT / "model.safetensors").read_bytes()[:300],
    ],
)
def test_a_damaged_or_hostile_file_is_named_without_a_traceback_from_deep_inside(
    tmp_path: Path, content: bytes
) -> None:
    folder = write(tmp_path)
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match="is not a complete safetensors file") as refused:
        load(folder)
    assert "model.safetensors" in str(refused.value)
    assert refused.value.__suppress_context__
    assert "\n" not in str(refused.value)


def test_only_safetensors_are_read(tmp_path: Path) -> None:
    folder = write(tmp_path)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert "Only safetensors are read" in refusal(folder)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe", b"[" * 100_000, b'"text"'])
def test_a_damaged_config_is_named(tmp_path: Path, content: bytes) -> None:
    folder = write(tmp_path)
    (folder / "config.json").write_bytes(content)
    assert "config.json" in refusal(folder)
