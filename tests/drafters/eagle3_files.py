"""A tiny EAGLE-3 checkpoint in the flat layout, its target, the reference's outputs, and damaged copies of it."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.utils import load_model

from mlx_spec.drafters import eagle3
from mlx_spec.drafters.eagle3.model import Eagle3Drafter
from mlx_spec.model.target import Target

FOLDER = Path(__file__).parent.parent / "fixtures" / "eagle3"
FLAT = FOLDER / "safeailab"
"""H 32, K 3, target layers 8, vocabulary 96, draft vocabulary 40."""

Config = dict[str, Any]
Tensors = dict[str, mx.array]


@functools.cache
def target() -> Target:
    """The target the drafter was made for: Llama with 8 layers."""
    return Target(load_model(FOLDER / "target")[0])


@functools.cache
def drafter() -> Eagle3Drafter:
    """The drafter as it is on disk, float32."""
    return load(FLAT)


def load(folder: Path) -> Eagle3Drafter:
    """The drafter in a folder, for that target."""
    return eagle3.load(folder, target())


def golden() -> Tensors:
    """The reference's inputs and outputs for the same weights."""
    return _load(FOLDER / "llama" / "golden.safetensors")


def config() -> Config:
    """The drafter's config.json."""
    content: Config = json.loads((FLAT / "config.json").read_text())
    return content


def tensors() -> Tensors:
    """The drafter's tensors under the names of the file."""
    return _load(FLAT / "model.safetensors")


def write(
    folder: Path,
    edit_config: Callable[[Config], object] = lambda content: None,
    edit_tensors: Callable[[Tensors], object] = lambda content: None,
) -> Path:
    """A copy of the checkpoint in `folder`, edited in place by the two functions."""
    folder.mkdir(exist_ok=True)
    changed_config, changed_tensors = config(), tensors()
    edit_config(changed_config)
    edit_tensors(changed_tensors)
    (folder / "config.json").write_text(json.dumps(changed_config))
    mx.save_safetensors(str(folder / "model.safetensors"), changed_tensors)
    return folder


def _load(path: Path) -> Tensors:
    loaded = mx.load(str(path))
    assert isinstance(loaded, dict)
    return loaded
