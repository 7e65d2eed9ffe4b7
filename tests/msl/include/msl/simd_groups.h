// What lanes do together: reductions, shuffles, votes, and barriers.
#pragma once

namespace metal {

enum SumOrder : uint32_t { NEIGHBOURS_FIRST, HALVES_FIRST, LANE_BY_LANE };

// The order inside simd_sum is the hardware's. Partners at distance 1, 2, 4, 8, 16; at 16, 8, 4, 2, 1; or one by one.
template <class T, class Combine> inline void reduce(T* values, uint32_t active, Combine combine) {
  if (msl::options.sum_order == LANE_BY_LANE) {
    T sum = values[__builtin_ctz(active)];
    for (int i = __builtin_ctz(active) + 1; i < 32; i++)
      if (active >> i & 1) sum = combine(sum, values[i]);
    std::fill(values, values + 32, sum);
    return;
  }
  for (int step = 0; step < 5; step++) {
    const int distance = msl::options.sum_order == HALVES_FIRST ? 16 >> step : 1 << step;
    T combined[32];
    uint32_t reached = active;
    for (int i = 0; i < 32; i++) {
      const int partner = i ^ distance;
      const bool here = active >> i & 1, there = active >> partner & 1;
      combined[i] = here && there ? combine(values[i], values[partner]) : there ? values[partner] : values[i];
      if (here || there) reached |= 1u << i;
    }
    std::copy(combined, combined + 32, values);
    active = reached;
  }
}

template <class T> inline void gather(msl::Lane** lanes, uint32_t active, T* values) {
  for (int i = 0; i < 32; i++) values[i] = active >> i & 1 ? *static_cast<T*>(lanes[i]->data) : T{};
}
template <class T> inline void scatter(msl::Lane** lanes, uint32_t active, const T* values) {
  for (int i = 0; i < 32; i++)
    if (active >> i & 1) *static_cast<T*>(lanes[i]->data) = values[i];
}

#define MSL_REDUCE(name, expression)                                         \
  template <class T> MSL_TOGETHER T name(T value) {                          \
    const auto resolve = [](msl::Lane** lanes, uint32_t active, int) {       \
      T values[32];                                                          \
      gather(lanes, active, values);                                         \
      reduce(values, active, [](T a, T b) { return T(expression); });        \
      scatter(lanes, active, values);                                        \
    };                                                                       \
    msl::meet(MSL_SITE, resolve, &value, 0);                                 \
    return value;                                                            \
  }
MSL_REDUCE(simd_sum, a + b)
MSL_REDUCE(simd_product, a * b)
MSL_REDUCE(simd_and, a & b)
MSL_REDUCE(simd_or, a | b)
MSL_REDUCE(simd_xor, a ^ b)
MSL_REDUCE(simd_max, metal::max(a, b))
MSL_REDUCE(simd_min, metal::min(a, b))

// A lane takes the value of lane `source`, an expression of its own number i and of p. A lane that is not there
// gives nothing: the value stays, and is counted unless `edge_is_defined`.
#define MSL_SHUFFLE(name, source_lane, edge_is_defined)                              \
  template <class T> MSL_TOGETHER T name(T value, ushort parameter) {                \
    const auto resolve = [](msl::Lane** lanes, uint32_t active, int) {               \
      T values[32], moved[32];                                                       \
      gather(lanes, active, values);                                                 \
      for (int i = 0; i < 32; i++) {                                                 \
        if (!(active >> i & 1)) continue;                                            \
        const int p = lanes[i]->parameter, source = source_lane;                     \
        const bool outside = source < 0 || source > 31;                              \
        const bool absent = outside || !(active >> source & 1);                      \
        if (absent && !(outside && edge_is_defined)) msl::counters.reads_of_absent_lanes++; \
        moved[i] = absent ? values[i] : values[source];                              \
      }                                                                              \
      scatter(lanes, active, moved);                                                 \
    };                                                                               \
    msl::meet(MSL_SITE, resolve, &value, parameter);                                 \
    return value;                                                                    \
  }
MSL_SHUFFLE(simd_shuffle, p, false)
MSL_SHUFFLE(simd_broadcast, p, false)
MSL_SHUFFLE(simd_shuffle_down, i + p, true)
MSL_SHUFFLE(simd_shuffle_up, i - p, true)
MSL_SHUFFLE(simd_shuffle_xor, i ^ p, false)
MSL_SHUFFLE(simd_shuffle_rotate_down, (i + p) & 31, false)
MSL_SHUFFLE(simd_shuffle_rotate_up, (i - p) & 31, false)
MSL_SHUFFLE(quad_shuffle, (i & ~3) + p, false)
MSL_SHUFFLE(quad_broadcast, (i & ~3) + p, false)
MSL_SHUFFLE(quad_shuffle_xor, (i & ~3) + ((i ^ p) & 3), false)
MSL_SHUFFLE(quad_shuffle_down, (i & 3) + p < 4 ? i + p : 99, true)

template <class T> METAL_FUNC T quad_sum(T value) {
  value += quad_shuffle_xor(value, 1);
  return value + quad_shuffle_xor(value, 2);
}

#define MSL_PREFIX(name, result)                                             \
  template <class T> MSL_TOGETHER T name(T value) {                          \
    const auto resolve = [](msl::Lane** lanes, uint32_t active, int) {       \
      T values[32], sum{};                                                   \
      gather(lanes, active, values);                                         \
      for (int i = 0; i < 32; i++) {                                         \
        if (!(active >> i & 1)) continue;                                    \
        const T own = values[i], before = sum;                               \
        sum = T(sum + own);                                                  \
        values[i] = result;                                                  \
        (void)before;                                                        \
      }                                                                      \
      scatter(lanes, active, values);                                        \
    };                                                                       \
    msl::meet(MSL_SITE, resolve, &value, 0);                                 \
    return value;                                                            \
  }
MSL_PREFIX(simd_prefix_inclusive_sum, sum)
MSL_PREFIX(simd_prefix_exclusive_sum, before)

template <class T> MSL_TOGETHER T simd_broadcast_first(T value) {
  const auto resolve = [](msl::Lane** lanes, uint32_t active, int) {
    T values[32];
    gather(lanes, active, values);
    std::fill(values, values + 32, T(values[__builtin_ctz(active)]));
    scatter(lanes, active, values);
  };
  msl::meet(MSL_SITE, resolve, &value, 0);
  return value;
}

struct simd_vote {
  using vote_t = uint64_t;
  uint64_t lanes;
  simd_vote(uint64_t given) : lanes(given) {}
  explicit operator uint64_t() const { return lanes; }
  bool all() const { return lanes == 0xffffffffull; }
  bool any() const { return lanes; }
};

// Every active lane learns which active lanes said yes, and which are active (in the high half).
MSL_TOGETHER inline uint64_t ballot(const void* site, bool yes) {
  uint64_t value = yes;
  const auto resolve = [](msl::Lane** lanes, uint32_t active, int) {
    uint64_t said = uint64_t(active) << 32;
    for (int i = 0; i < 32; i++)
      if ((active >> i & 1) && *static_cast<uint64_t*>(lanes[i]->data)) said |= 1ull << i;
    for (int i = 0; i < 32; i++)
      if (active >> i & 1) *static_cast<uint64_t*>(lanes[i]->data) = said;
  };
  msl::meet(site, resolve, &value, 0);
  return value;
}
MSL_TOGETHER inline simd_vote simd_ballot(bool yes) { return ballot(MSL_SITE, yes) & 0xffffffff; }
MSL_TOGETHER inline bool simd_any(bool yes) { return uint32_t(ballot(MSL_SITE, yes)) != 0; }
MSL_TOGETHER inline bool simd_all(bool yes) {
  const uint64_t said = ballot(MSL_SITE, yes);
  return uint32_t(said) == uint32_t(said >> 32);
}
MSL_TOGETHER inline bool simd_is_first() {
  const uint32_t active = ballot(MSL_SITE, true) >> 32;
  return msl::current->lane == uint32_t(__builtin_ctz(active));
}
MSL_TOGETHER inline void simdgroup_barrier(mem_flags) { ballot(MSL_SITE, true); }
MSL_TOGETHER inline void threadgroup_barrier(mem_flags) {
  msl::current->site = MSL_SITE;
  msl::current->state = msl::AT_BARRIER;
  msl::to_scheduler();
}

}  // namespace metal
