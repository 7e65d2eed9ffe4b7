// Attention of a block of queries, every query with the bits that MLX's kernel for one query gives it over its own keys.
//
//   queries [B, H, W, D], keys [B, Hk, N, D], values [B, Hk, N, D] with any strides but 1 along the last axis,
//   stops [W]: query i sees the keys before stops[i]; starts [W]: and none before starts[i]; sinks [H] if there are any
//
// In one pass, MLX deals keys to 32 SIMD-groups in turn; in two, to as many SIMD-groups as there are blocks. Each
// keeps a running maximum, sum and output in float, one key after the other; at the end these are merged by simd_max and
// simd_sum. A key that a query does not see leaves that query's share alone, so which SIMD-group a key goes to and in which
// order depends on its number only. Here a SIMD-group reads a key once for up to TILE queries.
//
// Registers: TILE * (2 * D / 32 + 2) and 2 * D / 32. Threadgroup memory: 4.3 KB where SIMD-groups are merged.

template <typename T, int D, int TILE> struct QueryTile {
  static constant constexpr const int OWN = D / 32;
  float query[TILE][OWN], output[TILE][OWN], highest[TILE], sum[TILE];

  METAL_FUNC void begin(const device T* queries, float scale, int count) thread {
    for (int i = 0; i < TILE; i++) {
      for (int j = 0; j < OWN; j++) {
        query[i][j] = i < count ? static_cast<float>(scale) * queries[size_t(i) * D + j] : 0.0f;
        output[i][j] = 0.0f;
      }
      highest[i] = -metal::numeric_limits<float>::max();
      sum[i] = 0.0f;
    }
  }

  METAL_FUNC void sink(float score) thread {
    for (int i = 0; i < TILE; i++) {
      highest[i] = score;
      sum[i] = 1.0f;
    }
  }

  // Key number `key`; `limits` holds starts and stops of the tile's queries.
  METAL_FUNC void see(
      const device T* keys, const device T* values, int key, const device int* starts, const device int* stops,
      int count) thread {
    float own_key[OWN], own_value[OWN];
    for (int j = 0; j < OWN; j++) {
      own_key[j] = keys[j];
      own_value[j] = values[j];
    }
    for (int i = 0; i < TILE; i++) {
      if (i >= count || key < starts[i] || key >= stops[i]) continue;
      float score = 0.0f;
      for (int j = 0; j < OWN; j++) score += query[i][j] * own_key[j];
      score = simd_sum(score);
      const float higher = max(highest[i], score);
      const float factor = fast::exp(highest[i] - higher), weight = fast::exp(score - higher);
      highest[i] = higher;
      sum[i] = sum[i] * factor + weight;
      for (int j = 0; j < OWN; j++) output[i][j] = output[i][j] * factor + weight * own_value[j];
    }
  }
};

// Grid: (heads of all rows * 1024, tiles of queries); a threadgroup of 32 SIMD-groups for each.
template <typename T, int D, int TILE, bool SINKS, typename Sinks>
METAL_FUNC void block_attention(
    const device T* queries, const device T* keys, const device T* values, const device int* starts,
    const device int* stops, Sinks sinks, device T* out, const constant int64_t* key_strides,
    const constant int64_t* value_strides,
    int heads, int key_heads, int width, int count, float scale, uint3 group, uint simd_group, uint lane,
    threadgroup float* exchange, threadgroup float* highest, threadgroup float* sums) {
  constexpr int OWN = D / 32;
  const int head = int(group.x) % heads, batch = int(group.x) / heads, key_head = head / (heads / key_heads);
  const int first = int(group.y) * TILE, here = min(TILE, width - first);
  const size_t row = (size_t(group.x) * width + first) * D;
  keys += batch * key_strides[0] + key_head * key_strides[1] + int(lane) * OWN;
  values += batch * value_strides[0] + key_head * value_strides[1] + int(lane) * OWN;

  QueryTile<T, D, TILE> tile;
  tile.begin(queries + row + int(lane) * OWN, scale, here);
  if (SINKS && simd_group == 0) tile.sink(static_cast<float>(sinks[head]));
  for (int key = int(simd_group); key < count; key += 32)
    tile.see(keys + key * key_strides[2], values + key * value_strides[2], key, starts + first, stops + first, here);

  for (int i = 0; i < here; i++) {
    if (lane == 0) {
      highest[simd_group] = tile.highest[i];
      sums[simd_group] = tile.sum[i];
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    const float own = highest[lane], all = simd_max(own), factor = fast::exp(own - all);
    const float sum = simd_sum(sums[lane] * factor);
    for (int j = 0; j < OWN; j++) {
      exchange[int(lane) * 32 + int(simd_group)] = tile.output[i][j];
      threadgroup_barrier(mem_flags::mem_threadgroup);
      const float merged = simd_sum(exchange[int(simd_group) * 32 + int(lane)] * factor);
      if (lane == 0)
        out[row + size_t(i) * D + int(simd_group) * OWN + j] = static_cast<T>(sum == 0 ? merged : (merged / sum));
      threadgroup_barrier(mem_flags::mem_threadgroup);
    }
  }
}

// First pass. Grid: (key heads * 32, rows of the batch * heads to a key head, blocks * tiles of queries).
template <typename T, int D, int TILE, bool SINKS, typename Sinks>
METAL_FUNC void block_attention_blocks(
    const device T* queries, const device T* keys, const device T* values, const device int* starts,
    const device int* stops, Sinks sinks, device T* partial, device float* sums, device float* highest,
    const constant int64_t* key_strides,
    const constant int64_t* value_strides, int heads, int key_heads, int width, int count,
    int blocks, float scale, uint3 group, uint in_group, uint lane) {
  constexpr int OWN = D / 32;
  const int share = heads / key_heads, key_head = int(group.x), batch = int(group.y);
  const int head = share * key_head + int(in_group), block = int(group.z) % blocks;
  const int first = int(group.z) / blocks * TILE, here = min(TILE, width - first);
  const size_t row = (size_t(batch) * heads + head) * width + first;
  keys += batch * key_strides[0] + key_head * key_strides[1] + int(lane) * OWN;
  values += batch * value_strides[0] + key_head * value_strides[1] + int(lane) * OWN;

  QueryTile<T, D, TILE> tile;
  tile.begin(queries + row * D + int(lane) * OWN, scale, here);
  if (SINKS && block == 0) tile.sink(static_cast<float>(sinks[head]));
  for (int key = block; key < count; key += blocks)
    tile.see(keys + key * key_strides[2], values + key * value_strides[2], key, starts + first, stops + first, here);

  for (int i = 0; i < here; i++) {
    const size_t at = (row + i) * blocks + block;
    if (lane == 0) {
      sums[at] = tile.sum[i];
      highest[at] = tile.highest[i];
    }
    for (int j = 0; j < OWN; j++) partial[at * D + int(lane) * OWN + j] = static_cast<T>(tile.output[i][j]);
  }
}

// Second pass. Grid: (queries of all heads and rows * 1024); a threadgroup of 32 SIMD-groups for each.
template <typename T, int D>
METAL_FUNC void block_attention_merge(
    const device T* partial, const device float* sums, const device float* highest, device T* out, int blocks,
    uint3 group, uint simd_group, uint lane, threadgroup float* exchange) {
  constexpr int OWN = D / 32;
  const size_t row = group.x;
  sums += row * blocks;
  highest += row * blocks;
  float all = -metal::numeric_limits<float>::max(), sum = 0.0f, output[OWN];
  for (int b = 0; b < blocks / 32; b++) all = max(all, highest[int(lane) + 32 * b]);
  all = simd_max(all);
  for (int b = 0; b < blocks / 32; b++) {
    const float factor = fast::exp(highest[int(lane) + 32 * b] - all);
    sum += factor * sums[int(lane) + 32 * b];
  }
  sum = simd_sum(sum);
  for (int j = 0; j < OWN; j++) output[j] = 0.0f;
  for (int b = 0; b < blocks / 32; b++) {
    const int block = int(simd_group) + 32 * b;
    const float factor = fast::exp(highest[block] - all);
    const device T* from = partial + (row * blocks + block) * D + int(lane) * OWN;
    for (int j = 0; j < OWN; j++) output[j] += factor * static_cast<float>(from[j]);
  }
  for (int j = 0; j < OWN; j++) {
    exchange[int(lane) * 32 + int(simd_group)] = output[j];
    threadgroup_barrier(mem_flags::mem_threadgroup);
    const float merged = simd_sum(exchange[int(simd_group) * 32 + int(lane)]);
    if (lane == 0) out[row * D + int(simd_group) * OWN + j] = static_cast<T>(sum == 0 ? merged : (merged / sum));
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
}
