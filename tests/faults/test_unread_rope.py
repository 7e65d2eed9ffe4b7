"""A kind of fault with a target's own prediction layer: refused for what mlx-lm left unread, building the target."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlx_spec import generate_step
from mlx_spec.drafters.mtp.model import MtpDrafter, target_args
from mlx_spec.errors import IncompatiblePair
from mlx_spec.model.target import Target
from mlx_spec.pairing import load_drafter
from mlx_spec.split_mtp import split
from tests.drafters.native import build_target
from tests.oracle import run_stock
from tests.tiny_mtp import checkpoint, write

pytestmark = pytest.mark.faults

UNREAD = ("deepseek_v3", "deepseek_v32", "glm4_moe_lite", "kimi_k25", "mimo", "step3p5", "bailing_moe_v3")
"""Families of which mlx-lm reads `rope_theta` beside the other settings alone, and has a value where it is absent."""

READ = ("glm_moe_dsa", "exaone_moe", "qwen35_dense_real")
"""Families of which it reads `rope_parameters`."""

THETA = 5e5


def moved(content: dict[str, Any], theta: Any = THETA) -> None:
    """As transformers writes it now."""
    text = content.get("text_config", content)
    text.pop("rope_theta", None)
    text.pop("rope_scaling", None)
    text["rope_parameters"] = {**text.get("rope_parameters", {}), "rope_theta": theta, "rope_type": "default"}


def built(folder: Path, family: str) -> Target:
    """The target as mlx-lm builds it from a folder's config."""
    content = json.loads((folder / "config.json").read_text())
    if family in UNREAD:
        # So that nobody reads it here either.
        content.get("text_config", content).pop("rope_parameters", None)
    return build_target(content, checkpoint(family)[1])


def made(folder: Path, family: str, theta: Any = THETA) -> tuple[Path, Target]:
    """A checkpoint with its rotation in `rope_parameters` alone, and its target."""
    written = write(folder, family, lambda content: moved(content, theta))
    return written, built(written, family)


@pytest.mark.every_case
@pytest.mark.parametrize("family", UNREAD)
def test_the_prediction_layer_follows_the_target_as_it_was_built(tmp_path: Path, family: str) -> None:
    folder, target = made(tmp_path / "target", family)
    theta = target_args(target).rope_theta
    assert theta != THETA, "the fact this rests on"
    with pytest.warns(UserWarning, match=r"does not read rope_parameters\.rope_theta=500000\.0") as told:
        drafter = load_drafter(folder, target)
    assert len([each for each in told if "rope_parameters" in str(each.message)]) == 1
    assert f"rope_theta={theta}" in str(told[0].message)
    assert isinstance(drafter, MtpDrafter)


@pytest.mark.slow
@pytest.mark.part(1)
@pytest.mark.parametrize("family", UNREAD)
@pytest.mark.filterwarnings("ignore:.*does not read rope_parameters")
def test_its_text_is_stocks(tmp_path: Path, family: str) -> None:
    folder, target = made(tmp_path / "target", family)
    prompt, drafter = [3, 1, 4, 1, 5], load_drafter(folder, target)
    want = list(run_stock(target.model, prompt, 10).ids)
    got = generate_step(mx.array(prompt), target.model, draft_model=drafter, draft_block_size=2, max_tokens=10)
    assert [token for token, _ in got] == want


@pytest.mark.parametrize("family", READ)
def test_what_mlx_lm_reads_there_still_tells_another_model(tmp_path: Path, family: str) -> None:
    _, target = made(tmp_path / "target", family, 1e4)
    other, _ = made(tmp_path / "other", family, THETA)
    with pytest.raises(IncompatiblePair, match=r"rope_theta=500000\.0 against 10000\.0"):
        load_drafter(other, target)


@pytest.mark.parametrize("family", UNREAD)
def test_what_stands_beside_the_other_settings_still_tells_another_model(tmp_path: Path, family: str) -> None:
    _, target = made(tmp_path / "target", family)

    def other(content: dict[str, Any]) -> None:
        content.get("text_config", content)["rope_theta"] = 12345.0

    with pytest.raises(IncompatiblePair, match=r"rope_theta=12345\.0 against"):
        load_drafter(write(tmp_path / "other", family, other), target)


@pytest.mark.parametrize("family", ["deepseek_v3", "mimo", "kimi_k25"])
def test_a_target_that_was_told_its_rotation_is_of_that_model(tmp_path: Path, family: str) -> None:
    """As by `load(model_config=...)`: then what the checkpoint says is what the target has."""
    folder = write(tmp_path / "target", family, moved)
    told = write(
        tmp_path / "told", family, lambda content: content.get("text_config", content).update(rope_theta=THETA)
    )
    target = built(told, family)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_drafter(folder, target)


@pytest.mark.parametrize("family", ["deepseek_v3", "mimo", "glm4_moe_lite"])
def test_scaling_that_is_not_read_is_told_too(tmp_path: Path, family: str) -> None:
    def scaled(content: dict[str, Any]) -> None:
        theta = content.pop("rope_theta", 1e4)
        content.pop("rope_scaling", None)
        content["rope_parameters"] = {"rope_theta": theta, "rope_type": "yarn", "factor": 4.0}

    folder = write(tmp_path / "target", family, scaled)
    target = built(folder, family)
    with pytest.warns(UserWarning, match=r"rope_parameters\.factor=4\.0"):
        load_drafter(folder, target)


@pytest.mark.filterwarnings("ignore:.*does not read rope_parameters")
@pytest.mark.parametrize("family", ["deepseek_v3", "step3p5", "bailing_moe_v3"])
def test_a_layer_that_was_split_off_follows_the_target_as_well(tmp_path: Path, family: str) -> None:
    folder, target = made(tmp_path / "target", family)
    assert isinstance(load_drafter(split(folder, tmp_path / "alone"), target), MtpDrafter)
