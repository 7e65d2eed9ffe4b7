"""The target's embedding and head, repeated beside a prediction layer: what is wrong with them is said."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import pytest
from mlx import nn

from mlx_spec.drafters.mtp.model import MtpDrafter
from mlx_spec.errors import CheckpointError
from mlx_spec.model.target import Target
from mlx_spec.pairing import load_drafter
from mlx_spec.split_mtp import split
from tests.drafters.native import build_target
from tests.tiny_mtp import VOCAB, Tensors, checkpoint, names_of, target, write

FAMILIES = ("deepseek_v3", "glm4_moe", "deepseek_v32", "glm_moe_dsa", "glm4_moe_lite", "kimi_k25", "longcat_flash")

DAMAGE: dict[str, tuple[Callable[[mx.array], mx.array], str]] = {
    "cut": (lambda array: mx.contiguous(array[:-1]), f"has shape [{VOCAB - 1}, "),
    "transposed": (lambda array: mx.contiguous(array.T), f", {VOCAB}], wanted [{VOCAB}, "),
    "not a number": (lambda array: mx.where(mx.arange(VOCAB)[:, None] == 1, float("nan"), array), "holds NaN"),
    "integers": (lambda array: array.astype(mx.int32), "has dtype int32, wanted bfloat16"),
}


def copies(family: str) -> list[str]:
    names = names_of(family)
    assert names.copies
    return [names.place + part for part in names.copies]


def edited(folder: Path, family: str, name: str, edit: Callable[[mx.array], mx.array]) -> Path:
    def change(tensors: Tensors) -> None:
        tensors[name] = edit(tensors[name])

    return write(folder, family, edit_tensors=change)


def told(folder: Path, own: Target) -> list[str]:
    """Warnings of loading."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert isinstance(load_drafter(folder, own), MtpDrafter)
    return [str(warning.message) for warning in caught]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_copy_is_named(family: str, damage: str, tmp_path: Path) -> None:
    edit, words = DAMAGE[damage]
    for index, name in enumerate(copies(family)):
        folder = edited(tmp_path / str(index), family, name, edit)
        with pytest.raises(CheckpointError) as refused:
            load_drafter(folder, target(family))
        assert name in str(refused.value)
        assert words in str(refused.value)


@pytest.mark.parametrize("family", [*FAMILIES, "step3p5"])
@pytest.mark.parametrize("edit", [lambda array: array[::-1], lambda array: 1.05 * array], ids=["other rows", "louder"])
def test_a_copy_that_is_none_is_told_with_one_warning(
    family: str, edit: Callable[[mx.array], mx.array], tmp_path: Path
) -> None:
    for index, name in enumerate(copies(family)):
        (warning,) = told(edited(tmp_path / str(index), family, name, edit), target(family))
        what = "head" if "head" in name else "embedding"
        assert f"{name} in {tmp_path / str(index)} is not the target's {what}" in warning


@pytest.mark.parametrize("family", FAMILIES)
def test_a_true_copy_in_half_precision_is_no_news(family: str, tmp_path: Path) -> None:
    for index, name in enumerate(copies(family)):
        folder = edited(tmp_path / str(index), family, name, lambda array: array.astype(mx.bfloat16))
        assert told(folder, target(family)) == []


def test_a_quantized_targets_copies_may_be_as_far_off_as_quantization_makes_them(tmp_path: Path) -> None:
    family = "deepseek_v3"
    quantized = build_target(*checkpoint(family)).model
    nn.quantize(quantized, 32, 4, class_predicate=lambda name, _: name in ("model.embed_tokens", "lm_head"))
    own = Target(quantized)
    assert told(write(tmp_path / "true", family), own) == []
    for index, name in enumerate(copies(family)):
        assert len(told(edited(tmp_path / str(index), family, name, lambda array: array[::-1]), own)) == 1


def test_without_the_targets_weights_copies_are_not_compared(tmp_path: Path) -> None:
    family = "glm4_moe_lite"
    split(write(tmp_path / "source", family), tmp_path / "out")
    damaged = edited(tmp_path / "damaged", family, copies(family)[0], DAMAGE["not a number"][0])
    with pytest.raises(CheckpointError, match="embed_tokens.weight holds NaN"):
        split(damaged, tmp_path / "other")
