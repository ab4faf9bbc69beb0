// int4 weights: a step is a tile of 64 inputs. Nibbles are unpacked in registers and multiplied as they are, 0..15, by the signed
// bytes of the rows; that a nibble stands for itself - 8 is settled by starting each group's sums at -8 * (the sum of the row's
// values in that group). A group's sum is within 32 * 127 * 8 < 2^15, so one 16-bit multiplication scales and adds it.
// All sums are exact: their order is free. Included by linear.h.

template <int kRows>
inline void multiply_int4_panel(const Pass& pass) {
  const int64_t row_stride = pass.row_stride, sums_stride = pass.sums_stride;
  const char* weights = pass.weights;
  const char* rows = pass.rows;
  const int32_t* input_sums = pass.input_sums;
  const Int low_nibble = _mm512_set1_epi8(0x0f), high_nibble = _mm512_set1_epi8(int8_t(0xf0));
  Int sums[kRows];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) sums[r] = _mm512_setzero_si512();
  for (int tile = 0; tile < pass.steps; ++tile, weights += kInt4Tile, rows += 64, input_sums += 2) {
    if (kRows > 1) {  // more than one row is slower than memory: see prefetch_stream
#pragma GCC unroll 9
      for (int line = 0; line < kInt4Tile; line += 64) prefetch_line(weights + kFarAhead + line);
    }
    Int low[kRows], high[kRows];
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const int32_t* sum = input_sums + r * sums_stride;
      low[r] = _mm512_set1_epi32(-8 * sum[0]);
      high[r] = _mm512_set1_epi32(-128 * sum[1]);  // a high nibble is left where it is, and counts 16 times
    }
#pragma GCC unroll 8
    for (int quad = 0; quad < 8; ++quad) {
      const Int packed = _mm512_loadu_si512(weights + quad * 64);
      const Int first = _mm512_and_si512(packed, low_nibble), second = _mm512_and_si512(packed, high_nibble);
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        low[r] = dot_u8s8(low[r], first, splat_bits(rows + r * row_stride + quad * 4));
        high[r] = dot_u8s8(high[r], second, splat_bits(rows + r * row_stride + quad * 4 + 32));
      }
    }
    const auto scale = [&](int group) {
      return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(weights + 512 + group * kPanel)));
    };
    const Int low_scale = scale(0), high_scale = scale(1);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      sums[r] = multiply_add_s16(sums[r], low[r], low_scale);
      sums[r] = multiply_add_s16(sums[r], _mm512_srai_epi32(high[r], 4), high_scale);  // exact: the 16 is a factor
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) store(pass.sums + r * pass.sum_stride, _mm512_castsi512_ps(sums[r]));
}

template <typename Numbers>
struct Int4Passes;
template <int... kLess>
struct Int4Passes<std::integer_sequence<int, kLess...>> {
  static constexpr Multiply multiply[] = {multiply_int4_panel<kLess + 1>...};
};
struct Int4Format : RowsAsPrepared {
  static constexpr int kStepInputs = 64, kStepBytes = kInt4Tile, kPassRows = 8, kFewestRows = 4, kSide = 1, kSideRows = kPassRows;
  static constexpr auto& multiply = Int4Passes<std::make_integer_sequence<int, kPassRows>>::multiply;
  static constexpr auto& multiply_side = multiply;
};
