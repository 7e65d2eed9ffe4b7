"""Damaged EAGLE-3 checkpoints: whatever is wrong with a tensor or a key is named, or changes nothing."""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlx_spec.errors import MlxSpecError
from mlx_spec.model.target import Target
from mlx_spec.pairing import load_drafter
from tests.drafters.eagle3_files import FOLDER, target
from tests.drafters.eagle3_made import VARIANTS, made_config, made_tensors, target_of

FIXTURES = ("safeailab", "llama", "qwen3", "two_layers", "norm_before_fc", "fullvocab", "eagle31")
SOON = ("eagle31", "made_norm_before_fc", "made_five_taps_two_layers", "made_latent", "made_heads_for_deepseek")
LATER = sorted({*FIXTURES, *(f"made_{name}" for name in VARIANTS)} - set(SOON))
LAYOUTS = (*SOON, *(pytest.param(name, marks=pytest.mark.deep) for name in LATER))

TRAINING_ONLY = "t2d"

LEFT_OUT = {
    "rope_scaling": "plain positions",
    "norm_before_residual": "false in the flat layout",
    "beta_fast": "32",
    "mscale": "1",
    "mscale_all_dim": "0",
}
"""Keys whose absence has a meaning that every library agrees on, so that a file without them is complete."""

UNBOUNDED = ("rope_theta", "factor", "original_max_position_embeddings", *LEFT_OUT, "beta_slow")
"""Numbers of the rotation, of which none is too large to be meant."""

Content = dict[str, Any]


@dataclass(frozen=True)
class Checkpoint:
    """What a folder holds, in memory."""

    config: Content
    tensors: dict[str, mx.array]
    target: Target

    def outcome(self, folder: Path, config: Content | None = None, tensors: dict[str, mx.array] | None = None) -> str:
        """What loading it says, errors and warnings; followed by what it computes."""
        (folder / "config.json").write_text(json.dumps(self.config if config is None else config))
        mx.save_safetensors(str(folder / "model.safetensors"), self.tensors if tensors is None else tensors)
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            try:
                computed = self._computed(folder)
            except MlxSpecError as error:
                computed = f"refused: {error}"
        return "".join(f"{warning.message}\n" for warning in warned) + computed

    def _computed(self, folder: Path) -> str:
        drafter: Any = load_drafter(folder, self.target)
        network, key = drafter.network, mx.random.key(4)
        tapped = mx.random.normal((1, 6, network.tapped_size), key=key)
        ids = mx.array([[3, 70, 11, 9, 42, 8]])
        states = network.run(ids, network.fuse(tapped, self.target), network.new_caches(), 0, self.target)
        fed = network.carry(states).sum().item()
        return f"computed {drafter.taps} {fed!r} {network.logits(states, self.target).sum().item()!r}"


def checkpoint(layout: str) -> Checkpoint:
    if layout.startswith("made_"):
        variant = layout.removeprefix("made_")
        return Checkpoint(made_config(variant), made_tensors(variant), target_of(variant))
    tensors = mx.load(str(FOLDER / layout / "model.safetensors"))
    assert isinstance(tensors, dict)
    return Checkpoint(json.loads((FOLDER / layout / "config.json").read_text()), tensors, target())


def without(content: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in content.items() if key != name}


def damages(content: dict[str, mx.array], name: str) -> Iterator[tuple[str, dict[str, mx.array]]]:
    """Every way to damage one tensor."""
    array, rest = content[name], without(content, name)
    yield "deleted", rest
    yield "renamed", {**rest, f"{name}_": array}
    yield "truncated", {**rest, name: array[:-1]}
    yield "of one axis more", {**rest, name: array[None]}
    yield "of integers", {**rest, name: array.astype(mx.uint8)}
    if array.ndim == 2 and array.shape[0] != array.shape[1]:
        yield "transposed", {**rest, name: array.T}
    if array.dtype == mx.float32:
        yield "NaN", {**rest, name: mx.where(mx.arange(array.size).reshape(array.shape) == 1, mx.nan, array)}


def may_be_borrowed(name: str, case: Checkpoint) -> bool:
    """The embedding is the target's where there is none; so is the head, if it is for the whole vocabulary."""
    return name == "embed_tokens.weight" or (
        name == "lm_head.weight" and "d2t" not in case.tensors and not name.startswith("made")
    )


@pytest.mark.part(2)
@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_damaged_tensor_is_named(layout: str, tmp_path: Path, tell: Callable[[str], None]) -> None:
    case, tried = checkpoint(layout), 0
    assert case.outcome(tmp_path).startswith("computed")
    for name in case.tensors:
        for damage, tensors in damages(case.tensors, name):
            said = case.outcome(tmp_path, tensors=tensors)
            tried += 1
            if name == TRAINING_ONLY or (damage in ("deleted", "renamed") and may_be_borrowed(name, case)):
                continue
            assert "refused: " in said, f"{name} {damage}: {said}"
            assert name in said, f"{name} {damage}: {said}"
    tell(f"eagle3 {layout}: {tried} damaged tensors")


def keys(content: Content, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The path of every key, nested ones included."""
    for key, value in content.items():
        yield (*path, key)
        if isinstance(value, dict):
            yield from keys(value, (*path, key))


def edited(content: Content, path: tuple[str, ...], edit: Callable[[Content, str], None]) -> Content:
    """A copy with one key edited."""
    changed = copy.deepcopy(content)
    place = changed
    for key in path[:-1]:
        place = place[key]
    edit(place, path[-1])
    return changed


def _delete(place: Content, key: str) -> None:
    del place[key]


def _rename(place: Content, key: str) -> None:
    place[f"{key}_"] = place.pop(key)


def _to(value: object) -> Callable[[Content, str], None]:
    return lambda place, key: place.update({key: value})


EDITS = {
    "deleted": _delete,
    "renamed": _rename,
    "a word": _to("nonsense"),
    "negative": _to(-7),
    "a list": _to([[]]),
    "huge": _to(10**30),
}


@pytest.mark.part(2)
@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_damaged_key_is_named_or_changes_nothing(layout: str, tmp_path: Path, tell: Callable[[str], None]) -> None:
    case, tried = checkpoint(layout), 0
    whole = case.outcome(tmp_path)
    for path in keys(case.config):
        for damage, edit in EDITS.items():
            said = case.outcome(tmp_path, config=edited(case.config, path, edit))
            tried += 1
            computed = said.splitlines()[-1]
            if computed == whole or (damage in ("deleted", "renamed") and path[-1] in LEFT_OUT):
                continue
            if damage == "huge" and path[-1] in UNBOUNDED:
                continue
            assert path[-1] in said, f"{'.'.join(path)} {damage}: {said}"
    tell(f"eagle3 {layout}: {tried} damaged keys")
