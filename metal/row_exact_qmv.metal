// Rows times a packed matrix, every row with the bits of MLX's product of one row, the matrix read once for up to 16 rows.
//
//   y[m, n] = sum over k of value(w[n, k]) * x[m, k]      x [M, K], y [M, N], all row-contiguous
//
//   affine         value = scale * q + bias, q of 2, 3, 4, 5, 6 or 8 bits, a scale and a bias in T for each group
//   floating point value = scale * q, q e2m1 or e4m3, a scale of one byte for each group: e4m3 for groups of 16, else e8m0
//
// In MLX's kernel for one row a lane takes VALUES neighbouring columns at a time, sums x times q over them in packs,
// applies scale and bias, and adds that to its total; the lanes' totals are added by simd_sum. Fields stay where they lie
// in their bytes, and x is divided by the power of two instead, which matters for denormals; so it is here. For K of 64 and
// 128 four lanes make an output, and quad_sum adds them.
//
// A SIMD-group decodes R rows of w for each of its teams of lanes, and uses them for up to TILE rows of x.

// How MLX packs q of each width: PACK values in BYTES bytes; `decode` gives TERMS floats; `prepare` gives the columns of
// x as `add` wants them, and adds the columns to a sum.

template <int BITS> struct AffinePack;

// Four values in whole bytes or halves of them, their products added to one another first.
template <typename Word, int FIRST, int SECOND, int THIRD, int FOURTH, int STEP> struct FourToAWord {
  static constant constexpr const int PACK = 4;
  static constant constexpr const int BYTES = sizeof(Word);
  static constant constexpr const int TERMS = 4;
  static METAL_FUNC void decode(const device uint8_t* w, thread float* q) {
    const Word word = *(const device Word*)w;
    q[0] = float(word & FIRST);
    q[1] = float(word & SECOND);
    q[2] = float(word & THIRD);
    q[3] = float(word & FOURTH);
  }
  template <typename T> static METAL_FUNC void prepare(const device T* x, thread float* columns, thread float& sum) {
    sum += float(x[0]) + float(x[1]) + float(x[2]) + float(x[3]);
    columns[0] = x[0];
    columns[1] = x[1] / float(STEP);
    columns[2] = x[2] / float(STEP * STEP);
    columns[3] = x[3] / float(STEP * STEP * STEP);
  }
  static METAL_FUNC void add(const thread float* q, const thread float* columns, thread float& total) {
    total += (columns[0] * q[0] + columns[1] * q[1] + columns[2] * q[2] + columns[3] * q[3]);
  }
};
template <> struct AffinePack<2> : FourToAWord<uint8_t, 0x03, 0x0c, 0x30, 0xc0, 4> {};
template <> struct AffinePack<4> : FourToAWord<uint16_t, 0x000f, 0x00f0, 0x0f00, 0xf000, 16> {};

// Values that cross bytes come in two parts, the second for the column times 256.
template <> struct AffinePack<3> {
  static constant constexpr const int PACK = 8;
  static constant constexpr const int BYTES = 3;
  static constant constexpr const int TERMS = 10;
  static METAL_FUNC void decode(const device uint8_t* w, thread float* q) {
    q[0] = float(w[0] & 0x07);
    q[1] = float(w[0] & 0x38);
    q[2] = float(w[0] & 0xc0);
    q[3] = float(w[1] & 0x01);
    q[4] = float(w[1] & 0x0e);
    q[5] = float(w[1] & 0x70);
    q[6] = float(w[1] & 0x80);
    q[7] = float(w[2] & 0x03);
    q[8] = float(w[2] & 0x1c);
    q[9] = float(w[2] & 0xe0);
  }
  template <typename T> static METAL_FUNC void prepare(const device T* x, thread float* columns, thread float& sum) {
    sum += float(x[0]) + float(x[1]) + float(x[2]) + float(x[3]) + float(x[4]) + float(x[5]) + float(x[6]) + float(x[7]);
    columns[0] = x[0];
    columns[1] = x[1] / 8.0f;
    columns[2] = x[2] / 64.0f;
    columns[3] = x[3] / 2.0f;
    columns[4] = x[4] / 16.0f;
    columns[5] = x[5] / 128.0f;
    columns[6] = x[6] / 4.0f;
    columns[7] = x[7] / 32.0f;
  }
  static METAL_FUNC void add(const thread float* q, const thread float* columns, thread float& total) {
    total += q[0] * columns[0];
    total += q[1] * columns[1];
    total += q[2] * columns[2];
    total += q[3] * (columns[2] * 256.0f);
    total += q[4] * columns[3];
    total += q[5] * columns[4];
    total += q[6] * columns[5];
    total += q[7] * (columns[5] * 256.0f);
    total += q[8] * columns[6];
    total += q[9] * columns[7];
  }
};

template <> struct AffinePack<5> {
  static constant constexpr const int PACK = 8;
  static constant constexpr const int BYTES = 5;
  static constant constexpr const int TERMS = 12;
  static METAL_FUNC void decode(const device uint8_t* w, thread float* q) {
    q[0] = float(w[0] & 0x1f);
    q[1] = float(w[0] & 0xe0);
    q[2] = float(w[1] & 0x03);
    q[3] = float(w[1] & 0x7c);
    q[4] = float(w[1] & 0x80);
    q[5] = float(w[2] & 0x0f);
    q[6] = float(w[2] & 0xf0);
    q[7] = float(w[3] & 0x01);
    q[8] = float(w[3] & 0x3e);
    q[9] = float(w[3] & 0xc0);
    q[10] = float(w[4] & 0x07);
    q[11] = float(w[4] & 0xf8);
  }
  template <typename T> static METAL_FUNC void prepare(const device T* x, thread float* columns, thread float& sum) {
    sum += float(x[0]) + float(x[1]) + float(x[2]) + float(x[3]) + float(x[4]) + float(x[5]) + float(x[6]) + float(x[7]);
    columns[0] = x[0];
    columns[1] = x[1] / 32.0f;
    columns[2] = x[2] / 4.0f;
    columns[3] = x[3] / 128.0f;
    columns[4] = x[4] / 16.0f;
    columns[5] = x[5] / 2.0f;
    columns[6] = x[6] / 64.0f;
    columns[7] = x[7] / 8.0f;
  }
  static METAL_FUNC void add(const thread float* q, const thread float* columns, thread float& total) {
    total += q[0] * columns[0];
    total += q[1] * columns[1];
    total += q[2] * (columns[1] * 256.0f);
    total += q[3] * columns[2];
    total += q[4] * columns[3];
    total += q[5] * (columns[3] * 256.0f);
    total += q[6] * columns[4];
    total += q[7] * (columns[4] * 256.0f);
    total += q[8] * columns[5];
    total += q[9] * columns[6];
    total += q[10] * (columns[6] * 256.0f);
    total += q[11] * columns[7];
  }
};

template <> struct AffinePack<6> {
  static constant constexpr const int PACK = 4;
  static constant constexpr const int BYTES = 3;
  static constant constexpr const int TERMS = 6;
  static METAL_FUNC void decode(const device uint8_t* w, thread float* q) {
    q[0] = float(w[0] & 0x3f);
    q[1] = float(w[0] & 0xc0);
    q[2] = float(w[1] & 0x0f);
    q[3] = float(w[1] & 0xf0);
    q[4] = float(w[2] & 0x03);
    q[5] = float(w[2] & 0xfc);
  }
  template <typename T> static METAL_FUNC void prepare(const device T* x, thread float* columns, thread float& sum) {
    sum += float(x[0]) + float(x[1]) + float(x[2]) + float(x[3]);
    columns[0] = x[0];
    columns[1] = x[1] / 64.0f;
    columns[2] = x[2] / 16.0f;
    columns[3] = x[3] / 4.0f;
  }
  static METAL_FUNC void add(const thread float* q, const thread float* columns, thread float& total) {
    total += q[0] * columns[0];
    total += q[1] * columns[1];
    total += q[2] * (columns[1] * 256.0f);
    total += q[3] * columns[2];
    total += q[4] * (columns[2] * 256.0f);
    total += q[5] * columns[3];
  }
};

template <> struct AffinePack<8> {
  static constant constexpr const int PACK = 1;
  static constant constexpr const int BYTES = 1;
  static constant constexpr const int TERMS = 1;
  static METAL_FUNC void decode(const device uint8_t* w, thread float* q) { q[0] = float(w[0]); }
  template <typename T> static METAL_FUNC void prepare(const device T* x, thread float* columns, thread float& sum) {
    sum += x[0];
    columns[0] = x[0];
  }
  static METAL_FUNC void add(const thread float* q, const thread float* columns, thread float& total) {
    total += columns[0] * q[0];
  }
};

// Halves that hold the small floats: exact, and with the hardware's own way with denormal halves, as in MLX.
static METAL_FUNC float e2m1(uint field) {
  const half magnitude = as_type<half>(ushort((field & 7) << 9)) * half(16384.0f);
  return float(field & 8 ? -magnitude : magnitude);
}
static METAL_FUNC float e4m3(uint field) {
  const uint magnitude = field & 127;
  const uint word = (magnitude << 7) | (((magnitude + 1) >> 7) << 14) | ((field & 128) << 8);
  return float(as_type<half>(ushort(word)) * half(256.0f));
}
static METAL_FUNC float e8m0(uint field) { return as_type<float>(field == 0 ? 0x400000u : field << 23); }

template <int BITS> struct FloatPack;
template <> struct FloatPack<4> {
  static constant constexpr const int PACK = 4;
  static constant constexpr const int BYTES = 2;
  static constant constexpr const int TERMS = 4;
  static METAL_FUNC void decode(const device uint8_t* w, thread float* q) {
    const uint word = *(const device uint16_t*)w;
    for (int i = 0; i < 4; i++) q[i] = e2m1(word >> (4 * i));
  }
  template <typename T> static METAL_FUNC void prepare(const device T* x, thread float* columns, thread float&) {
    for (int i = 0; i < 4; i++) columns[i] = x[i];
  }
  static METAL_FUNC void add(const thread float* q, const thread float* columns, thread float& total) {
    total += (columns[0] * q[0] + columns[1] * q[1] + columns[2] * q[2] + columns[3] * q[3]);
  }
};
template <> struct FloatPack<8> {
  static constant constexpr const int PACK = 1;
  static constant constexpr const int BYTES = 1;
  static constant constexpr const int TERMS = 1;
  static METAL_FUNC void decode(const device uint8_t* w, thread float* q) { q[0] = e4m3(w[0]); }
  template <typename T> static METAL_FUNC void prepare(const device T* x, thread float* columns, thread float&) {
    columns[0] = x[0];
  }
  static METAL_FUNC void add(const thread float* q, const thread float* columns, thread float& total) {
    total += columns[0] * q[0];
  }
};

// What a group of columns adds to an output. A product returned by a function is rounded before it is added.
template <typename T, int BITS, int GROUP> struct AffineGroups {
  typedef AffinePack<BITS> Pack;
  typedef T Scale;
  float scale, bias;
  METAL_FUNC void read(const device Scale* scales, const device Scale* biases, size_t at) thread {
    scale = scales[at];
    bias = biases[at];
  }
  METAL_FUNC float value(float total, float sum) const thread { return scale * total + sum * bias; }
};
template <typename T, int BITS, int GROUP> struct FloatGroups {
  typedef FloatPack<BITS> Pack;
  typedef uint8_t Scale;
  float scale;
  METAL_FUNC void read(const device Scale* scales, const device Scale*, size_t at) thread {
    scale = GROUP == 16 ? e4m3(scales[at]) : e8m0(scales[at]);
  }
  METAL_FUNC float value(float total, float) const thread { return scale * total; }
};

template <typename T, typename Groups, int BITS, int GROUP, int VALUES, int LANES, int R, int TILE>
struct RowExactQmv {
  typedef typename Groups::Pack Pack;
  typedef typename Groups::Scale Scale;
  static constant constexpr const int PACKS = VALUES / Pack::PACK;
  static constant constexpr const int TEAMS = 32 / LANES;

  static METAL_FUNC void run(
      const device uint8_t* w, const device Scale* scales, const device Scale* biases, const device T* x, device T* y,
      int N, int K, int rows, uint group, uint simd_group, uint lane, uint simd_groups) {
    const int member = int(lane) % LANES;
    const int first = ((int(group) * int(simd_groups) + int(simd_group)) * TEAMS + int(lane) / LANES) * R;
    float result[R][TILE];
    for (int r = 0; r < R; r++)
      for (int m = 0; m < TILE; m++) result[r][m] = 0.0f;

    // Four lanes share a row out in whole quarters, 32 lanes in turns.
    const int own = LANES == 4 ? K / 4 : VALUES, turn = LANES == 4 ? VALUES : LANES * VALUES;
    const int stop = LANES == 4 ? (member + 1) * own : K;
    for (int k = member * own; k < stop; k += turn) {
      float q[R][PACKS * Pack::TERMS];
      Groups groups[R];
      for (int r = 0; r < R; r++) {
        const size_t row = min(first + r, N - 1);
        const device uint8_t* packed = w + row * (size_t(K) * BITS / 8) + k * BITS / 8;
        for (int p = 0; p < PACKS; p++) Pack::decode(packed + p * Pack::BYTES, q[r] + p * Pack::TERMS);
        groups[r].read(scales, biases, row * (K / GROUP) + k / GROUP);
      }
      for (int m = 0; m < TILE; m++) {
        if (m >= rows) continue;
        float columns[VALUES], sum = 0.0f;
        for (int p = 0; p < PACKS; p++) {
          const int at = p * Pack::PACK;
          Pack::prepare(x + size_t(m) * K + k + at, columns + at, sum);
        }
        for (int r = 0; r < R; r++) {
          float total = 0.0f;
          for (int p = 0; p < PACKS; p++) Pack::add(q[r] + p * Pack::TERMS, columns + p * Pack::PACK, total);
          result[r][m] += groups[r].value(total, sum);
        }
      }
    }
    for (int r = 0; r < R; r++)
      for (int m = 0; m < TILE; m++) {
        const float all = LANES == 4 ? quad_sum(result[r][m]) : simd_sum(result[r][m]);
        if (member == 0 && m < rows && first + r < N) y[size_t(m) * N + first + r] = static_cast<T>(all);
      }
  }
};

// Threadgroups lie along x over rows of w, 2 for each SIMD-group and team, and along y over tiles of 16 rows of x.
template <typename T, typename Groups, int BITS, int GROUP, int VALUES, int LANES, typename Scale>
METAL_FUNC void row_exact_qmv(
    const device uint32_t* w, const device Scale* scales, const device Scale* biases, const device T* x, device T* y,
    int N, int K, int M, uint3 group, uint simd_group, uint lane, uint simd_groups) {
  const int first = int(group.y) * 16;
  RowExactQmv<T, Groups, BITS, GROUP, VALUES, LANES, 2, 16>::run(
      (const device uint8_t*)w, scales, biases, x + size_t(first) * K, y + size_t(first) * N, N, K, min(16, M - first),
      group.x, simd_group, lane, simd_groups);
}
