"""Quantized block drafters: stored so, or quantized when loaded, they compute what their rounded weights give."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlx_spec.drafters import dflash
from mlx_spec.drafters.dflash.model import BlockDrafter
from mlx_spec.errors import CheckpointError, UnsupportedOption
from tests.drafters.block_files import HIDDEN, Config, Tensors, cold, drafter, load, target, tensors, text, write

TOLERANCE = 1e-5
FORMATS: list[dict[str, Any]] = [
    {"group_size": 32, "bits": 8},
    {"group_size": 32, "bits": 4},
    {"group_size": 32, "bits": 4, "mode": "mxfp4"},
    {"group_size": 16, "bits": 4, "mode": "nvfp4"},
]
PARTS = ("weight", "scales", "biases")
NAMES = ("dflash", "dflash2", "dspark_gated", "gemma4_dspark", "muse_glimmer_assistant")


def matrices(name: str, form: dict[str, Any]) -> list[str]:
    """Paths of the modules whose rows are whole groups."""
    return [
        tensor.removesuffix(".weight")
        for tensor, array in tensors(name).items()
        if tensor.endswith(".weight") and array.ndim == 2 and array.shape[1] % form["group_size"] == 0
    ]


def packed(content: Tensors, modules: list[str], form: dict[str, Any]) -> None:
    for module in modules:
        parts = mx.quantize(content[f"{module}.weight"], **form)
        content.update({f"{module}.{part}": array for part, array in zip(PARTS, parts, strict=False)})


def rounded(content: Tensors, modules: list[str], form: dict[str, Any]) -> None:
    for module in modules:
        parts = mx.quantize(content[f"{module}.weight"], **form)
        content[f"{module}.weight"] = mx.dequantize(*parts, **form, dtype=mx.float32)


def assert_computes_alike(one: BlockDrafter, other: BlockDrafter) -> None:
    states = []
    for source in (one, other):
        state = cold(source, *text(14, source))
        run = source.run([7], source.proposals, state.contexts, state.position, target())
        states.append((run, source.heads.logits(run, target()), state.propose([7], source.proposals).ids))
    for mine, theirs in zip(*states, strict=True):
        assert mx.abs(mine.astype(mx.float32) - theirs.astype(mx.float32)).max().item() < TOLERANCE * 10


@pytest.mark.part(10)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_a_quantized_drafter_computes_what_its_rounded_weights_give(
    tmp_path: Path, name: str, form: dict[str, Any]
) -> None:
    modules = matrices(name, form)
    assert len(modules) >= 10
    float_one = load(write(tmp_path / "rounded", name, edit_tensors=lambda content: rounded(content, modules, form)))
    stored = load(
        write(
            tmp_path / "stored",
            name,
            lambda content: content.update(quantization=form),
            lambda content: packed(content, modules, form),
        )
    )
    assert stored.network.tensors.formats.keys() == set(modules) or name == "muse_glimmer_assistant"
    assert_computes_alike(stored, float_one)
    folder = write(tmp_path / "plain", name)
    if len(modules) == sum(array.ndim == 2 and key.endswith(".weight") for key, array in tensors(name).items()):
        on_load = dflash.load(folder, target(), quantize=form)
    else:
        with pytest.warns(UserWarning, match="no whole groups"):
            on_load = dflash.load(folder, target(), quantize=form)
    assert on_load.network.tensors.formats == stored.network.tensors.formats
    assert_computes_alike(on_load, float_one)
    assert on_load.network.tensors["fc.weight"].dtype == mx.uint32


def test_a_module_may_have_a_format_of_its_own_or_none(tmp_path: Path) -> None:
    form, own = FORMATS[1], FORMATS[0]

    def said(content: Config) -> None:
        content["quantization"] = {**form, "fc": own, "layers.0.mlp.up_proj": False}

    def stored(content: Tensors) -> None:
        packed(content, ["layers.0.mlp.gate_proj"], form)
        packed(content, ["fc"], own)

    formats = load(write(tmp_path, "dflash", said, stored)).network.tensors.formats
    assert {module: form.bits for module, form in formats.items()} == {"layers.0.mlp.gate_proj": 4, "fc": 8}


def test_scales_that_the_config_says_nothing_about_are_named(tmp_path: Path) -> None:
    folder = write(tmp_path, "dflash", edit_tensors=lambda content: packed(content, ["fc"], FORMATS[0]))
    with pytest.raises(CheckpointError, match=r"holds fc\.scales, but its config\.json has no quantization block"):
        load(folder)


@pytest.mark.parametrize("part", ["weight", "scales", "biases"])
def test_a_part_of_a_quantized_matrix_that_is_missing_or_misshapen_is_named(tmp_path: Path, part: str) -> None:
    for gone in (True, False):

        def damage(content: Tensors, gone: bool = gone) -> None:
            packed(content, ["layers.1.mlp.up_proj"], FORMATS[0])
            array = content.pop(f"layers.1.mlp.up_proj.{part}")
            if not gone:
                content[f"layers.1.mlp.up_proj.{part}"] = array[:-1]

        folder = write(tmp_path, "dflash", lambda content: content.update(quantization=FORMATS[0]), damage)
        with pytest.raises(CheckpointError, match=rf"layers\.1\.mlp\.up_proj\.({part}|biases|weight)"):
            load(folder)


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        ({"group_size": 32, "bits": 7}, "quantize is"),
        ({"bits": 4}, "group_size"),
        ({"group_size": 128, "bits": 4}, "no matrix of the drafter has rows that are a multiple of 128"),
    ],
)
def test_what_cannot_be_quantized_is_refused(tmp_path: Path, wanted: Config, words: str) -> None:
    with pytest.raises(UnsupportedOption, match=words):
        dflash.load(write(tmp_path, "dflash"), target(), quantize=wanted)


def test_a_drafter_that_is_stored_quantized_is_not_quantized_again(tmp_path: Path) -> None:
    folder = write(
        tmp_path,
        "dflash",
        lambda content: content.update(quantization=FORMATS[0]),
        lambda content: packed(content, ["fc"], FORMATS[0]),
    )
    with pytest.raises(UnsupportedOption, match="stored quantized already"):
        dflash.load(folder, target(), quantize=FORMATS[0])


def test_another_librarys_formats_are_refused_by_name(tmp_path: Path) -> None:
    def foreign(content: Tensors) -> None:
        content["fc.weight_packed"] = mx.zeros((HIDDEN, 4), mx.int32)

    folder = write(
        tmp_path, "dflash", lambda content: content.update(quantization_config={"quant_method": "gptq"}), foreign
    )
    with pytest.raises(CheckpointError, match="'gptq', which is not supported"):
        load(folder)


def test_an_unquantized_drafter_has_no_formats() -> None:
    assert not drafter("dflash").network.tensors.formats
