"""EAGLE-3 for DeepSeek-V3 and Kimi K2: what such drafters take from the target, and how their files count layers."""

from __future__ import annotations

import functools
import json
import warnings
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import pytest
from mlx import nn
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

from mlx_spec.drafters import eagle3
from mlx_spec.drafters.eagle3.lineage import Lineage
from mlx_spec.drafters.eagle3.model import Eagle3Drafter
from mlx_spec.drafters.registry import validate_drafter_compatibility
from mlx_spec.errors import CheckpointError, IncompatiblePair, UnsupportedOption
from mlx_spec.model.target import Target
from mlx_spec.pairing import load_drafter
from tests.drafters.eagle3_made import (
    DRAFTED,
    HIDDEN,
    YARN,
    Config,
    Tensors,
    deepseek,
    kimi,
    made_target,
    target_of,
    write_made,
)
from tests.drafters.test_eagle3_variants import text
from tests.tiny import VOCAB, randomise

IDS = "eagle_aux_hidden_state_layer_ids"


@functools.cache
def kimi_target(layers: int = 8) -> Target:
    return Target(randomise(lambda: kimi(layers), seed=6))


def load(folder: Path, target: Target) -> Eagle3Drafter:
    drafter = load_drafter(folder, target)
    assert isinstance(drafter, Eagle3Drafter)
    return drafter


def refusal(folder: Path, target: Target) -> str:
    with pytest.raises(CheckpointError) as refused:
        load(folder, target)
    return str(refused.value)


def listing(ids: object) -> Callable[[Config], None]:
    def edit(content: Config) -> None:
        content["eagle_config"] = {IDS: ids}

    return edit


def wider(states: int) -> Callable[[Tensors], None]:
    """fc for that many states of the target."""

    def edit(content: Tensors) -> None:
        content["fc.weight"] = mx.zeros((HIDDEN, states * HIDDEN))

    return edit


# Layers


def test_lists_count_the_inputs_of_layers(tmp_path: Path) -> None:
    assert load(write_made(tmp_path, "heads_for_deepseek"), made_target(True)).taps == (1, 4)
    assert load(write_made(tmp_path, "latent"), made_target(True)).taps == (1, 3, 4)
    assert load(write_made(tmp_path, "latent"), kimi_target()).taps == (1, 3, 4)


def test_the_same_list_counts_outputs_for_any_other_target(tmp_path: Path) -> None:
    assert load(write_made(tmp_path, "heads_for_deepseek"), made_target()).taps == (2, 5)


@pytest.mark.parametrize("ids", [[0, 4], [-1, 4]])
def test_a_layer_number_that_is_not_positive_is_refused(tmp_path: Path, ids: list[int]) -> None:
    message = refusal(write_made(tmp_path, "heads_for_deepseek", listing(ids)), made_target(True))
    assert f"{IDS} is {ids}, but the smallest layer number is 1 here" in message


def test_a_list_that_starts_with_1_can_be_read_in_two_ways_and_is_told(tmp_path: Path) -> None:
    folder = write_made(tmp_path, "heads_for_deepseek", listing([1, 5]))
    with pytest.warns(UserWarning, match=r"the first means the output of layer 0.*pass taps=\(1, 5\)"):
        assert load(folder, made_target(True)).taps == (0, 4)


@pytest.mark.parametrize(
    ("target", "states", "layers", "taps"),
    [
        ("deepseek", 2, 8, (1, 4)),
        ("deepseek", 3, 8, (1, 3, 4)),
        ("deepseek", 3, 11, (1, 4, 7)),
        ("kimi", 2, 8, (2, 5)),
        ("kimi", 3, 8, (2, 4, 5)),
        ("llama", 3, 8, (1, 3, 4)),
    ],
)
def test_a_drafter_that_lists_no_layers_gets_the_usual_ones_of_the_targets_depth(
    tmp_path: Path, target: str, states: int, layers: int, taps: tuple[int, ...]
) -> None:
    made = kimi_target(layers) if target == "kimi" else made_target(target == "deepseek", layers)
    folder = write_made(tmp_path, "heads_for_deepseek", lambda content: content.pop("eagle_config"), wider(states))
    with pytest.warns(UserWarning, match=f"the outputs of layers .* are taken, the usual ones for {layers} layers"):
        assert load(folder, made).taps == taps


@pytest.mark.parametrize(
    ("for_deepseek", "states", "layers"), [(True, 3, 4), (True, 2, 4), (False, 2, 8), (False, 3, 5)]
)
def test_where_there_are_no_usual_layers_the_list_is_asked_for(
    tmp_path: Path, for_deepseek: bool, states: int, layers: int
) -> None:
    folder = write_made(tmp_path, "heads_for_deepseek", lambda content: content.pop("eagle_config"), wider(states))
    message = refusal(folder, made_target(for_deepseek, layers))
    assert f"There is no default for {states} of {layers} layers" in message
    assert "taps=" in message


def test_the_number_of_layers_must_be_what_fc_reads(tmp_path: Path) -> None:
    folder = write_made(tmp_path, "heads_for_deepseek", listing([2, 3, 5]))
    message = refusal(folder, made_target(True))
    assert "lists 3 layers" in message
    assert "for 2 states" in message


@pytest.mark.parametrize("columns", [HIDDEN, 4 * HIDDEN, 2 * HIDDEN + 1])
def test_fc_must_read_two_or_three_states(tmp_path: Path, columns: int) -> None:
    def edit(content: Tensors) -> None:
        content["fc.weight"] = mx.zeros((HIDDEN, columns))

    message = refusal(write_made(tmp_path, "heads_for_deepseek", edit_tensors=edit), made_target(True))
    assert f"fc.weight has {columns} columns" in message
    assert "2 or 3 states" in message


def test_a_drafter_without_fc_is_refused_by_name(tmp_path: Path) -> None:
    folder = write_made(tmp_path, "heads_for_deepseek", edit_tensors=lambda content: content.pop("fc.weight"))
    assert "fc.weight is missing" in refusal(folder, made_target(True))


# Settings from the target


def test_settings_that_a_latent_drafter_leaves_out_are_the_targets_and_are_told(tmp_path: Path) -> None:
    left_out = ("rms_norm_eps", "kv_lora_rank", "num_attention_heads", "v_head_dim")
    target = made_target(True)
    complete = load(write_made(tmp_path / "complete", "latent"), target)
    folder = write_made(tmp_path / "lean", "latent", lambda content: [content.pop(key) for key in left_out])
    with pytest.warns(UserWarning, match="taken from the deepseek_v3 target") as warned:
        lean = load(folder, target)
    assert all(key in str(warned[0].message) for key in left_out)
    ids, tapped = text("latent", 6)
    states = [drafter.open(target) for drafter in (complete, lean)]
    for state in states:
        state.read_prompt([ids], tapped)
    assert states[0].propose([3], 4).ids.tolist() == states[1].propose([3], 4).ids.tolist()


def test_rope_scaling_is_needed_where_the_target_has_none_either(tmp_path: Path) -> None:
    folder = write_made(tmp_path, "latent", lambda content: content.pop("rope_scaling"))
    assert "latent attention needs rope_scaling of type 'yarn'" in refusal(folder, made_target(True))
    linear = write_made(
        tmp_path, "latent", lambda content: content.update(rope_scaling={"type": "linear", "factor": 2})
    )
    assert "latent attention needs rope_scaling of type 'yarn'" in refusal(linear, made_target(True))


def test_the_drafters_own_rope_scaling_wins_over_the_targets(tmp_path: Path) -> None:
    scaled = Target(randomise(lambda: deepseek(rope_scaling={**YARN, "beta_fast": 4.0}), seed=6))
    assert load(write_made(tmp_path, "latent"), scaled).config.rope.scaling["beta_fast"] == 32.0
    folder = write_made(tmp_path, "latent", lambda content: content.pop("rope_scaling"))
    with pytest.warns(UserWarning, match="lacks rope_scaling: taken from the deepseek_v3 target"):
        assert load(folder, scaled).config.rope.scaling["beta_fast"] == 4.0


def test_a_drafter_with_ordinary_heads_may_rotate_plainly(tmp_path: Path) -> None:
    folder = write_made(tmp_path, "heads_for_deepseek", lambda content: content.pop("rope_scaling"))
    assert load(folder, made_target(True)).config.rope.scaling is None


def test_experts_of_the_original_say_nothing_about_the_drafters_dense_layer(tmp_path: Path) -> None:
    experts = {"n_routed_experts": 8, "num_experts_per_tok": 2, "first_k_dense_replace": 1, "scoring_func": "sigmoid"}
    folder = write_made(tmp_path, "latent", lambda content: content.update(experts))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load(folder, made_target(True))


@pytest.mark.parametrize(
    ("key", "value"), [("num_hidden_layers", 2), ("rope_interleave", False), ("kv_lora_rank", "32"), ("v_head_dim", 0)]
)
def test_a_latent_geometry_that_cannot_be_is_named(tmp_path: Path, key: str, value: object) -> None:
    folder = write_made(tmp_path, "latent", lambda content: content.update({key: value}))
    assert key in refusal(folder, made_target(True))


# What is shared


def test_a_drafter_in_floating_point_stays_so_beside_a_quantized_target(tmp_path: Path) -> None:
    def halved(content: Tensors) -> None:
        content.update({name: array.astype(mx.bfloat16) for name, array in content.items() if name != "d2t"})

    model = randomise(deepseek, seed=6)
    nn.quantize(
        model, group_size=32, bits=4, class_predicate=lambda name, module: "embed_tokens" in name or "lm_head" in name
    )
    drafter = load(write_made(tmp_path, "latent", edit_tensors=halved), Target(model))
    parameters = dict(tree_flatten(drafter.network.modules.parameters()))
    assert {array.dtype for array in parameters.values()} == {mx.bfloat16}
    assert not any("scales" in name for name in parameters)
    ids, tapped = text("latent", 6)
    state = drafter.open(Target(model))
    state.read_prompt([ids], tapped)
    assert state.propose([3], 3).ids.shape == (1, 3)
    assert {array.dtype for array in state.arrays()} <= {mx.bfloat16, mx.float32}
    assert {cache.keys.dtype for cache in state.cache_tree([])["draft"]} == {mx.bfloat16}


def test_a_foreign_quantization_block_without_such_tensors_is_ignored_with_a_warning(tmp_path: Path) -> None:
    copied = {"quantization_config": {"quant_algo": "NVFP4", "quant_method": "modelopt"}}
    with pytest.warns(UserWarning, match=r"quantization_config \(modelopt\) is ignored"):
        load(write_made(tmp_path, "latent", lambda content: content.update(copied)), made_target(True))
    coded = write_made(
        tmp_path,
        "latent",
        lambda content: content.update(copied),
        lambda content: content.update({"layers.0.mlp.up_proj.weight_scale": mx.ones((1,))}),
    )
    assert "layers.0.mlp.up_proj.weight_scale" in refusal(coded, made_target(True))


def test_only_the_embedding_is_shared_and_it_is_not_copied(tmp_path: Path) -> None:
    drafter = load(write_made(tmp_path, "latent"), made_target(True))
    assert not drafter.network.has_embedding
    ids = mx.array([[3, 90]])
    assert mx.array_equal(drafter.network.embed(ids, made_target(True)), made_target(True).raw_embed(ids))
    assert "embed_tokens" not in drafter.network.modules
    for target in (made_target(True), kimi_target()):
        with pytest.raises(IncompatiblePair, match=r"no lm_head\.weight.*only the embedding is shared"):
            load(write_made(tmp_path, "latent", edit_tensors=lambda content: content.pop("lm_head.weight")), target)


def test_a_drafter_for_kimi_with_ordinary_heads_may_use_the_targets_head(tmp_path: Path) -> None:
    def headless(content: Tensors) -> None:
        del content["lm_head.weight"], content["d2t"]

    folder = write_made(tmp_path, "heads_for_deepseek", lambda content: content.pop("draft_vocab_size"), headless)
    drafter, states = load(folder, kimi_target()), mx.random.normal((1, 1, HIDDEN))
    normed = drafter.network.modules.norm(states)
    assert mx.array_equal(drafter.network.logits(states, kimi_target()), kimi_target().head(normed))
    with pytest.raises(IncompatiblePair, match=r"no lm_head\.weight"):
        load(folder, made_target(True))


@pytest.mark.parametrize("variant", ["latent", "heads_for_deepseek"])
def test_both_sides_have_caches_of_their_own_that_advance_together(variant: str, tmp_path: Path) -> None:
    target = target_of(variant)
    drafter = load(write_made(tmp_path, variant), target)
    target.attach_taps(drafter.taps)
    caches, state = make_prompt_cache(target.model), drafter.open(target)
    ids = text(variant, 9)[0]
    for begin, end in ((0, 5), (5, 8)):
        hidden = target.forward(mx.array([ids[begin:end]]), caches, drafter.taps).hidden
        state.read_prompt([ids[begin:end]], hidden)
        tree = state.cache_tree(caches)
        assert list(tree) == ["target", "draft"]
        assert {cache.offset for cache in tree["target"]} == {end}
        assert {cache.offset for cache in tree["draft"]} == {end - 1}
    mx.eval(state.arrays(), [cache.state for cache in caches])
    assert (len(tree["target"]), len(tree["draft"])) == (8, 1)
    first = {side: (tree[side][0].keys, tree[side][0].values) for side in tree}
    per_row = {side: [array.shape[1] * array.shape[3] for array in arrays] for side, arrays in first.items()}
    assert per_row["draft"] == (per_row["target"] if variant == "latent" else [24, 24])


def test_a_distributed_group_of_more_than_one_device_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Group:
        def size(self) -> int:
            return 2

    monkeypatch.setattr(mx.distributed, "init", Group)
    with pytest.raises(UnsupportedOption, match="distributed group of 2"):
        eagle3.load(write_made(tmp_path, "latent"), made_target(True))


def test_what_is_known_of_a_target_does_not_depend_on_how_its_name_is_spelled() -> None:
    assert (Lineage.of(made_target(True)).deepseek, Lineage.of(made_target(True)).kimi) == (True, False)
    assert (Lineage.of(kimi_target()).deepseek, Lineage.of(kimi_target()).kimi) == (True, True)
    plain = Target(randomise(lambda: deepseek(model_type="kimi_k2"), seed=6))
    assert (plain.name, Lineage.of(plain).kimi) == ("deepseek_v3", True)
    assert not Lineage.of(made_target()).deepseek


def test_the_pairs_pass_the_check_of_every_pair(tmp_path: Path) -> None:
    for variant in ("latent", "heads_for_deepseek"):
        for target in (made_target(True), kimi_target()):
            validate_drafter_compatibility(load(write_made(tmp_path, variant), target), target)
    assert json.loads((tmp_path / "config.json").read_text())["vocab_size"] == VOCAB > DRAFTED
