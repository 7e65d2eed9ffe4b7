"""The tensors of a prediction layer: names and shapes as they stand in the files, mapped to mlx-lm's."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import mlx.core as mx
from mlx.utils import tree_flatten

from mlx_spec.drafters.mtp.files import PredictionTensors
from mlx_spec.drafters.mtp.layouts import Layout
from mlx_spec.drafters.mtp.model import Predictor
from mlx_spec.drafters.stored_tensors import dtypes_like, fault, fault_of_values
from mlx_spec.errors import CheckpointError

NAMED = 12
"""Faults spelled out in one message."""

_IGNORED = re.compile(r"(.*\.)?rotary_emb\.inv_freq")

_STACK = "switch_mlp."

_LATENT_PARTS = ("embed_q.weight", "unembed_out.weight")


@dataclass(frozen=True)
class Kept:
    """How a file keeps one parameter.

    Attributes:
        shapes: name of each tensor -> its shape.
        build: these tensors, in order -> the parameter.
    """

    shapes: Mapping[str, tuple[int, ...]]
    build: Callable[[Sequence[mx.array]], mx.array]


def file_name(parameter: str, layout: Layout) -> str:
    """A parameter of `Predictor` -> its name in a file, after the place."""
    part, _, rest = parameter.partition(".")
    if part == "body":
        if rest.startswith(f"{layout.trunk_norm}."):
            return f"{layout.final_norm}.{rest.removeprefix(f'{layout.trunk_norm}.')}"
        _, number, rest = rest.split(".", 2)
        for start, stored in layout.renamed.items():
            if rest.startswith(start):
                rest = stored + rest.removeprefix(start)
        return layout.layer.format(i=number) + rest
    name = {
        "embedding_norm": layout.embedding_norm,
        "hidden_norm": layout.hidden_norm,
        "projection": layout.projection,
        "final_norm": layout.final_norm,
        "head": layout.head,
    }[part]
    return f"{name}.{rest}"


def kept_as(name: str, shapes: Mapping[str, tuple[int, ...]], found: Collection[str]) -> Kept:
    """How the files at hand keep a parameter that mlx-lm calls `name`.

    Args:
        name: one of `shapes`.
        shapes: name -> shape of every parameter of the layer.
        found: names of the tensors in the files.
    """
    shape = shapes[name]
    before, stack, _ = name.partition(_STACK)
    if stack and not _any_starts(found, before + stack):
        return _expert_form(name, shape, found)
    for part in _LATENT_PARTS:
        attention = name.removesuffix(part)
        if name.endswith(part) and not any(attention + each in found for each in _LATENT_PARTS):
            return _latent_form(attention, part, shapes)
    return Kept({name: shape}, lambda arrays: arrays[0])


def _any_starts(names: Collection[str], start: str) -> bool:
    return any(name.startswith(start) for name in names)


def _expert_form(name: str, shape: tuple[int, ...], found: Collection[str]) -> Kept:
    """Experts side by side in two tensors, or one by one."""
    head, _, rest = name.partition(_STACK)
    projection, _, kind = rest.partition(".")
    experts = f"{head}experts."
    if f"{experts}gate_up_proj" in found or f"{experts}down_proj" in found:
        if projection == "down_proj":
            return Kept({f"{experts}down_proj": shape}, lambda arrays: arrays[0])
        count, rows, columns = shape
        first = projection == "gate_proj"
        return Kept(
            {f"{experts}gate_up_proj": (count, 2 * rows, columns)},
            lambda arrays: arrays[0][:, :rows] if first else arrays[0][:, rows:],
        )
    names = [f"{experts}{expert}.{projection}.{kind}" for expert in range(shape[0])]
    return Kept({each: shape[1:] for each in names}, mx.stack)  # type: ignore[arg-type]


def _latent_form(attention: str, part: str, shapes: Mapping[str, tuple[int, ...]]) -> Kept:
    """Keys and values of latent attention as one projection out of the latent, head by head."""
    heads, rank, nope = shapes[f"{attention}embed_q.weight"]
    values = shapes[f"{attention}unembed_out.weight"][1]

    def build(arrays: Sequence[mx.array]) -> mx.array:
        by_head = arrays[0].reshape(heads, nope + values, rank)
        if part == "embed_q.weight":
            return mx.contiguous(by_head[:, :nope].swapaxes(-1, -2))
        return mx.contiguous(by_head[:, nope:])

    return Kept({f"{attention}kv_b_proj.weight": (heads * (nope + values), rank)}, build)


def assign(predictor: Predictor, layout: Layout, stored: PredictionTensors) -> None:
    """Give a prediction layer its weights, and take them out of `stored`.

    Args:
        predictor: already quantized where the files are.
        layout: of the family.
        stored: what the files hold.

    Raises:
        CheckpointError: names every tensor that is missing, misshapen, of a wrong dtype, not finite or unknown.

    Cost:
        Evaluates the weights, one parameter at a time: the largest is in memory twice.
    """
    parameters = dict(tree_flatten(predictor.parameters()))
    wanted = {file_name(name, layout): array for name, array in parameters.items()}
    shapes = {name: array.shape for name, array in wanted.items()}
    forms = {name: kept_as(name, shapes, stored.tensors) for name in wanted}
    _check(wanted, forms, stored, layout)
    shifted = zero_centred(predictor) if layout.zero_centred and not stored.converted else set()
    uses = Counter(source for form in forms.values() for source in form.shapes)
    loaded = []
    for parameter in parameters:
        form = forms[file_name(parameter, layout)]
        array = form.build([stored.tensors[source] for source in form.shapes])
        array = array + 1 if parameter in shifted else array
        mx.eval(array)
        said = fault_of_values(array)
        if said:
            raise CheckpointError(f"{stored.folder}: {_not_finite(form, stored)} {said}")
        loaded.append((parameter, array))
        uses.subtract(form.shapes.keys())
        for source in form.shapes:
            if not uses[source]:
                del stored.tensors[source]
    predictor.load_weights(loaded)


def zero_centred(predictor: Predictor) -> set[str]:
    """Names of the norm weights that a layout with zero-centred norms keeps as w - 1."""
    # Some of mlx-lm's modules have a class of their own for these.
    return {f"{path}.weight" for path, module in predictor.named_modules() if type(module).__name__.endswith("RMSNorm")}


def _check(
    wanted: Mapping[str, mx.array], forms: Mapping[str, Kept], stored: PredictionTensors, layout: Layout
) -> None:
    problems: dict[str, str] = {}
    for name, parameter in wanted.items():
        for source, shape in forms[name].shapes.items():
            said = fault(stored.tensors.get(source), shape, dtypes_like(parameter.dtype))
            if said:
                problems[source] = f"{stored.full_name(source)} {said}"
    used = {source for form in forms.values() for source in form.shapes} | set(layout.copies)
    spare = [stored.full_name(name) for name in stored.tensors if name not in used and not _IGNORED.fullmatch(name)]
    told = list(problems.values())
    if spare:
        told.append(f"not known in such a layer: {_listed(spare)}")
    if told:
        raise CheckpointError(
            f"{stored.folder}: {_listed(told, '; ')}. "
            "A prediction layer is read as one decoder layer of the target's own architecture and size."
        )


def _not_finite(form: Kept, stored: PredictionTensors) -> str:
    named = [source for source in form.shapes if not mx.isfinite(stored.tensors[source]).all().item()]
    return stored.full_name(named[0])


def _listed(items: Sequence[str], separator: str = ", ") -> str:
    more = len(items) - NAMED
    return separator.join(items[:NAMED]) + (f"{separator}and {more} more" if more > 0 else "")
