// int4 weights: a step is a tile of 64 inputs. Nibbles are unpacked in registers and multiplied as they are, 0..15, by the signed
// bytes of the rows; that a nibble stands for itself - 8 is settled by starting each group's sums at -8 * (the sum of the row's
// values in that group). A group's sum is within 32 * 127 * 8 < 2^15, so one 16-bit multiplication scales and adds it.

template <int kRows, int kPanels, bool kPrefetch>
inline __attribute__((always_inline)) void multiply_int4_tile(const Strip& strip, int tile, Int (&sums)[kRows][kPanels]) {
  const char* weights = strip.weights + int64_t(tile) * kInt4Tile;
  const char* rows = strip.rows + int64_t(tile) * 64;
  const int32_t* group_sums = strip.group_sums + tile * 2;
  const int64_t panel_bytes = strip.panel_bytes, row_stride = strip.row_stride, ahead = strip.next - strip.weights;
#pragma GCC unroll 2
  for (int group = 0; group < 2; ++group) {
    const Int nibble = _mm512_set1_epi8(group ? int8_t(0xf0) : int8_t(0x0f));
    Int partial[kRows][kPanels];
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      const Int sum = _mm512_slli_epi32(splat_bits(group_sums + r * strip.group_stride + group), group ? 7 : 3);
#pragma GCC unroll 3
      for (int p = 0; p < kPanels; ++p) partial[r][p] = _mm512_sub_epi32(_mm512_setzero_si512(), sum);
    }
#pragma GCC unroll 8
    for (int quad = 0; quad < 8; ++quad) {
      Int operands[kRows];
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) operands[r] = splat_bits(rows + r * row_stride + group * 32 + quad * 4);
#pragma GCC unroll 3
      for (int p = 0; p < kPanels; ++p) {
        const char* line = weights + p * panel_bytes + quad * 64;
        if (kPrefetch && !group) prefetch_line(line + ahead);
        const Int column = _mm512_and_si512(_mm512_loadu_si512(line), nibble);
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) partial[r][p] = dot_u8s8(partial[r][p], column, operands[r]);
      }
    }
#pragma GCC unroll 3
    for (int p = 0; p < kPanels; ++p) {
      const char* scales = weights + p * panel_bytes + 512 + group * 16;
      const Int scale = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(scales)));
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) {
        const Int sum = group ? _mm512_srai_epi32(partial[r][p], 4) : partial[r][p];  // a high nibble counts 16 times: exact
        sums[r][p] = multiply_add_s16(sums[r][p], sum, scale);
      }
    }
  }
}

template <int kRows, int kPanels>
inline void multiply_int4_strip(const Strip& strip) {
  float* const tile_sums = strip.tile;
  const int tile_stride = strip.tile_stride;
  Int sums[kRows][kPanels];
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 3
    for (int p = 0; p < kPanels; ++p) {
      sums[r][p] = strip.first ? _mm512_setzero_si512() : _mm512_loadu_si512(tile_sums + r * tile_stride + p * kPanel);
    }
  }
  for (int tile = 0, due = strip.pass; tile < strip.steps; ++tile) {
    if (tile == due) {
      multiply_int4_tile<kRows, kPanels, true>(strip, tile, sums);
      due += strip.passes;
    } else {
      multiply_int4_tile<kRows, kPanels, false>(strip, tile, sums);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 3
    for (int p = 0; p < kPanels; ++p) _mm512_storeu_si512(tile_sums + r * tile_stride + p * kPanel, sums[r][p]);
  }
}

struct Int4Format {
  static constexpr int kStepBytes = kInt4Tile, kStepRowBytes = 64, kStepInputs = 64, kStripSteps = 8, kPanels = 3;
  static constexpr Multiply multiply[kPassRows][kPanels] = {
      {multiply_int4_strip<1, 1>, multiply_int4_strip<1, 2>, multiply_int4_strip<1, 3>},
      {multiply_int4_strip<2, 1>, multiply_int4_strip<2, 2>, multiply_int4_strip<2, 3>},
      {multiply_int4_strip<3, 1>, multiply_int4_strip<3, 2>, multiply_int4_strip<3, 3>},
      {multiply_int4_strip<4, 1>, multiply_int4_strip<4, 2>, multiply_int4_strip<4, 3>},
  };
};
