// Rows times a matrix, every row with the bits of MLX's product of one row, the matrix read once for up to 16 rows.
//
//   y[m, n] = sum over k of w[n, k] * x[m, k]  (+ bias[n])      w [N, K], x [M, K], y [M, N], all row-contiguous
//
// MLX's kernel for one row gives an output to SN lanes of each of BN SIMD-groups. A lane takes 4 neighbouring columns
// of every 4 * SN * BN, multiplies and adds them in float in ascending order, zeros past the end included; the lanes'
// sums are added by a ladder of shuffles, the groups' in ascending order. Here more rows take the same way at once: an
// output's order is the same, and how many outputs a lane holds does not enter it.
//
// A SIMD-group holds R rows of w for each of its 32 / SN teams of lanes, and TILE rows of x. Accumulators take
// R * TILE = 32 registers, columns of x 4 * TILE.

template <typename T, int R, int TILE, int BN, int SN>
struct RowExactGemv {
  static constant constexpr const int TEAMS = 32 / SN;
  static constant constexpr const int STRIDE = 4 * SN * BN;

  // One step of 4 columns. Rows of x past `rows` are left alone.
  template <bool TAIL>
  static METAL_FUNC void step(
      const device T* w, const device T* x, int K, int k, int rows, const thread int (&row)[R],
      thread float (&sum)[R][TILE]) {
    float columns[TILE][4];
    for (int m = 0; m < TILE; m++)
      for (int j = 0; j < 4; j++)
        columns[m][j] = m < rows && (!TAIL || k + j < K) ? static_cast<float>(x[size_t(m) * K + k + j]) : 0.0f;
    for (int r = 0; r < R; r++) {
      const device T* from = w + size_t(row[r]) * K + k;
      for (int j = 0; j < 4; j++) {
        const float weight = !TAIL || k + j < K ? static_cast<float>(from[j]) : 0.0f;
        for (int m = 0; m < TILE; m++)
          if (m < rows) sum[r][m] += weight * columns[m][j];
      }
    }
  }

  // `part` holds (BN - 1) * R * TILE floats for each row group of the threadgroup.
  template <bool HAS_BIAS, typename Bias>
  static METAL_FUNC void run(
      const device T* w, const device T* x, Bias bias, device T* y, int N, int K, int rows, uint group, uint simd_group,
      uint lane, uint simd_groups, threadgroup float* part) {
    const int share = int(simd_group) % BN, own = int(simd_group) / BN, groups = int(simd_groups) / BN;
    const int team = int(lane) / SN, member = int(lane) % SN;
    const int first = ((int(group) * groups + own) * TEAMS + team) * R;
    int row[R];
    for (int r = 0; r < R; r++) row[r] = min(first + r, N - 1);
    float sum[R][TILE];
    for (int r = 0; r < R; r++)
      for (int m = 0; m < TILE; m++) sum[r][m] = 0.0f;

    int k = (share * SN + member) * 4;
    const int whole = K / STRIDE * STRIDE;
    for (int done = 0; done < whole; done += STRIDE, k += STRIDE) step<false>(w, x, K, k, rows, row, sum);
    if (whole < K) step<true>(w, x, K, k, rows, row, sum);

    for (int r = 0; r < R; r++)
      for (int m = 0; m < TILE; m++)
        for (ushort distance = SN / 2; distance >= 1; distance >>= 1)
          sum[r][m] += simd_shuffle_down(sum[r][m], distance);
    if (BN > 1) {
      if (member == 0 && share > 0)
        for (int r = 0; r < R; r++)
          for (int m = 0; m < TILE; m++) part[((share - 1) * groups + own) * R * TILE + r * TILE + m] = sum[r][m];
      threadgroup_barrier(mem_flags::mem_threadgroup);
      if (member == 0 && share == 0)
        for (int other = 1; other < BN; other++)
          for (int r = 0; r < R; r++)
            for (int m = 0; m < TILE; m++) sum[r][m] += part[((other - 1) * groups + own) * R * TILE + r * TILE + m];
    }
    if (member != 0 || share != 0) return;
    for (int r = 0; r < R; r++)
      for (int m = 0; m < TILE; m++)
        if (m < rows && first + r < N) {
          // The bias is added to the rounded product, in T, as MLX does for one row.
          const T product = static_cast<T>(sum[r][m]);
          y[size_t(m) * N + first + r] = HAS_BIAS ? static_cast<T>(product + bias[first + r]) : product;
        }
  }
};

// Threadgroups lie along x over rows of w, 8 for each row group of a threadgroup and team, and along y over tiles of
// 16 rows of x. A tile with fewer rows takes fewer accumulators for each row of w, and more rows of w at once.
template <typename T, int BN, int SN, bool HAS_BIAS, typename Bias>
METAL_FUNC void row_exact_gemv(
    const device T* w, const device T* x, Bias bias, device T* y, int N, int K, int M, uint3 group, uint simd_group,
    uint lane, uint simd_groups, threadgroup float* part) {
  const int first = int(group.y) * 16, rows = min(16, M - first);
  x += size_t(first) * K;
  y += size_t(first) * N;
  if (rows <= 4) {
    RowExactGemv<T, 8, 4, BN, SN>::template run<HAS_BIAS>(
        w, x, bias, y, N, K, rows, group.x, simd_group, lane, simd_groups, part);
  } else if (rows <= 8) {
    for (uint half_group = 0; half_group < 2; half_group++) {
      if (BN > 1) threadgroup_barrier(mem_flags::mem_threadgroup);
      RowExactGemv<T, 4, 8, BN, SN>::template run<HAS_BIAS>(
          w, x, bias, y, N, K, rows, group.x * 2 + half_group, simd_group, lane, simd_groups, part);
    }
  } else {
    for (uint quarter = 0; quarter < 4; quarter++) {
      if (BN > 1) threadgroup_barrier(mem_flags::mem_threadgroup);
      RowExactGemv<T, 2, 16, BN, SN>::template run<HAS_BIAS>(
          w, x, bias, y, N, K, rows, group.x * 4 + quarter, simd_group, lane, simd_groups, part);
    }
  }
}
