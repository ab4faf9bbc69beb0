// Products whose step is a vector of weights and 4 bytes of each row: a float, a pair of bfloat16 or a quad of int8.
// Included by linear.h.

// Prefetch of the weights that follow, two lines: measured. More than a few rows are slower than memory: L2 is filled far enough ahead that
// no row waits. Fewer are faster than memory, and processors differ. AMD's own prefetch keeps up with one row; with more the stream must
// pass through L1 without evicting them, for their misses would queue behind its own. On Intel's, what so passes by L2 is lost before it is
// needed, and two to four rows took three times as long; one row is helped a little.
constexpr int kNearAhead = 4096, kMiddleAhead = 8192, kFarAhead = 16384;  // bytes
template <int kRows>
inline void prefetch_stream(const char* weights, bool is_intel) {
  if (kRows > 4) {
    prefetch_line(weights + kFarAhead);
    prefetch_line(weights + kFarAhead + 64);
  } else if (kRows > 1 && !is_intel) {
    prefetch_line_once(weights + kNearAhead);
    prefetch_line_once(weights + kNearAhead + 64);
  } else if (kRows == 1 && is_intel) {
    prefetch_line(weights + kMiddleAhead);
    prefetch_line(weights + kMiddleAhead + 64);
  }
}

// Every output has two accumulators, for its even and its odd steps, each in ascending order; their sum is the result, whatever the
// number of rows and panels. (A single chain of additions, each waiting for the last, would read weights at half the speed of the cache.)
//
// Dot: start(pass, row) of the even sums; enter(weights) as they are multiplied; add(sums, weights, inputs); join(even, odd).
template <typename Dot, int kPanels, int kRows>
inline void multiply_panels(const Pass& pass) {
  const char* weights = pass.weights;
  const int64_t row_stride = pass.row_stride, panel_bytes = pass.panel_bytes;
  // Rows are addressed from every fifth: pointers to all would not fit into registers.
  constexpr int kFifths = (kRows + 4) / 5;
  const char* fifths[kFifths];
  for (int i = 0; i < kFifths; ++i) fifths[i] = pass.rows + (5 * i + 2) * row_stride;
  typename Dot::Sum even[kPanels][kRows], odd[kPanels][kRows];
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
    for (int p = 0; p < kPanels; ++p) even[p][r] = Dot::start(pass, r), odd[p][r] = typename Dot::Sum{};
  }

  // a step of every panel
  const auto enter = [&](int at, Int (&entered)[kPanels]) {
#pragma GCC unroll 2
    for (int p = 0; p < kPanels; ++p) {
      entered[p] = Dot::enter(_mm512_load_si512(weights + p * panel_bytes + at));
      asm("" : "+v"(entered[p]));  // stays in a register: gcc 12 would load it anew for every row
    }
  };
  // a row's inputs, loaded once, times all panels
  const auto add = [&](int r, int at, const Int (&entered)[kPanels], typename Dot::Sum (&sums)[kPanels][kRows]) {
    Int inputs = splat_bits(fifths[r / 5] + (r % 5 - 2) * row_stride + at);
    if (kPanels > 1) asm("" : "+v"(inputs));
#pragma GCC unroll 2
    for (int p = 0; p < kPanels; ++p) sums[p][r] = Dot::add(sums[p][r], entered[p], inputs);
  };
  const bool is_intel = __builtin_cpu_is("intel");
  const char* const end = weights + int64_t(pass.steps) * 64;
  for (; end - weights > 64; weights += 128) {
    Int first[kPanels], second[kPanels];
    enter(0, first);
    if (kPanels == 1) {
      prefetch_stream<kRows>(weights, is_intel);
      enter(64, second);
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) add(r, 0, first, even), add(r, 4, second, odd);
    } else {  // one step after the other: registers hold no more weights
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) add(r, 0, first, even);
      enter(64, second);
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) add(r, 4, second, odd);
    }
#pragma GCC unroll 4
    for (int i = 0; i < kFifths; ++i) {
      fifths[i] += 8;
      asm("" : "+r"(fifths[i]));  // pointers of their own: gcc 12 would make one for every row after all
    }
  }
  if (weights < end) {
    Int last[kPanels];
    enter(0, last);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) add(r, 0, last, even);
  }

  float* const sums = pass.sums;
  const int sum_stride = pass.sum_stride;
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
    for (int p = 0; p < kPanels; ++p) store(sums + r * sum_stride + p * kPanel, Dot::join(even[p][r], odd[p][r]));
  }
}

// multiply[rows - 1].
template <typename Dot, int kPanels, typename Numbers>
struct DotPasses;
template <typename Dot, int kPanels, int... kLess>
struct DotPasses<Dot, kPanels, std::integer_sequence<int, kLess...>> {
  static constexpr Multiply multiply[] = {multiply_panels<Dot, kPanels, kLess + 1>...};
};
// Rows: as many as there are registers for two sums of each and panel, beside the weights. A weight is then read once for up to 14 tokens,
// which counts where it comes from memory.
template <typename Dot>
struct DotFormat : RowsAsPrepared {
  static constexpr int kStepInputs = Dot::kInputs, kStepBytes = 64, kPassRows = 14, kFewestRows = 4, kSide = 2, kSideRows = 7;
  static constexpr auto& multiply = DotPasses<Dot, 1, std::make_integer_sequence<int, kPassRows>>::multiply;
  static constexpr auto& multiply_side = DotPasses<Dot, kSide, std::make_integer_sequence<int, kSideRows>>::multiply;
};

struct Float32Dot {
  using Sum = Vec;
  static constexpr int kInputs = 1;
  static Vec start(const Pass&, int) { return zero(); }
  static Int enter(Int weights) { return weights; }
  static Vec add(Vec sums, Int weights, Int inputs) {
    return _mm512_fmadd_ps(_mm512_castsi512_ps(inputs), _mm512_castsi512_ps(weights), sums);
  }
  static Vec join(Vec even, Vec odd) { return _mm512_add_ps(even, odd); }
};

struct BFloat16Dot {
  using Sum = Vec;
  static constexpr int kInputs = 2;
  static Vec start(const Pass&, int) { return zero(); }
  static Int enter(Int weights) { return weights; }
  static Vec add(Vec sums, Int weights, Int inputs) { return dot_bf16(sums, inputs, weights); }
  static Vec join(Vec even, Vec odd) { return _mm512_add_ps(even, odd); }
};

// VPDPBUSD takes unsigned times signed: weights enter as w + 128, and the sums start at -128 * (the sum of the row's inputs). (With unsigned
// inputs every product would need an instruction more, for each row.)
struct Int8Dot {
  using Sum = Int;
  static constexpr int kInputs = 4;
  static Int start(const Pass& pass, int r) { return _mm512_set1_epi32(-128 * pass.input_sums[r * pass.sums_stride]); }
  static Int enter(Int weights) { return _mm512_xor_si512(weights, _mm512_set1_epi8(int8_t(0x80))); }
  static Int add(Int sums, Int weights, Int inputs) { return dot_u8s8(sums, weights, inputs); }
  static Vec join(Int even, Int odd) { return _mm512_castsi512_ps(_mm512_add_epi32(even, odd)); }
};
