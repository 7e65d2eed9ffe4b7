"""Kernels of our own: Metal text from `metal/`, handed to MLX on first use."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

LEAST_ELEMENTS = 8
"""MLX puts an input of fewer elements into another address space, which changes the kernel's text: it would be compiled
again, and its pointers would not fit. Inputs whose size follows the width are padded to this many."""

SIMD_LANES = 32

_GPU_CORES = {"p": 6, "g": 10, "s": 32, "d": 64}
"""A round number of cores by the last letter of Metal's architecture name: phones, base and Pro, Max, Ultra."""


@dataclass(frozen=True)
class Kernel:
    """A function of `metal/<file>.metal`, as MLX calls it.

    Attributes:
        name: of the kernel.
        file: whose text holds the function.
        inputs, outputs: names the body uses.
        body: one statement that calls the function. MLX declares the built-ins, shapes and strides that it names.
        contiguous: whether inputs are copied where they are not row-contiguous; else the body asks for strides.
    """

    name: str
    file: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    body: str
    contiguous: bool = True

    def __call__(
        self, inputs: Sequence[mx.array], outputs: Sequence[tuple[Sequence[int], mx.Dtype]], **call: Any
    ) -> Any:
        """Run it lazily.

        Args:
            inputs: in the order of `inputs`.
            outputs: shape and dtype of each output.
            call: grid, threadgroup and template values, as MLX takes them.

        Returns:
            A list of arrays, not evaluated.
        """
        shapes, dtypes = zip(*outputs, strict=True)
        return _made(mx.fast.metal_kernel, self)(inputs=inputs, output_shapes=shapes, output_dtypes=dtypes, **call)


@functools.cache
def _made(maker: Callable[..., Any], kernel: Kernel) -> Any:
    return maker(
        name=f"mlx_spec_{kernel.name}",
        input_names=list(kernel.inputs),
        output_names=list(kernel.outputs),
        header=metal_text(kernel.file),
        source=kernel.body,
        ensure_row_contiguous=kernel.contiguous,
    )


def kernels_run_here() -> bool:
    """Whether MLX can run kernels: on Metal, on its default device."""
    return mx.metal.is_available() and mx.default_device().type == mx.gpu


def metal_folder() -> Path:
    """Where the Metal files are: beside the package in a checkout, inside it where it was installed."""
    installed = Path(__file__).resolve().parents[1] / "_metal"
    return installed if installed.is_dir() else Path(__file__).resolve().parents[2] / "metal"


@functools.cache
def metal_text(file: str) -> str:
    """The text of `metal/<file>.metal`.

    Raises:
        FileNotFoundError: the file is missing; the installation is damaged.
    """
    return (metal_folder() / f"{file}.metal").read_text()


@functools.cache
def kernels_digest() -> str:
    """A digest of all Metal text: what was found out with one text says nothing about another."""
    texts = (path.read_bytes() for path in sorted(metal_folder().glob("*.metal")))
    return hashlib.sha256(b"".join(texts)).hexdigest()[:16]


def gpu_class() -> str:
    """The last letter of Metal's architecture name: p for phones, g base and Pro, s Max, d Ultra; "g" for any other."""
    letter = str(mx.device_info().get("architecture", ""))[-1:]
    return letter if letter in _GPU_CORES else "g"


def gpu_cores() -> int:
    """About how many cores the GPU has, from its class. Launch shapes depend on it; results do not."""
    return _GPU_CORES[gpu_class()]


def padded(array: mx.array) -> mx.array:
    """The array, or where it is so small that MLX would change a kernel's text, its elements and more in a row."""
    missing = LEAST_ELEMENTS - array.size
    return array if missing <= 0 else mx.pad(array.reshape(-1), (0, missing))
