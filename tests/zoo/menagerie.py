"""One tiny random model per architecture of mlx-lm, built from a config as mlx-lm builds a real one."""

from __future__ import annotations

import copy
import importlib
import json
import pkgutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm.models
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.utils import _get_classes

from tests.oracle import rng_key, seed_from_key

PARAMETERS_AT_MOST = 100_000_000
"""A config that leaves sizes out gets those of the real model, which is no animal for this zoo."""

CONFIGS = Path(__file__).with_name("configs")

EMBEDDING_STD = 0.15
"""Small enough that what the layers add outweighs the token itself: a tied head would repeat its input."""

HEAD_GAIN = 3.0
HEADS = ("lm_head", "embed_out", "output", "ff_out")

OURS = ("name", "seed", "max_kv_size")
"""Keys of an entry that are about the zoo; what remains is the config."""

ONLY_LOOKED_FOR = "hf_olmo"
"""olmo ends the process when this package is absent, and then never uses it. A stand-in of that name is enough."""


@dataclass(frozen=True)
class Specimen:
    """One config of the zoo.

    Attributes:
        name: what reports call it.
        config: what a checkpoint's config.json would hold.
        seed: of the random weights.
        max_kv_size: as in mlx-lm's `generate_step`; it turns plain caches into rings that keep their first tokens.
    """

    name: str
    config: Mapping[str, Any]
    seed: int = 0
    max_kv_size: int | None = None

    @property
    def module(self) -> str:
        """The mlx-lm module that mlx-lm picks for this config.

        Raises:
            ValueError: mlx-lm has no module for it.
        """
        _provide_stand_in()
        _, arguments = _get_classes(dict(self.config))
        return str(arguments.__module__).rpartition(".")[2]

    def build(self, dtype: str) -> nn.Module:
        """The model with weights that depend on the seed alone. The caller's random state stays where it is.

        Args:
            dtype: name of an mlx dtype.
        """
        key = rng_key()
        mx.random.seed(self.seed)
        try:
            model = bare_model(self.config)
            give_weights(model, self.seed, getattr(mx, dtype))
        finally:
            seed_from_key(key)
        return model


def specimens(configs: Sequence[Mapping[str, Any]]) -> list[Specimen]:
    """One specimen per config object. A repeated name gets a number.

    Raises:
        ValueError: an entry is no object with a `model_type`. Names its place.
    """
    found: list[Specimen] = []
    taken: dict[str, int] = {}
    for place, config in enumerate(configs):
        if not isinstance(config, Mapping) or not isinstance(config.get("model_type"), str):
            raise ValueError(f"entry {place} is no config: an object with a `model_type` was expected, got {config!r}")
        rest = {key: value for key, value in config.items() if key not in OURS}
        name = str(config.get("name") or config["model_type"])
        taken[name] = taken.get(name, 0) + 1
        if taken[name] > 1:
            name = f"{name} ({taken[name]})"
        found.append(Specimen(name, rest, int(config.get("seed", 0)), config.get("max_kv_size")))
    return found


def read_configs(path: Path) -> list[Specimen]:
    """The specimens of one file: a JSON list of config objects.

    Raises:
        ValueError: the file holds something else.
    """
    configs = json.loads(path.read_text(encoding="utf-8"))
    if isinstance(configs, dict):
        configs = [configs]
    if not isinstance(configs, list):
        raise ValueError(f"{path} holds a {type(configs).__name__}; a JSON list of config objects was expected")
    return specimens(configs)


def whole_zoo() -> list[Specimen]:
    """Every specimen of `configs/`, by name."""
    found = [specimen for path in sorted(CONFIGS.glob("*.json")) for specimen in read_configs(path)]
    return sorted(found, key=lambda specimen: specimen.name.lower())


def architectures() -> list[str]:
    """The modules of the installed mlx-lm that define a `Model`."""
    _provide_stand_in()
    names = [module.name for module in pkgutil.iter_modules(mlx_lm.models.__path__)]
    return [name for name in names if hasattr(importlib.import_module(f"mlx_lm.models.{name}"), "Model")]


def missing_architectures(zoo: Sequence[Specimen]) -> list[str]:
    """Modules of the installed mlx-lm that define a `Model` and have no config."""
    return sorted(set(architectures()) - {specimen.module for specimen in zoo})


def bare_model(config: Mapping[str, Any]) -> nn.Module:
    """What mlx-lm makes of a config before it loads weights."""
    _provide_stand_in()
    own = copy.deepcopy(dict(config))  # some modules write into it
    model_class, arguments = _get_classes(own)
    model = model_class(arguments.from_dict(own))
    count = sum(array.size for _, array in tree_flatten(model.parameters()))
    if count > PARAMETERS_AT_MOST:
        raise ValueError(f"{count} parameters, at most {PARAMETERS_AT_MOST} fit here: give every size in the config")
    _refuse_wild_writes(model)
    if "quantization" in own:
        _quantize(model, own["quantization"])
    return model


def _provide_stand_in() -> None:
    sys.modules.setdefault(ONLY_LOOKED_FOR, ModuleType(ONLY_LOOKED_FOR))


def _refuse_wild_writes(model: nn.Module) -> None:
    """phi3small masks fixed ids of its logits; with fewer of them, mlx writes past the end and corrupts the process."""
    masked = getattr(model, "_dummy_tokenizer_ids", None)
    if masked is not None and int(masked.max().item()) >= model.args.vocab_size:
        raise ValueError(
            f"mlx-lm masks the logit of id {int(masked.max().item())} of this architecture, "
            f"which a vocabulary of {model.args.vocab_size} does not have"
        )


def _quantize(model: nn.Module, scheme: Mapping[str, Any]) -> None:
    group_size = scheme["group_size"]
    nn.quantize(
        model,
        group_size=group_size,
        bits=scheme["bits"],
        mode=scheme.get("mode", "affine"),
        class_predicate=lambda _, part: hasattr(part, "to_quantized") and part.weight.shape[-1] % group_size == 0,
    )


def give_weights(model: nn.Module, seed: int, dtype: mx.Dtype) -> None:
    """Random weights under which signals neither vanish nor explode and logits are not flat.

    Matrices are normal with variance 1 / fan-in, the head `HEAD_GAIN` times that; vectors, and what a module sets to
    a value of its own, stay near it. Floats become `dtype` but where the model's `cast_predicate` says otherwise.
    """
    rng = np.random.default_rng(seed)
    parts = dict(model.named_modules())
    casts: Callable[[str], bool] = getattr(model, "cast_predicate", lambda _: True)
    weights = []
    for name, initial in sorted(tree_flatten(model.parameters())):
        owner = parts.get(name.rpartition(".")[0])
        weight = _weight(name, initial, owner, rng)
        if mx.issubdtype(initial.dtype, mx.floating) and initial.dtype == mx.float32 and casts(name):
            weight = weight.astype(dtype)
        weights.append((name, weight))
    model.update(tree_unflatten(weights))
    model.eval()
    mx.eval(model.parameters())


def _weight(name: str, initial: mx.array, owner: Any, rng: np.random.Generator) -> mx.array:
    if initial.dtype == mx.uint32:
        return mx.array(rng.integers(0, 2**32, initial.shape, dtype=np.uint32))
    if not mx.issubdtype(initial.dtype, mx.floating):
        return initial
    noise = mx.array(rng.standard_normal(initial.shape, dtype=np.float32))
    leaf = name.rpartition(".")[2]
    if leaf == "signs":
        return mx.where(noise > 0, 1.0, -1.0)
    if hasattr(owner, "scales") or hasattr(owner, "quant_key_scale"):
        return _quantized_part(leaf, initial, noise)
    if leaf == "A_log" or initial.ndim < 2:
        return initial + 0.1 * noise
    if isinstance(owner, nn.Embedding):
        return EMBEDDING_STD * noise
    fan_in = int(np.prod(initial.shape[1:])) if isinstance(owner, nn.Conv1d) else initial.shape[-1]
    gain = HEAD_GAIN if any(part in HEADS for part in name.split(".")) else 1.0
    return gain * noise / fan_in**0.5


def _quantized_part(leaf: str, initial: mx.array, noise: mx.array) -> mx.array:
    """Scales and offsets of quantized entries: small, and of one sign where the format wants it."""
    if leaf.endswith(("scale", "scales")):
        return (0.02 + 0.01 * mx.abs(noise)).astype(initial.dtype)
    if leaf == "biases":
        return (-0.05 + 0.01 * noise).astype(initial.dtype)
    return initial + 0.1 * noise
