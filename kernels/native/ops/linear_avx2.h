// Products on 16 registers of 8 numbers. A step is 64 bytes of weights, two registers, times 4 bytes of each row (bfloat16: two floats, see
// WidenedRows). Registers hold two vectors of sums or four for few rows only; the panel is then in the core's own cache for the others.
// Included by linear.h.

// 4 bytes in every lane, loaded where it stands: gcc 12 would load them once for all uses, and keep sums in memory for want of registers.
FT_INLINE __m256i splat_anew(const char* p) {
  __m256i x;
  asm volatile("vpbroadcastd %1, %0" : "=x"(x) : "m"(*reinterpret_cast<const int32_t*>(p)));
  return x;
}
// gcc 12 would rather add all products of a tile at its end, and keep them until then.
FT_INLINE void add_now(__m256i& sum) { asm("" : "+x"(sum)); }
FT_INLINE __m256i load_part(const char* p) { return _mm256_load_si256(vectors_at(p)); }

// Pointers to the rows of a pass that move along the inputs, each in a register of its own: gcc 12 would compute them anew at every step.
template <int kRows>
struct RowPointers {
  const char* of[kRows];

  FT_INLINE explicit RowPointers(const Pass& pass) {
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) of[r] = pass.rows + r * pass.row_stride;
  }
  FT_INLINE void move(int bytes) {
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      of[r] += bytes;
      asm("" : "+r"(of[r]));
    }
  }
};

constexpr int kWeightsAhead = 1024;  // bytes that are fetched ahead: measured on Zen 3, where its own prefetch leaves a tenth of the time idle

template <int kRows, typename Part>
FT_INLINE void store_sums(const Pass& pass, const Part (&low)[kRows], const Part (&high)[kRows]) {
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
    char* to = reinterpret_cast<char*>(pass.sums + r * pass.sum_stride);
    __builtin_memcpy(to, &low[r], 32);
    __builtin_memcpy(to + 32, &high[r], 32);
  }
}

// Each of the following: the inputs of an output are added in ascending order, whatever the number of rows.

struct Float32Dot {
  using Rows = RowsAsPrepared;
  static constexpr int kInputs = 1, kPassRows = 6;
  template <int kRows>
  static void multiply(const Pass& pass) {
    __m256 low[kRows] = {}, high[kRows] = {};
    RowPointers<kRows> rows(pass);
    const char* weights = pass.weights;
    for (const char* const end = weights + int64_t(pass.steps) * 64; weights < end; weights += 64, rows.move(4)) {
      prefetch_line(weights + kWeightsAhead);
      const __m256 first = _mm256_castsi256_ps(load_part(weights)), second = _mm256_castsi256_ps(load_part(weights + 32));
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        const __m256 x = _mm256_castsi256_ps(splat_anew(rows.of[r]));
        low[r] = _mm256_fmadd_ps(x, first, low[r]);
        high[r] = _mm256_fmadd_ps(x, second, high[r]);
      }
    }
    store_sums(pass, low, high);
  }
};

// A float is a bfloat16 with zeros behind it. Even inputs and odd ones are summed apart: one chain of additions would have each wait for the
// last. First all rows' even ones, for registers hold no more weights.
struct BFloat16Dot {
  using Rows = WidenedRows;
  static constexpr int kInputs = 2, kPassRows = 3;
  template <int kRows>
  static void multiply(const Pass& pass) {
    __m256 low[kRows] = {}, high[kRows] = {}, odd_low[kRows] = {}, odd_high[kRows] = {};
    const __m256i odd = _mm256_set1_epi32(int(0xffff0000));
    RowPointers<kRows> rows(pass);
    const char* weights = pass.weights;
    for (const char* const end = weights + int64_t(pass.steps) * 64; weights < end; weights += 64, rows.move(8)) {
      prefetch_line(weights + kWeightsAhead);
      __m256 first = _mm256_castsi256_ps(_mm256_slli_epi32(load_part(weights), 16));
      __m256 second = _mm256_castsi256_ps(_mm256_slli_epi32(load_part(weights + 32), 16));
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        const __m256 x = _mm256_castsi256_ps(splat_anew(rows.of[r]));
        low[r] = _mm256_fmadd_ps(x, first, low[r]);
        high[r] = _mm256_fmadd_ps(x, second, high[r]);
      }
      first = _mm256_castsi256_ps(_mm256_and_si256(load_part(weights), odd));
      second = _mm256_castsi256_ps(_mm256_and_si256(load_part(weights + 32), odd));
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        const __m256 x = _mm256_castsi256_ps(splat_anew(rows.of[r] + 4));
        odd_low[r] = _mm256_fmadd_ps(x, first, odd_low[r]);
        odd_high[r] = _mm256_fmadd_ps(x, second, odd_high[r]);
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      low[r] = _mm256_add_ps(low[r], odd_low[r]);
      high[r] = _mm256_add_ps(high[r], odd_high[r]);
    }
    store_sums(pass, low, high);
  }
};

// VPMADDUBSW multiplies unsigned by signed bytes and adds neighbours, up to 32767: w x = |w| (x with w's sign), and two products of at most
// 127^2 fit.
struct Int8Dot {
  using Rows = RowsAsPrepared;
  static constexpr int kInputs = 4, kPassRows = 4;
  template <int kRows>
  static void multiply(const Pass& pass) {
    __m256i low[kRows] = {}, high[kRows] = {};
    const __m256i ones = _mm256_set1_epi16(1);
    RowPointers<kRows> rows(pass);
    const char* weights = pass.weights;
    for (const char* const end = weights + int64_t(pass.steps) * 64; weights < end; weights += 64, rows.move(4)) {
      prefetch_line(weights + kWeightsAhead);
      __m256i w = load_part(weights), size = _mm256_abs_epi8(w);
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        const __m256i pairs = _mm256_maddubs_epi16(size, _mm256_sign_epi8(splat_anew(rows.of[r]), w));
        low[r] = _mm256_add_epi32(low[r], _mm256_madd_epi16(pairs, ones));
      }
      w = load_part(weights + 32), size = _mm256_abs_epi8(w);
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        const __m256i pairs = _mm256_maddubs_epi16(size, _mm256_sign_epi8(splat_anew(rows.of[r]), w));
        high[r] = _mm256_add_epi32(high[r], _mm256_madd_epi16(pairs, ones));
      }
    }
    store_sums(pass, low, high);
  }
};

// int4 and int2: a step is a tile of codes. A lane of 16 bits adds 16 products: that and where it starts stay within 16 * 127 * 8 * 2 < 2^15
// once all are added, and on the way it may wrap around. Two groups and half the outputs at a time: registers hold no more sums.
template <Precision kPrecision>
struct CodeDot {
  using Of = Codes<kPrecision>;
  using Rows = RowsAsPrepared;
  static constexpr int kInputs = Of::kInputs, kPassRows = 4;

  // The doubled codes of a group.
  template <int kGroupOf>
  static FT_INLINE __m256i codes_of(__m256i packed) {
    constexpr int kHeight = Of::height(kGroupOf);
    if constexpr (kHeight < 0) packed = _mm256_slli_epi16(packed, -kHeight);
    if constexpr (kHeight > 0) packed = _mm256_srli_epi16(packed, kHeight);
    return _mm256_and_si256(packed, _mm256_set1_epi8(Of::kMost));
  }

  // Adds two groups' products with half the outputs, from `weights` and their group scales on.
  template <int kGroup0, int kRows>
  static FT_INLINE void add_half(const RowPointers<kRows>& rows, const int32_t* input_sums, int64_t sums_stride, const char* weights,
                                 const char* scales, __m256i (&sums)[kRows]) {
    __m256i low[kRows], high[kRows];
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const int32_t* sum = input_sums + r * sums_stride + kGroup0;
      low[r] = _mm256_set1_epi32(uint16_t(-Of::kLess * sum[0]));  // in the lower of the two lanes that an output has
      high[r] = _mm256_set1_epi32(uint16_t(-Of::kLess * sum[1]));
    }
#pragma GCC unroll 8
    for (int quad = 0; quad < 8; ++quad) {
      const __m256i packed = _mm256_loadu_si256(vectors_at(weights + quad * 64));
      const __m256i first = codes_of<kGroup0>(packed), second = codes_of<kGroup0 + 1>(packed);
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        low[r] = _mm256_add_epi16(low[r], _mm256_maddubs_epi16(first, splat_anew(rows.of[r] + kGroup0 * kGroup + quad * 4)));
        add_now(low[r]);
        high[r] = _mm256_add_epi16(high[r], _mm256_maddubs_epi16(second, splat_anew(rows.of[r] + (kGroup0 + 1) * kGroup + quad * 4)));
        add_now(high[r]);
      }
    }
    const auto scale = [&](int group) {  // twice 16 bits an output
      const __m256i wide = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(scales + group * kPanel)));
      return _mm256_or_si256(wide, _mm256_slli_epi32(wide, 16));
    };
    const __m256i low_scale = scale(kGroup0), high_scale = scale(kGroup0 + 1);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const __m256i both = _mm256_add_epi32(_mm256_madd_epi16(low[r], low_scale), _mm256_madd_epi16(high[r], high_scale));
      sums[r] = _mm256_add_epi32(sums[r], both);
    }
  }

  template <int kRows>
  static void multiply(const Pass& pass) {
    __m256i low[kRows] = {}, high[kRows] = {};
    RowPointers<kRows> rows(pass);
    const char* weights = pass.weights;
    const int32_t* input_sums = pass.input_sums;
    for (int tile = 0; tile < pass.steps; ++tile, weights += Of::kTileBytes, input_sums += Of::kGroups, rows.move(Of::kInputs)) {
      for (int line = 0; line < Of::kTileBytes; line += 64) prefetch_line(weights + kWeightsAhead + line);
      add_half<0>(rows, input_sums, pass.sums_stride, weights, weights + 512, low);
      add_half<0>(rows, input_sums, pass.sums_stride, weights + 32, weights + 512 + 8, high);
      if constexpr (Of::kGroups == 4) {
        add_half<2>(rows, input_sums, pass.sums_stride, weights, weights + 512, low);
        add_half<2>(rows, input_sums, pass.sums_stride, weights + 32, weights + 512 + 8, high);
      }
    }
    store_sums(pass, low, high);
  }
};

// multiply[rows - 1].
template <typename Dot, typename Numbers>
struct DotPasses;
template <typename Dot, int... kLess>
struct DotPasses<Dot, std::integer_sequence<int, kLess...>> {
  static constexpr Multiply multiply[] = {Dot::template multiply<kLess + 1>...};
};
template <typename Dot>
constexpr int step_bytes = 64;
template <Precision kPrecision>
constexpr int step_bytes<CodeDot<kPrecision>> = Codes<kPrecision>::kTileBytes;
template <typename Dot>
struct DotFormat : Dot::Rows {
  static constexpr int kStepInputs = Dot::kInputs, kStepBytes = step_bytes<Dot>;
  static constexpr int kPassRows = Dot::kPassRows, kFewestRows = 1, kSide = 1, kSideRows = kPassRows;
  static constexpr auto& multiply = DotPasses<Dot, std::make_integer_sequence<int, kPassRows>>::multiply;
  static constexpr auto &multiply_alone = multiply, &multiply_side = multiply;
};
template <Precision kPrecision>
using CodeFormat = DotFormat<CodeDot<kPrecision>>;
