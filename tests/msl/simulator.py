"""`mx.fast.metal_kernel` on a CPU: MLX itself writes the function around the body, so the text that runs is the text
MLX would hand to Metal."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import mlx.core as mx
import numpy as np

from tests.msl.kernel import Counters, Kernel, Run

_make_real = mx.fast.metal_kernel
_IN_ORDER = Run()
_run: ContextVar[Run] = ContextVar("run of simulated kernels", default=_IN_ORDER)
_NOT_TEXT = ("verbose", "stream")
_UTILS = '#include "mlx/backend/metal/kernels/utils.h"\n'


def to_numpy(value: Any) -> np.ndarray:
    """An array or number as numpy, writable; bfloat16 as its bits."""
    array = value if isinstance(value, mx.array) else mx.array(value)
    if array.dtype == mx.bfloat16:
        return np.array(array.reshape(-1).view(mx.uint16)).reshape(array.shape)
    return np.array(array)


def to_mlx(array: np.ndarray, dtype: mx.Dtype) -> mx.array:
    """Back from `to_numpy`."""
    given = mx.array(array)
    return given.view(mx.bfloat16) if dtype == mx.bfloat16 else given


def generated_text(kernel: Any, **call: Any) -> str:
    """The text MLX generates for one call of a `metal_kernel` object, also where MLX has no Metal.

    While a function is exported a kernel is only recorded, and `verbose` prints its text.
    """
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as printed:
        with _standard_output_to(printed.fileno()):
            recorded = os.path.join(folder, "recorded.mlxfn")
            mx.export_function(recorded, lambda _: kernel(**call, verbose=True), mx.zeros((1,)))
        printed.seek(0)
        text = printed.read().decode()
    return text[text.index("```\n") + 4 : text.rindex("\n```")]


@contextlib.contextmanager
def _standard_output_to(descriptor: int) -> Iterator[None]:
    sys.stdout.flush()
    saved = os.dup(1)
    os.dup2(descriptor, 1)
    try:
        yield
    finally:
        ctypes.CDLL(None).fflush(None)
        os.dup2(saved, 1)
        os.close(saved)


class SimulatedKernel:
    """Stands in for `mx.fast.metal_kernel`, evaluated at once; call it outside `mx.compile`.

    Attributes:
        texts: every text MLX generated for it, in order; more than one means Metal would have compiled again.
        counters: of the last call.
    """

    def __init__(
        self,
        name: str,
        input_names: Sequence[str],
        output_names: Sequence[str],
        source: str,
        **settings: Any,
    ) -> None:
        self.name = name
        self.source = source
        self.input_names = list(input_names)
        self.counters = Counters()
        self._contiguous = bool(settings.get("ensure_row_contiguous", True))
        self._built: dict[str, Kernel] = {}
        self._generated: dict[Any, str] = {}
        self._kernel = _make_real(
            name=name, input_names=self.input_names, output_names=list(output_names), source=source, **settings
        )

    @property
    def texts(self) -> list[str]:
        return list(dict.fromkeys(self._generated.values()))

    def __call__(
        self,
        *,
        inputs: Sequence[Any],
        output_shapes: Sequence[Sequence[int]],
        output_dtypes: Sequence[mx.Dtype],
        init_value: float | None = None,
        **call: Any,
    ) -> list[mx.array]:
        given = [value if isinstance(value, mx.array) else mx.array(value) for value in inputs]
        mx.eval(given)
        wanted = list(zip(map(tuple, output_shapes), output_dtypes, strict=True))
        outputs = [_output(shape, dtype, init_value) for shape, dtype in wanted]
        text = self._text(given, output_shapes=output_shapes, output_dtypes=output_dtypes, **call)
        self._launch(text, given, outputs, **call)
        return [to_mlx(array, dtype) for array, (_, dtype) in zip(outputs, wanted, strict=True)]

    def _launch(self, text: str, inputs: list[mx.array], outputs: list[np.ndarray], **call: Any) -> None:
        """Run the kernel of a text, and write the outputs."""
        arrays = [
            array for name, value in zip(self.input_names, inputs, strict=True) for array in self._bound(name, value)
        ]
        kernel = self._kernel_of(text)
        kernel(dict(enumerate([*arrays, *outputs])), call["grid"], call["threadgroup"], _run.get())
        self.counters = kernel.counters

    def _kernel_of(self, text: str) -> Kernel:
        if text not in self._built:
            instance = re.search(r"decltype\((.*?)\) ", text)
            self._built[text] = Kernel(_UTILS + text, instance[1] if instance else None)
        return self._built[text]

    def _text(self, inputs: list[mx.array], **call: Any) -> str:
        kinds = tuple((value.dtype, value.ndim, value.size < 8) for value in inputs)
        key = repr((kinds, call.get("template"), call["output_dtypes"]))
        if key not in self._generated:
            wanted = {name: value for name, value in call.items() if value is not None and name not in _NOT_TEXT}
            self._generated[key] = generated_text(self._kernel, inputs=inputs, **wanted)
        return self._generated[key]

    def _bound(self, name: str, value: mx.array) -> Iterator[np.ndarray]:
        """An input as MLX binds it: with its shape, strides and rank where the source names them."""
        array = np.ascontiguousarray(to_numpy(value)).reshape(value.shape) if self._contiguous else _as_it_lies(value)
        array.flags.writeable = False
        yield array
        if not value.ndim:
            return
        strides = [stride // array.itemsize for stride in array.strides]
        facts = {"shape": (value.shape, np.int32), "strides": (strides, np.int64), "ndim": (value.ndim, np.int32)}
        for fact, (numbers, dtype) in facts.items():
            if f"{name}_{fact}" in self.source:
                yield np.array(numbers, dtype)


def _as_it_lies(value: mx.array) -> np.ndarray:
    """A view of an array's own memory, with its strides; bfloat16 as its bits."""
    return np.asarray(memoryview(value.view(mx.uint16) if value.dtype == mx.bfloat16 else value))


class RecordedKernel(SimulatedKernel):
    """Stands in for `mx.fast.metal_kernel` where only the text matters: nothing runs, outputs are zeros."""

    def _launch(self, text: str, inputs: list[mx.array], outputs: list[np.ndarray], **call: Any) -> None:
        for array in outputs:
            array.fill(0)


def _output(shape: tuple[int, ...], dtype: mx.Dtype, init_value: float | None) -> np.ndarray:
    """An output as Metal gives it: whatever was there before. An element left unwritten shows."""
    array = to_numpy(mx.full(shape, 0 if init_value is None else init_value, dtype=dtype))
    if init_value is None:
        array.reshape(-1).view(np.uint8)[:] = 0xA5 if dtype == mx.bool_ else 0xFF
    return array


@contextlib.contextmanager
def simulated() -> Iterator[None]:
    """Kernels made inside run here, on what seems to be a GPU."""
    saved = mx.fast.metal_kernel, mx.metal.is_available, mx.default_device
    mx.fast.metal_kernel, mx.metal.is_available = SimulatedKernel, lambda: True
    mx.default_device = lambda: mx.Device(mx.gpu, 0)
    try:
        yield
    finally:
        mx.fast.metal_kernel, mx.metal.is_available, mx.default_device = saved


@contextlib.contextmanager
def running(run: Run) -> Iterator[None]:
    """Simulated kernels called inside run in these orders."""
    token = _run.set(run)
    try:
        yield
    finally:
        _run.reset(token)
