// Products whose step is a vector of weights and 4 bytes of each row: a float, a pair of bfloat16 or a quad of int8.

// Dot: kInputs a step; start(strip, panel) of the sums; operand(bytes of a row) in every lane; add(sums, operand, weights).
template <typename Dot, int kRows, int kPanels, bool kPrefetch>
inline __attribute__((always_inline)) void multiply_steps(const Strip& strip, int begin, int end, Vec (&sums)[kRows][kPanels]) {
  const char* weights = strip.weights + int64_t(begin) * 64;
  const char* rows = strip.rows + int64_t(begin) * 4;
  const int64_t panel_bytes = strip.panel_bytes, row_stride = strip.row_stride, ahead = strip.next - strip.weights;
  for (int s = begin; s < end; ++s, weights += 64, rows += 4) {
    Int operands[kRows];
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) operands[r] = Dot::operand(rows + r * row_stride);
#pragma GCC unroll 6
    for (int p = 0; p < kPanels; ++p) {
      if (kPrefetch) prefetch_line(weights + p * panel_bytes + ahead);
      const Int column = _mm512_load_si512(weights + p * panel_bytes);
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) sums[r][p] = Dot::add(sums[r][p], operands[r], column);
    }
  }
}

template <typename Dot, int kRows, int kPanels>
inline void multiply_strip(const Strip& strip) {
  float* const tile = strip.tile;
  const int tile_stride = strip.tile_stride;
  Vec sums[kRows][kPanels];
#pragma GCC unroll 6
  for (int p = 0; p < kPanels; ++p) {
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      sums[r][p] = strip.first ? Dot::start(strip, p) : load(tile + r * tile_stride + p * kPanel);
    }
  }
  constexpr int kShare = 16;  // steps: passes take turns with the prefetch
  for (int s = 0, due = strip.pass * kShare; s < strip.steps; s += kShare) {
    const int end = min_of(s + kShare, strip.steps);
    if (s == due) {
      multiply_steps<Dot, kRows, kPanels, true>(strip, s, end, sums);
      due += strip.passes * kShare;
    } else {
      multiply_steps<Dot, kRows, kPanels, false>(strip, s, end, sums);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 6
    for (int p = 0; p < kPanels; ++p) store(tile + r * tile_stride + p * kPanel, sums[r][p]);
  }
}

template <typename Dot>
struct DotFormat {
  static constexpr int kStepBytes = 64, kStepRowBytes = 4, kStepInputs = Dot::kInputs, kStripSteps = 64, kPanels = kGroupPanels;
  static constexpr Multiply multiply[kPassRows][kPanels] = {
      {multiply_strip<Dot, 1, 1>, multiply_strip<Dot, 1, 2>, multiply_strip<Dot, 1, 3>, multiply_strip<Dot, 1, 4>,
       multiply_strip<Dot, 1, 5>, multiply_strip<Dot, 1, 6>},
      {multiply_strip<Dot, 2, 1>, multiply_strip<Dot, 2, 2>, multiply_strip<Dot, 2, 3>, multiply_strip<Dot, 2, 4>,
       multiply_strip<Dot, 2, 5>, multiply_strip<Dot, 2, 6>},
      {multiply_strip<Dot, 3, 1>, multiply_strip<Dot, 3, 2>, multiply_strip<Dot, 3, 3>, multiply_strip<Dot, 3, 4>,
       multiply_strip<Dot, 3, 5>, multiply_strip<Dot, 3, 6>},
      {multiply_strip<Dot, 4, 1>, multiply_strip<Dot, 4, 2>, multiply_strip<Dot, 4, 3>, multiply_strip<Dot, 4, 4>,
       multiply_strip<Dot, 4, 5>, multiply_strip<Dot, 4, 6>},
  };
};

struct Float32Dot {
  static constexpr int kInputs = 1;
  static Vec start(const Strip&, int) { return zero(); }
  static Int operand(const char* row) { return splat_bits(row); }
  static Vec add(Vec sums, Int operand, Int weights) {
    return _mm512_fmadd_ps(_mm512_castsi512_ps(operand), _mm512_castsi512_ps(weights), sums);
  }
};

struct BFloat16Dot {
  static constexpr int kInputs = 2;
  static Vec start(const Strip&, int) { return zero(); }
  static Int operand(const char* row) { return splat_bits(row); }
  static Vec add(Vec sums, Int operand, Int weights) { return dot_bf16(sums, operand, weights); }
};

// VPDPBUSD takes unsigned times signed: rows enter as x + 128, and the sums start at -128 * (the sum of the output's weights).
struct Int8Dot {
  static constexpr int kInputs = 4;
  static Vec start(const Strip& strip, int panel) {
    const Int sums = _mm512_loadu_si512(strip.column_sums + panel * kPanel);
    return _mm512_castsi512_ps(_mm512_sub_epi32(_mm512_setzero_si512(), _mm512_slli_epi32(sums, 7)));
  }
  static Int operand(const char* row) { return _mm512_xor_si512(splat_bits(row), _mm512_set1_epi8(int8_t(0x80))); }
  static Vec add(Vec sums, Int operand, Int weights) {
    return _mm512_castsi512_ps(dot_u8s8(_mm512_castps_si512(sums), operand, weights));
  }
};
