"""Quantized EAGLE-3 drafters: stored so in each of mlx's formats, and quantized when they are loaded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx import nn
from mlx.utils import tree_flatten

from mlx_spec.drafters.eagle3.model import Eagle3Drafter
from mlx_spec.errors import CheckpointError, UnsupportedOption
from mlx_spec.pairing import load_drafter
from tests.drafters.eagle3_made import Config, Tensors, target_of, write_made
from tests.drafters.test_eagle3_variants import text
from tests.oracle import rng_key

FORMATS = {
    "affine_8": {"group_size": 32, "bits": 8, "mode": "affine"},
    "affine_4": {"group_size": 32, "bits": 4, "mode": "affine"},
    "affine_3": {"group_size": 32, "bits": 3, "mode": "affine"},
    "mxfp4": {"group_size": 32, "bits": 4, "mode": "mxfp4"},
    "mxfp8": {"group_size": 32, "bits": 8, "mode": "mxfp8"},
    "nvfp4": {"group_size": 16, "bits": 4, "mode": "nvfp4"},
}

PARTS = ("weight", "scales", "biases")
KEPT = ("norm", "d2t")


def quantized(form: Config, only: Callable[[str], bool] = lambda name: True) -> Callable[[Tensors], None]:
    """Store every matrix in a format."""

    def edit(content: Tensors) -> None:
        for name, array in list(content.items()):
            if array.ndim == 2 and only(name):
                parts = mx.quantize(array, form["group_size"], form["bits"], mode=form["mode"])
                content.update({name.replace("weight", part): x for part, x in zip(PARTS, parts, strict=False)})

    return edit


def rounded(form: Config) -> Callable[[Tensors], None]:
    """Give every matrix the values that the format can hold, in floating point."""

    def edit(content: Tensors) -> None:
        for name, array in list(content.items()):
            if array.ndim == 2:
                parts = mx.quantize(array, form["group_size"], form["bits"], mode=form["mode"])
                content[name] = mx.dequantize(*parts, **form, dtype=mx.float32)

    return edit


def saying(block: Any) -> Callable[[Config], None]:
    return lambda content: content.update(quantization=block)


def load(folder: Path, variant: str, **options: Any) -> Eagle3Drafter:
    drafter = load_drafter(folder, target_of(variant), **options)
    assert isinstance(drafter, Eagle3Drafter)
    return drafter


def outputs(drafter: Eagle3Drafter, variant: str) -> tuple[mx.array, list[list[int]]]:
    """Logits after a short text, and the proposals that follow."""
    ids, tapped = text(variant, 6)
    target, network = target_of(variant), drafter.network
    states = network.run(mx.array([ids]), network.fuse(tapped, target), network.new_caches(), 0, target)
    state = drafter.open(target)
    state.read_prompt([ids], tapped)
    return network.logits(states, target), state.propose([7], 4).ids.tolist()


def assert_same_outputs(one: Eagle3Drafter, other: Eagle3Drafter, variant: str) -> None:
    (left, proposed), (right, expected) = outputs(one, variant), outputs(other, variant)
    assert mx.abs(left - right).max().item() < 1e-4
    assert proposed == expected


@pytest.mark.parametrize("variant", ["two_layers", "five_taps", "latent"])
@pytest.mark.parametrize("form", FORMATS)
def test_a_drafter_stored_quantized_computes_with_the_stored_values(form: str, variant: str, tmp_path: Path) -> None:
    block = FORMATS[form]
    stored = load(write_made(tmp_path / "q", variant, saying(block), quantized(block)), variant)
    names = {name for name, _ in tree_flatten(stored.network.modules.parameters())}
    assert "layers.0.mlp.up_proj.scales" in names
    assert "fc.scales" in names
    values = load(write_made(tmp_path / "f", variant, edit_tensors=rounded(block)), variant)
    assert_same_outputs(stored, values, variant)


@pytest.mark.parametrize("variant", ["two_layers", "latent"])
@pytest.mark.parametrize("form", FORMATS)
def test_a_drafter_quantized_on_load_computes_with_rounded_values(form: str, variant: str, tmp_path: Path) -> None:
    block = FORMATS[form]
    folder = write_made(tmp_path / "plain", variant)
    drafter = load(folder, variant, quantize=block)
    names = {name for name, _ in tree_flatten(drafter.network.modules.parameters())}
    assert {"fc.scales", "lm_head.scales", "layers.0.self_attn.o_proj.scales"} <= names
    if variant == "latent":  # the joint matrix is cut before it is quantized, so its groups are others
        assert "layers.0.self_attn.embed_q.scales" in names
        assert outputs(drafter, variant)[0].shape == outputs(load(folder, variant), variant)[0].shape
        return
    values = load(write_made(tmp_path / "rounded", variant, edit_tensors=rounded(block)), variant)
    assert_same_outputs(drafter, values, variant)


def test_quantizing_on_load_changes_the_drafter_and_not_the_target(tmp_path: Path) -> None:
    folder, target = write_made(tmp_path, "two_layers"), target_of("two_layers")
    before = dict(tree_flatten(target.model.parameters()))
    plain, coarse = load(folder, "two_layers"), load(folder, "two_layers", quantize={"group_size": 32, "bits": 2})
    assert not mx.allclose(outputs(plain, "two_layers")[0], outputs(coarse, "two_layers")[0], atol=1e-2).item()
    after = dict(tree_flatten(target.model.parameters()))
    assert all(after[name] is array for name, array in before.items())


def test_single_modules_may_have_formats_of_their_own_or_none(tmp_path: Path) -> None:
    whole, own = FORMATS["affine_4"], FORMATS["affine_8"]
    head = {"group_size": 32, "bits": 8}

    def mixed(content: Tensors) -> None:
        quantized(whole, lambda name: name not in ("lm_head.weight", "fc.weight"))(content)
        quantized(own, lambda name: name == "lm_head.weight")(content)

    block = {**whole, "lm_head": head, "fc": False}
    drafter = load(write_made(tmp_path, "two_layers", saying(block), mixed), "two_layers")
    assert (drafter.network.modules.lm_head.bits, drafter.network.modules.layers[1].mlp.up_proj.bits) == (8, 4)
    assert type(drafter.network.modules.fc) is nn.Linear


def test_formats_of_single_modules_are_named_as_the_file_names_its_tensors(tmp_path: Path) -> None:
    def renamed(content: Tensors) -> None:
        quantized(FORMATS["affine_8"])(content)
        for name in list(content):
            content["model." + name.replace("layers.0.", "midlayer.")] = content.pop(name)

    block = {
        **FORMATS["affine_4"],
        **{
            f"model.{name}": {"group_size": 32, "bits": 8}
            for name in (
                "fc",
                "lm_head",
                *(f"midlayer.self_attn.{x}_proj" for x in "qkvo"),
                *(f"midlayer.mlp.{x}_proj" for x in ("gate", "up", "down")),
            )
        },
    }
    drafter = load(write_made(tmp_path, "llama", saying(block), renamed), "llama")
    assert drafter.network.modules.layers[0].mlp.up_proj.bits == 8


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
def test_a_quantized_drafter_in_half_precision_keeps_large_states_finite(dtype: mx.Dtype, tmp_path: Path) -> None:
    def halved(content: Tensors) -> None:
        content.update({name: x.astype(dtype) for name, x in content.items() if x.dtype == mx.float32})
        quantized(FORMATS["affine_8"])(content)

    drafter = load(write_made(tmp_path, "llama", saying(FORMATS["affine_8"]), halved), "llama")
    assert drafter.network.dtype == dtype
    _, tapped = text("llama", 4)
    fused = drafter.network.fuse(tapped * 1e4, target_of("llama"))
    assert fused.dtype == dtype
    assert mx.isfinite(fused).all().item()
    assert drafter.network.modules.fc.scales.dtype == (mx.float32 if dtype == mx.float16 else dtype)


@pytest.mark.parametrize("options", [{}, {"quantize": FORMATS["affine_4"]}])
def test_loading_draws_nothing_from_the_random_state(options: dict[str, Any], tmp_path: Path) -> None:
    # Whoever seeds before loading gets the text of the one-token loop.
    stored, plain = FORMATS["affine_8"], write_made(tmp_path / "plain", "llama")
    coded = write_made(tmp_path / "coded", "llama", saying(stored), quantized(stored))
    for folder in (plain,) if options else (plain, coded):
        mx.random.seed(7)
        before = rng_key()
        load(folder, "llama", **options)
        assert rng_key() == before


# What is wrong is named


def refusal(folder: Path, variant: str = "llama") -> str:
    with pytest.raises(CheckpointError) as refused:
        load(folder, variant)
    return str(refused.value)


def test_scales_without_a_block_are_named(tmp_path: Path) -> None:
    message = refusal(write_made(tmp_path, "llama", edit_tensors=quantized(FORMATS["affine_4"])))
    assert "layers.0.mlp.up_proj.scales" in message
    assert "no quantization block" in message


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("damage", ["deleted", "truncated", "wrong dtype"])
def test_a_damaged_part_of_a_quantized_matrix_is_named(part: str, damage: str, tmp_path: Path) -> None:
    name = f"layers.0.mlp.up_proj.{part}"

    def edit(content: Tensors) -> None:
        quantized(FORMATS["affine_4"])(content)
        array = content.pop(name)
        if damage == "truncated":
            content[name] = array[:-1]
        if damage == "wrong dtype":
            content[name] = array.astype(mx.int32)

    message = refusal(write_made(tmp_path, "llama", saying(FORMATS["affine_4"]), edit))
    # Without its scales a matrix counts as one in floating point, whose shape it does not have.
    assert (name if (part, damage) != ("scales", "deleted") else "layers.0.mlp.up_proj.") in message


@pytest.mark.parametrize(
    "block",
    [
        {"group_size": 32},
        {"group_size": 32, "bits": 7},
        {"group_size": 31, "bits": 4},
        {"group_size": 32, "bits": "4"},
        {"group_size": 64, "bits": 4, "mode": "mxfp4"},
        {"group_size": 32, "bits": 4, "mode": "int4"},
        {"group_size": 32, "bits": 4, "lm_head": 3},
        "4bit",
    ],
)
def test_a_block_that_mlx_has_no_format_for_is_named(block: object, tmp_path: Path) -> None:
    message = refusal(write_made(tmp_path, "llama", saying(block), quantized(FORMATS["affine_4"])))
    assert "quantization" in message


def test_a_block_that_does_not_fit_the_stored_codes_is_named_by_tensor(tmp_path: Path) -> None:
    message = refusal(write_made(tmp_path, "llama", saying(FORMATS["affine_8"]), quantized(FORMATS["affine_4"])))
    assert "layers.0.mlp.up_proj.weight has shape" in message


def test_the_copy_of_the_block_that_mlx_lm_writes_is_understood(tmp_path: Path) -> None:
    form = FORMATS["affine_4"]
    both = lambda content: content.update(quantization=form, quantization_config=form)  # noqa: E731
    assert load(write_made(tmp_path, "llama", both, quantized(form)), "llama").network.modules.fc.bits == 4
    copy = lambda content: content.update(quantization_config=form)  # noqa: E731
    assert load(write_made(tmp_path, "llama", copy, quantized(form)), "llama").network.modules.fc.bits == 4
    two = lambda content: content.update(quantization=form, quantization_config=FORMATS["affine_8"])  # noqa: E731
    assert "expected one object, or two equal" in refusal(write_made(tmp_path, "llama", two, quantized(form)))


def test_what_cannot_be_quantized_on_load_is_refused_or_named(tmp_path: Path) -> None:
    folder, form = write_made(tmp_path, "llama"), {"group_size": 32, "bits": 4}
    with pytest.raises(UnsupportedOption, match="bits"):
        load(folder, "llama", quantize={"group_size": 32, "bits": 7})
    with pytest.raises(UnsupportedOption, match="group_size"):
        load(folder, "llama", quantize={"bits": 4})
    with pytest.raises(UnsupportedOption, match="an n-gram drafter"):
        load_drafter("ngram", target_of("llama"), quantize=form)
    with pytest.warns(UserWarning, match=r"not quantized, their rows are no whole groups: .*layers\.0\.mlp\.up_proj"):
        load(folder, "llama", quantize={"group_size": 64, "bits": 4})
    stored = write_made(tmp_path, "llama", saying(FORMATS["affine_4"]), quantized(FORMATS["affine_4"]))
    with pytest.raises(UnsupportedOption, match="stored quantized already"):
        load(stored, "llama", quantize=form)
