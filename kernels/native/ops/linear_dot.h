// Products whose step is a vector of weights and 4 bytes of each row: a float, a pair of bfloat16 or a quad of int8.

// Dot: kInputs a step; start(column sums) of the even accumulator; operand(bytes of a row) in every lane; add(sums, operand, weights);
// join(sums, sums).

template <typename Dot, int kRows>
inline void multiply_panel(const Strip& strip) {
  const char* weights = strip.weights;
  const char* rows = strip.rows;
  const int64_t row_stride = strip.row_stride;
  Vec even[kRows], odd[kRows];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) even[r] = Dot::start(strip.column_sums), odd[r] = zero();
  const char* const end = weights + int64_t(strip.steps) * 64;
  for (; weights + 64 < end; weights += 128, rows += 8) {
    if (kRows > 1) {  // a stream of weights through L1 would evict the rows, whose misses then queue behind those of the stream
      prefetch_line_once(weights + 4096);
      prefetch_line_once(weights + 4096 + 64);
    }
    const Int first = _mm512_load_si512(weights), second = _mm512_load_si512(weights + 64);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      even[r] = Dot::add(even[r], Dot::operand(rows + r * row_stride), first);
      odd[r] = Dot::add(odd[r], Dot::operand(rows + r * row_stride + 4), second);
    }
  }
  if (weights < end) {
    const Int last = _mm512_load_si512(weights);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) even[r] = Dot::add(even[r], Dot::operand(rows + r * row_stride), last);
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) store(strip.tile + r * strip.tile_stride, Dot::join(even[r], odd[r]));
}

// Every other step from `begin` on.
template <typename Dot, int kRows, int kPanels, bool kPrefetch>
inline __attribute__((always_inline)) void multiply_steps(const Strip& strip, int begin, int end, Vec (&sums)[kRows][kPanels]) {
  const char* weights = strip.weights + int64_t(begin) * 64;
  const char* rows = strip.rows + int64_t(begin) * 4;
  const int64_t panel_bytes = strip.panel_bytes, row_stride = strip.row_stride, ahead = strip.next - strip.weights;
  for (int s = begin; s < end; s += 2, weights += 128, rows += 8) {
    Int operands[kRows];
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) operands[r] = Dot::operand(rows + r * row_stride);
#pragma GCC unroll 3
    for (int p = 0; p < kPanels; ++p) {
      if (kPrefetch) prefetch_line(weights + p * panel_bytes + ahead);
      const Int column = _mm512_load_si512(weights + p * panel_bytes);
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) sums[r][p] = Dot::add(sums[r][p], operands[r], column);
    }
  }
}

template <typename Dot, int kRows, int kPanels>
inline void multiply_strip(const Strip& strip) {
  const int tile_stride = strip.tile_stride;
  for (int odd = 0; odd < 2; ++odd) {
    float* const tile = odd ? strip.odd_tile : strip.tile;
    Vec sums[kRows][kPanels];
#pragma GCC unroll 3
    for (int p = 0; p < kPanels; ++p) {
      const Vec start = odd ? zero() : Dot::start(strip.column_sums + p * kPanel);
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) sums[r][p] = strip.first ? start : load(tile + r * tile_stride + p * kPanel);
    }
    constexpr int kShare = 16;  // steps: passes take turns with the prefetch
    for (int s = odd, due = strip.pass * kShare + odd; s < strip.steps; s += kShare) {
      const int end = min_of(s + kShare, strip.steps);
      if (s == due) {
        multiply_steps<Dot, kRows, kPanels, true>(strip, s, end, sums);
        due += strip.passes * kShare;
      } else {
        multiply_steps<Dot, kRows, kPanels, false>(strip, s, end, sums);
      }
    }
    const bool join = odd && strip.last;
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 3
      for (int p = 0; p < kPanels; ++p) {
        float* const even = strip.tile + r * tile_stride + p * kPanel;
        if (join) {
          store(even, Dot::join(load(even), sums[r][p]));
        } else {
          store(tile + r * tile_stride + p * kPanel, sums[r][p]);
        }
      }
    }
  }
}

template <typename Dot>
struct DotFormat {
  static constexpr int kStepBytes = 64, kStepRowBytes = 4, kStepInputs = Dot::kInputs, kPanelRows = 4;
  static constexpr bool kHasStrips = true;
  static constexpr int kStripSteps = 384;
  static constexpr Multiply one_panel[kPanelRows] = {multiply_panel<Dot, 1>, multiply_panel<Dot, 2>, multiply_panel<Dot, 3>,
                                                   multiply_panel<Dot, 4>};
  static constexpr Multiply strips[kPassRows][kStripPanels] = {
      {multiply_strip<Dot, 1, 1>, multiply_strip<Dot, 1, 2>, multiply_strip<Dot, 1, 3>},
      {multiply_strip<Dot, 2, 1>, multiply_strip<Dot, 2, 2>, multiply_strip<Dot, 2, 3>},
      {multiply_strip<Dot, 3, 1>, multiply_strip<Dot, 3, 2>, multiply_strip<Dot, 3, 3>},
      {multiply_strip<Dot, 4, 1>, multiply_strip<Dot, 4, 2>, multiply_strip<Dot, 4, 3>},
      {multiply_strip<Dot, 5, 1>, multiply_strip<Dot, 5, 2>, multiply_strip<Dot, 5, 3>},
      {multiply_strip<Dot, 6, 1>, multiply_strip<Dot, 6, 2>, multiply_strip<Dot, 6, 3>},
      {multiply_strip<Dot, 7, 1>, multiply_strip<Dot, 7, 2>, multiply_strip<Dot, 7, 3>},
      {multiply_strip<Dot, 8, 1>, multiply_strip<Dot, 8, 2>, multiply_strip<Dot, 8, 3>},
  };
};

struct Float32Dot {
  static constexpr int kInputs = 1;
  static Vec start(const int32_t*) { return zero(); }
  static Int operand(const char* row) { return splat_bits(row); }
  static Vec add(Vec sums, Int operand, Int weights) {
    return _mm512_fmadd_ps(_mm512_castsi512_ps(operand), _mm512_castsi512_ps(weights), sums);
  }
  static Vec join(Vec even, Vec odd) { return _mm512_add_ps(even, odd); }
};

struct BFloat16Dot {
  static constexpr int kInputs = 2;
  static Vec start(const int32_t*) { return zero(); }
  static Int operand(const char* row) { return splat_bits(row); }
  static Vec add(Vec sums, Int operand, Int weights) { return dot_bf16(sums, operand, weights); }
  static Vec join(Vec even, Vec odd) { return _mm512_add_ps(even, odd); }
};

// VPDPBUSD takes unsigned times signed: rows enter as x + 128, and the sums start at -128 * (the sum of the output's weights).
struct Int8Dot {
  static constexpr int kInputs = 4;
  static Vec start(const int32_t* column_sums) {
    const Int sums = _mm512_slli_epi32(_mm512_loadu_si512(column_sums), 7);
    return _mm512_castsi512_ps(_mm512_sub_epi32(_mm512_setzero_si512(), sums));
  }
  static Int operand(const char* row) { return _mm512_xor_si512(splat_bits(row), _mm512_set1_epi8(int8_t(0x80))); }
  static Vec add(Vec sums, Int operand, Int weights) {
    return _mm512_castsi512_ps(dot_u8s8(_mm512_castps_si512(sums), operand, weights));
  }
  static Vec join(Vec even, Vec odd) {
    return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(even), _mm512_castps_si512(odd)));
  }
};
