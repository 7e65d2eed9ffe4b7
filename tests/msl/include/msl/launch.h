// Runs a grid: buffers between unmapped pages, threadgroup memory poisoned before each threadgroup, arguments bound
// by the type and attribute of each parameter.
#pragma once

// Every threadgroup variable is placed in this section, so that all of them can be found.
extern "C" char __start_msl_threadgroup[] __attribute__((weak, visibility("hidden")));
extern "C" char __stop_msl_threadgroup[] __attribute__((weak, visibility("hidden")));

namespace msl {

constexpr char POISON = static_cast<char>(0xff);
struct Buffer {
  char* start;
  uint64_t bytes;
};
static std::vector<Buffer> buffers;

inline long distance(const Buffer& buffer, const char* at) {
  return std::max(buffer.start - at, at - (buffer.start + buffer.bytes));
}

static void on_fault(int, siginfo_t* info, void*) {
  const char* at = static_cast<char*>(info->si_addr);
  int nearest = -1;
  for (int i = 0; i < int(buffers.size()); i++)
    if (buffers[i].start && (nearest < 0 || distance(buffers[i], at) < distance(buffers[nearest], at))) nearest = i;
  char message[160];
  if (nearest < 0) fail("access to unmapped memory");
  snprintf(message, sizeof message, "access outside buffer %d: byte %ld of %lu", nearest, at - buffers[nearest].start,
           static_cast<unsigned long>(buffers[nearest].bytes));
  fail(message);
}

inline void run_grid() {
  const size_t shared_bytes = __start_msl_threadgroup ? __stop_msl_threadgroup - __start_msl_threadgroup : 0;
  for (uint32_t z = 0; z < dispatch.groups[2]; z++)
    for (uint32_t y = 0; y < dispatch.groups[1]; y++)
      for (uint32_t x = 0; x < dispatch.groups[0]; x++) {
        dispatch.group[0] = x, dispatch.group[1] = y, dispatch.group[2] = z;
        if (shared_bytes) memset(__start_msl_threadgroup, POISON, shared_bytes);
        run_group();
      }
}

inline int launch(void (*body)(Lane&), const uint32_t* grid, const uint32_t* threads, const Options* given,
                  Counters* counted, Buffer* bound, int count, char* error, int error_bytes) {
  kernel_body = body;
  options = *given;
  counters = {};
  failure[0] = 0;
  current = nullptr;
  buffers.assign(bound, bound + count);
  for (int d = 0; d < 3; d++) {
    dispatch.grid[d] = grid[d];
    dispatch.threads[d] = std::min(threads[d], grid[d]);
    dispatch.groups[d] = dispatch.threads[d] ? (grid[d] + dispatch.threads[d] - 1) / dispatch.threads[d] : 0;
  }
  if (dispatch.threads[0] * dispatch.threads[1] * dispatch.threads[2] > MAX_THREADS) {
    snprintf(error, error_bytes, "more than %u threads in a threadgroup", MAX_THREADS);
    return 1;
  }
#if defined(__x86_64__)
  constexpr unsigned FLUSH_AND_TREAT_DENORMALS_AS_ZERO = 0x8040;
  const unsigned control = _mm_getcsr();
  if (options.flush_denormals) _mm_setcsr(control | FLUSH_AND_TREAT_DENORMALS_AS_ZERO);
#endif
  static char fault_stack[64 * 1024];
  stack_t stack = {}, old_stack;
  stack.ss_sp = fault_stack;
  stack.ss_size = sizeof fault_stack;
  sigaltstack(&stack, &old_stack);
  struct sigaction action = {}, old_segv, old_bus;
  action.sa_sigaction = on_fault;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
  sigaction(SIGSEGV, &action, &old_segv);
  sigaction(SIGBUS, &action, &old_bus);
  const int failed = sigsetjmp(escape, 1);
  if (!failed) run_grid();
  sigaction(SIGSEGV, &old_segv, nullptr);
  sigaction(SIGBUS, &old_bus, nullptr);
  sigaltstack(&old_stack, nullptr);
#if defined(__x86_64__)
  _mm_setcsr(control);
#endif
  *counted = counters;
  snprintf(error, error_bytes, "%s", failure);
  return failed;
}

// A buffer as the parameter's own type wants it.
template <class P> struct Argument;
template <class T> struct Argument<T*> {
  static T* get(void* start) { return static_cast<T*>(start); }
};
template <class T> struct Argument<T&> {
  static T& get(void* start) { return *static_cast<T*>(start); }
};
template <class F> struct Parameters;
template <class... P> struct Parameters<void (*)(P...)> {
  template <int I> using at = std::tuple_element_t<I, std::tuple<P...>>;
};

// A built-in as the parameter's own type wants it: a scalar or a vector of two or three.
template <class P> inline P builtin(metal::uint3 value) {
  if constexpr (std::is_integral_v<P>) {
    return P(value.x);
  } else {
    P result;
    for (size_t i = 0; i < sizeof(result.v) / sizeof(result.v[0]); i++) result.v[i] = value.v[i];
    return result;
  }
}
template <class P> inline P builtin(uint32_t value) { return builtin<P>(metal::uint3(value, 1, 1)); }
inline metal::uint3 three(const uint32_t* p) { return metal::uint3(p[0], p[1], p[2]); }
inline uint32_t full_group() { return dispatch.threads[0] * dispatch.threads[1] * dispatch.threads[2]; }

#define MSL_BUILTIN(name, expression)                     \
  template <class P> inline P builtin_##name(Lane& lane) { \
    (void)lane;                                           \
    return builtin<P>(expression);                        \
  }
MSL_BUILTIN(thread_position_in_grid, three(lane.in_grid))
MSL_BUILTIN(thread_position_in_threadgroup, three(lane.in_group))
MSL_BUILTIN(threadgroup_position_in_grid, three(lane.group))
MSL_BUILTIN(threads_per_grid, three(dispatch.grid))
MSL_BUILTIN(threads_per_threadgroup, three(dispatch.threads))
MSL_BUILTIN(dispatch_threads_per_threadgroup, three(dispatch.threads))
MSL_BUILTIN(threadgroups_per_grid, three(dispatch.groups))
MSL_BUILTIN(grid_size, three(dispatch.grid))
MSL_BUILTIN(grid_origin, metal::uint3(0, 0, 0))
MSL_BUILTIN(thread_index_in_threadgroup, lane.index)
MSL_BUILTIN(thread_index_in_simdgroup, lane.lane)
MSL_BUILTIN(simdgroup_index_in_threadgroup, lane.simd_group)
MSL_BUILTIN(thread_index_in_quadgroup, lane.lane & 3)
MSL_BUILTIN(quadgroup_index_in_threadgroup, lane.index / 4)
MSL_BUILTIN(threads_per_simdgroup, LANES)
MSL_BUILTIN(thread_execution_width, LANES)
MSL_BUILTIN(simdgroups_per_threadgroup, dispatch.simd_groups)
MSL_BUILTIN(quadgroups_per_threadgroup, (dispatch.group_threads + 3) / 4)
MSL_BUILTIN(dispatch_simdgroups_per_threadgroup, (full_group() + LANES - 1) / LANES)
MSL_BUILTIN(dispatch_quadgroups_per_threadgroup, (full_group() + 3) / 4)

}  // namespace msl
