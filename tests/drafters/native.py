"""Targets out of checkpoints that carry a prediction layer, also where mlx-lm's own loader cannot read them.

Tiny checkpoints differ from published ones in what mlx-lm relies on: the number of the layer past the last, experts
that a converter left one by one, a rotation that newer configs keep in an object of its own.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.utils import _get_classes

from mlx_spec.model.target import Target

Tensors = dict[str, mx.array]

FIXTURES = Path(__file__).parent.parent / "fixtures" / "mtp"

PREDICTION = re.compile(r"(^|\.)mtp[._]")

_EXPERT = re.compile(r"(.*\.experts)\.0\.gate_proj\.weight")

FUSED = ("qwen3_5_moe",)
"""mlx-lm modules that read experts side by side only."""


@functools.cache
def native_target(folder: Path) -> Target:
    """The target of a checkpoint folder, by mlx-lm's own classes."""
    config = json.loads((folder / "config.json").read_text())
    tensors: Tensors = {}
    for path in folder.glob("*.safetensors"):
        if "golden" not in path.name:
            tensors.update(mx.load(str(path)))
    return build_target(config, tensors)


def build_target(config: Mapping[str, Any], tensors: Mapping[str, mx.array]) -> Target:
    """A target from a config.json object and the tensors of its checkpoint, prediction layer included."""
    config = flat(config)
    model_class, arguments = _get_classes(config)
    model = model_class(arguments.from_dict(config))
    beyond = re.compile(rf"(^|\.)layers\.{len(model.layers)}\.")
    kept = {key: array for key, array in tensors.items() if not PREDICTION.search(key) and not beyond.search(key)}
    if model_class.__module__.rpartition(".")[2] in FUSED:
        kept = _side_by_side(kept)
    model.load_weights(list(model.sanitize(kept).items()))
    model.eval()
    mx.eval(model.parameters())
    return Target(model)


def flat(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config as mlx-lm's argument classes read it."""
    rope = config.get("rope_parameters") or {}
    named = {key: rope[key] for key in ("rope_theta", "partial_rotary_factor") if key in rope}
    model_type = config["model_type"].removesuffix("_text")
    # mlx-lm changes the objects it is given.
    return json.loads(json.dumps({"rope_scaling": None, **named, **config, "model_type": model_type}))  # type: ignore[no-any-return]


def _side_by_side(tensors: Tensors) -> Tensors:
    result = dict(tensors)
    for name in tensors:
        match = _EXPERT.fullmatch(name)
        if match is None:
            continue
        prefix = match[1]
        count = sum(1 for key in tensors if key.startswith(f"{prefix}.") and key.endswith(".gate_proj.weight"))

        def stack(part: str, prefix: str = prefix, count: int = count) -> mx.array:
            return mx.stack([result.pop(f"{prefix}.{each}.{part}.weight") for each in range(count)])

        result[f"{prefix}.gate_up_proj"] = mx.concatenate([stack("gate_proj"), stack("up_proj")], axis=1)
        result[f"{prefix}.down_proj"] = stack("down_proj")
    return result
