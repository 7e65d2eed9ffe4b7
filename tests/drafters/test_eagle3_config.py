"""The EAGLE-3 config: every key that matters is needed, understood, or refused by name."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.rope_utils import initialize_rope

from mlx_spec.drafters.eagle3.config import Eagle3Config
from mlx_spec.errors import CheckpointError
from tests.drafters.eagle3_files import FLAT, Config, config

NEEDED = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "num_hidden_layers",
    "rms_norm_eps",
    "hidden_act",
    "vocab_size",
)


def edited(edit: Callable[[Config], object]) -> Config:
    content = config()
    edit(content)
    return content


def parse(content: Config, taps: tuple[int, ...] | None = None) -> Eagle3Config:
    return Eagle3Config.parse(content, FLAT, taps)


def refusal(content: Config) -> str:
    with pytest.raises(CheckpointError) as refused:
        parse(content)
    assert str(FLAT / "config.json") in str(refused.value)
    return str(refused.value)


def without(*keys: str) -> Config:
    return edited(lambda content: [content.pop(key, None) for key in keys])


def test_the_flat_layout_is_read() -> None:
    parsed = parse(config())
    assert (parsed.hidden_size, parsed.head_dim, parsed.vocab_size, parsed.draft_vocab_size) == (32, 8, 96, 40)
    assert parsed.taps == (1, 3, 4)
    assert (parsed.rope.theta, parsed.rope.fraction, parsed.rope.scaling) == (10000.0, 1.0, None)
    assert parsed.target_hidden_size == 32


def test_it_cannot_be_changed_afterwards() -> None:
    with pytest.raises(ValueError, match="frozen"):
        parse(config()).hidden_size = 3


@pytest.mark.parametrize("key", NEEDED)
def test_a_needed_key_that_is_missing_or_null_is_named(key: str) -> None:
    assert key in refusal(without(key))
    assert key in refusal(edited(lambda content: content.update({key: None})))


def test_all_missing_keys_are_named_at_once() -> None:
    message = refusal(without("vocab_size", "rms_norm_eps"))
    assert "vocab_size" in message
    assert "rms_norm_eps" in message


def test_the_rope_base_is_not_guessed() -> None:
    assert "rope_theta is missing" in refusal(without("rope_theta"))


def test_optional_keys_have_the_documented_defaults() -> None:
    parsed = parse(without("head_dim", "draft_vocab_size"))
    assert (parsed.head_dim, parsed.draft_vocab_size) == (8, 96)
    flags = (parsed.attention_bias, parsed.mlp_bias, parsed.bias, parsed.tie_word_embeddings)
    assert not any(flags)


def test_a_head_dim_that_cannot_be_derived_is_asked_for() -> None:
    content = without("head_dim")
    content["num_attention_heads"], content["num_key_value_heads"] = 6, 3
    assert "lacks head_dim" in refusal(content)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_size", "32"),
        ("hidden_size", 32.5),
        ("hidden_size", 0),
        ("hidden_size", 10**30),
        ("vocab_size", 2**40),
        ("num_attention_heads", 2**24),
        ("hidden_size", True),
        ("intermediate_size", -1),
        ("num_attention_heads", 0),
        ("num_attention_heads", "four"),
        ("num_key_value_heads", [2]),
        ("num_key_value_heads", 3),
        ("head_dim", 7),
        ("head_dim", 0),
        ("rms_norm_eps", 0),
        ("rms_norm_eps", float("nan")),
        ("rms_norm_eps", "1e-5"),
        ("vocab_size", {}),
        ("draft_vocab_size", 97),
        ("target_hidden_size", "x"),
        ("attention_bias", "no"),
        ("mlp_bias", 2),
        ("tie_word_embeddings", "true"),
        ("rope_theta", "1e4"),
        ("rope_theta", -1),
        ("rope_theta", float("inf")),
        ("eagle_config", [1, 2, 3]),
    ],
)
def test_a_wrong_value_is_named_with_what_was_found(key: str, value: object) -> None:
    message = refusal(edited(lambda content: content.update({key: value})))
    assert key in message
    assert str(value).strip("'") in message


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model_type", "gemma2"),
        ("hidden_act", "gelu"),
        ("sliding_window", 2048),
        ("use_sliding_window", True),
        ("layer_types", ["sliding_attention"]),
        ("num_local_experts", 8),
        ("final_logit_softcapping", 30.0),
        ("rope_interleave", True),
    ],
)
def test_what_is_not_supported_is_refused_by_name_with_what_is(key: str, value: object) -> None:
    message = refusal(edited(lambda content: content.update({key: value})))
    assert f"{key}=" in message
    assert "Supported are EAGLE-3 drafters with" in message


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("use_aux_hidden_state", False),
        ("use_input_layernorm_in_first_layer", False),
        ("use_last_layernorm", False),
        ("use_mtp_layernorm", True),
        ("parallel_draft_step", 2),
    ],
)
def test_variants_named_in_eagle_config_are_refused_too(key: str, value: object) -> None:
    message = refusal(edited(lambda content: content["eagle_config"].update({key: value})))
    assert f"eagle_config.{key}={value!r}" in message


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("norm_before_residual", False),
        ("fc_norm", None),
        ("sliding_window", None),
        ("layer_types", ["full_attention"]),
        ("quantization_config", None),
        ("num_aux_hidden_states", 3),
    ],
)
def test_the_same_keys_are_fine_with_values_that_change_nothing(key: str, value: object) -> None:
    assert parse(edited(lambda content: content.update({key: value}))).taps == (1, 3, 4)


def test_a_window_that_is_switched_off_is_fine() -> None:
    content = edited(lambda content: content.update(sliding_window=4096, use_sliding_window=False))
    assert parse(content).hidden_size == 32


def test_unknown_keys_are_named_in_one_warning() -> None:
    content = edited(lambda content: content.update(moon_phase=3, tides="high"))
    content["eagle_config"]["weather"] = "fair"
    with pytest.warns(UserWarning, match=r"moon_phase, tides, eagle_config\.weather") as warned:
        parse(content)
    assert len(warned) == 1


def test_keys_that_say_nothing_about_the_forward_pass_are_silent() -> None:
    inert: Config = dict.fromkeys(
        ("torch_dtype", "dtype", "transformers_version", "use_cache", "attention_dropout"), "x"
    )
    inert.update(
        initializer_range=0.02, pretraining_tp=1, bos_token_id=1, max_position_embeddings=9, max_window_layers=3
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        parse(edited(lambda content: content.update(inert)))


# Layers


def tapped(where: str | None, key: str, ids: object) -> Config:
    content = config()
    content["eagle_config"] = {"use_aux_hidden_state": True}
    place = content if where is None else content[where]
    place[key] = ids
    return content


@pytest.mark.parametrize(
    ("where", "key", "outputs"),
    [
        ("eagle_config", "eagle_aux_hidden_state_layer_ids", (1, 3, 4)),
        (None, "target_layer_ids", (1, 3, 4)),
        (None, "eagle_aux_hidden_state_layer_ids", (0, 2, 3)),
        (None, "aux_hidden_state_layer_ids", (0, 2, 3)),
    ],
)
def test_each_list_of_layers_is_counted_its_own_way(where: str | None, key: str, outputs: tuple[int, ...]) -> None:
    parsed = parse(tapped(where, key, [1, 3, 4]))
    assert parsed.taps == outputs
    assert key in parsed.taps_from


@pytest.mark.parametrize("ids", [None, []])
def test_a_missing_list_is_an_error_that_names_the_keys(ids: object) -> None:
    message = refusal(tapped("eagle_config", "eagle_aux_hidden_state_layer_ids", ids))
    for words in ("eagle_config.eagle_aux_hidden_state_layer_ids", "target_layer_ids", "taps="):
        assert words in message
    assert "does not list the target layers" in refusal(without("eagle_config"))


@pytest.mark.parametrize("ids", [[3, 1, 4], [1, 1, 4], [-1, 3], "1,3,4", [1.0, 3], [True, 3], 7, {"a": 1}])
def test_a_list_that_is_not_ascending_layer_numbers_is_refused(ids: object) -> None:
    assert "eagle_config.eagle_aux_hidden_state_layer_ids" in refusal(
        tapped("eagle_config", "eagle_aux_hidden_state_layer_ids", ids)
    )


def test_the_embedding_as_a_layer_is_refused() -> None:
    assert "the smallest layer number is 1 here" in refusal(tapped(None, "eagle_aux_hidden_state_layer_ids", [0, 3]))
    assert "the smallest layer number is 0 here" in refusal(tapped(None, "target_layer_ids", [-1, 3]))


def test_two_lists_must_mean_the_same_layers() -> None:
    content = config()
    content["eagle_aux_hidden_state_layer_ids"] = [2, 4, 5]
    assert parse(content).taps == (1, 3, 4)
    content["eagle_aux_hidden_state_layer_ids"] = [1, 3, 4]
    assert "lists different layers" in refusal(content)


def test_a_count_that_contradicts_the_list_is_refused() -> None:
    assert "num_aux_hidden_states=4" in refusal(edited(lambda content: content.update(num_aux_hidden_states=4)))


def test_taps_given_by_the_caller_win() -> None:
    parsed = parse(without("eagle_config"), taps=(0, 5))
    assert (parsed.taps, parsed.taps_from) == ((0, 5), "taps=")
    assert parse(config(), taps=(2, 6, 7)).taps == (2, 6, 7)
    for wrong in ((), (5, 0), (-1, 2)):
        with pytest.raises(CheckpointError, match="taps="):
            parse(config(), taps=wrong)


# Rotary positions


def roped(top: float | None, **nested: Any) -> Config:
    content = without("rope_theta")
    if top is not None:
        content["rope_theta"] = top
    content.update(nested)
    return content


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 32.0}


def test_flat_nested_and_mixed_places_give_the_same_settings() -> None:
    flat = parse(roped(5e5, rope_scaling=LLAMA3)).rope
    assert parse(roped(None, rope_parameters={**LLAMA3, "rope_theta": 5e5})).rope == flat
    assert parse(roped(None, rope_scaling={**LLAMA3, "rope_theta": 5e5})).rope == flat
    assert parse(roped(5e5, rope_parameters={**LLAMA3, "rope_theta": 5e5}, rope_scaling=None)).rope == flat
    assert flat.theta == 5e5
    assert flat.scaling == LLAMA3


@pytest.mark.parametrize("scaling", [LLAMA3, YARN, {"rope_type": "linear", "factor": 2.0}, {"rope_type": "default"}])
def test_every_supported_scaling_rotates_as_mlx_lm_does(scaling: Config) -> None:
    x = mx.random.normal((1, 2, 5, 8))
    ours = parse(roped(1e4, rope_scaling=scaling)).rope.build(8)
    theirs = initialize_rope(8, 1e4, False, scaling)
    assert mx.array_equal(ours(x, offset=70), theirs(x, offset=70))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (roped(1e4, rope_scaling={"rope_type": "dynamic", "factor": 2.0}), "rope type 'dynamic' is not supported"),
        (roped(1e4, rope_scaling={"rope_type": ["yarn"]}), "is not supported"),
        (roped(1e4, rope_scaling={"rope_type": "llama3", "factor": 2.0}), "low_freq_factor"),
        (roped(1e4, rope_scaling={**YARN, "attention_factor": 1.2}), "attention_factor=1.2"),
        (roped(1e4, rope_scaling={**YARN, "rope_type": "llama3"}), "contradict each other"),
        (roped(1e4, rope_scaling={**YARN, "factor": "4"}), "factor is '4'"),
        (roped(1e4, rope_scaling=YARN, rope_parameters=LLAMA3), "contradict each other"),
        (roped(1e4, rope_parameters={"rope_theta": 2e4}), "remove the wrong one"),
        (roped(1e4, rope_scaling="yarn"), "expected an object"),
        (roped(1e4, partial_rotary_factor=2.0), "partial_rotary_factor"),
        (roped(1e4, partial_rotary_factor=0.2), "would rotate 1 entries"),
    ],
)
def test_a_rotation_that_is_not_understood_is_refused(content: Config, words: str) -> None:
    assert words in refusal(content)


def test_a_partial_rotation_leaves_the_rest_of_each_head_alone() -> None:
    rope = parse(roped(1e4, partial_rotary_factor=0.25)).rope
    assert parse(roped(None, rope_parameters={"rope_theta": 1e4, "partial_rotary_factor": 0.25})).rope == rope
    x = mx.random.normal((1, 2, 5, 8))
    rotated = rope.build(8)(x, offset=3)
    assert mx.array_equal(rotated[..., 2:], x[..., 2:])
    assert not mx.array_equal(rotated[..., :2], x[..., :2])


def test_sections_for_images_change_nothing_about_text() -> None:
    sections = {"mrope_section": [1, 1, 2], "mrope_interleaved": True, "rope_theta": 1e4, "rope_type": "default"}
    assert parse(roped(None, rope_parameters=sections)).rope == parse(roped(1e4)).rope


def test_the_file_is_named_by_its_own_folder() -> None:
    with pytest.raises(CheckpointError, match=r"elsewhere.config\.json"):
        Eagle3Config.parse(without("vocab_size"), Path("elsewhere"))
