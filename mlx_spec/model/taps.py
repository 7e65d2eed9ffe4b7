"""Hidden states out of an unmodified mlx-lm model: layer classes swapped for ones that can record."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any

import mlx.core as mx
from mlx import nn

from mlx_spec.model.swap import lock, swap_class, swap_of

_TAP = "tap"
"""Kind of the swap."""

_recorder: ContextVar[dict[int, mx.array] | None] = ContextVar("mlx_spec_recorder", default=None)
"""id(layer) -> output, for the forward that is being built in this context; None outside one."""


@cache
def _recording_class(base: type[Any]) -> type[Any]:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = base.__call__(self, *args, **kwargs)
        record = _recorder.get()
        if record is not None and id(self) in record:
            record[id(self)] = output[0] if isinstance(output, tuple) else output
        return output

    return swap_class(base, _TAP, __call__=call)


def attach(layers: Sequence[nn.Module]) -> None:
    """Let these layers be recorded. Attaching twice is attaching once.

    Only the class of each instance changes: the parameter tree, the attributes and the quantization
    stay as they are, and a forward outside `recording` computes what it always did.
    """
    with lock:
        for layer in layers:
            if swap_of(layer, _TAP) is None:
                layer.__class__ = _recording_class(type(layer))


@contextmanager
def recording(layers: Sequence[nn.Module]) -> Iterator[list[mx.array]]:
    """Record the outputs of attached layers over one forward.

    Args:
        layers: the layers wanted, each once.

    Yields:
        A list that holds, once the block is left, one [B, T, H] array per layer, in order.
    """
    record: dict[int, Any] = dict.fromkeys(map(id, layers))
    outputs: list[mx.array] = []
    token = _recorder.set(record)
    try:
        yield outputs
    finally:
        _recorder.reset(token)
    outputs.extend(record[id(layer)] for layer in layers)
