// Products whose step is a vector of weights and what each row has for it: a float, a pair of bfloat16 (two floats without FT_BF16) or a quad
// of int8.
// Included by linear.h.

// Prefetch of the weights that follow, some lines: measured. More than a few rows are slower than memory: L2 is filled far enough ahead that
// no row waits. Fewer are faster than memory, and processors differ. AMD's own prefetch keeps up with one row; with more the stream must
// pass through L1 without evicting them, for their misses would queue behind its own. On Intel's, what so passes by L2 is lost before it is
// needed, and two to four rows took three times as long; one row is helped a little.
constexpr int kNearAhead = 4096, kMiddleAhead = 8192, kFarAhead = 16384;  // bytes
template <int kRows, int kLines>
inline void prefetch_stream(const char* weights, bool is_intel) {
  for (const char* const end = weights + kLines * 64; weights < end; weights += 64) {
    if (kRows > 4) {
      prefetch_line(weights + kFarAhead);
    } else if (kRows > 1 && !is_intel) {
      prefetch_line_once(weights + kNearAhead);
    } else if (kRows == 1 && is_intel) {
      prefetch_line(weights + kMiddleAhead);
    }
  }
}

// Rows of a pass, addressed from every fifth: pointers to all would not fit into registers.
template <int kRows>
struct RowFifths {
  static constexpr int kFifths = (kRows + 4) / 5;
  const char* at[kFifths];
  const int64_t row_stride;

  FT_INLINE explicit RowFifths(const Pass& pass) : row_stride(pass.row_stride) {
    for (int i = 0; i < kFifths; ++i) at[i] = pass.rows + (5 * i + 2) * row_stride;
  }
  FT_INLINE const char* row(int r) const { return at[r / 5] + (r % 5 - 2) * row_stride; }
  FT_INLINE void move(int bytes) {
#pragma GCC unroll 4
    for (int i = 0; i < kFifths; ++i) {
      at[i] += bytes;
      asm("" : "+r"(at[i]));  // pointers of their own: gcc 12 would make one for every row after all
    }
  }
};

// Every output has two accumulators, for its even and its odd steps, each in ascending order; their sum is the result, whatever the
// number of rows and panels. (A single chain of additions, each waiting for the last, would read weights at half the speed of the cache.)
//
// Dot: start(pass, row) of the even sums; enter(weights) as they are multiplied; add(sums, weights, inputs); join(even, odd).
template <typename Dot, int kPanels, int kRows>
inline void multiply_panels(const Pass& pass) {
  const char* weights = pass.weights;
  const int64_t panel_bytes = pass.panel_bytes;
  RowFifths<kRows> rows(pass);
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
      entered[p] = Dot::enter(load_line(weights + p * panel_bytes + at));
      asm("" : "+v"(entered[p]));  // stays in a register: gcc 12 would load it anew for every row
    }
  };
  // a row's inputs, loaded once, times all panels
  const auto add = [&](int r, int step, const Int (&entered)[kPanels], typename Dot::Sum (&sums)[kPanels][kRows]) {
    const auto inputs = Dot::template inputs<(kPanels > 1)>(rows.row(r) + step * Dot::kRowBytes);
#pragma GCC unroll 2
    for (int p = 0; p < kPanels; ++p) sums[p][r] = Dot::add(sums[p][r], entered[p], inputs);
  };
  const bool is_intel = __builtin_cpu_is("intel");
  const char* const end = weights + int64_t(pass.steps) * 64;
  for (; end - weights > 64; weights += 128) {
    Int first[kPanels], second[kPanels];
    enter(0, first);
    if (kPanels == 1) {
      prefetch_stream<kRows, 2>(weights, is_intel);
      enter(64, second);
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) add(r, 0, first, even), add(r, 1, second, odd);
    } else {  // one step after the other: registers hold no more weights
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) add(r, 0, first, even);
      enter(64, second);
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) add(r, 1, second, odd);
    }
    rows.move(2 * Dot::kRowBytes);
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
struct DotFormat : Dot::Rows {
  static constexpr int kStepInputs = Dot::kInputs, kStepBytes = 64;
  static constexpr int kPassRows = Dot::kPassRows, kFewestRows = 4, kSide = 2, kSideRows = kPassRows / kSide;
  static constexpr auto& multiply = DotPasses<Dot, 1, std::make_integer_sequence<int, kPassRows>>::multiply;
  static constexpr auto &multiply_alone = multiply, &multiply_side = DotPasses<Dot, kSide, std::make_integer_sequence<int, kSideRows>>::multiply;
};

// 4 bytes of a row in every lane. kKeep: in a register, for several panels.
struct SplatInputs {
  using Rows = RowsAsPrepared;
  static constexpr int kRowBytes = 4, kPassRows = 14;
  template <bool kKeep>
  static Int inputs(const char* p) {
    Int inputs = splat_bits(p);
    if (kKeep) asm("" : "+v"(inputs));
    return inputs;
  }
};

struct Float32Dot : SplatInputs {
  using Sum = Vec;
  static constexpr int kInputs = 1;
  static Vec start(const Pass&, int) { return zero(); }
  static Int enter(Int weights) { return weights; }
  static Vec add(Vec sums, Int weights, Int inputs) {
    return mul_add(as_floats(inputs), as_floats(weights), sums);
  }
  static Vec join(Vec even, Vec odd) { return even + odd; }
};

#if FT_BF16
struct BFloat16Dot : SplatInputs {
  using Sum = Vec;
  static constexpr int kInputs = 2;
  static Vec start(const Pass&, int) { return zero(); }
  static Int enter(Int weights) { return weights; }
  static Vec add(Vec sums, Int weights, Int inputs) { return dot_bf16(sums, inputs, weights); }
  static Vec join(Vec even, Vec odd) { return even + odd; }
};
#else
// A float is a bfloat16 with zeros behind it; the two of a weight's lane meet two floats of the row.
struct BFloat16Dot {
  using Rows = WidenedRows;
  using Sum = Vec;
  static constexpr int kInputs = 2, kRowBytes = 8, kPassRows = 12;  // registers hold both halves of the weights, too
  struct Inputs {
    Vec first, second;
  };
  template <bool /*kKeep*/>
  static Inputs inputs(const char* p) {
    return {as_floats(splat_bits(p)), as_floats(splat_bits(p + 4))};
  }
  static Vec start(const Pass&, int) { return zero(); }
  static Int enter(Int weights) { return weights; }
  static Vec add(Vec sums, Int weights, Inputs inputs) {
    sums = mul_add(inputs.first, as_floats(shift_left(weights, 16)), sums);
    return mul_add(inputs.second, as_floats(bits_and(weights, splat_int(int(0xffff0000)))), sums);
  }
  static Vec join(Vec even, Vec odd) { return even + odd; }
};
#endif

// VPDPBUSD takes unsigned times signed: weights enter as w + 128, and the sums start at -128 * (the sum of the row's inputs). (With unsigned
// inputs every product would need an instruction more, for each row.)
struct Int8Dot : SplatInputs {
  using Sum = Int;
  static constexpr int kInputs = 4;
  static Int start(const Pass& pass, int r) { return splat_int(-128 * pass.input_sums[r * pass.sums_stride]); }
  static Int enter(Int weights) { return bits_xor(weights, splat_byte(int8_t(0x80))); }
  static Int add(Int sums, Int weights, Int inputs) { return dot_u8s8(sums, weights, inputs); }
  static Vec join(Int even, Int odd) { return as_floats(::foretoken::add(even, odd)); }
};
