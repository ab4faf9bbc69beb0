// Compact weights (CompactHead of kernels.h): made bfloat16 in registers, and multiplied as those are, in the same order. Included by linear.h.

// The four vectors of a block: codes become the two bytes of exponents by table lookups, which signs and mantissas join.
struct CompactTables {
  Int high, low;

  explicit CompactTables(const CompactHead& head)
      : high(_mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<const __m128i*>(head.high)))),
        low(_mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<const __m128i*>(head.low)))) {}

  FT_INLINE void read(const char* block, Int (&vectors)[4]) const {
    const Int nibble = _mm512_set1_epi8(15), packed = load_line(block);
    half(load_line(block + 64), _mm512_and_si512(packed, nibble), vectors[0], vectors[1]);
    half(load_line(block + 128), _mm512_and_si512(_mm512_srli_epi16(packed, 4), nibble), vectors[2], vectors[3]);
  }

 private:
  FT_INLINE void half(Int rest, Int codes, Int& first, Int& second) const {
    const Int sign = _mm512_set1_epi8(int8_t(0x80));
    const Int upper = _mm512_ternarylogic_epi64(rest, sign, _mm512_shuffle_epi8(high, codes), 0xea);  // (rest & sign) | exponent
    const Int lower = _mm512_ternarylogic_epi64(rest, sign, _mm512_shuffle_epi8(low, codes), 0xba);   // (rest & ~sign) | exponent
    first = _mm512_unpacklo_epi8(lower, upper);
    second = _mm512_unpackhi_epi8(lower, upper);
  }
};

constexpr int kRawAhead = 1024;  // bytes: of normal numbers a panel of 576 inputs has two raw blocks, with their numbers 576

// As multiply_panels<BFloat16Dot, 1, kRows>.
template <bool kUnpack, int kRows>
inline void multiply_compact(const Pass& pass) {
  const auto& head = *reinterpret_cast<const CompactHead*>(pass.weights);
  const CompactTables tables(head);
  const int32_t* next_raw = head.raw;
  const char* raw = reinterpret_cast<const char*>(head.raw) + raw_list_bytes(head.num_raw);
  {  // the next panel's: no prefetcher would know
    const char* const others = raw + int64_t(head.num_raw) * kRawBlock;
    for (int line = 0; line < kRawAhead; line += 64) prefetch_line(others + line);
  }
  const char* weights = pass.weights + sizeof(CompactHead);
  char* unpacked = pass.unpacked;
  RowFifths<kRows> rows(pass);
  Vec even[kRows], odd[kRows];
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) even[r] = odd[r] = zero();

  const bool is_intel = __builtin_cpu_is("intel");
  const int blocks = pass.steps / 4;
  for (int block = 0; block < blocks; ++block, weights += kCompactBlock) {
    Int vectors[4];
    prefetch_stream<kRows, 3>(weights, is_intel);
    if (__builtin_expect(block == *next_raw, 0)) {
      for (int i = 0; i < 4; ++i) vectors[i] = load_line(raw + i * 64);
      raw += kRawBlock;
      ++next_raw;
    } else {
      tables.read(weights, vectors);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      if (kUnpack) store_line(unpacked + i * 64, vectors[i]);
      asm("" : "+v"(vectors[i]));  // stays in a register, as in multiply_panels
    }
    if (kUnpack) unpacked += kRawBlock;
#pragma GCC unroll 4
    for (int i = 0; i < 4; i += 2) {
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) {
        const char* const inputs = rows.row(r) + i * 4;
        even[r] = dot_bf16(even[r], splat_bits(inputs), vectors[i]);
        odd[r] = dot_bf16(odd[r], splat_bits(inputs + 4), vectors[i + 1]);
      }
    }
    rows.move(16);
  }
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) store(pass.sums + r * pass.sum_stride, even[r] + odd[r]);
}

template <int kRows>
inline void multiply_compact_panel(const Pass& pass) {
  pass.unpacked ? multiply_compact<true, kRows>(pass) : multiply_compact<false, kRows>(pass);
}

template <typename Numbers>
struct CompactPasses;
template <int... kLess>
struct CompactPasses<std::integer_sequence<int, kLess...>> {
  static constexpr Multiply multiply[] = {multiply_compact_panel<kLess + 1>...};
};
struct CompactFormat : DotFormat<BFloat16Dot> {
  static constexpr bool kUnpacks = true;
  static constexpr int kPassRows = 10;  // more leave too few registers for unpacking
  static constexpr int kHeadBytes = int(sizeof(CompactHead)), kStepBytes = kCompactBlock / 4;
  static constexpr auto& multiply = CompactPasses<std::make_integer_sequence<int, kPassRows>>::multiply;
  static constexpr auto& multiply_alone = DotFormat<BFloat16Dot>::multiply;
  static constexpr int64_t unpacked_bytes(int inputs) { return int64_t(inputs) * 2 * kPanel; }
};
static_assert(kTileBytesOfRows % 64 == 0 && kTileBytesOfRows <= kLinearSums && CompactFormat::kSide == 2, "see linear_scratch");
