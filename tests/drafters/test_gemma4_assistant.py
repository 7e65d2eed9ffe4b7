"""Gemma 4's assistant: its reading of the target's keys, its files, and its rounds."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx import nn
from mlx.utils import tree_flatten
from mlx_lm.models import gemma4_text
from mlx_lm.models.cache import KVCache, QuantizedKVCache, RotatingKVCache

from mlx_spec import Statistics, generate_step
from mlx_spec.cache.adopt import new_caches, rows_in_order
from mlx_spec.drafters import gemma4_assistant
from mlx_spec.drafters.gemma4_assistant.model import AssistantState, Gemma4Assistant, Reading
from mlx_spec.errors import CheckpointError, IncompatiblePair, TransactionError, UnsupportedOption
from mlx_spec.model.target import Target
from tests.bits import assert_same_bits
from tests.double import PATTERNS, double, each_chip
from tests.drafters.parity_gemma4_assistant import handed
from tests.oracle import assert_same_output, rng_key, run_stock
from tests.same_cache import assert_same_cache
from tests.tiny import MIXES, PROMPT, VOCAB, randomise

FOLDER = Path(__file__).parent.parent / "fixtures" / "gemma4_assistant" / "assistant_ordered"
WINDOW, HIDDEN = 8, 48
IDS = tuple((7 * place + 3) % 61 for place in range(30))
TEXT: dict[str, Any] = {
    "model_type": "gemma4_text",
    "hidden_size": HIDDEN,
    "num_hidden_layers": 4,
    "intermediate_size": 72,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_global_key_value_heads": 1,
    "head_dim": 8,
    "global_head_dim": 16,
    "vocab_size": VOCAB,
    "vocab_size_per_layer_input": 0,
    "hidden_size_per_layer_input": 0,
    "num_kv_shared_layers": 0,
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    "attention_k_eq_v": True,
    "use_double_wide_mlp": False,
    "final_logit_softcapping": 30.0,
    "tie_word_embeddings": False,
    "max_position_embeddings": 512,
}


@functools.cache
def target() -> Target:
    """A target whose next token hangs mostly on the last one, and a little on the text before it."""
    return Target(new_model())


def new_model() -> nn.Module:
    """Its model, of which nothing was found out yet."""
    model = randomise(lambda: gemma4_text.Model(gemma4_text.ModelArgs.from_dict(TEXT)), 5)
    for layer in model.layers:
        layer.self_attn.o_proj.weight = layer.self_attn.o_proj.weight * 0.3
        layer.mlp.down_proj.weight = layer.mlp.down_proj.weight * 0
        layer.layer_scalar = mx.ones((1,))
    mx.eval(model.parameters())
    return model


def config(**changes: Any) -> dict[str, Any]:
    """Of an assistant as wide as the target."""
    layers = {"num_hidden_layers": 2, "num_kv_shared_layers": 2, "tie_word_embeddings": True}
    kinds = ["sliding_attention", "full_attention"]
    text = {**TEXT, **layers, "layer_types": kinds, "final_logit_softcapping": None}
    return {
        "architectures": ["Gemma4AssistantForCausalLM"],
        "model_type": "gemma4_assistant",
        "backbone_hidden_size": HIDDEN,
        "use_ordered_embeddings": False,
        "text_config": text,
        **changes,
    }


def write(
    folder: Path,
    content: dict[str, Any] | None = None,
    edit: Callable[[dict[str, mx.array]], object] = lambda tensors: None,
) -> Path:
    """An assistant that gives the target's own logits for the last token, and none of its attention."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(content or config()))
    parsed = gemma4_assistant.AssistantConfig.parse(content or config(), folder)
    network = randomise(lambda: gemma4_assistant.AssistantNetwork(parsed), 9)
    tensors = dict(tree_flatten(network.parameters()))
    for name in tensors:
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensors[name] = mx.zeros_like(tensors[name])
        if name.endswith("layer_scalar"):
            tensors[name] = mx.ones((1,))
    model = target().model
    tensors["model.embed_tokens.weight"] = model.lm_head.weight
    tensors["model.norm.weight"] = model.model.norm.weight
    tensors["pre_projection.weight"] = mx.concatenate([mx.eye(HIDDEN), mx.zeros((HIDDEN, HIDDEN))], axis=1)
    edit(tensors)
    mx.save_safetensors(str(folder / "model.safetensors"), tensors)
    return folder


def load(folder: Path) -> Gemma4Assistant:
    return gemma4_assistant.load(folder, target())


# Rounds


@pytest.mark.part(2)
@pytest.mark.slow
@pytest.mark.parametrize("width", [2, 3, 5])
def test_the_text_is_the_targets_own_and_good_proposals_are_kept(tmp_path: Path, width: int) -> None:
    emitted = 40
    run = run_stock(target().model, PROMPT, emitted)
    statistics, caches = Statistics(), new_caches(target().model)
    options = {"draft_model": load(write(tmp_path / "a")), "draft_block_size": width, "statistics": statistics}
    pairs = list(generate_step(mx.array(PROMPT), target().model, prompt_cache=caches, max_tokens=emitted, **options))
    assert_same_output(pairs, run, emitted)
    assert_same_cache(caches, run.cache_after(emitted))
    assert statistics.drafter_failures == 0
    assert 0 < statistics.accepted_tokens < statistics.proposed_tokens
    assert len(PROMPT) + emitted > 2 * WINDOW


@each_chip
def test_the_text_is_the_same_where_several_rows_round_differently_from_one(tmp_path: Path, chip: str) -> None:
    drafter, model, statistics = load(write(tmp_path / "a")), new_model(), Statistics()
    with double(PATTERNS[chip]):
        run = run_stock(model, PROMPT, 40)
        options = {"draft_model": drafter, "draft_block_size": 3, "statistics": statistics}
        assert_same_output(list(generate_step(mx.array(PROMPT), model, max_tokens=40, **options)), run, 40)
    assert statistics.accepted_tokens > 0


def test_a_state_is_a_function_of_the_committed_text() -> None:
    """After zero, some and all proposals were kept, it proposes what one that has just read the text proposes."""
    drafter = gemma4_assistant.load(FOLDER, fixture_target())
    model = fixture_target().model
    fixture_target().attach_taps(drafter.taps)

    def read(length: int, steps: tuple[int, ...]) -> list[list[int]]:
        caches, state, begun = new_caches(model), drafter.open(fixture_target()), 0
        state.look_at(caches)
        for step in steps:
            part = mx.array([IDS[begun : begun + step]])
            hidden = fixture_target().forward(part, caches, drafter.taps).hidden
            (state.catch_up if begun else state.read_prompt)(part.tolist(), hidden)
            begun += step
            state.propose([3], 4)
            state.abort()
        assert begun == length
        return state.propose([IDS[length]], 4).ids.tolist()

    for steps in ((9, 1, 1, 3), (9, 4, 1), (14,), (1,) * 14):
        assert read(14, steps) == read(14, (14,))
    assert read(14, (14,)) != read(20, (14, 6))


def test_text_that_others_put_into_the_caches_is_not_missed_and_not_said_to_be() -> None:
    drafter, model = gemma4_assistant.load(FOLDER, fixture_target()), fixture_target().model
    told = []
    for shown in (14, 1):
        caches, statistics = new_caches(model), Statistics()
        if shown < 14:
            mx.eval(model(mx.array([IDS[: 14 - shown]]), cache=caches))
        options = {"prompt_cache": caches, "statistics": statistics, "draft_block_size": 3, "verify": "fast"}
        steps = generate_step(mx.array(IDS[14 - shown : 14]), model, draft_model=drafter, max_tokens=4, **options)
        told.append((list(steps) and statistics.accepted_by_depth, statistics.notes))
    assert told[0] == told[1]


def test_one_forward_of_one_token_is_run_per_proposal(tmp_path: Path) -> None:
    drafter = load(write(tmp_path / "a"))
    steps, step = [], drafter.network.step

    def counted(embedded: mx.array, *others: Any) -> mx.array:
        steps.append(embedded.shape)
        return step(embedded, *others)

    object.__setattr__(drafter.network, "step", counted)
    state = read_text(drafter, 6)
    state.propose([4], 5)
    assert steps == [(1, 1, HIDDEN)] * 5


def read_text(drafter: Gemma4Assistant, length: int) -> AssistantState:
    caches, state = new_caches(target().model), drafter.open(target())
    target().attach_taps(drafter.taps)
    hidden = target().forward(mx.array([IDS[:length]]), caches, drafter.taps).hidden
    state.look_at(caches)
    state.read_prompt([list(IDS[:length])], hidden)
    return state


def test_nothing_is_proposed_before_anything_was_read(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="read the prompt first"):
        load(write(tmp_path / "a")).open(target()).propose([4], 2)


@functools.cache
def fixture_target() -> Target:
    args = {**TEXT, "vocab_size": 64, "intermediate_size": 64, "tie_word_embeddings": True}
    return Target(randomise(lambda: gemma4_text.Model(gemma4_text.ModelArgs.from_dict(args)), 3))


def test_what_it_sees_can_be_set() -> None:
    drafter, seen = gemma4_assistant.load(FOLDER, fixture_target()), []
    for reading in (Reading(), Reading(rows_back=1), Reading(rows_beyond_window=-1)):
        drafter.reading = reading
        caches, state = new_caches(fixture_target().model), drafter.open(fixture_target())
        fixture_target().attach_taps(drafter.taps)
        hidden = fixture_target().forward(mx.array([IDS[:14]]), caches, drafter.taps).hidden
        state.look_at(caches)
        state.read_prompt([list(IDS[:14])], hidden)
        keys, position = handed(state)
        seen.append((position, keys["sliding_attention"][0].shape[2]))
    assert seen == [(14, WINDOW + 1), (13, WINDOW + 1), (14, WINDOW - 1)]


# Rows in order


@pytest.mark.parametrize("keep", [0, 2])
@pytest.mark.parametrize("steps", [(3,), (9,), (3, 1, 1), (9, 1), (9, *[1] * 5), tuple([1] * 20), (5, 4, 6)])
def test_the_rows_of_a_window_come_in_the_order_of_the_text(steps: tuple[int, ...], keep: int) -> None:
    ring, rows = RotatingKVCache(max_size=6, keep=keep), mx.arange(40.0).reshape(1, 1, 40, 1) * mx.ones((1, 2, 1, 4))
    begun = 0
    for step in steps:
        ring.update_and_fetch(rows[:, :, begun : begun + step], -rows[:, :, begun : begun + step])
        begun += step
    keys, values = rows_in_order(ring)
    got = keys[0, 0, :, 0].tolist()
    assert got == sorted(got)
    assert got[-1] == begun - 1
    assert len(got) >= min(begun, 6)
    assert got[:keep] == list(range(min(keep, begun)))[: len(got)]
    assert_same_bits(-keys, values)


def test_rows_that_grow_at_the_end_come_as_they_are_and_packed_ones_unpacked() -> None:
    rows = mx.random.normal((1, 2, 11, 64))
    plain, packed = KVCache(), QuantizedKVCache(group_size=32, bits=8)
    for cache in (plain, packed):
        cache.update_and_fetch(rows, rows * 2)
    assert_same_bits(rows_in_order(plain)[0], rows)
    keys, values = rows_in_order(packed)
    assert mx.abs(keys - rows).max().item() < 0.05
    assert values.shape == rows.shape


def test_rows_of_an_empty_or_unknown_cache_are_refused() -> None:
    with pytest.raises(TransactionError, match="no rows yet"):
        rows_in_order(KVCache())


# Files


def refusal(folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        load(folder)
    return str(caught.value)


def names() -> list[str]:
    loaded = mx.load(str(FOLDER / "model.safetensors"))
    assert isinstance(loaded, dict)
    return sorted(loaded)


@pytest.mark.part(20)
@pytest.mark.parametrize("name", names())
def test_a_damaged_tensor_is_named(tmp_path: Path, name: str) -> None:
    content = json.loads((FOLDER / "config.json").read_text())
    whole: dict[str, mx.array] = mx.load(str(FOLDER / "model.safetensors"))  # type: ignore[assignment]
    (tmp_path / "config.json").write_text(json.dumps(content))

    def refused(edited: dict[str, mx.array]) -> str:
        mx.save_safetensors(str(tmp_path / "model.safetensors"), edited)
        with pytest.raises(CheckpointError) as caught:
            gemma4_assistant.load(tmp_path, fixture_target())
        return str(caught.value)

    rest = {key: array for key, array in whole.items() if key != name}
    assert f"{name} is missing" in refused(rest)
    assert f"{name} is missing" in refused({**rest, f"{name}2": whole[name]})
    assert f"{name} has shape" in refused({**rest, name: whole[name][:-1]})
    assert f"{name} has dtype" in refused({**rest, name: whole[name].astype(mx.int32)})
    if whole[name].ndim == 2 and len(set(whole[name].shape)) == 2:
        assert f"{name} has shape" in refused({**rest, name: whole[name].T})
    if whole[name].dtype == mx.float32:
        assert f"{name} holds NaN" in refused({**rest, name: whole[name] * mx.nan})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"text_config": None}, "text_config"),
        ({"backbone_hidden_size": "48"}, "backbone_hidden_size"),
        ({"use_ordered_embeddings": 1}, "use_ordered_embeddings"),
        ({"use_ordered_embeddings": True}, "num_centroids"),
        ({"use_ordered_embeddings": True, "num_centroids": 7, "centroid_intermediate_top_k": 2}, "num_centroids=7"),
        ({"use_ordered_embeddings": True, "num_centroids": 1, "centroid_intermediate_top_k": 3}, "top_k=3"),
    ],
    ids=str,
)
def test_a_config_that_cannot_be_is_refused(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    folder = write(tmp_path / "a")
    (folder / "config.json").write_text(json.dumps(config(**changes)))
    assert words in refusal(folder)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *((key, None) for key in ("hidden_size", "head_dim", "vocab_size", "sliding_window", "num_hidden_layers")),
        ("layer_types", ["sliding_attention"]),
        ("layer_types", ["sliding_attention", "chunked_attention"]),
        ("num_kv_shared_layers", 1),
        ("enable_moe_block", True),
        ("hidden_size_per_layer_input", 16),
        ("tie_word_embeddings", False),
    ],
    ids=str,
)
def test_a_setting_of_the_layers_that_cannot_be_is_refused(tmp_path: Path, key: str, value: Any) -> None:
    folder = write(tmp_path / "a")
    (folder / "config.json").write_text(json.dumps(config(text_config={**config()["text_config"], key: value})))
    assert f"text_config.{key}" in refusal(folder)


@pytest.mark.parametrize("per_layer", [None, {}, {"1": {"head_dim": 16}}], ids=str)
def test_sizes_of_full_attention_layers_are_read_in_either_spelling(tmp_path: Path, per_layer: Any) -> None:
    text = {key: value for key, value in config()["text_config"].items() if "global" not in key}
    right = {**text, "per_layer_config": {"1": {"head_dim": 16, "num_key_value_heads": 1}}}
    folder = write(tmp_path / "a", config(text_config=right))
    assert load(folder).config.args.global_head_dim == 16
    (folder / "config.json").write_text(json.dumps(config(text_config={**text, "per_layer_config": per_layer})))
    assert "per_layer_config" in refusal(folder)


def test_quantized_weights_are_read_as_they_are_stored(tmp_path: Path) -> None:
    """The projection into the drafter has rows of 96 entries, three groups of 32."""

    def packed(tensors: dict[str, mx.array]) -> None:
        parts = mx.quantize(tensors.pop("pre_projection.weight"), group_size=32, bits=8)
        tensors.update(zip((f"pre_projection.{part}" for part in ("weight", "scales", "biases")), parts, strict=True))

    settings = config(quantization={"group_size": 32, "bits": 8})
    plain, quantized = load(write(tmp_path / "a")), load(write(tmp_path / "b", settings, packed))
    assert quantized.network.pre_projection.bits == 8
    assert read_text(quantized, 6).propose([4], 3).ids.tolist() == read_text(plain, 6).propose([4], 3).ids.tolist()
    with pytest.raises(CheckpointError, match=r"pre_projection.scales"):
        load(write(tmp_path / "c", edit=packed))


def test_weights_are_quantized_when_loaded(tmp_path: Path) -> None:
    folder = write(tmp_path / "a")
    with pytest.warns(UserWarning, match=r"gate_proj"):
        packed = gemma4_assistant.load(folder, target(), quantize={"group_size": 32, "bits": 8})
    assert packed.network.pre_projection.bits == 8
    assert read_text(packed, 6).propose([4], 3).ids.tolist() == read_text(load(folder), 6).propose([4], 3).ids.tolist()


def test_loading_leaves_the_random_state_alone(tmp_path: Path) -> None:
    folder = write(tmp_path / "a")
    before = rng_key()
    load(folder)
    assert rng_key() == before


# Pairs


def test_another_target_is_refused_with_both_values(tmp_path: Path) -> None:
    drafter = load(write(tmp_path / "a"))
    drafter.check(target())
    with pytest.raises(IncompatiblePair, match="Gemma 4"):
        drafter.check(Target(MIXES["dense"].model()))
    with pytest.raises(IncompatiblePair, match="vocabulary 97 against 64"):
        drafter.check(fixture_target())
    with pytest.raises(UnsupportedOption, match="last layer, 3"):
        gemma4_assistant.load(tmp_path / "a", target(), taps=(1,))
