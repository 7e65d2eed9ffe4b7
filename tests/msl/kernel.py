"""Any MSL kernel on numpy arrays."""

from __future__ import annotations

import ctypes
import mmap
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx
import numpy as np

from tests.msl.compiler import build, preprocess
from tests.msl.translate import Kernels, Parameter, translate

FORWARD, BACKWARD, SHUFFLED = 0, 1, 2
NEIGHBOURS_FIRST, HALVES_FIRST, LANE_BY_LANE = 0, 1, 2

_FENCE = 0xA5
_GUARD_BYTES = 4 << 20


class KernelError(RuntimeError):
    """A kernel did what Metal forbids: out of bounds, a half-reached barrier, a diverged SIMD operation."""


@dataclass(frozen=True)
class Run:
    """How a kernel is run.

    Attributes:
        sum_order: partners of `simd_sum`: NEIGHBOURS_FIRST, HALVES_FIRST or LANE_BY_LANE. The hardware's is not known.
        lane_order: FORWARD, BACKWARD or SHUFFLED; a result that depends on it has a race.
        strict: whether diverged SIMD operations and half-reached barriers are errors.
        flush_denormals: as MLX builds its kernels.
        at_end: whether arrays end at an unmapped page; else they begin after one.
        seed: of the shuffled order.
    """

    sum_order: int = NEIGHBOURS_FIRST
    lane_order: int = FORWARD
    strict: bool = True
    flush_denormals: bool = True
    at_end: bool = True
    seed: int = 1


class _Options(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint32) for name in ("sum_order", "lane_order", "flush_denormals", "strict")] + [
        ("seed", ctypes.c_uint64)
    ]


class Counters(ctypes.Structure):
    """What a run did."""

    _fields_ = [
        (name, ctypes.c_uint64)
        for name in (
            *("groups", "threads", "simd_operations", "barriers"),
            *("diverged", "ended_before_barrier", "reads_of_absent_lanes"),
        )
    ]


class _Buffer(ctypes.Structure):
    _fields_ = [("start", ctypes.c_void_p), ("bytes", ctypes.c_uint64)]


class _Fenced:
    """A copy of an array between two stretches that cannot be touched, at the end or at the start of what lies between.

    What is left of the pages between is filled with a pattern, so that a write beside the array shows afterwards.
    """

    def __init__(self, array: np.ndarray, at_end: bool) -> None:
        self.array = array
        if any(stride < 0 for stride in array.strides):
            raise ValueError("an array with negative strides cannot be a buffer")
        reach = sum((size - 1) * stride for size, stride in zip(array.shape, array.strides, strict=True))
        self.bytes = array.itemsize + reach if array.size else 0
        room = -(-max(self.bytes, 1) // 16) * 16
        page = mmap.PAGESIZE
        self._between = -(-room // page) * page
        self._map = mmap.mmap(-1, self._between + 2 * _GUARD_BYTES)
        base = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self._inside = base + _GUARD_BYTES
        for start in (base, self._inside + self._between):
            if ctypes.CDLL(None).mprotect(ctypes.c_void_p(start), ctypes.c_size_t(_GUARD_BYTES), 0):
                raise OSError("the pages around an array cannot be protected")
        self.start = self._inside + (self._between - room if at_end else 0)
        ctypes.memset(self._inside, _FENCE, self._between)
        ctypes.memmove(self.start, array.ctypes.data, self.bytes)

    def give_back(self) -> None:
        """Copy the contents into the array, if it may be written, after looking at the bytes around them."""
        before = ctypes.string_at(self._inside, self.start - self._inside)
        behind = self.start + self.bytes
        after = ctypes.string_at(behind, self._inside + self._between - behind)
        if set(before + after) - {_FENCE}:
            raise KernelError(f"a write beside an array of {self.bytes} bytes")
        if self.array.flags.writeable:
            ctypes.memmove(self.array.ctypes.data, self.start, self.bytes)


@dataclass
class Kernel:
    """An instantiation of a kernel, built.

    Attributes:
        text: MSL.
        function: what to run, as `gemv<float, 4>`; needed where the text has several kernels.
        constants: function constants by index.
        include: folders of headers; the installed mlx wheel's by default.
        counters: of the last run.
    """

    text: str
    function: str | None = None
    constants: Mapping[int, int | float | bool] = field(default_factory=dict)
    include: Sequence[Path] = ()
    counters: Counters = field(default_factory=Counters)

    def __post_init__(self) -> None:
        body, kernels = translate(preprocess(self.text, self.include or [mlx_include()]), self.constants)
        function, parameters = _chosen(self.function, kernels)
        self.buffers = sorted({p.buffer for p in parameters if p.buffer is not None})
        self._library = ctypes.CDLL(str(build(_program(body, function, parameters, self._slots))))

    @property
    def _slots(self) -> int:
        return max(self.buffers, default=-1) + 1

    def __call__(
        self, buffers: Mapping[int, Any], grid: Sequence[int], threads: Sequence[int], run: Run | None = None
    ) -> None:
        """Run on arrays, which are read and, where they may be, written in place.

        Args:
            buffers: arrays by buffer index.
            grid: threads in x, y, z.
            threads: of a threadgroup.
            run: how.

        Raises:
            KernelError: what the kernel did wrong; the arrays are as before the call.
        """
        run = run or Run()
        fenced = {index: _Fenced(np.asarray(buffers[index]), run.at_end) for index in self.buffers if index in buffers}
        bound = (_Buffer * self._slots)()
        for index, copy in fenced.items():
            bound[index] = _Buffer(copy.start, copy.bytes)
        options = _Options(run.sum_order, run.lane_order, run.flush_denormals, run.strict, run.seed)
        self.counters, error = Counters(), ctypes.create_string_buffer(512)
        sizes = [(ctypes.c_uint32 * 3)(*size) for size in (grid, threads)]
        failed = self._library.msl_launch(
            bound, *sizes, ctypes.byref(options), ctypes.byref(self.counters), error, len(error)
        )
        if failed:
            raise KernelError(error.value.decode())
        for copy in fenced.values():
            copy.give_back()


def mlx_include() -> Path:
    """The headers of the installed mlx wheel."""
    return Path(next(iter(mlx.__path__))) / "include"


def _chosen(function: str | None, kernels: Kernels) -> tuple[str, list[Parameter]]:
    if function is None:
        if len(kernels) != 1:
            raise ValueError(f"name one of {sorted(kernels)}")
        function = next(iter(kernels))
    match = re.match(r"\w+", function)
    if match is None or match[0] not in kernels:
        raise ValueError(f"no kernel {function!r}; the text has {sorted(kernels)}")
    return function, kernels[match[0]]


def _program(body: str, function: str, parameters: Iterable[Parameter], slots: int) -> str:
    arguments = []
    for place, parameter in enumerate(parameters):
        wanted = f"msl::Parameters<Function>::at<{place}>"
        if parameter.builtin is not None:
            arguments.append(f"msl::builtin_{parameter.builtin}<{wanted}>(lane)")
        else:
            arguments.append(f"msl::Argument<{wanted}>::get(bound[{parameter.buffer}].start)")
    return f"""{body}
static msl::Buffer* bound;
static void entry(msl::Lane& lane) {{
  constexpr auto function = &{function};
  using Function = std::remove_const_t<decltype(function)>;
  function({", ".join(arguments)});
}}
extern "C" int msl_launch(msl::Buffer* buffers, const uint32_t* grid, const uint32_t* threads,
                          const msl::Options* options, msl::Counters* counters, char* error, int error_bytes) {{
  bound = buffers;
  return msl::launch(entry, grid, threads, options, counters, buffers, {slots}, error, error_bytes);
}}
"""
