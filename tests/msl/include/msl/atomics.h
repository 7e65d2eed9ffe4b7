// Atomics. One fiber runs at a time, so plain memory operations are atomic.
#pragma once

namespace metal {

enum memory_order {
  memory_order_relaxed, memory_order_acquire, memory_order_release, memory_order_acq_rel, memory_order_seq_cst
};
template <class T> struct atomic { T value; };
typedef atomic<uint> atomic_uint;
typedef atomic<int> atomic_int;
typedef atomic<float> atomic_float;
typedef atomic<bool> atomic_bool;

template <class T> T atomic_load_explicit(const atomic<T>* target, memory_order) { return target->value; }
template <class T, class U> void atomic_store_explicit(atomic<T>* target, U given, memory_order) {
  target->value = T(given);
}

#define MSL_ATOMIC(name, expression)                                                \
  template <class T, class U> T name(atomic<T>* target, U given, memory_order) {    \
    const T old = target->value, value = T(given);                                  \
    (void)value;                                                                    \
    target->value = T(expression);                                                  \
    return old;                                                                     \
  }
MSL_ATOMIC(atomic_exchange_explicit, value)
MSL_ATOMIC(atomic_fetch_add_explicit, old + value)
MSL_ATOMIC(atomic_fetch_sub_explicit, old - value)
MSL_ATOMIC(atomic_fetch_max_explicit, old < value ? value : old)
MSL_ATOMIC(atomic_fetch_min_explicit, value < old ? value : old)
MSL_ATOMIC(atomic_fetch_or_explicit, old | value)
MSL_ATOMIC(atomic_fetch_and_explicit, old& value)
MSL_ATOMIC(atomic_fetch_xor_explicit, old ^ value)

template <class T, class U>
bool atomic_compare_exchange_weak_explicit(atomic<T>* target, T* expected, U given, memory_order, memory_order) {
  const bool equal = target->value == *expected;
  if (equal) target->value = T(given);
  else *expected = target->value;
  return equal;
}

struct os_log {
  template <class... A> constexpr os_log(A...) {}
  template <class... A> void log_debug(A...) const {}
};

}  // namespace metal
