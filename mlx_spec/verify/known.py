"""What is known of a model as it is now."""

from __future__ import annotations

import functools
import threading
import weakref
from typing import Any

import mlx.core as mx
from mlx import nn

from mlx_spec.cache.adopt import Likeness
from mlx_spec.model.swap import swap_of
from mlx_spec.model.target import Target
from mlx_spec.sampling import random_state_kept
from mlx_spec.verify import mixers
from mlx_spec.verify.bindings import Bindings
from mlx_spec.verify.certificate import Certificate
from mlx_spec.verify.exemplar import Exemplar
from mlx_spec.verify.lengths import block_limit
from mlx_spec.verify.op_table import OpTable
from mlx_spec.verify.trial import Situation
from mlx_spec.verify.verdicts import Verdicts


class Known:
    """What was found out about a model between two changes of it. Safe to share between threads.

    It names the model's modules, so it is of no use for what the model becomes.

    Attributes:
        ops: the routes found for the model's ops.
    """

    def __init__(self, model: nn.Module, verdicts: Verdicts, bindings: Bindings) -> None:
        self._exemplar = Exemplar(model, verdicts)
        self.ops: OpTable = self._exemplar.own_ops
        self._model = weakref.ref(model)
        self._bindings = bindings
        self._certificates: dict[Situation, Certificate] = {}
        self._draws: bool | None = None
        self._mixers: list[weakref.ref[Any]] | None = None
        self._lock = threading.RLock()

    def take_complaint(self) -> str | None:
        """Why findings on disk were not believed, in a sentence; told once."""
        return self.ops.verdicts.take_complaint()

    @functools.cached_property
    def block_limit(self) -> int | None:
        """See `lengths.block_limit`."""
        return block_limit(self._alive())

    def draws(self, likeness: Likeness) -> bool:
        """Whether a forward draws random numbers, as dropout does in training: then no two of its calls agree.

        Args:
            likeness: of caches that serve the model.

        Cost:
            Once, a forward of one token, of which nothing is evaluated.
        """
        if self._draws is None:
            target = Target(self._alive())
            with random_state_kept():
                target.forward(mx.zeros((1, 1), mx.uint32), likeness.fresh())
            self._draws = target.draws
        return self._draws

    def certificate(self, situation: Situation) -> Certificate:
        """What the model was found to do with blocks in a situation; nothing is tried before it is asked."""
        with self._lock:
            if situation not in self._certificates:
                self._certificates[situation] = Certificate(self._alive(), situation, self._exemplar, self._bindings)
            return self._certificates[situation]

    def attach_mixers(self) -> None:
        """Let every mixer of the model be driven. They are found by one traced forward, when first asked for."""
        with self._lock:
            parts = None if self._mixers is None else [part() for part in self._mixers]
            if parts is None or any(swap_of(part, mixers.MIX) is None for part in parts):
                self._mixers = [weakref.ref(mixer) for mixer in mixers.attach_all(self._alive())]

    def _alive(self) -> Any:
        model = self._model()
        if model is None:
            raise AssertionError("the model of this record is gone")
        return model
