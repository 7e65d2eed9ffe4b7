"""Finds a C++ compiler that rounds as Metal's does, and builds translated kernels with it, once each."""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
INSTALL = "apt-get install --no-install-recommends clang-19"
MIN_CLANG = 16
"""Before it clang has no `_Float16` on ordinary x86 machines, and the address-space check knows no templates."""

_NAMES = ("clang++-19", "clang++-21", "clang++-20", "clang++-18", "clang++-17", "clang++-16", "clang++")
_APPLE_HEADERS = (
    *("metal_atomic", "metal_common", "metal_compute", "metal_integer", "metal_limits", "metal_logging", "metal_math"),
    *("metal_numeric", "metal_relational", "metal_simdgroup", "metal_simdgroup_matrix", "metal_stdlib"),
    *("metal_tensor", "metal_uniform"),
)


class CompileError(RuntimeError):
    """The compiler refused a text; its message is the reason."""


@functools.cache
def find_compiler() -> str | None:
    """Path of a clang++ of a version that serves, `$MSL_CXX` first, or None."""
    for name in (os.environ.get("MSL_CXX"), *_NAMES):
        path = shutil.which(name) if name else None
        if path is not None and _major_version(path) >= MIN_CLANG:
            return path
    return None


def _major_version(path: str) -> int:
    said = subprocess.run([path, "-dM", "-E", "-x", "c++", os.devnull], capture_output=True, text=True, check=False)
    words = [line.split() for line in said.stdout.splitlines() if line.startswith("#define __clang_major__ ")]
    return int(words[0][2]) if words else 0


def compiler() -> str:
    """The compiler, or an error that says how to get one."""
    path = find_compiler()
    if path is None:
        raise CompileError(f"no clang++ of version {MIN_CLANG} or newer on PATH; {INSTALL}, or set MSL_CXX")
    return path


def cache_folder() -> Path:
    """Where built kernels are kept: `$MSL_CACHE`, else a folder in the temporary directory."""
    folder = Path(os.environ.get("MSL_CACHE") or Path(tempfile.gettempdir()) / "mlx_spec-msl")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def preprocess(text: str, include: Sequence[Path]) -> str:
    """MSL text after its includes and macros, with Apple's headers empty."""
    folders = [HERE / "standins", _empty_apple_headers(), *include]
    flags = ["-E", "-P", "-x", "c++", "-std=c++17", "-nostdinc", "-nostdinc++"]
    flags += ["-D__METAL__", "-D__METAL_VERSION__=320"]
    return _run([compiler(), *flags, *(f"-I{folder}" for folder in folders), "-"], text)


def build(source: str) -> Path:
    """A shared library for C++ text behind `msl.h`; one that was built before from the same is taken."""
    key = _digest(compiler(), *_flags(), _headers(), source)
    library = cache_folder() / f"{key}.so"
    if not library.exists():
        behind = ["-shared", "-include-pch", str(_precompiled()), "-x", "c++", "-"]
        _make(library, behind, source)
    return library


def _flags() -> list[str]:
    flags = ["-std=c++20", "-O2", "-fPIC", "-w", "-fno-math-errno", "-fno-strict-aliasing"]
    flags += ["-ffp-contract=on", "-Xclang", "-ffloat16-excess-precision=none", "-fconvergent-functions"]
    return flags + (["-mavx2", "-mfma", "-mf16c"] if platform.machine() == "x86_64" else [])


def _precompiled() -> Path:
    """`msl.h` as the compiler has read it. It is bound to the files' places and times."""
    times = [f"{path} {path.stat().st_mtime_ns}" for path in sorted((HERE / "include").rglob("*.h"))]
    header = cache_folder() / f"{_digest(compiler(), *_flags(), *times)}.pch"
    if not header.exists():
        _make(header, [f"-I{HERE / 'include'}", "-x", "c++-header", str(HERE / "include" / "msl" / "msl.h")], "")
    return header


def _make(target: Path, arguments: Sequence[str], text: str) -> None:
    """Compile into a file that others see when it is whole."""
    unfinished = target.with_name(f"{os.getpid()}-{target.name}")
    _run([compiler(), *_flags(), *arguments, "-o", str(unfinished)], text)
    unfinished.replace(target)


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]


def _run(command: list[str], text: str) -> str:
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    if done.returncode:
        raise CompileError(done.stderr[:8000])
    return done.stdout


@functools.cache
def _headers() -> str:
    return "".join(path.read_text() for path in sorted((HERE / "include").rglob("*.h")))


@functools.cache
def _empty_apple_headers() -> Path:
    folder = cache_folder() / "apple"
    folder.mkdir(exist_ok=True)
    for name in _APPLE_HEADERS:
        (folder / name).touch()
    return folder
