"""Which of the target's layers a drafter reads: lists that count layers in different ways, read as one."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mlx_spec.drafters.eagle3.keys import EAGLE_CONFIG, Settings
from mlx_spec.drafters.eagle3.lineage import Lineage
from mlx_spec.errors import CheckpointError

# Where the tapped layers are listed, and what to subtract to get 0-based layer outputs. A list that counts hidden
# states, or the inputs of layers, has the embedding as entry 0, so layer i's output is entry i + 1.
_PLACES = (
    (EAGLE_CONFIG, "eagle_aux_hidden_state_layer_ids", 0),
    (EAGLE_CONFIG, "aux_hidden_state_layer_ids", 0),
    (None, "target_layer_ids", 0),
    (None, "eagle_aux_hidden_state_layer_ids", 1),
    (None, "aux_hidden_state_layer_ids", 1),
)


@dataclass(frozen=True)
class Taps:
    """The layers, and where they were listed.

    Attributes:
        layers: 0-based decoder layers whose outputs are read, ascending.
        origin: for messages.
    """

    layers: tuple[int, ...]
    origin: str


def read_taps(settings: Settings, override: Sequence[int] | None, lineage: Lineage | None, count: int | None) -> Taps:
    """Find the layers.

    Args:
        settings: the config.
        override: 0-based layer outputs to read instead of those the file lists.
        lineage: what is known about the target; None for nothing.
        count: how many layers fc reads; None for unknown.

    Raises:
        CheckpointError: no list and no default, lists that contradict each other or what fc reads, or no list of
            ascending layers.

    Warns:
        UserWarning: a default is taken, or a list can be read in two ways.
    """
    taps = _found(settings, override, lineage, count)
    wanted = settings.values.get("num_aux_hidden_states")
    if wanted is not None and wanted != len(taps.layers):
        raise CheckpointError(
            f"{settings.path}: num_aux_hidden_states={wanted!r}, but {taps.origin} lists {len(taps.layers)} layers"
        )
    # For other targets the shape of fc.weight says so, with whatever else is wrong.
    if count != len(taps.layers) and lineage is not None and lineage.deepseek and count is not None:
        raise CheckpointError(
            f"{settings.path}: {taps.origin} lists {len(taps.layers)} layers, but the columns of fc.weight are for "
            f"{count} states of the target's hidden size"
        )
    return taps


def _found(settings: Settings, override: Sequence[int] | None, lineage: Lineage | None, count: int | None) -> Taps:
    path = settings.path
    if override is not None:
        return Taps(_checked(list(override), 0, "taps=", path), "taps=")
    found = []
    for place, key, shift in _PLACES:
        ids = (settings.values if place is None else settings.eagle).get(key)
        if ids is not None and ids != []:
            name = key if place is None else f"{place}.{key}"
            if place is not None and lineage is not None and lineage.deepseek:
                shift = 1
                _warn_two_readings(ids, name, path, lineage)
            found.append(Taps(_checked(ids, shift, name, path), f"{name}={ids}"))
    if not found:
        if settings.latent:
            raise CheckpointError(
                f"{path} does not list the target layers the drafter reads, and for latent attention there are no "
                f"usual ones ({_LIST_KEYS}). Add the list to the file, or pass taps=(...), 0-based layer outputs."
            )
        return _default(path, lineage, count)
    if len({taps.layers for taps in found}) > 1:
        raise CheckpointError(
            f"{path} lists different layers in {' and '.join(taps.origin for taps in found)}. Lists in {EAGLE_CONFIG} "
            "and target_layer_ids count layer outputs from 0, the others count hidden states, one more. "
            "Remove the wrong one, or pass taps=(...), 0-based layer outputs."
        )
    return found[0]


def _warn_two_readings(ids: object, name: str, path: Path, lineage: Lineage) -> None:
    if isinstance(ids, list) and ids and ids[0] == 1:
        warnings.warn(
            f"{path}: {name} is {ids}. For {lineage.name} targets such lists count the inputs of layers, so the first "
            "means the output of layer 0; some files count outputs. If few proposals are accepted, pass "
            f"taps={tuple(ids)}.",
            stacklevel=7,
        )


_LIST_KEYS = f"{EAGLE_CONFIG}.eagle_aux_hidden_state_layer_ids, target_layer_ids or eagle_aux_hidden_state_layer_ids"


def _default(path: Path, lineage: Lineage | None, count: int | None) -> Taps:
    layers = lineage.default_taps(count) if lineage is not None and count is not None else None
    if lineage is None or layers is None:
        known = "" if lineage is None else f" There is no default for {count or '?'} of {lineage.layer_count} layers."
        raise CheckpointError(
            f"{path} does not list the target layers the drafter reads "
            f"({_LIST_KEYS}).{known} Add the list to the file, or pass taps=(...), 0-based layer outputs."
        )
    warnings.warn(
        f"{path} does not list the target layers the drafter reads ({_LIST_KEYS}): the outputs of layers "
        f"{list(layers)} are taken, the usual ones for {lineage.layer_count} layers. Pass taps=(...) for others.",
        stacklevel=7,
    )
    return Taps(layers, f"the usual layers {list(layers)}")


def _checked(ids: object, shift: int, name: str, path: Path) -> tuple[int, ...]:
    if not isinstance(ids, list) or not ids or any(type(item) is not int for item in ids):
        raise CheckpointError(f"{path}: {name} is {ids!r}, expected a list of layer numbers")
    taps = tuple(item - shift for item in ids)
    if list(taps) != sorted(set(taps)):
        raise CheckpointError(f"{path}: {name} is {ids}, expected ascending layer numbers, each once")
    if taps[0] < 0:
        raise CheckpointError(
            f"{path}: {name} is {ids}, but the smallest layer number is {shift} here: "
            "reading the embedding instead of a layer's output is not supported"
        )
    return taps
