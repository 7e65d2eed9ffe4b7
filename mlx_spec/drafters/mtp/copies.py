"""The target's embedding and head, repeated beside a prediction layer: looked at, though the target's own serve."""

from __future__ import annotations

import mlx.core as mx
from mlx.utils import tree_flatten

from mlx_spec.drafters.mtp.files import PredictionTensors
from mlx_spec.drafters.mtp.layouts import Layout
from mlx_spec.drafters.stored_tensors import FLOATS, fault, fault_of_values
from mlx_spec.errors import CheckpointError
from mlx_spec.model.target import Target

_ROWS = 64
"""Rows compared of an embedding, and states that heads are compared on."""

_ROUNDED, _QUANTIZED = 0.02, 0.5
"""How far apart the same numbers may be, relative to their size: in half precision, and quantized to two bits. Those of
another table are about 1.4 apart."""


def differing_copies(stored: PredictionTensors, layout: Layout, target: Target) -> list[str]:
    """Names of the copies that are not what the target has.

    Args:
        stored: what the files hold. The copies are taken out.
        layout: of the family.
        target: one without weights is compared with nothing.

    Raises:
        CheckpointError: names every copy that is misshapen, of a wrong dtype or not finite.

    Cost:
        Evaluates the copies, one after another, and one product of the target's head with them.
    """
    shape = (target.vocab_size, target.hidden_size)
    faults, differing = [], []
    for name, what in layout.copies.items():
        copy = stored.tensors.pop(name, None)
        if copy is None:
            continue
        said = fault(copy, shape, FLOATS) or fault_of_values(copy)
        if said:
            faults.append(f"{stored.full_name(name)} {said}")
        elif target.has_weights and _distance(copy, what, target) > _allowed(target):
            differing.append(name)
    if faults:
        raise CheckpointError(
            f"{stored.folder}: {'; '.join(faults)}. The target's own serves: delete it, or repair it."
        )
    return differing


def _distance(copy: mx.array, what: str, target: Target) -> float:
    if what == "embedding":
        ids = mx.arange(0, copy.shape[0], max(1, copy.shape[0] // _ROWS), dtype=mx.int32)
        own, other = target.embed(ids[None])[0], copy[ids]
    else:
        states = mx.random.normal((1, _ROWS, copy.shape[1]), key=mx.random.key(0)).astype(copy.dtype)
        own, other = target.head(states), states @ copy.T
    own, other = own.astype(mx.float32), other.astype(mx.float32)
    distance = mx.sqrt(((own - other) ** 2).sum() / mx.maximum((own**2).sum(), 1e-30))
    return float(distance.item())  # type: ignore[arg-type]


def _allowed(target: Target) -> float:
    quantized = any(name.endswith(".scales") for name, _ in tree_flatten(target.model.parameters()))
    return _QUANTIZED if quantized else _ROUNDED
