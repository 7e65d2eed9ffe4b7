"""Quantized drafters: modules stored in one of mlx's formats, and modules quantized when they are loaded."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, Self

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten
from pydantic import BaseModel, ConfigDict, PositiveInt, ValidationError

from mlx_spec.arguments import refusal, whole
from mlx_spec.errors import CheckpointError, InvalidRequest, UnsupportedOption

BLOCK = "quantization"
DEFAULTS = {"affine": (64, 4), "mxfp4": (32, 4), "nvfp4": (16, 4), "mxfp8": (32, 8)}
"""Mode -> group size and bits where none are given, as in mlx-lm."""
_COPY = "quantization_config"
_FOREIGN = ("quant_method", "quant_algo")


class Format(BaseModel):
    """One of mlx's quantized formats.

    Attributes:
        group_size: entries of a row that share a scale.
        bits: per entry.
        mode: how the numbers are coded.
    """

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    group_size: PositiveInt
    bits: PositiveInt
    mode: Literal["affine", "mxfp4", "mxfp8", "nvfp4"] = "affine"

    @classmethod
    def parse(cls, block: object, where: str) -> Self:
        """Read a block of a config.json, or an argument.

        Raises:
            ValueError: says what is wrong with it, in one line that starts with `where`.
        """
        try:
            parsed = cls.model_validate(block)
            mx.quantize(mx.zeros((1, 32 * parsed.group_size)), parsed.group_size, parsed.bits, mode=parsed.mode)
        except ValidationError as error:
            wrong = [f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()]
            raise ValueError(f"{where} is {block!r}: {'; '.join(wrong)}") from None
        except (ValueError, TypeError) as error:
            raise ValueError(f"{where} is {block!r}: {error}") from None
        return parsed


def parse_short(text: str) -> dict[str, Any]:
    """Read what a command line says: BITS, BITS,GROUP_SIZE, or the name of a mode.

    Returns:
        `group_size`, `bits` and `mode`, as `quantize_on_load` takes them. Whether mlx has such a format is not asked.

    Raises:
        ValueError: `text` is none of these. Lists the modes.

    Example:
        >>> parse_short("4,32")
        {'group_size': 32, 'bits': 4, 'mode': 'affine'}
        >>> parse_short("mxfp8")
        {'group_size': 32, 'bits': 8, 'mode': 'mxfp8'}
    """
    numbers = text.split(",")
    if text in DEFAULTS:
        group_size, bits = DEFAULTS[text]
        return {"group_size": group_size, "bits": bits, "mode": text}
    if len(numbers) > 2 or not all(number.isascii() and number.isdigit() for number in numbers):
        raise ValueError(
            f"got {text!r}, expected bits per weight as in '4', bits and group size as in '4,32', or one of "
            f"{', '.join(DEFAULTS)}."
        )
    bits, *group = map(int, numbers)
    return {"group_size": group[0] if group else DEFAULTS["affine"][0], "bits": bits, "mode": "affine"}


def wanted_format(given: object) -> dict[str, Any] | None:
    """What a caller asks for, spelled out: `group_size`, `bits` and `mode`, or what `parse_short` takes.

    Returns:
        None for None.

    Raises:
        InvalidRequest: it is neither.
        UnsupportedOption: mlx has no such format.
    """
    if given is None:
        return None
    given = whole(given)
    if isinstance(given, str) or (isinstance(given, int) and not isinstance(given, bool)):
        try:
            given = parse_short(str(given))
        except ValueError as error:
            raise InvalidRequest(f"quantize: {error}") from None
    if not isinstance(given, Mapping):
        wanted = f"{{'group_size': .., 'bits': .., 'mode': ..}}, or short '4', '4,32' or one of {', '.join(DEFAULTS)}"
        raise refusal("quantize", wanted, given)
    _format_of(given)
    return dict(given)


class Quantization(BaseModel):
    """What a config.json says about the formats of its modules.

    Attributes:
        default: of every module that is stored quantized and not named in `modules`.
        modules: path of a module -> its own format, or None if it is stored in floating point.
    """

    model_config = ConfigDict(frozen=True)

    default: Format
    modules: Mapping[str, Format | None]

    def format_of(self, module: str) -> Format | None:
        """The format that a module is to have, should it be quantized."""
        return self.modules.get(module, self.default)


def read_quantization(
    config: Mapping[str, Any], path: Path, rename: Callable[[str], str] = lambda name: name
) -> Quantization | None:
    """Read the block that mlx's converters write: `group_size`, `bits`, `mode`, and blocks of single modules.

    Args:
        config: the config.json object.
        path: where it came from, for messages.
        rename: a module's path in the file -> its path in the loaded drafter.

    Returns:
        None where the file says nothing, or speaks of another library's formats.

    Raises:
        CheckpointError: says what is wrong with the block.
    """
    block, copy = config.get(BLOCK), config.get(_COPY)
    if block is None and isinstance(copy, dict) and not any(key in copy for key in _FOREIGN):
        block = copy
    if block is None:
        return None
    if not isinstance(block, dict) or (copy is not None and copy != block and not _is_foreign(copy)):
        raise CheckpointError(
            f"{path}: {BLOCK} is {block!r} and {_COPY} is {copy!r}; expected one object, or two equal"
        )
    own = {key: value for key, value in block.items() if key in Format.model_fields}
    try:
        modules = {
            rename(name): None if value is False else Format.parse(_with_mode(value, own), f"{BLOCK}.{name}")
            for name, value in block.items()
            if name not in own and value is not True
        }
        return Quantization(default=Format.parse(own, BLOCK), modules=modules)
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}") from None


def foreign_quantization(config: Mapping[str, Any], names: Collection[str], path: Path) -> str | None:
    """Another library's quantization, which is refused where tensors are stored in it.

    Args:
        names: of the stored tensors.

    Returns:
        A sentence for a warning where the block is there but no tensor is: a copy of the target's, most likely.

    Raises:
        CheckpointError: names the tensors.
    """
    block = config.get(_COPY)
    if not _is_foreign(block):
        return None
    coded = sorted(name for name in names if "weight_scale" in name or "weight_packed" in name)
    if coded:
        raise CheckpointError(
            f"{path}: {_COPY} is {_method(block)!r}, which is not supported ({', '.join(coded[:3])} …). Use the "
            "unquantized drafter, or one that mlx's converters quantized."
        )
    return f"{_COPY} ({_method(block)}) is ignored: no tensor is stored that way"


def quantize_as_stored(
    modules: nn.Module, quantization: Quantization | None, names: Collection[str], folder: Path
) -> None:
    """Give every module whose scales are stored its quantized class.

    Args:
        modules: the drafter's, freshly made, in place.
        quantization: what its config.json says.
        names: of the stored tensors, as the modules call them.
        folder: for messages.

    Raises:
        CheckpointError: names modules whose stored tensors and config contradict each other.

    Cost:
        Lazy: the random weights of a fresh module are never computed.
    """
    scaled = {name.removesuffix(".scales") for name in names if name.endswith(".scales")}
    if quantization is None:
        if scaled:
            raise CheckpointError(
                f"{folder} holds {', '.join(f'{name}.scales' for name in sorted(scaled))}, but its config.json has no "
                f"{BLOCK} block with group_size and bits"
            )
        return
    wrong = [f"{name}.scales is missing" for name, own in quantization.modules.items() if own and name not in scaled]
    wrong += [
        f"{name}.scales is there, but {BLOCK}.{name} is false"
        for name in sorted(scaled)
        if quantization.format_of(name) is None
    ]
    if wrong:
        raise CheckpointError(f"{folder}: {'; '.join(wrong)}")

    def chosen(name: str, module: nn.Module) -> bool | dict[str, Any]:
        own = quantization.format_of(name) if name in scaled and is_quantizable(module) else None
        return own.model_dump() if own else False

    with _saying(folder):
        nn.quantize(modules, class_predicate=chosen)


def quantize_on_load(modules: nn.Module, wanted: Mapping[str, Any], spared: tuple[str, ...] = ()) -> list[str]:
    """Quantize every module that can be, in place.

    Args:
        modules: loaded, in floating point.
        wanted: `group_size`, `bits` and, if it is not "affine", `mode`.
        spared: what the paths of modules that are to stay in floating point end with.

    Returns:
        Paths of the matrices left as they are, because a row is no whole number of groups.

    Raises:
        UnsupportedOption: mlx has no such format, the drafter is stored quantized, or nothing in it can be quantized.
    """
    form = _format_of(wanted)
    parameters = dict(tree_flatten(modules.parameters()))
    if any(name.endswith(".scales") for name in parameters):
        raise UnsupportedOption("quantize was given, but the drafter is stored quantized already. Leave it out.")
    candidates = [name for name, module in modules.named_modules() if _may_be_quantized(name, module, spared)]
    left = [name for name in candidates if parameters[f"{name}.weight"].shape[-1] % form.group_size]
    if len(left) == len(candidates):
        raise UnsupportedOption(
            f"quantize={dict(wanted)}: no matrix of the drafter has rows that are a multiple of {form.group_size}"
        )
    chosen = set(candidates) - set(left)
    nn.quantize(modules, class_predicate=lambda name, _: name in chosen and form.model_dump())
    return sorted(left)


def _format_of(wanted: Mapping[str, Any]) -> Format:
    try:
        return Format.parse(dict(wanted), "quantize")
    except ValueError as error:
        raise UnsupportedOption(
            f"{error}. Give group_size and bits, and a mode of {', '.join(DEFAULTS)}; or short: '4', '4,32', 'mxfp4'."
        ) from None


def _may_be_quantized(name: str, module: nn.Module, spared: tuple[str, ...]) -> bool:
    return is_quantizable(module) and not name.endswith(spared)


def is_quantizable(module: nn.Module) -> bool:
    """Whether mlx has a quantized class for a module."""
    return hasattr(module, "to_quantized")


@contextmanager
def _saying(folder: Path) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise CheckpointError(f"{folder}: {BLOCK} does not fit the drafter: {error}") from None


def _with_mode(value: object, own: Mapping[str, Any]) -> object:
    """A module's block may leave out what it has in common with the whole."""
    return {**own, **value} if isinstance(value, dict) else value


def _is_foreign(block: object) -> bool:
    return isinstance(block, dict) and any(key in block for key in _FOREIGN)


def _method(block: object) -> object:
    assert isinstance(block, dict)
    return next(block[key] for key in _FOREIGN if key in block)
