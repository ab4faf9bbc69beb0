// Products whose step is a vector of weights and 4 bytes of each row: a float, a pair of bfloat16 or a quad of int8.
// Included by linear.h.

// Prefetch of the weights that follow, two lines: measured. With one row the processor's own keeps up with memory, and more would be in
// its way. A few rows are still faster than memory: the stream must pass through L1 without evicting them, for their misses would queue
// behind its own. More are slower than memory: then L2 is filled far enough ahead that no row waits.
constexpr int kNearAhead = 4096;  // bytes
template <int kRows>
inline void prefetch_stream(const char* weights, int64_t first, int64_t second) {
  if (kRows > 4) {
    prefetch_line(weights + first);
    prefetch_line(weights + second);
  } else if (kRows > 1) {
    prefetch_line_once(weights + kNearAhead);
    prefetch_line_once(weights + kNearAhead + 64);
  }
}

// Every output has two accumulators, for its even and its odd steps, each in ascending order; their sum is the result, whatever the
// number of rows. (A single chain of additions, each waiting for the last, would read weights at half the speed of the cache.)
//
// Dot: start(pass, row) of the even sums; enter(weights) as they are multiplied; add(sums, weights, bytes of a row); join(even, odd).
template <typename Dot, int kRows>
inline void multiply_panel(const Pass& pass) {
  const char* weights = pass.weights;
  const int64_t row_stride = pass.row_stride, first_ahead = pass.ahead[0], second_ahead = pass.ahead[1];
  // Rows are addressed from every fifth: pointers to all would not fit into registers.
  constexpr int kFifths = (kRows + 4) / 5;
  const char* fifths[kFifths];
  for (int i = 0; i < kFifths; ++i) fifths[i] = pass.rows + (5 * i + 2) * row_stride;
  const auto row = [&](int r) { return fifths[r / 5] + (r % 5 - 2) * row_stride; };
  typename Dot::Sum even[kRows], odd[kRows];
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) even[r] = Dot::start(pass, r), odd[r] = typename Dot::Sum{};
  const char* const end = weights + int64_t(pass.steps) * 64;
  for (; end - weights > 64; weights += 128) {
    prefetch_stream<kRows>(weights, first_ahead, second_ahead);
    Int first = Dot::enter(_mm512_load_si512(weights)), second = Dot::enter(_mm512_load_si512(weights + 64));
    asm("" : "+v"(first), "+v"(second));  // stay in registers: gcc 12 would load them anew for every row
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      even[r] = Dot::add(even[r], first, splat_bits(row(r)));
      odd[r] = Dot::add(odd[r], second, splat_bits(row(r) + 4));
    }
#pragma GCC unroll 4
    for (int i = 0; i < kFifths; ++i) {
      fifths[i] += 8;
      asm("" : "+r"(fifths[i]));  // pointers of their own: gcc 12 would make one for every row after all
    }
  }
  if (weights < end) {
    const Int last = Dot::enter(_mm512_load_si512(weights));
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) even[r] = Dot::add(even[r], last, splat_bits(row(r)));
  }
  float* const sums = pass.sums;
  const int sum_stride = pass.sum_stride;
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) store(sums + r * sum_stride, Dot::join(even[r], odd[r]));
}

// multiply[rows - 1].
template <typename Dot, typename Numbers>
struct DotPasses;
template <typename Dot, int... kLess>
struct DotPasses<Dot, std::integer_sequence<int, kLess...>> {
  static constexpr Multiply multiply[] = {multiply_panel<Dot, kLess + 1>...};
};
template <typename Dot>
struct DotFormat : DotPasses<Dot, std::make_integer_sequence<int, Dot::kPassRows>> {
  static constexpr int kStepInputs = Dot::kInputs, kStepBytes = 64, kPassRows = Dot::kPassRows;
};

// kPassRows: so many that there are registers for two sums each and two vectors of weights. A weight is then read once for up to 14
// tokens, which counts where it comes from memory.
struct Float32Dot {
  using Sum = Vec;
  static constexpr int kInputs = 1, kPassRows = 14;
  static Vec start(const Pass&, int) { return zero(); }
  static Int enter(Int weights) { return weights; }
  static Vec add(Vec sums, Int weights, Int inputs) {
    return _mm512_fmadd_ps(_mm512_castsi512_ps(inputs), _mm512_castsi512_ps(weights), sums);
  }
  static Vec join(Vec even, Vec odd) { return _mm512_add_ps(even, odd); }
};

struct BFloat16Dot {
  using Sum = Vec;
  static constexpr int kInputs = 2, kPassRows = 14;
  static Vec start(const Pass&, int) { return zero(); }
  static Int enter(Int weights) { return weights; }
  static Vec add(Vec sums, Int weights, Int inputs) { return dot_bf16(sums, inputs, weights); }
  static Vec join(Vec even, Vec odd) { return _mm512_add_ps(even, odd); }
};

// VPDPBUSD takes unsigned times signed: weights enter as w + 128, and the sums start at -128 * (the sum of the row's inputs). (With unsigned
// inputs every product would need an instruction more, for each row.)
struct Int8Dot {
  using Sum = Int;
  static constexpr int kInputs = 4, kPassRows = 14;
  static Int start(const Pass& pass, int r) { return _mm512_set1_epi32(-128 * pass.input_sums[r * pass.sums_stride]); }
  static Int enter(Int weights) { return _mm512_xor_si512(weights, _mm512_set1_epi8(int8_t(0x80))); }
  static Int add(Int sums, Int weights, Int inputs) { return dot_u8s8(sums, weights, inputs); }
  static Vec join(Int even, Int odd) { return _mm512_castsi512_ps(_mm512_add_epi32(even, odd)); }
};
