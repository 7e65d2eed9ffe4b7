// Threads of a threadgroup as fibers of one operating-system thread.
//
// A lane runs until it meets others: the lanes of a SIMD-group at a simd_* call, the threads of a threadgroup at a
// barrier. The order in which lanes run between meetings is chosen by the caller, so that a result which depends on
// it shows, and a run is deterministic.
#pragma once

namespace msl {

constexpr uint32_t LANES = 32;
constexpr uint32_t MAX_THREADS = 1024;
constexpr size_t STACK_BYTES = 256 * 1024;

enum State : uint8_t { READY, AT_SIMD, AT_BARRIER, DONE };
enum LaneOrder : uint32_t { FORWARD, BACKWARD, SHUFFLED };

struct Lane;
using Resolve = void (*)(Lane** lanes, uint32_t active, int parameter);

struct Lane {
  void* stack_pointer = nullptr;
  char* stack = nullptr;
  State state = DONE;
  const void* site = nullptr;   // where in the program it waits
  Resolve resolve = nullptr;    // what the lanes that wait with it do together
  void* data = nullptr;         // this lane's value in that
  int parameter = 0;
  uint32_t in_grid[3], in_group[3], group[3];
  uint32_t index, simd_group, lane;
#if !defined(__x86_64__)
  ucontext_t context;
#endif
};

struct Counters {
  uint64_t groups, threads, simd_operations, barriers, diverged, ended_before_barrier, reads_of_absent_lanes;
};

struct Options {
  uint32_t sum_order, lane_order, flush_denormals, strict;
  uint64_t seed;
};

struct Dispatch {
  uint32_t threads[3], grid[3], groups[3], group[3];
  uint32_t group_threads, simd_groups;
};

static Lane* current;
static Dispatch dispatch;
static Counters counters;
static Options options;
static std::vector<Lane> lanes;
static void (*kernel_body)(Lane&);
static char failure[512];
static sigjmp_buf escape;

[[noreturn]] inline void fail(const char* message) {
  const Lane none{};
  const Lane& at = current ? *current : none;
  snprintf(failure, sizeof failure, "%s (threadgroup %u,%u,%u thread %u,%u,%u)", message, dispatch.group[0],
           dispatch.group[1], dispatch.group[2], at.in_group[0], at.in_group[1], at.in_group[2]);
  siglongjmp(escape, 1);
}

#if defined(__x86_64__)
static void* scheduler_stack_pointer;
extern "C" void msl_switch(void** save, void* load);
asm(".text\n.p2align 4\n.hidden msl_switch\n.globl msl_switch\n.type msl_switch,@function\nmsl_switch:\n"
    "pushq %rbp\npushq %rbx\npushq %r12\npushq %r13\npushq %r14\npushq %r15\n"
    "movq %rsp,(%rdi)\nmovq %rsi,%rsp\n"
    "popq %r15\npopq %r14\npopq %r13\npopq %r12\npopq %rbx\npopq %rbp\nret\n.size msl_switch,.-msl_switch\n");
inline void to_scheduler() { msl_switch(&current->stack_pointer, scheduler_stack_pointer); }
inline void to_lane(Lane& lane) {
  current = &lane;
  msl_switch(&scheduler_stack_pointer, lane.stack_pointer);
}
#else
static ucontext_t scheduler_context;
inline void to_scheduler() { swapcontext(&current->context, &scheduler_context); }
inline void to_lane(Lane& lane) {
  current = &lane;
  swapcontext(&scheduler_context, &lane.context);
}
#endif

static void lane_main() {
  kernel_body(*current);
  current->state = DONE;
  to_scheduler();
  __builtin_unreachable();
}

inline void start(Lane& lane) {
  if (!lane.stack) {
    const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    void* memory = mmap(nullptr, STACK_BYTES, PROT_READ | PROT_WRITE, flags, -1, 0);
    if (memory == MAP_FAILED) fail("no memory for a thread's stack");
    lane.stack = static_cast<char*>(memory);
  }
  lane.state = READY;
#if defined(__x86_64__)
  // The stack as msl_switch leaves it: six saved registers below lane_main's address, 8 modulo 16 as after a call.
  void** top = reinterpret_cast<void**>(lane.stack + STACK_BYTES - 8);
  *top = nullptr;
  top[-1] = reinterpret_cast<void*>(&lane_main);
  for (int saved = 2; saved < 8; saved++) top[-saved] = nullptr;
  lane.stack_pointer = top - 7;
#else
  getcontext(&lane.context);
  lane.context.uc_stack.ss_sp = lane.stack;
  lane.context.uc_stack.ss_size = STACK_BYTES;
  lane.context.uc_link = nullptr;
  makecontext(&lane.context, (void (*)())lane_main, 0);
#endif
}

inline void meet(const void* site, Resolve resolve, void* data, int parameter) {
  current->site = site;
  current->resolve = resolve;
  current->data = data;
  current->parameter = parameter;
  current->state = AT_SIMD;
  to_scheduler();
}

inline uint32_t random_word() {
  options.seed = options.seed * 6364136223846793005ull + 1442695040888963407ull;
  return options.seed >> 33;
}

inline void put_in_order(uint32_t* order, uint32_t count) {
  for (uint32_t i = 0; i < count; i++) order[i] = options.lane_order == BACKWARD ? count - 1 - i : i;
  if (options.lane_order != SHUFFLED) return;
  for (uint32_t i = count; i > 1; i--) std::swap(order[i - 1], order[random_word() % i]);
}

// The lanes that wait at one place act together. Others have diverged; the earliest place in the program goes first.
inline void resolve_meeting(Lane** group, uint32_t count, uint32_t waiting, bool some_at_barrier) {
  const void* site = nullptr;
  for (uint32_t i = 0; i < count; i++)
    if ((waiting >> i & 1) && (!site || group[i]->site < site)) site = group[i]->site;
  uint32_t active = 0;
  Lane* first = nullptr;
  for (uint32_t i = 0; i < count; i++) {
    if (!(waiting >> i & 1) || group[i]->site != site) continue;
    active |= 1u << i;
    if (!first) first = group[i];
  }
  if (active != waiting || some_at_barrier) {
    counters.diverged++;
    current = first;
    if (options.strict) fail("lanes of one SIMD-group wait at different places");
  }
  Lane* all[LANES] = {};
  std::copy(group, group + count, all);
  counters.simd_operations++;
  first->resolve(all, active, first->parameter);
  for (uint32_t i = 0; i < count; i++)
    if (active >> i & 1) group[i]->state = READY;
}

// Runs a SIMD-group until every lane has ended or waits at a barrier.
inline void run_simd_group(uint32_t number) {
  const uint32_t count = std::min(LANES, dispatch.group_threads - number * LANES);
  Lane* group[LANES];
  uint32_t order[LANES];
  for (uint32_t i = 0; i < count; i++) group[i] = &lanes[number * LANES + i];
  put_in_order(order, count);
  for (;;) {
    for (uint32_t i = 0; i < count; i++)
      if (group[order[i]]->state == READY) to_lane(*group[order[i]]);
    uint32_t waiting = 0;
    bool some_at_barrier = false;
    for (uint32_t i = 0; i < count; i++) {
      if (group[i]->state == AT_SIMD) waiting |= 1u << i;
      some_at_barrier |= group[i]->state == AT_BARRIER;
    }
    if (!waiting) return;
    resolve_meeting(group, count, waiting, some_at_barrier);
  }
}

// The last threadgroups of a grid are cut at its edge.
inline void place_lanes() {
  uint32_t size[3];
  for (int d = 0; d < 3; d++)
    size[d] = std::min(dispatch.threads[d], dispatch.grid[d] - dispatch.group[d] * dispatch.threads[d]);
  dispatch.group_threads = size[0] * size[1] * size[2];
  dispatch.simd_groups = (dispatch.group_threads + LANES - 1) / LANES;
  if (lanes.size() < dispatch.group_threads) lanes.resize(dispatch.group_threads);
  for (uint32_t i = 0; i < dispatch.group_threads; i++) {
    Lane& lane = lanes[i];
    lane.index = i;
    lane.simd_group = i / LANES;
    lane.lane = i % LANES;
    lane.in_group[0] = i % size[0];
    lane.in_group[1] = i / size[0] % size[1];
    lane.in_group[2] = i / size[0] / size[1];
    for (int d = 0; d < 3; d++) {
      lane.group[d] = dispatch.group[d];
      lane.in_grid[d] = dispatch.group[d] * dispatch.threads[d] + lane.in_group[d];
    }
    start(lane);
  }
}

// Whether a barrier was passed; false when every thread has ended.
inline bool pass_barrier() {
  uint32_t waiting = 0;
  const void* site = nullptr;
  bool at_different_barriers = false;
  for (uint32_t i = 0; i < dispatch.group_threads; i++) {
    if (lanes[i].state == DONE) continue;
    at_different_barriers |= site && site != lanes[i].site;
    site = lanes[i].site;
    current = &lanes[i];
    waiting++;
  }
  if (!waiting) return false;
  if (waiting < dispatch.group_threads) {
    counters.ended_before_barrier++;
    if (options.strict) fail("some threads ended before a barrier others wait at");
  }
  if (at_different_barriers && options.strict) fail("threads of one threadgroup wait at different barriers");
  counters.barriers++;
  for (uint32_t i = 0; i < dispatch.group_threads; i++)
    if (lanes[i].state == AT_BARRIER) lanes[i].state = READY;
  return true;
}

inline void run_group() {
  place_lanes();
  counters.groups++;
  counters.threads += dispatch.group_threads;
  do {
    for (uint32_t i = 0; i < dispatch.simd_groups; i++)
      run_simd_group(options.lane_order == BACKWARD ? dispatch.simd_groups - 1 - i : i);
  } while (pass_barrier());
}

}  // namespace msl

// Lanes meet by return address. Unless a call is `convergent`, the optimiser may give lanes that branch apart later
// their own copy of it, and they would no longer meet.
#define MSL_SITE __builtin_return_address(0)
#define MSL_TOGETHER __attribute__((noinline, convergent))
