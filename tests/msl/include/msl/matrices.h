// 8x8 matrices spread over a SIMD-group. Lane l holds two neighbours of one row, in the layout MLX's kernels rely on.
// The order of the eight products of an element is the hardware's own; here it is ascending, one rounding a step.
#pragma once

namespace metal {

template <class T, int R = 8, int C = 8> struct simdgroup_matrix {
  vec<T, 2> elements;
  simdgroup_matrix() = default;
  vec<T, 2>& thread_elements() { return elements; }
};
typedef simdgroup_matrix<float> simdgroup_float8x8;
typedef simdgroup_matrix<half> simdgroup_half8x8;
typedef simdgroup_matrix<bfloat> simdgroup_bfloat8x8;

template <class T, int R> inline simdgroup_matrix<T, R, R> make_filled_simdgroup_matrix(T value) {
  simdgroup_matrix<T, R, R> filled;
  filled.elements[0] = filled.elements[1] = value;
  return filled;
}

inline void matrix_place(int lane, int& row, int& column) {
  const int quad = lane / 4;
  row = (quad & 4) + (lane / 2) % 4;
  column = (quad & 2) * 2 + (lane % 2) * 2;
}

template <class D, class A, class B, class C> struct matrix_product {
  simdgroup_matrix<A> a;
  simdgroup_matrix<B> b;
  simdgroup_matrix<C> c;
  simdgroup_matrix<D> d;
};

template <class D, class A, class B, class C>
MSL_TOGETHER void simdgroup_multiply_accumulate(simdgroup_matrix<D>& d, simdgroup_matrix<A> a, simdgroup_matrix<B> b,
                                                simdgroup_matrix<C> c) {
  using Product = matrix_product<D, A, B, C>;
  Product product{a, b, c, {}};
  const auto resolve = [](msl::Lane** lanes, uint32_t active, int) {
    if (active != 0xffffffffu) msl::fail("a matrix operation needs all 32 lanes");
    float left[8][8], right[8][8];
    int row, column;
    for (int i = 0; i < 32; i++) {
      const Product* own = static_cast<Product*>(lanes[i]->data);
      matrix_place(i, row, column);
      for (int e = 0; e < 2; e++) {
        left[row][column + e] = float(own->a.elements[e]);
        right[row][column + e] = float(own->b.elements[e]);
      }
    }
    for (int i = 0; i < 32; i++) {
      Product* own = static_cast<Product*>(lanes[i]->data);
      matrix_place(i, row, column);
      for (int e = 0; e < 2; e++) {
        float sum = float(own->c.elements[e]);
        for (int k = 0; k < 8; k++) sum = std::fma(left[row][k], right[k][column + e], sum);
        own->d.elements[e] = D(sum);
      }
    }
  };
  msl::meet(MSL_SITE, resolve, &product, 0);
  d = product.d;
}

template <class D, class A, class B>
METAL_FUNC void simdgroup_multiply(simdgroup_matrix<D>& d, simdgroup_matrix<A> a, simdgroup_matrix<B> b) {
  simdgroup_multiply_accumulate(d, a, b, make_filled_simdgroup_matrix<D, 8>(D(0)));
}

template <class T, class P>
inline void simdgroup_load(simdgroup_matrix<T>& d, const P* p, ulong stride = 8, ulong2 origin = ulong2(0, 0),
                           bool transposed = false) {
  int row, column;
  matrix_place(msl::current->lane, row, column);
  for (int e = 0; e < 2; e++)
    d.elements[e] = T(transposed ? p[(origin.x + column + e) * stride + origin.y + row]
                                 : p[(origin.y + row) * stride + origin.x + column + e]);
}

template <class T, class P>
inline void simdgroup_store(simdgroup_matrix<T> d, P* p, ulong stride = 8, ulong2 origin = ulong2(0, 0),
                            bool transposed = false) {
  int row, column;
  matrix_place(msl::current->lane, row, column);
  for (int e = 0; e < 2; e++)
    (transposed ? p[(origin.x + column + e) * stride + origin.y + row]
                : p[(origin.y + row) * stride + origin.x + column + e]) = P(d.elements[e]);
}

}  // namespace metal
