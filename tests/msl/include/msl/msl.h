// Metal Shading Language on a CPU, one threadgroup at a time: what a translated kernel is compiled behind.
//
// Built with clang and -ffp-contract=on, `a += b * c` becomes a fused multiply-add exactly where Metal's front end,
// also clang, makes it one. Denormals are flushed, as MLX's kernels are built.
#pragma once

#include <algorithm>
#include <cmath>
#include <csetjmp>
#include <csignal>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>
#include <sys/mman.h>
#if defined(__x86_64__)
#include <xmmintrin.h>
#else
#include <ucontext.h>
#endif

// libstdc++ puts a second abs(float) into the global namespace.
#define abs msl_abs
#define METAL_FUNC inline __attribute__((always_inline))

#include "msl/scalars.h"
#include "msl/fibers.h"
#include "msl/vectors.h"
#include "msl/types.h"
#include "msl/math.h"
#include "msl/simd_groups.h"
#include "msl/atomics.h"
#include "msl/matrices.h"
#include "msl/launch.h"
#include "msl/inner_names.h"

using namespace metal;
