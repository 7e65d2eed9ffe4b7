"""What is special about single families of prediction layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import KVCache

from mlx_spec.drafters.mtp.model import MtpDrafter
from mlx_spec.errors import CheckpointError, IncompatiblePair
from mlx_spec.pairing import load_drafter
from tests.drafters.native import build_target
from tests.tiny_mtp import CONFIGS, Tensors, checkpoint, names_of, target, write


def load(folder: Path, family: str) -> MtpDrafter:
    loaded = load_drafter(folder, target(family))
    assert isinstance(loaded, MtpDrafter)
    return loaded


def parameters(drafter: MtpDrafter) -> dict[str, mx.array]:
    return dict(tree_flatten(drafter.network.predictor.parameters()))


def assert_same(one: MtpDrafter, other: MtpDrafter) -> None:
    ours, theirs = parameters(one), parameters(other)
    assert ours.keys() == theirs.keys()
    assert all(mx.array_equal(array, theirs[name]) for name, array in ours.items())


# Step 3.5


@pytest.mark.parametrize("count", [-1, "two", 2.5])
def test_a_number_of_layers_that_is_none_is_refused(count: Any, tmp_path: Path) -> None:
    folder = write(tmp_path / "a", "step3p5", lambda config: config.update(num_nextn_predict_layers=count))
    with pytest.raises(CheckpointError, match="num_nextn_predict_layers="):
        load(folder, "step3p5")


def test_its_decoder_layer_may_be_wrapped_or_not(tmp_path: Path) -> None:
    family = "step3p5"

    def unwrap(tensors: Tensors) -> None:
        for name in list(tensors):
            tensors[name.replace(".transformer.", ".")] = tensors.pop(name)

    wrapped, bare = write(tmp_path / "a", family), write(tmp_path / "b", family, edit_tensors=unwrap)
    assert_same(load(wrapped, family), load(bare, family))
    mixed = write(tmp_path / "c", family, edit_tensors=lambda tensors: tensors.update(_renamed_one(tensors)))
    with pytest.raises(CheckpointError, match=r"model.layers.3.transformer.input_layernorm.weight is missing"):
        load(mixed, family)


def _renamed_one(tensors: Tensors) -> Tensors:
    return {
        "model.layers.3.input_layernorm.weight": tensors.pop("model.layers.3.transformer.input_layernorm.weight"),
    }


def test_its_settings_are_those_past_the_targets_layers(tmp_path: Path) -> None:
    attention = load(write(tmp_path / "a", "step3p5"), "step3p5").network.predictor.body.layers[0].self_attn
    assert attention.is_sliding
    assert attention.num_heads == 6
    assert attention.rope.dims == 6
    assert attention.rope.base == 3e4


@pytest.mark.parametrize("key", ["layer_types", "rope_theta"])
def test_lists_that_end_with_the_targets_layers_are_refused(key: str, tmp_path: Path) -> None:
    config, tensors = checkpoint("step3p5")
    short = {**config, key: config[key][:3]}
    own = build_target(short, tensors)
    folder = write(tmp_path / "a", "step3p5", lambda content: content.update({key: short[key]}))
    with pytest.raises(IncompatiblePair, match=f"the target's {key} say nothing of layer 3"):
        load_drafter(folder, own)


def test_a_window_is_kept_by_the_mask_alone(tmp_path: Path) -> None:
    # A block written into a ring at once can be kept or dropped as a whole only; the pairs of a round are kept in part.
    network = load(write(tmp_path / "a", "step3p5"), "step3p5").network
    caches = network.new_caches()
    assert [type(cache) for cache in caches] == [KVCache]
    ids, states = mx.array([[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]]), mx.random.normal((1, 12, 40), key=mx.random.key(1))
    whole = network.run(ids, states, caches, 0, target("step3p5"))
    forgotten = mx.concatenate([states[:, :1] + 100, states[:, 1:]], axis=1)
    other = network.run(ids, forgotten, network.new_caches(), 0, target("step3p5"))
    window = CONFIGS["step3p5"]["sliding_window"]
    same = (mx.abs(whole - other).max(axis=-1) == 0)[0].tolist()
    assert same == [False] * window + [True] * (12 - window)


def test_its_own_head_serves(tmp_path: Path) -> None:
    family = "step3p5"
    network = load(write(tmp_path / "a", family), family).network
    states = mx.random.normal((1, 3, 40), key=mx.random.key(2))
    head = checkpoint(family)[1][f"{names_of(family).place}shared_head.output.weight"]
    logits = network.logits(states, target(family))
    assert mx.abs(logits - network.predictor.final_norm(states) @ head.T).max().item() < 1e-5
    assert mx.abs(logits - target(family).head(network.predictor.final_norm(states))).max().item() > 0.1


# Nemotron-H and EXAONE-MoE: settings of the prediction layer alone


@pytest.mark.parametrize(
    ("family", "setting"),
    [
        ("nemotron_h", {"mtp_hybrid_override_pattern": "*EM"}),
        ("nemotron_h", {"mtp_hybrid_override_pattern": "M"}),
        ("nemotron_h", {"mtp_layers_block_type": ["mamba", "moe"]}),
        ("nemotron_h", {"num_nextn_predict_layers": 2}),
        ("exaone_moe", {"mtp_layer_types": ["sliding_attention"]}),
        ("exaone_moe", {"mtp_sliding_windows": [128]}),
        ("exaone_moe", {"num_nextn_predict_layers": 3}),
    ],
)
def test_a_prediction_layer_of_another_kind_is_refused(family: str, setting: dict[str, Any], tmp_path: Path) -> None:
    folder = write(tmp_path / "a", family, lambda config: config.update(setting))
    ((key, value),) = setting.items()
    with pytest.raises(CheckpointError) as refused:
        load(folder, family)
    assert f"{key}={value!r}" in str(refused.value)


@pytest.mark.parametrize("stated", [["attention", "moe"], ["full_attention", "moe"]])
def test_the_kinds_of_layers_may_be_listed_by_name(stated: list[str], tmp_path: Path) -> None:
    def by_name(config: dict[str, Any]) -> None:
        del config["mtp_hybrid_override_pattern"]
        config["mtp_layers_block_type"] = stated
        config["hybrid_override_pattern"] = list(config["hybrid_override_pattern"])

    assert load(write(tmp_path / "a", "nemotron_h", by_name), "nemotron_h")


@pytest.mark.parametrize("windows", [True, False])
def test_whether_it_is_rotated_hangs_on_the_target_having_windows(windows: bool, tmp_path: Path) -> None:
    config, tensors = checkpoint("exaone_moe")
    if not windows:
        config = {**config, "layer_types": ["full_attention"] * 3}
    folder = write(tmp_path / "a", "exaone_moe", lambda content: content.update(layer_types=config["layer_types"]))
    drafter = load_drafter(folder, build_target(config, tensors))
    assert isinstance(drafter, MtpDrafter)
    attention = drafter.network.predictor.body.layers[0].self_attn
    assert not attention.is_sliding_window
    assert attention.use_rope != windows
