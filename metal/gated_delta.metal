// The gated delta rule over a block of tokens, leaving a tape; and the state after some of them, from the tape.
//
//   S = S * g;  d = (v - S k) * beta;  S = S + d k^T;  y = S q        for each token whose mask is true
//
//   q, k [B, T, Hk, Dk]; v, y [B, T, Hv, Dv]; g [B, T, Hv], or [B, T, Hv, Dk] if VECTOR; beta [B, T, Hv]; mask [B, T];
//   state [B, Hv, Dv, Dk]; tape [B, T, Hv, Dv] float: d. All row-contiguous.
//
// A SIMD-group holds one row of a state, Dk / 32 neighbours to a lane, in float. The order of every sum is that of
// mlx-lm's kernel: within a lane ascending, over lanes by simd_sum, or by partners at distance 1, 2, 4, 8, 16 where
// mlx-lm writes that order out (TREE). Since d is on the tape, going over the tokens again needs no sum.
//
// Registers: 2 * Dk / 32 and a few. No threadgroup memory.

template <bool TREE> static METAL_FUNC float over_lanes(float value) {
  if (!TREE) return simd_sum(value);
  for (ushort distance = 1; distance < 32; distance <<= 1) value += simd_shuffle_xor(value, distance);
  return value;
}

template <typename T, typename State, int Dk, int Dv, int Hk, int Hv, bool VECTOR, bool MASKED, bool TREE,
          typename Beta, typename Gate, typename Mask>
METAL_FUNC void gated_delta_block(
    const device T* q, const device T* k, const device T* v, Gate g, Beta beta, Mask mask, const device State* state_in,
    device T* y, device float* tape, device State* state_out, int T_tokens, uint3 at, uint lane) {
  constexpr int OWN = Dk / 32;
  const int row = int(at.y), head = int(at.z) % Hv, batch = int(at.z) / Hv, key_head = head / (Hv / Hk);
  const int first = OWN * int(lane);
  const size_t from = (size_t(at.z) * Dv + row) * Dk + first;
  float state[OWN];
  for (int i = 0; i < OWN; i++) state[i] = static_cast<float>(state_in[from + i]);

  for (int t = 0; t < T_tokens; t++) {
    const size_t token = size_t(batch) * T_tokens + t;
    const size_t out = (token * Hv + head) * Dv + row, keys = (token * Hk + key_head) * Dk + first;
    if (MASKED && !mask[token]) {
      if (lane == 0) {
        y[out] = static_cast<T>(0);
        tape[out] = 0.0f;
      }
      continue;
    }
    const size_t gates = VECTOR ? (token * Hv + head) * Dk + first : token * Hv + head;
    float held = 0.0f;
    for (int i = 0; i < OWN; i++) {
      state[i] = state[i] * g[VECTOR ? gates + i : gates];
      held += state[i] * k[keys + i];
    }
    held = over_lanes<TREE>(held);
    const float delta = (v[out] - held) * beta[token * Hv + head];
    float read = 0.0f;
    for (int i = 0; i < OWN; i++) {
      state[i] = state[i] + k[keys + i] * delta;
      read += state[i] * q[keys + i];
    }
    read = over_lanes<TREE>(read);
    if (lane == 0) {
      y[out] = static_cast<T>(read);
      tape[out] = delta;
    }
  }
  for (int i = 0; i < OWN; i++) state_out[from + i] = static_cast<State>(state[i]);
}

// `counts` [B]: how many tokens of each row of the batch to go over.
template <typename T, typename State, int Dk, int Dv, int Hk, int Hv, bool VECTOR, bool MASKED, typename Gate,
          typename Mask>
METAL_FUNC void gated_delta_replay(
    const device T* k, Gate g, Mask mask, const device float* tape, const device State* state_in,
    const device int* counts, device State* state_out, int T_tokens, uint3 at, uint lane) {
  constexpr int OWN = Dk / 32;
  const int row = int(at.y), head = int(at.z) % Hv, batch = int(at.z) / Hv, key_head = head / (Hv / Hk);
  const int first = OWN * int(lane);
  const size_t from = (size_t(at.z) * Dv + row) * Dk + first;
  float state[OWN];
  for (int i = 0; i < OWN; i++) state[i] = static_cast<float>(state_in[from + i]);
  for (int t = 0; t < counts[batch]; t++) {
    const size_t token = size_t(batch) * T_tokens + t;
    if (MASKED && !mask[token]) continue;
    const size_t keys = (token * Hk + key_head) * Dk + first;
    const size_t gates = VECTOR ? (token * Hv + head) * Dk + first : token * Hv + head;
    const float delta = tape[(token * Hv + head) * Dv + row];
    for (int i = 0; i < OWN; i++) {
      state[i] = state[i] * g[VECTOR ? gates + i : gates];
      state[i] = state[i] + k[keys + i] * delta;
    }
  }
  for (int i = 0; i < OWN; i++) state_out[from + i] = static_cast<State>(state[i]);
}
