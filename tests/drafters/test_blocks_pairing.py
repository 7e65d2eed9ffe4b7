"""Block drafters and targets that do not fit, and what a folder loads as."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mlx_spec.drafters import Drafter, dflash, validate_drafter_compatibility
from mlx_spec.drafters.dflash.model import BlockDrafter
from mlx_spec.drafters.families import ANY_TARGET
from mlx_spec.drafters.registry import resolve_family
from mlx_spec.errors import CheckpointError, IncompatiblePair
from mlx_spec.model.target import Target
from mlx_spec.pairing import load_drafter
from tests.drafters.block_files import FOLDERS, Config, config, target, write
from tests.drafters.test_blocks import merge
from tests.tiny import MIXES
from tests.zoo.menagerie import bare_model


def of_shape(**sizes: int) -> Target:
    """A Qwen3 target like the fixtures' but for these sizes."""
    content: dict[str, Any] = {
        "model_type": "qwen3",
        "hidden_size": 32,
        "num_hidden_layers": 6,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": 64,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
    }
    return Target(bare_model({**content, **sizes}))


def load(folder: Path, target: Target, **options: Any) -> Drafter:
    """As `load_drafter`, but without asking which architectures a family is made for."""
    drafter = dflash.load(folder, target, **options)
    validate_drafter_compatibility(drafter, target)
    return drafter


@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_loads_without_a_word_and_needs_no_kind(tmp_path: Path, name: str) -> None:
    family = resolve_family(config(name))
    assert family.loadable
    assert family.name == name.removesuffix("_sliding").removesuffix("_gated")
    loaded = load(write(tmp_path / "folder", name), target())
    assert isinstance(loaded, BlockDrafter)
    assert loaded.kind == family.kind == "dflash"
    if family.targets == ANY_TARGET:
        assert load_drafter(tmp_path / "folder", target()).name == "folder"
    else:
        with pytest.raises(IncompatiblePair, match=f"are made for {family.targets[0]}"):
            load_drafter(tmp_path / "folder", target())


@pytest.mark.parametrize("name", FOLDERS)
def test_layers_that_the_caller_names_are_read_instead(tmp_path: Path, name: str) -> None:
    folder = write(tmp_path / "folder", name)
    count = len(load(folder, target()).taps)
    assert load(folder, target(), taps=range(count)).taps == tuple(range(count))
    with pytest.raises(CheckpointError, match=r"fc\.weight has shape"):
        load(folder, target(), taps=range(count + 1))


@pytest.mark.parametrize("name", FOLDERS)
def test_another_hidden_size_is_refused_with_both(tmp_path: Path, name: str) -> None:
    with pytest.raises(IncompatiblePair, match="hidden size 32, but target 'qwen3' has 40"):
        load(write(tmp_path / "folder", name), of_shape(hidden_size=40))


@pytest.mark.parametrize("name", FOLDERS)
def test_another_number_of_layers_is_refused_with_both(tmp_path: Path, name: str) -> None:
    if name == "muse_glimmer_assistant":
        with pytest.raises(IncompatiblePair, match=r"reads the output of layer 3 .* has layers 0\.\.2"):
            load(write(tmp_path / "folder", name), of_shape(num_hidden_layers=3))
        return
    for layers in (5, 7):
        with pytest.raises(IncompatiblePair, match=f"a target of 6 layers, but 'qwen3' has {layers}"):
            load(write(tmp_path / "folder", name), of_shape(num_hidden_layers=layers))


@pytest.mark.parametrize("beyond", [6, 7])
def test_a_layer_the_target_does_not_have_is_refused(tmp_path: Path, beyond: int) -> None:
    def silent(content: Config) -> None:
        del content["num_target_layers"]
        merge(content, {"dflash_config": {"target_layer_ids": [1, beyond]}})

    with pytest.raises(IncompatiblePair, match=rf"reads the output of layer {beyond} .* has layers 0\.\.5"):
        load(write(tmp_path / "folder", "dflash", silent), target())


@pytest.mark.parametrize("rows", [48, 72])
def test_another_vocabulary_is_refused_where_tables_are_borrowed(tmp_path: Path, rows: int) -> None:
    with pytest.raises(IncompatiblePair, match=f"(vocabulary of 64 .* has {rows}|masks with token 63)"):
        load(write(tmp_path / "folder", "dflash"), of_shape(vocab_size=rows))


def test_padding_rows_are_no_other_vocabulary_where_the_tables_are_its_own(tmp_path: Path) -> None:
    folder = write(tmp_path / "folder", "dspark")
    assert load(folder, of_shape(vocab_size=72)).kind == "dflash"
    with pytest.raises(IncompatiblePair, match="ids up to 63, but target 'qwen3' has 48"):
        load(folder, of_shape(vocab_size=48))
    with pytest.raises(IncompatiblePair, match="has 5000"):
        load(folder, of_shape(vocab_size=5000))


def test_a_mask_token_the_target_cannot_embed_is_refused(tmp_path: Path) -> None:
    folder = write(tmp_path / "folder", "muse_glimmer_assistant")
    with pytest.raises(IncompatiblePair, match="masks with token 63, but target 'qwen3' has a vocabulary of 60"):
        load(folder, of_shape(vocab_size=60))


def test_own_hidden_size_needs_own_tables(tmp_path: Path) -> None:
    def wider_target(content: Config) -> None:
        content["target_hidden_size"] = MIXES["dense_qk_norm"].model().args.hidden_size

    with pytest.raises(CheckpointError, match=r"fc\.weight has shape \[32, 64\], wanted \[32, 104\]"):
        load(write(tmp_path / "folder", "dflash", wider_target), target())


def test_a_config_that_names_no_layers_is_an_error_that_says_so(tmp_path: Path) -> None:
    def silent(content: Config) -> None:
        del content["dflash_config"]["target_layer_ids"]

    with pytest.raises(CheckpointError, match="lacks target_layer_ids"):
        load(write(tmp_path / "folder", "dflash", silent), target())


def test_the_fixtures_say_how_many_layers_their_target_has() -> None:
    assert [config(name).get("num_target_layers") for name in FOLDERS] == [6, 6, 6, 6, 6, 6, None]
