"""Tiny checkpoints of block drafters, their target, and edited copies of them."""

from __future__ import annotations

import functools
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.utils import load_model

from mlx_spec.drafters import dflash
from mlx_spec.drafters.dflash.model import BlockDrafter
from mlx_spec.drafters.dflash.state import BlockState
from mlx_spec.model.target import Target

FIXTURES = Path(__file__).parent.parent / "fixtures"

FOLDERS = {
    "dflash": "dflash_v1/draft_legacy",
    "dflash_sliding": "dflash_v1/draft_nested_swa",
    "dflash2": "dflash2/draft",
    "dspark": "dspark/qwen3_vanilla",
    "dspark_gated": "dspark/qwen3_gated",
    "gemma4_dspark": "dspark/gemma4",
    "muse_glimmer_assistant": "muse_glimmer_assistant/assistant",
}
"""Name -> folder. All have H 32 and two layers, and are for a target of 6 layers and a vocabulary of 64."""

VOCAB, HIDDEN = 64, 32

Config = dict[str, Any]
Tensors = dict[str, mx.array]


@functools.cache
def target() -> Target:
    """Qwen3 with 6 layers, H 32 and a vocabulary of 64: it fits every one of the drafters."""
    return Target(load_model(FIXTURES / "dflash_v1" / "target")[0])


@functools.cache
def drafter(name: str) -> BlockDrafter:
    """A drafter as it is on disk, float32. Shared: leave its settings alone."""
    return edited(name)


def edited(
    name: str,
    edit_config: Callable[[Config], object] = lambda content: None,
    edit_tensors: Callable[[Tensors], object] = lambda content: None,
) -> BlockDrafter:
    """A drafter whose files were edited in place by the two functions."""
    with tempfile.TemporaryDirectory() as folder:
        return load(write(Path(folder), name, edit_config, edit_tensors))


def load(folder: Path) -> BlockDrafter:
    """The drafter in a folder, for that target."""
    return dflash.load(folder, target())


def config(name: str) -> Config:
    """A drafter's config.json."""
    content: Config = json.loads((FIXTURES / FOLDERS[name] / "config.json").read_text())
    return content


def tensors(name: str) -> Tensors:
    """A drafter's tensors under the names of the file."""
    loaded = mx.load(str(FIXTURES / FOLDERS[name] / "model.safetensors"))
    assert isinstance(loaded, dict)
    return loaded


def write(
    folder: Path,
    name: str,
    edit_config: Callable[[Config], object] = lambda content: None,
    edit_tensors: Callable[[Tensors], object] = lambda content: None,
) -> Path:
    """A copy of a checkpoint in `folder`, edited in place by the two functions."""
    folder.mkdir(exist_ok=True)
    changed_config, changed_tensors = config(name), tensors(name)
    edit_config(changed_config)
    edit_tensors(changed_tensors)
    (folder / "config.json").write_text(json.dumps(changed_config))
    mx.save_safetensors(str(folder / "model.safetensors"), changed_tensors)
    return folder


def text(length: int, source: BlockDrafter, seed: int = 3) -> tuple[list[int], mx.array]:
    """Committed tokens and made-up states for them, [1, length, K*H]."""
    rng = np.random.default_rng(seed)
    tapped = source.network.tapped_size - source.network.embedded_size
    ids = rng.integers(0, VOCAB, length).tolist()
    return ids, mx.array(rng.standard_normal((1, length, tapped)), mx.float32)


def cold(source: BlockDrafter, ids: list[int], hidden: mx.array, start: int = 0) -> BlockState:
    """A state that read everything in one chunk."""
    state = source.open(target(), start)
    state.read_prompt([ids], hidden)
    return state
