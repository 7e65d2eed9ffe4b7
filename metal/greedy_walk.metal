// From a block's logits to its tokens without leaving the GPU, in two dispatches.
//
// `argmax_split`: each threadgroup finds the best token of its share of a row. What is compared is the logit, or the
// log-probability T(logit - lse) as mlx-lm's greedy choice compares it. Ties go to the lowest token; the first NaN is
// the maximum. With a mask, one bit to a token, only tokens whose bit is set are looked at.
//
// `block_walk`: one threadgroup for each row of the batch merges the shares, compares with the proposals, and writes
//
//   [accepted, fault 0 .. fault W-1, token 0 .. token W-1]
//
//   accepted  leading proposals that equal the choice before them
//   fault     1 where the choice is NaN, with log-probabilities where their log-sum-exp is; 2 where no token is allowed,
//             which is token -1; else 0
//
// Choices made otherwise are one share each.
//
// Registers: a dozen. Threadgroup memory: 256 bytes and 384 bytes.

constant constexpr const uint NO_TOKEN = 0xffffffffu;

struct Best {
  float value;
  uint token;

  METAL_FUNC void begin() thread {
    value = -INFINITY;
    token = NO_TOKEN;
  }
  static METAL_FUNC bool is_nan(float x) { return (as_type<uint>(x) & 0x7fffffffu) > 0x7f800000u; }
  // Whether (x, at) comes before what was seen so far.
  METAL_FUNC bool loses_to(float x, uint at) const thread {
    if (at == NO_TOKEN) return false;
    if (token == NO_TOKEN) return true;
    if (is_nan(x) || is_nan(value)) return is_nan(x) && (!is_nan(value) || at < token);
    return x > value || (x == value && at < token);
  }
  METAL_FUNC void see(float x, uint at) thread {
    if (!loses_to(x, at)) return;
    value = x;
    token = at;
  }
  METAL_FUNC void over_lanes() thread {
    for (ushort distance = 16; distance >= 1; distance >>= 1) {
      const float x = simd_shuffle_down(value, distance);
      const uint at = simd_shuffle_down(token, distance);
      see(x, at);
    }
  }
};

// Grid: (shares * threads, rows). `allowed`: [rows, ceil(V / 32)].
template <typename T, bool LOGPROBS, bool MASKED>
METAL_FUNC void argmax_split(
    const device T* logits, const device T* lse, const device uint* allowed, device float* values, device uint* tokens,
    uint V, uint3 group, uint3 groups, uint thread_index, uint threads, uint simd_group, uint lane, uint simd_groups,
    threadgroup float* shared_values, threadgroup uint* shared_tokens) {
  const uint row = group.y, words = (V + 31) / 32;
  const uint share = (V + groups.x - 1) / groups.x, from = group.x * share, to = min(V, from + share);
  logits += size_t(row) * V;
  const T shift = LOGPROBS ? lse[row] : T(0);
  Best best;
  best.begin();
  for (uint first = from + 4 * thread_index; first < to; first += 4 * threads)
    for (uint at = first; at < min(first + 4, to); at++) {
      if (MASKED && !(allowed[size_t(row) * words + at / 32] >> (at % 32) & 1)) continue;
      best.see(static_cast<float>(LOGPROBS ? static_cast<T>(logits[at] - shift) : logits[at]), at);
    }
  best.over_lanes();
  if (lane == 0) {
    shared_values[simd_group] = best.value;
    shared_tokens[simd_group] = best.token;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (simd_group != 0) return;
  best.begin();
  if (lane < simd_groups) best.see(shared_values[lane], shared_tokens[lane]);
  best.over_lanes();
  if (lane == 0) {
    values[row * groups.x + group.x] = best.value;
    tokens[row * groups.x + group.x] = best.token;
  }
}

// Grid: (rows of the batch * threads); at most 32 positions. `proposals` [B, W-1].
template <typename T, bool LOGPROBS>
METAL_FUNC void block_walk(
    const device float* values, const device uint* tokens, const device T* lse, const device int* proposals,
    device int* result, int W, int shares, uint row, uint simd_group, uint lane, uint simd_groups,
    threadgroup int* choices, threadgroup int* faults) {
  for (int position = int(simd_group); position < W; position += int(simd_groups)) {
    const size_t from = (size_t(row) * W + position) * shares;
    Best best;
    best.begin();
    for (int share = int(lane); share < shares; share += 32) best.see(values[from + share], tokens[from + share]);
    best.over_lanes();
    if (lane == 0) {
      choices[position] = best.token == NO_TOKEN ? -1 : int(best.token);
      const float judged = LOGPROBS ? static_cast<float>(lse[row * W + position]) : best.value;
      faults[position] = best.token == NO_TOKEN ? 2 : Best::is_nan(judged) ? 1 : 0;
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (simd_group != 0) return;

  const int own = int(lane);
  const bool here = own < W;
  const int choice = here ? choices[own] : -1;
  const bool agrees = own < W - 1 && proposals[row * (W - 1) + own] == choice;
  const int accepted = min(simd_min(agrees ? 32 : own), W - 1);

  device int* out = result + row * (1 + 2 * W);
  if (own == 0) out[0] = accepted;
  if (here) {
    out[1 + own] = faults[own];
    out[1 + W + own] = choice;
  }
}
