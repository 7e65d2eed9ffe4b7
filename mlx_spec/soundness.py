"""Looks at a target's files before mlx-lm does, and at what mlx-lm made of them.

mlx-lm opens whatever has the right name, builds whatever a config asks for, and takes any array of the right size. So a
broken or hostile folder would hang, fill the memory, or end in an error about something else.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import Field, fields, is_dataclass
from importlib.util import find_spec
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten
from pydantic import StrictInt, TypeAdapter, ValidationError

from mlx_spec.drafters.checkpoint import (
    CONFIG_NAME,
    WEIGHTS_PATTERN,
    indexed_names,
    one_line,
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
_NUMBERS = re.compile(r"rope_theta|\w*_eps(ilon)?")
_ROPE = re.compile(r"rope_(scaling|parameters)\b")
_NUMBERS_OF_ROPE = re.compile(r"factor|theta|beta|mscale|max_position")
_ONE_NUMBER = re.compile(r"theta|eps")
_NEVER_ZERO = re.compile(r"head_dim|heads|hidden_size|vocab_size|intermediate_size")
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
        of_rope = _ROPE.search(key) and _NUMBERS_OF_ROPE.search(name)
        if (of_rope or _NUMBERS.fullmatch(name)) and (isinstance(value, str) or _is_endless(value)):
            yield key, value, _A_NUMBER
        if isinstance(value, str | list) and _ROPE.fullmatch(name):
            yield key, value, "an object"
        if isinstance(value, int | float) and value > LARGEST_SIZE and _SIZES.search(name):
            yield key, value, f"at most {LARGEST_SIZE}"
        if isinstance(value, int | float) and value > MOST_LAYERS and _LAYERS.fullmatch(name):
            yield key, value, f"at most {MOST_LAYERS}"


def _is_endless(value: object) -> bool:
    """NaN or infinite."""
    return isinstance(value, float) and not math.isfinite(value)


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


def check_arguments(args: object, folder: Path) -> None:
    """Refuse what mlx-lm made of a config where it holds something else than the kind of number mlx-lm says it reads.

    What a model does not read is in none of them, so that it may be anything.

    Args:
        args: an object of a model's own dataclass, as mlx-lm keeps its settings.
        folder: for messages.

    Raises:
        CheckpointError: names the setting, what it is and what was expected.
    """
    problems = [f"{key} is {_shown(value)}, expected {wanted}" for key, value, wanted in _odd_arguments(args)]
    if problems:
        raise CheckpointError(f"{folder / CONFIG_NAME}: {_several(problems)}.")


def check_built(model: nn.Module, folder: Path) -> None:
    """`check_arguments` of all that the parts of a model were built from: of a model inside another one too.

    Raises:
        CheckpointError: see there.
    """
    kept = (each for module in model.modules() for each in vars(module).values())
    for args in {id(each): each for each in kept if is_dataclass(each) and not isinstance(each, type)}.values():
        check_arguments(args, folder)


@contextmanager
def telling_zeros(args: object, folder: Path) -> Iterator[None]:
    """Whatever fails while a model is built of these: sizes of zero, which some models take for unsaid, are named.

    Raises:
        CheckpointError: with the error as its cause.
    """
    try:
        yield
    except Exception as error:
        zeros = list(_zeros(args))
        if not zeros:
            raise
        said = " and ".join(f"{name} is 0" for name in zeros)
        failure = f"mlx-lm cannot build it: {type(error).__name__}: {one_line(error)}"
        raise CheckpointError(f"{folder / CONFIG_NAME}: {said}, and {failure}") from error


_A_NUMBER = "a number"


def _zeros(args: object) -> Iterator[str]:
    for field in _fields(args):
        value = _value(args, field)
        if isinstance(value, dict) and _ROPE.search(field.name):
            numbers = _settings(value, f"{field.name}.")
            yield from (key for key, number in numbers if number == 0 and _NUMBERS_OF_ROPE.search(key))
        elif value == 0 and _NEVER_ZERO.search(field.name):
            yield field.name


def _fields(args: object) -> tuple[Field[Any], ...]:
    return fields(args) if is_dataclass(args) else ()


def _value(args: object, field: Field[Any]) -> Any:
    return getattr(args, field.name, None)


def _odd_arguments(args: object) -> Iterator[tuple[str, Any, str]]:
    try:
        kinds = get_type_hints(type(args))
    except (NameError, TypeError, AttributeError):  # it names what is not there when it runs
        return
    for field in _fields(args):
        value, options = _value(args, field), _options(kinds.get(field.name, Any))
        wanted = None
        if value is None:
            required = NoneType not in options and field.default is not None and _ONE_NUMBER.search(field.name)
            wanted = _A_NUMBER if required and _are(options, (int, float)) else None
        elif _are(options, (int, float)):
            wanted = _wanted_of_number(field, value)
        elif _are(options, (dict,)):
            wanted = None if isinstance(value, Mapping) else "an object"
        if wanted is not None:
            yield field.name, value, wanted


def _wanted_of_number(field: Field[Any], value: object) -> str | None:
    """What would have been expected in place of a value, where it cannot be."""
    # A number may differ from layer to layer, whatever the annotation says.
    if isinstance(value, list | tuple) and (len(value) > 1 or not _ONE_NUMBER.search(field.name)):
        return next((wanted for each in value if (wanted := _wanted_of_one(field, each)) is not None), None)
    return _wanted_of_one(field, value)


def _wanted_of_one(field: Field[Any], value: object) -> str | None:
    if not isinstance(value, int | float):
        return _A_NUMBER
    if _is_endless(value) and value != field.default:
        return _A_NUMBER
    # -1 is a way to say that there is none.
    least = 0 if _NEVER_ZERO.search(field.name) else -1
    of_size = _SIZES.search(field.name) or "window" in field.name
    return f"at least {least}" if of_size and value < least else None


def _options(kind: Any) -> tuple[Any, ...]:
    """The kinds that an annotation allows, without their parameters."""
    origin = get_origin(kind)
    if origin in (Union, UnionType):
        return tuple(get_origin(each) or each for each in get_args(kind))
    return (origin or kind,)


def _are(options: Iterable[Any], kinds: tuple[type, ...]) -> bool:
    """Whether these kinds are all that is allowed, besides None."""
    given = [option for option in options if option is not NoneType]
    return bool(given) and all(option in kinds for option in given)


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
