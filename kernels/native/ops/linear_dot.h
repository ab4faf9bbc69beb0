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
// Dot: start(column sums) of the even sums; operand(bytes of a row) in every lane; add(sums, operand, weights); join(even, odd).
template <typename Dot, int kRows>
inline void multiply_panel(const Pass& pass) {
  const char* weights = pass.weights;
  const int64_t row_stride = pass.row_stride, first_ahead = pass.ahead[0], second_ahead = pass.ahead[1];
  // Rows are addressed from every fifth: pointers to all would not fit into registers.
  constexpr int kFifths = (kRows + 4) / 5;
  const char* fifths[kFifths];
  for (int i = 0; i < kFifths; ++i) fifths[i] = pass.rows + (5 * i + 2) * row_stride;
  const auto row = [&](int r) { return fifths[r / 5] + (r % 5 - 2) * row_stride; };
  Vec even[kRows], odd[kRows];
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) even[r] = Dot::start(pass.column_sums), odd[r] = zero();
  const char* const end = weights + int64_t(pass.steps) * 64;
  for (; end - weights > 64; weights += 128) {
    prefetch_stream<kRows>(weights, first_ahead, second_ahead);
    Int first = _mm512_load_si512(weights), second = _mm512_load_si512(weights + 64);
    asm("" : "+v"(first), "+v"(second));  // stay in registers: gcc 12 would load them anew for every row
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      even[r] = Dot::add(even[r], Dot::operand(row(r)), first);
      odd[r] = Dot::add(odd[r], Dot::operand(row(r) + 4), second);
    }
#pragma GCC unroll 4
    for (int i = 0; i < kFifths; ++i) {
      fifths[i] += 8;
      asm("" : "+r"(fifths[i]));  // pointers of their own: gcc 12 would make one for every row after all
    }
  }
  if (weights < end) {
    const Int last = _mm512_load_si512(weights);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) even[r] = Dot::add(even[r], Dot::operand(row(r)), last);
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
// tokens, which counts where it comes from memory. (int8 operands take registers of their own: 12 rows ran a quarter slower.)
struct Float32Dot {
  static constexpr int kInputs = 1, kPassRows = 14;
  static Vec start(const int32_t*) { return zero(); }
  static Int operand(const char* row) { return splat_bits(row); }
  static Vec add(Vec sums, Int operand, Int weights) {
    return _mm512_fmadd_ps(_mm512_castsi512_ps(operand), _mm512_castsi512_ps(weights), sums);
  }
  static Vec join(Vec even, Vec odd) { return _mm512_add_ps(even, odd); }
};

struct BFloat16Dot {
  static constexpr int kInputs = 2, kPassRows = 14;
  static Vec start(const int32_t*) { return zero(); }
  static Int operand(const char* row) { return splat_bits(row); }
  static Vec add(Vec sums, Int operand, Int weights) { return dot_bf16(sums, operand, weights); }
  static Vec join(Vec even, Vec odd) { return _mm512_add_ps(even, odd); }
};

// VPDPBUSD takes unsigned times signed: rows enter as x + 128, and the sums start at -128 * (the sum of the output's weights).
struct Int8Dot {
  static constexpr int kInputs = 4, kPassRows = 10;
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
