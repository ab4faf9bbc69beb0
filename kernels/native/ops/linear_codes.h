// int4 and int2 weights: a step is a tile of codes. They are unpacked in registers and multiplied as they are, unsigned, by the signed bytes
// of the rows; what a code stands for less is settled by starting each group's sums there. Included by linear.h.

// How the codes of one precision lie and what they stand for: the code, doubled kDoublings times, less kLess, times scales.
template <Precision kPrecision>
struct Codes {
  static constexpr int kInputs = input_multiple(kPrecision), kGroups = groups_of_tile(kPrecision), kTileBytes = code_tile_bytes(kPrecision);
  static constexpr int kBits = 8 / kGroups;
  static constexpr int kDoublings = kPrecision == Precision::kInt2 ? 1 : 0, kLess = kPrecision == Precision::kInt2 ? 3 : 8;
  static constexpr int kMost = ((1 << kBits) - 1) << kDoublings;
  // By how many bits the doubled codes of a group stand too high in their bytes, -1 = one too low.
  static constexpr int height(int group) { return kBits * group - kDoublings; }
};

#if !FT_AVX2
// The doubled codes of two groups are left where they stand, if they are not too low, and count 2^height times. A group's sum is within
// 2^15, so one 16-bit multiplication scales and adds it. All sums are exact: their order is free.
template <typename Of, int kGroup0, int kRows>
inline void multiply_two_groups(const char* tile, const char* rows, int64_t row_stride, const int32_t* input_sums, int64_t sums_stride,
                                Int (&sums)[kRows]) {
  constexpr int kHeight0 = max_of(Of::height(kGroup0), 0), kHeight1 = Of::height(kGroup0 + 1);
  const Int mask0 = _mm512_set1_epi8(int8_t(Of::kMost << kHeight0)), mask1 = _mm512_set1_epi8(int8_t(Of::kMost << kHeight1));
  Int sums0[kRows], sums1[kRows];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
    const int32_t* sum = input_sums + r * sums_stride + kGroup0;
    sums0[r] = _mm512_set1_epi32(-(Of::kLess << kHeight0) * sum[0]);
    sums1[r] = _mm512_set1_epi32(-(Of::kLess << kHeight1) * sum[1]);
  }
#pragma GCC unroll 8
  for (int quad = 0; quad < 8; ++quad) {
    const Int packed = _mm512_loadu_si512(tile + quad * 64);
    const Int codes0 = _mm512_and_si512(Of::height(kGroup0) < 0 ? _mm512_slli_epi16(packed, 1) : packed, mask0);
    const Int codes1 = _mm512_and_si512(packed, mask1);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const char* inputs = rows + r * row_stride + kGroup0 * kGroup + quad * 4;
      sums0[r] = dot_u8s8(sums0[r], codes0, splat_bits(inputs));
      sums1[r] = dot_u8s8(sums1[r], codes1, splat_bits(inputs + kGroup));
    }
  }
  const auto scales = [&](int group) {
    return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(tile + 512 + group * kPanel)));
  };
  const Int scales0 = scales(kGroup0), scales1 = scales(kGroup0 + 1);
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
    sums[r] = multiply_add_s16(sums[r], _mm512_srai_epi32(sums0[r], kHeight0), scales0);  // exact: the height is a factor
    sums[r] = multiply_add_s16(sums[r], _mm512_srai_epi32(sums1[r], kHeight1), scales1);
  }
}

template <typename Of, int kRows>
inline void multiply_codes(const Pass& pass) {
  const int64_t row_stride = pass.row_stride, sums_stride = pass.sums_stride;
  const char* tile = pass.weights;
  const char* rows = pass.rows;
  const int32_t* input_sums = pass.input_sums;
  Int sums[kRows];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) sums[r] = _mm512_setzero_si512();
  for (int step = 0; step < pass.steps; ++step, tile += Of::kTileBytes, rows += Of::kInputs, input_sums += Of::kGroups) {
    if (kRows > 1 || FT_AMX) {  // see prefetch_stream
#pragma GCC unroll 9
      for (int line = 0; line < Of::kTileBytes; line += 64) prefetch_line(tile + kFarAhead + line);
    }
    multiply_two_groups<Of, 0>(tile, rows, row_stride, input_sums, sums_stride, sums);
    if constexpr (Of::kGroups == 4) multiply_two_groups<Of, 2>(tile, rows, row_stride, input_sums, sums_stride, sums);
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) store(pass.sums + r * pass.sum_stride, _mm512_castsi512_ps(sums[r]));
}

template <typename Of, typename Numbers>
struct CodePasses;
template <typename Of, int... kLess>
struct CodePasses<Of, std::integer_sequence<int, kLess...>> {
  static constexpr Multiply multiply[] = {multiply_codes<Of, kLess + 1>...};
};
template <Precision kPrecision>
struct CodeFormat : RowsAsPrepared {
  using Of = Codes<kPrecision>;
  static constexpr int kStepInputs = Of::kInputs, kStepBytes = Of::kTileBytes, kPassRows = 8, kFewestRows = 4, kSide = 1, kSideRows = kPassRows;
  static constexpr auto& multiply = CodePasses<Of, std::make_integer_sequence<int, kPassRows>>::multiply;
  static constexpr auto &multiply_alone = multiply, &multiply_side = multiply;
};
#endif
