"""Settings of block drafters: every layout is read, and whatever is wrong with a key is an error that names it."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest

from mlx_spec.drafters.dflash.config import BlockConfig
from mlx_spec.drafters.dflash.keys import DRAFT_NUMBERS, DRAFT_OPTIONS, INERT, SHAPE_KEYS, SHAPE_OPTIONS
from mlx_spec.drafters.dflash.state import Sight
from mlx_spec.errors import CheckpointError
from tests.drafters.block_files import FOLDERS, VOCAB, Config, config
from tests.drafters.test_blocks import laguna, merge

FOLDER = Path("somewhere")


def parse(content: Config, taps: tuple[int, ...] | None = None) -> BlockConfig:
    return BlockConfig.parse(content, FOLDER, VOCAB, taps)


def refusal(content: Config) -> str:
    with pytest.raises(CheckpointError) as refused:
        parse(content)
    assert str(FOLDER / "config.json") in str(refused.value)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def places(content: Config, key: str) -> list[Config]:
    own = content.get("dflash_config", {})
    return [place for place in (content, own) if key in place]


def changed(name: str, **edit: Any) -> Config:
    """A config with keys replaced where they stand, new ones at top level."""
    content = config(name)
    for key, value in edit.items():
        for place in places(content, key) or [content]:
            place[key] = value
    return content


def without(name: str, key: str) -> Config:
    content = config(name)
    for place in places(content, key):
        del place[key]
    return content


NEEDED: dict[str, tuple[str, ...]] = {
    "dflash": ("mask_token_id",),
    "dflash_sliding": ("mask_token_id", "sliding_window"),
    "dflash2": (
        "block_size",
        "mask_token_id",
        "conv_kernel_size",
        "conv_group_size",
        "selector_rank",
        "selector_top_k",
        "sliding_window",
    ),
    "dspark": ("block_size", "mask_token_id", "markov_head_type"),
    "gemma4_dspark": ("block_size", "global_head_dim", "attention_k_eq_v", "num_global_key_value_heads"),
    "muse_glimmer_assistant": ("block_size", "mask_token_id", "sliding_window"),
}


@pytest.mark.parametrize("name", FOLDERS)
def test_a_missing_size_is_named(name: str) -> None:
    for key in SHAPE_KEYS:
        if key == "head_dim" and name == "gemma4_dspark":
            continue  # another key says it there
        if key in config(name):
            assert f"lacks {key}. None of these is guessed" in refusal(without(name, key))


@pytest.mark.parametrize("name", NEEDED)
def test_a_missing_setting_of_the_draft_is_named(name: str) -> None:
    for key in NEEDED[name]:
        assert key in refusal(without(name, key))


@pytest.mark.parametrize("name", FOLDERS)
def test_missing_target_layers_are_named_and_not_guessed(name: str) -> None:
    message = refusal(without(name, "target_layer_ids"))
    assert "lacks target_layer_ids" in message
    assert "not guessed" in message
    assert "taps=(...)" in message
    assert parse(without(name, "target_layer_ids"), (0, 4)).taps == (0, 4)


@pytest.mark.parametrize("name", FOLDERS)
@pytest.mark.parametrize("wrong", ["text", -3, 2.5, [], {"a": 1}])
def test_every_key_of_a_wrong_kind_is_named(name: str, wrong: Any) -> None:
    read = {*SHAPE_KEYS, *SHAPE_OPTIONS, *DRAFT_NUMBERS, *DRAFT_OPTIONS} - INERT
    tried = 0
    for key in sorted(read):
        if not places(config(name), key) or _harmless(name, key, wrong):
            continue
        assert key in refusal(changed(name, **{key: wrong})), key
        tried += 1
    assert tried >= 10


def _harmless(name: str, key: str, wrong: Any) -> bool:
    if key in ("input_embedding_scale", "output_multiplier", "final_logit_softcapping", "rms_norm_eps", "rope_theta"):
        return wrong == 2.5
    if key in ("rope_parameters", "use_sliding_window"):
        return True
    if name == "gemma4_dspark":
        # Gemma's layers see everything, and its heads are those of the global layers.
        return key in ("head_dim", "sliding_window", "num_key_value_heads")
    return False


@pytest.mark.parametrize("name", FOLDERS)
def test_every_size_that_is_not_positive_is_named(name: str) -> None:
    for key in (*SHAPE_KEYS, "block_size"):
        if places(config(name), key) and not _harmless(name, key, 0):
            assert key in refusal(changed(name, **{key: 0}))


@pytest.mark.parametrize("name", FOLDERS)
def test_every_number_too_large_to_be_meant_is_named(name: str) -> None:
    for key in (*SHAPE_KEYS, "block_size", "markov_rank", "selector_rank", "conv_group_size"):
        if places(config(name), key) and not _harmless(name, key, 0) and key != "rms_norm_eps":
            content = changed(name, **{key: 10**12})
            content.pop("layer_types", None)
            assert key in refusal(content)
    wide = changed(name, num_attention_heads=2**23, num_key_value_heads=2**23)
    assert "no axis of a drafter is longer" in refusal(wide)


# Layouts


def test_the_block_is_found_in_either_place() -> None:
    assert parse(config("dflash")).block_size == parse(config("dflash_sliding")).block_size == 5
    assert places(config("dflash"), "block_size") == [config("dflash")]


def test_a_missing_block_is_the_usual_one_and_leaves_the_width_to_the_caller() -> None:
    with pytest.warns(UserWarning, match="lacks block_size, so every run must name a width"):
        parsed = parse(without("dflash", "block_size"))
    assert (parsed.block_size, parsed.proposals) == (16, 15)


def test_two_places_that_disagree_are_named() -> None:
    content = config("dflash")
    content["dflash_config"]["block_size"] = 7
    assert "block_size is 5 at top level and 7 in a nested object" in refusal(content)
    content["dflash_config"]["block_size"] = 5
    assert parse(content).block_size == 5


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 5e5},
        {"rope_theta": None, "rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}},
        {"rope_theta": 5e5, "rope_scaling": None, "rope_parameters": {"rope_type": "default"}},
    ],
)
def test_the_rotary_base_is_read_in_each_spelling(rope: Config) -> None:
    assert parse({**config("dflash"), **rope}).rope.theta == 5e5


def test_a_scaled_rope_is_read() -> None:
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    assert parse(changed("dflash", rope_scaling=scaling)).rope.scaling == scaling


def test_gemma_reads_the_rope_of_its_full_layers() -> None:
    rope = parse(config("gemma4_dspark")).rope
    assert (rope.theta, rope.fraction, rope.scaling) == (1e6, 0.25, {"rope_type": "proportional"})


@pytest.mark.parametrize("key", ["causal", "is_causal", "dflash_query_causal"])
def test_every_spelling_of_causal_is_for_all_layers(key: str) -> None:
    for said in (True, False):
        sights = parse(changed("dflash_sliding", **{key: said})).sights
        assert sights == (Sight(7, said), Sight(None, said))
    assert parse(config("dflash_sliding")).sights == (Sight(7, True), Sight(None, False))


def test_spellings_of_causal_that_disagree_are_named() -> None:
    assert "is_causal" in refusal(changed("dflash", causal=True, is_causal=False))


def test_a_window_over_the_draft_bounds_every_layer() -> None:
    content = config("dflash_sliding")
    merge(content, {"dflash_config": {"draft_window_size": 20}})
    assert [sight.reach for sight in parse(content).sights] == [7, 20]


def test_the_start_of_the_controller_is_the_default_width() -> None:
    content = config("dflash")
    merge(content, {"dflash_config": {"runtime_block_size": 3}})
    assert parse(content).runtime_block_size == 3


@pytest.mark.parametrize(
    ("edit", "proposals", "from_anchor"),
    [
        ({}, 4, True),
        ({"sample_from_anchor": True}, 4, True),
        ({"sample_from_anchor": False}, 3, False),
        ({"dspark_bonus_anchor": True}, 3, True),
    ],
)
def test_the_first_slot_of_a_nested_dspark_is_what_its_config_says(
    edit: Config, proposals: int, from_anchor: bool
) -> None:
    content = nested_dspark()
    merge(content, {"dflash_config": edit})
    parsed = parse(content)
    assert parsed.family == "dspark"
    assert (parsed.block_size, parsed.proposals, parsed.from_anchor) == (4, proposals, from_anchor)


def nested_dspark() -> Config:
    """The flat fixture's settings as SpecForge nests them."""
    content = config("dspark")
    own = ("block_size", "mask_token_id", "target_layer_ids", "markov_rank", "markov_head_type")
    moved = {key: content.pop(key) for key in (*own, "enable_confidence_head", "confidence_head_with_markov")}
    content.update(architectures=["DFlashDraftModel"], dflash_config={"projector_type": "dspark", **moved})
    return content


def speculators(method: str, name: str = "dspark") -> Config:
    """The flat fixture's settings as the speculators format lays them out."""
    flat = config(name)
    layer_keys = (*SHAPE_KEYS, *SHAPE_OPTIONS, "hidden_act", "model_type")
    return {
        "speculators_model_type": method,
        "architectures": ["DSparkDraftModel" if method == "dspark" else "DFlashSpeculator"],
        "transformer_layer_config": {key: flat[key] for key in layer_keys if flat.get(key) is not None},
        "aux_hidden_state_layer_ids": [2, 4],
        "block_size": 8,
        "mask_token_id": 63,
        "draft_vocab_size": 32,
        "speculators_config": {"algorithm": method},
    }


def test_the_speculators_layout_counts_hidden_states_and_has_defaults_of_its_own() -> None:
    parsed = parse(speculators("dspark"))
    assert (parsed.family, parsed.taps, parsed.proposals, parsed.from_anchor) == ("dspark", (1, 3), 8, True)
    assert (parsed.markov_rank, parsed.markov_head_type, parsed.enable_confidence_head) == (256, "vanilla", True)
    assert (parsed.vocab_size, parsed.draft_vocab_size) == (64, 32)
    assert not parsed.ships_tables
    plain = parse(speculators("dflash"))
    assert (plain.family, plain.proposals, plain.from_anchor, plain.markov_rank) == ("dflash", 7, False, 0)


@pytest.mark.parametrize(("said", "causal"), [(None, True), (False, True), (True, False)])
def test_sliding_layers_of_the_speculators_layout_are_causal_unless_it_says_otherwise(
    said: bool | None, causal: bool
) -> None:
    content = speculators("dflash", "dflash_sliding")
    content["sliding_window_non_causal"] = said
    assert parse(content).sights == (Sight(7, causal), Sight(None, False))


def test_what_the_speculators_layout_leaves_out_is_what_its_writer_left_out() -> None:
    content = speculators("dspark")
    for key in ("head_dim", "rms_norm_eps", "rope_parameters"):
        content["transformer_layer_config"].pop(key, None)
    parsed = parse(content)
    assert (parsed.head_dim, parsed.rms_norm_eps, parsed.rope.theta) == (128, 1e-6, 1e4)


@pytest.mark.parametrize(
    ("said", "family"),
    [
        ({"architectures": ["DFlashDraftModel"]}, "dflash"),
        ({"architectures": ["DFlashDraftModel"], "markov_rank": 4, "markov_head_type": "rnn"}, "dspark"),
        ({"architectures": ["DSparkDraftModel"]}, "dspark"),
        ({"architectures": None, "model_type": "dspark"}, "dspark"),
        ({"architectures": None, "model_type": "muse_glimmer_assistant"}, "muse_glimmer_assistant"),
        ({"architectures": ["Other"], "model_type": "qwen3_dflash"}, "dflash"),
    ],
)
def test_what_a_file_says_of_itself_names_its_family(said: Config, family: str) -> None:
    assert parse({**config("dflash"), **said}).family == family


def test_a_nested_gemma_dspark_stays_one() -> None:
    content = config("gemma4_dspark")
    own = {key: content.pop(key) for key in ("block_size", "mask_token_id", "target_layer_ids", "markov_rank")}
    content["dflash_config"] = {"projector_type": "dspark", **own}
    assert parse(content).family == "gemma4_dspark"


def test_a_dspark_without_a_markov_head_is_read() -> None:
    content = changed("dspark", markov_rank=0, enable_confidence_head=False)
    assert (parse(content).markov_rank, parse(content).proposals) == (0, 4)
    assert "confidence_head_with_markov" in refusal(changed("dspark", markov_rank=0))


def test_laguna_is_read() -> None:
    content = config("dflash")
    laguna(content)
    parsed = parse(content)
    assert (parsed.family, parsed.gated, parsed.tap_norms) == ("laguna_dflash", True, True)
    assert parsed.sights == (Sight(4, True),) * 2
    content["gating"] = "elementwise"
    assert "gating='elementwise'" in refusal(content)


# Relations


@pytest.mark.parametrize(
    ("name", "edit", "words"),
    [
        ("dflash", {"num_key_value_heads": 3}, "num_attention_heads=4 is not a multiple"),
        ("dflash", {"mask_token_id": 64}, "mask_token_id=64 is outside vocab_size=64"),
        ("dflash", {"target_layer_ids": [1, 6]}, "goes beyond num_target_layers=6"),
        ("dflash", {"target_layer_ids": [3, 1]}, "expected ascending"),
        ("dflash", {"target_layer_ids": [1, 1]}, "each once"),
        ("dflash", {"target_layer_ids": [-2, 1]}, "from -1"),
        ("dflash", {"target_layer_ids": [True, 3]}, "expected a list of layer numbers"),
        ("dflash", {"aux_hidden_state_layer_ids": [1, 3]}, "lists different layers"),
        ("dflash", {"block_size": 1}, "leaves no row"),
        ("dflash", {"draft_vocab_size": 65}, "draft_vocab_size=65 is larger"),
        ("dflash", {"head_dim": 7}, "head_dim=7"),
        ("dflash", {"markov_head_type": "lstm"}, "markov_head_type"),
        ("dflash", {"conv_kernel_size": 2}, "belong to DFlash2"),
        ("dflash", {"layer_types": ["full_attention"]}, "expected 2 entries"),
        ("dflash", {"layer_types": ["full_attention", "linear"]}, "expected 2 entries"),
        ("dflash_sliding", {"use_sliding_window": False}, "use_sliding_window is false"),
        ("dflash_sliding", {"swa_window_size": 9}, "expected one number"),
        ("dflash", {"rope_is_neox_style": "yes"}, "is_neox_style"),
        ("dflash2", {"conv_group_size": 5}, "not a multiple of conv_group_size=5"),
        ("dflash2", {"conv_kernel_size": 7}, "conv_kernel_size=7 exceeds the block"),
        ("dflash2", {"selector_top_k": 65}, "selector_top_k=65 exceeds the vocabulary"),
        ("dflash2", {"is_causal": True}, "causal block is not supported"),
        ("dflash2", {"draft_vocab_size": 32}, "draft_vocab_size=32 is not vocab_size=64"),
        ("gemma4_dspark", {"layer_types": ["sliding_attention"] * 2}, "see everything"),
        ("gemma4_dspark", {"enable_moe_block": True}, "enable_moe_block=True"),
        ("dflash", {"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ("dflash", {"quantization": {"bits": 4}}, "quantization is {'bits': 4}: group_size"),
        ("dflash", {"attention_value_scale": 0.5}, "attention_value_scale=0.5"),
        ("dflash", {"projector_type": "other"}, "projector_type='other'"),
    ],
)
def test_what_does_not_fit_together_is_named(name: str, edit: Config, words: str) -> None:
    assert words in refusal(changed(name, **edit))


@pytest.mark.parametrize("key", ["dflash_config", "transformer_layer_config"])
def test_an_object_that_is_none_is_named(key: str) -> None:
    assert f"{key} is [1], expected an object" in refusal({**config("dflash"), key: [1]})


def test_unknown_keys_are_named_in_one_warning() -> None:
    content = config("dflash")
    merge(content, {"surprise": 1, "dflash_config": {"another": 2}})
    with pytest.warns(UserWarning, match=r"ignored: surprise, dflash_config\.another") as warned:
        parse(content)
    assert len(warned) == 1


@pytest.mark.parametrize("name", FOLDERS)
def test_the_published_layouts_have_no_unknown_keys(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        parse(config(name))
