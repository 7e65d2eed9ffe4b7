"""Whether a kernel's pointers and references agree with the address spaces MLX gives its arguments.

clang's C++ for OpenCL is the one open front end with Metal's address-space rules. It only parses here. It has no bfloat
(half stands in for it; the simulator checks its conversions) and none of what MLX's own headers would add.
"""

from __future__ import annotations

import re
import subprocess

from tests.msl.compiler import compiler
from tests.msl.translate import BUILTINS

_PRELUDE = """
#define device __global
#define constant __constant
#define threadgroup __local
#define thread __private
#define METAL_FUNC inline
#pragma OPENCL EXTENSION cl_khr_fp16 : enable
typedef unsigned int uint32_t; typedef int int32_t; typedef unsigned long uint64_t; typedef long int64_t;
typedef unsigned char uint8_t; typedef signed char int8_t; typedef unsigned short uint16_t; typedef short int16_t;
typedef half float16_t; typedef half bfloat16_t; typedef half bfloat;
enum class mem_flags { mem_none, mem_device, mem_threadgroup };
void threadgroup_barrier(mem_flags);
void simdgroup_barrier(mem_flags);
template <class T> T simd_sum(T); template <class T> T simd_max(T); template <class T> T simd_min(T);
template <class T> T quad_sum(T); template <class T> T simd_broadcast_first(T);
template <class T> T simd_shuffle_down(T, ushort); template <class T> T simd_shuffle_up(T, ushort);
template <class T> T simd_shuffle_xor(T, ushort); template <class T> T simd_shuffle(T, ushort);
template <class T> T simd_broadcast(T, ushort); template <class T> T simd_prefix_inclusive_sum(T);
bool simd_any(bool); bool simd_all(bool);
template <class T, class U> T as_type(U);
namespace metal {
template <class T> struct numeric_limits { static constexpr T max() { return T(3.40282347e38f); } };
namespace fast { float exp(float); float exp2(float); float log(float); }
namespace precise { float exp(float); float rsqrt(float); float sqrt(float); }
}
namespace fast = metal::fast;
namespace precise = metal::precise;
"""
_KERNEL = re.compile(r"(?:template <([^>]*)>\s*)?\[\[kernel\]\] void (\w+)\(\n(.*?)\) \{\n", re.DOTALL)


def complaints(text: str) -> str:
    """What clang says against the text MLX generated for one call; empty where it agrees."""
    kernel = _KERNEL.search(text)
    if kernel is None:
        raise ValueError("the text has no kernel as MLX writes it")
    rest = text[kernel.end() :]
    body = rest.partition("\ntemplate [[host_name")[0]
    parameters, locals_ = _parameters(kernel[3])
    lines = [_PRELUDE, *_template_values(kernel[1], rest), text[: kernel.start()]]
    lines += [f"__kernel void {kernel[2]}({', '.join(parameters)}) {{", *locals_, body]
    flags = [
        "-x",
        "clcpp",
        "-cl-std=clc++2021",
        "-fsyntax-only",
        "-Xclang",
        "-finclude-default-header",
        "-Wno-unused-value",
    ]
    checked = subprocess.run(
        [compiler(), *flags, "-"], input="\n".join(lines), capture_output=True, text=True, check=False
    )
    return checked.stderr


def _template_values(declared: str | None, rest: str) -> list[str]:
    """The template's parameters as plain names with the values of the one instantiation."""
    given = re.search(r"decltype\(\w+<(.*?)>\)", rest)
    if declared is None or given is None:
        return []
    lines = []
    for parameter, value in zip(declared.split(","), given[1].split(","), strict=True):
        kind, name = parameter.split()
        is_type = kind == "typename"
        lines.append(f"typedef {value} {name};" if is_type else f"static __constant constexpr {kind} {name} = {value};")
    return lines


def _parameters(text: str) -> tuple[list[str], list[str]]:
    """Parameters as OpenCL may declare them, and what stands for the rest at the top of the body."""
    parameters, locals_ = [], []
    for parameter in (part.strip() for part in text.split(",\n")):
        builtin = re.match(r"(\w+) (\w+) \[\[\w+\]\]$", parameter)
        if builtin and builtin[2] in BUILTINS:
            locals_.append(f"const {builtin[1]} {builtin[2]} = {{}};")
            continue
        plain = re.sub(r" \[\[.*\]\]", "", parameter)
        reference = re.match(r"(.*)& (\w+)$", plain)
        if reference:
            parameters.append(f"{reference[1]}* {reference[2]}_pointer")
            locals_.append(f"{reference[1]}& {reference[2]} = *{reference[2]}_pointer;")
        else:
            parameters.append(plain)
    return parameters, locals_
