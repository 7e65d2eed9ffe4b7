"""Looks at a target's files before mlx-lm does, and at what mlx-lm made of them.

mlx-lm opens whatever has the right name, builds whatever a config asks for, and takes any array of the right size. So a
broken or hostile folder would hang, fill the memory, or end in an error about something else.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten
from pydantic import StrictInt, TypeAdapter, ValidationError

from mlx_spec.drafters.checkpoint import (
    CONFIG_NAME,
    WEIGHTS_PATTERN,
    indexed_names,
    read_config,
    read_object,
    require_bounded,
    stored_shapes,
)
from mlx_spec.errors import CheckpointError

_GENERATION = "generation_config.json"
_TOKENIZER_SETTINGS = "tokenizer_config.json"

_READ = ("*.json", "*.safetensors", "*.model", "*.tiktoken", "*.txt", "*.jsonl", "*.jinja", "*/*.jinja")
"""Names of files that mlx-lm or transformers may open."""

_NAMED_MODULES = {"tool_parser_type": "mlx_lm.tool_parsers", "chat_template_type": "mlx_lm.chat_templates"}
"""Setting of a tokenizer -> the package of mlx-lm that its value names a module of."""

_LAYERS = re.compile(r"(n|num|number_of)_.*(layer|block)s?|depth")
_PER_LAYER = re.compile(r"layer|block|pattern")
_SIZES = re.compile(r"size|dim|head|expert|rank|width|embd|d_model|inner|channel|group")
_ABOUT_PACKING = ("quantization", "quantization_config", "compression_config")

MOST_LAYERS = 1024
"""Every layer is built before a weight is looked at, at about a millisecond each. The deepest models have some 130."""

MOST_UNNAMED_LAYERS = 256
"""Of more layers than that there is at least one tensor each."""

LARGEST_SIZE = 2**31 - 1
"""mlx counts an axis in 32 bits."""

MOST_VALUES_PER_ELEMENT = 16
"""Weights of two bits, packed in 32."""

NAMED = 12
"""Faults spelled out in one message."""

_IDS: TypeAdapter[int | list[int] | None] = TypeAdapter(StrictInt | list[StrictInt] | None)


def check_target_files(folder: Path, changes: Mapping[str, Any] | None = None) -> None:
    """Refuse a target's folder that mlx-lm could not load, or should not.

    Args:
        folder: as `mlx_lm.load` wants it.
        changes: entries that will replace those of its config.json.

    Raises:
        ModelNotFound: no config.json in it.
        CheckpointError: a file that is none or too large; weights that their header does not account for; an index that
            leaves the folder; a config that asks for more than the weights can hold, or names what there is not.

    Cost:
        Reads the JSON files and the headers of the weights.
    """
    check_files(folder)
    config = {**read_config(folder), **(changes or {})}
    check_settings(config, folder)
    _check_tokenizer_settings(folder)
    indexed_names(folder)
    shapes = [shape for path in sorted(folder.glob(WEIGHTS_PATTERN)) for shape in stored_shapes(path)]
    if shapes:
        _check_against_weights(config, folder, shapes)


def check_files(folder: Path) -> None:
    """Refuse what is no regular file, or larger than any of its name, where a file will be opened.

    Raises:
        CheckpointError: names it.
    """
    for pattern in _READ:
        for path in sorted(folder.glob(pattern)):
            if not path.is_file():
                raise CheckpointError(f"{path} is no regular file")
            if path.suffix != ".safetensors":
                require_bounded(path)


def check_settings(config: Mapping[str, Any], folder: Path) -> None:
    """Refuse a config whose model could not be built.

    Raises:
        CheckpointError: names the setting, what it is and what was expected.
    """
    problems = [f"{key} is {_shown(value)}, expected {wanted}" for key, value, wanted in _odd_settings(config)]
    if problems:
        raise CheckpointError(f"{folder / CONFIG_NAME}: {_several(problems)}.")
    _check_ids(config, folder / CONFIG_NAME)
    if config.get("model_file") is not None:
        named = _shown(config["model_file"])
        raise CheckpointError(f"{folder / CONFIG_NAME}: model_file is {named}. No code of a checkpoint is ever run.")
    if (folder / _GENERATION).exists():
        _check_ids(read_object(folder / _GENERATION), folder / _GENERATION)


def _odd_settings(config: Mapping[str, Any]) -> Iterator[tuple[str, Any, str]]:
    """(setting, its value, what was expected) of each that cannot be."""
    if not isinstance(config.get("model_type"), str):
        yield "model_type", config.get("model_type"), "the name of an architecture"
    text = _text(config)
    for key in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"):
        value = text.get(key)
        if isinstance(value, bool | str) or (isinstance(value, int | float) and value < 1):
            yield key, value, "a positive integer"
    for key, value in _settings(config):
        name = key.rpartition(".")[2]
        if isinstance(value, str | list) and _PER_LAYER.search(name) and len(value) > 4 * MOST_LAYERS:
            yield key, f"{len(value)} entries long", f"at most {4 * MOST_LAYERS}"
        if isinstance(value, int | float) and value > LARGEST_SIZE and _SIZES.search(name):
            yield key, value, f"at most {LARGEST_SIZE}"
        if isinstance(value, int | float) and value > MOST_LAYERS and _LAYERS.fullmatch(name):
            yield key, value, f"at most {MOST_LAYERS}"


def _settings(config: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """Every setting of a config and of the objects in it, by dotted name."""
    for key, value in config.items():
        if isinstance(value, dict):
            if key not in _ABOUT_PACKING:
                yield from _settings(value, f"{before}{key}.")
        else:
            yield before + key, value


def _text(config: Mapping[str, Any]) -> Mapping[str, Any]:
    text = config.get("text_config")
    return {**config, **text} if isinstance(text, dict) else config


def _check_ids(config: Mapping[str, Any], path: Path) -> None:
    try:
        _IDS.validate_python(config.get("eos_token_id"))
    except ValidationError:
        shown = _shown(config["eos_token_id"])
        raise CheckpointError(f"{path}: eos_token_id is {shown}, expected a token id or a list of them.") from None


def _check_tokenizer_settings(folder: Path) -> None:
    path = folder / _TOKENIZER_SETTINGS
    settings = read_object(path) if path.exists() else {}
    for key, package in _NAMED_MODULES.items():
        named = settings.get(key)
        if named and not (isinstance(named, str) and named.isidentifier() and find_spec(f"{package}.{named}")):
            raise CheckpointError(f"{path}: {key} is {_shown(named)}, and mlx-lm has nothing of that name.")


def _check_against_weights(config: Mapping[str, Any], folder: Path, shapes: list[tuple[int, ...]]) -> None:
    text = _text(config)
    layers = text.get("num_hidden_layers")
    if isinstance(layers, int) and layers > max(len(shapes), MOST_UNNAMED_LAYERS):
        raise CheckpointError(
            f"{folder / CONFIG_NAME}: num_hidden_layers is {layers}, but the weights are {len(shapes)} tensors."
        )
    stored = sum(map(_elements, shapes))
    vocabulary, hidden = text.get("vocab_size"), text.get("hidden_size")
    if not (isinstance(vocabulary, int) and isinstance(hidden, int)):
        return
    # The embedding is the one part that no architecture is without.
    if vocabulary * hidden > stored * MOST_VALUES_PER_ELEMENT:
        raise CheckpointError(
            f"{folder / CONFIG_NAME}: an embedding of vocab_size {vocabulary} and hidden_size {hidden} has "
            f"{vocabulary * hidden} values, but the weights have {stored} elements in all."
        )


def _elements(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


# What mlx-lm made of them


class Blueprint:
    """What a model was before its weights came: told to be built through `noting`."""

    def __init__(self) -> None:
        self._classes: dict[str, type[nn.Module]] = {}
        self._floats: set[str] = set()

    def note(self, model: nn.Module) -> None:
        """Remember the classes of its modules and which of its parameters are floats."""
        self._classes = {name: type(module) for name, module in model.named_modules()}
        parameters: list[tuple[str, mx.array]] = tree_flatten(model.parameters())
        self._floats = {name for name, array in parameters if mx.issubdtype(array.dtype, mx.floating)}

    def require_floats(self, model: nn.Module, folder: Path) -> None:
        """Refuse integers where the model has floats, but for modules that were replaced by packed ones.

        Raises:
            CheckpointError: names them.
        """
        kept = {name for name, module in model.named_modules() if self._classes.get(name) is type(module)}
        problems = [
            f"{name} has dtype {str(array.dtype).removeprefix('mlx.core.')}, wanted floats"
            for name, array in tree_flatten(model.parameters())
            if name in self._floats and not mx.issubdtype(array.dtype, mx.floating) and name.rpartition(".")[0] in kept
        ]
        if problems:
            raise CheckpointError(f"{folder}: {_several(problems)}.")


def require_finite(model: nn.Module, folder: Path) -> None:
    """Refuse weights that are NaN or infinite.

    Raises:
        CheckpointError: names them.

    Cost:
        Reads every weight once.
    """
    problems = []
    for name, array in tree_flatten(model.parameters()):
        if mx.issubdtype(array.dtype, mx.floating):
            found = {"NaN": mx.isnan(array).sum(), "infinite": mx.isinf(array).sum()}
            counts = [f"{count.item()} {what}" for what, count in found.items() if count.item()]
            problems += [f"{name} holds {' and '.join(counts)} of {array.size} values"] if counts else []
    if problems:
        raise CheckpointError(f"{folder}: {_several(problems)}. Convert or download it again.")


def _several(problems: list[str]) -> str:
    more = len(problems) - NAMED
    return "; ".join(problems[:NAMED]) + (f"; and {more} more" if more > 0 else "")


def _shown(value: object) -> str:
    said = repr(value)
    return said if len(said) <= 80 else f"{said[:80]}…"
