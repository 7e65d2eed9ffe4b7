"""What a model is tried on where its weights of the moment would hide how it rounds.

A matrix of zeros, such as the one that a fresh adapter starts from, gives zeros however it is multiplied by. What is
found with it would be believed when its values have changed, and values are not looked at.
"""

from __future__ import annotations

import copy
import threading
import weakref
from typing import Any

import mlx.core as mx
import numpy as np
from mlx import nn

from mlx_spec.model.arrays import own_arrays
from mlx_spec.ops.choose import Subject, distinct
from mlx_spec.verify import mixers
from mlx_spec.verify.op_table import OpTable
from mlx_spec.verify.verdicts import Verdicts

_SAMPLE = 4096
"""Values of an array that are looked at."""

_FAINT = 1e-2
"""Of one over the root of a matrix's columns, the size of values whose sums are about as large as what comes in."""


class Exemplar:
    """A model with weights that show how it rounds: the model itself, or a copy with some random ones in their place.

    The copy shares every other array. It is made when something is to be tried.
    """

    def __init__(self, model: nn.Module, verdicts: Verdicts) -> None:
        self.own_ops = OpTable(verdicts, self._to_try)
        self._model = weakref.ref(model)
        self._verdicts = verdicts
        self._copied: tuple[nn.Module, OpTable] | None = None
        self._looked = False
        self._lock = threading.RLock()

    def all_tried(self) -> list[tuple[Any, OpTable]]:
        """What blocks have to be equal on, each with its ops: the model as it is, and the copy if there is one."""
        copied, ops = self.tried()
        return [(copied, ops)] if ops is self.own_ops else [(copied, ops), (self._alive(), self.own_ops)]

    def tried(self) -> tuple[Any, OpTable]:
        """What ops are tried on, and the copy's or the model's own table of them."""
        with self._lock:
            model = self._alive()
            if not self._looked:
                copied = filled_copy(model)
                if copied is not None:
                    mixers.attach(copied)
                    self._copied = copied, OpTable(self._verdicts)
                self._looked = True
            return self._copied or (model, self.own_ops)

    def _to_try(self, subject: Subject) -> Subject:
        model, ops = self.tried()
        if ops is self.own_ops:
            return subject
        return distinct(list(ops.subjects(model).values())).get(subject.key, subject)

    def _alive(self) -> Any:
        model = self._model()
        if model is None:
            raise AssertionError("the model of this exemplar is gone")
        return model


def filled_copy(model: nn.Module) -> nn.Module | None:
    """A copy in which random values stand for arrays that all but vanish; None where none does.

    None as well where the model holds something that cannot be copied.
    """
    arrays = {id(array): array for module in model.modules() for array in own_arrays(module)}
    # Scales are small where values take many bits: they say nothing of the size of the matrix they belong to.
    packing = {
        id(module.get(name)) for module in model.modules() if "scales" in module for name in ("scales", "biases")
    }
    faint = _faint([array for place, array in arrays.items() if place not in packing])
    if not faint:
        return None
    keys = iter(mx.random.split(mx.random.key(0), len(faint)))
    filled = {id(array): _random(array, next(keys)) for array in faint}
    try:
        copied: nn.Module = copy.deepcopy(model, {**arrays, **filled})
    except (TypeError, AttributeError, NotImplementedError, RuntimeError):
        return None
    mx.eval(list(filled.values()))
    return copied


def _faint(arrays: list[mx.array]) -> list[mx.array]:
    floats = [array for array in arrays if mx.issubdtype(array.dtype, mx.floating) and array.size]
    if not floats:
        return []
    largest = [mx.abs(_sample(array)).max().astype(mx.float32) for array in floats]
    try:
        sizes = list(map(float, np.array(mx.stack(largest))))
    except RuntimeError:
        sizes = list(map(_size_alone, largest))
    return [array for array, size in zip(floats, sizes, strict=True) if size < _FAINT * _usual(array)]


def _size_alone(largest: mx.array) -> float:
    """The size; not to be known where another thread left the array lazy, and what runs here reads no such array."""
    try:
        return float(np.array(largest))
    except RuntimeError:
        return float("inf")


def _usual(array: mx.array) -> float:
    return float((array.shape[-1] if array.ndim > 1 else 1) ** -0.5)


def _sample(array: mx.array) -> mx.array:
    rows = max(1, _SAMPLE // max(1, array.size // array.shape[0])) if array.ndim else 0
    return array[:rows] if array.ndim else array


def _random(array: mx.array, key: mx.array) -> mx.array:
    return (mx.random.normal(array.shape, key=key) * _usual(array)).astype(array.dtype)
