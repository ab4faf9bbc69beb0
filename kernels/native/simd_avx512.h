// Vectors of 16 numbers in one register. Included by simd.h, which says what is common to all instruction sets; simd_avx2.h has the same
// functions for two registers each.

using Vec = __m512;       // 16 floats
using Int = __m512i;      // 16 integers of 32 bits, or 64 bytes
using Halves = __m256i;   // 16 of 16 bits
using Doubles = __m512d;  // 8
using Mask = __mmask16;   // of 16 lanes
using DoublesMask = __mmask8;

// ---- memory: anywhere; or a line, which begins at a multiple of 64 bytes

FT_INLINE Vec load(const float* p) { return _mm512_loadu_ps(p); }
FT_INLINE void store(float* p, Vec v) { _mm512_storeu_ps(p, v); }
// To memory past the caches, a whole line: only seen by other threads for sure after finish_stores().
FT_INLINE void store_once(float* p, Vec v) { _mm512_stream_ps(p, v); }
FT_INLINE Int load_int(const void* p) { return _mm512_loadu_si512(p); }
FT_INLINE void store_int(void* p, Int v) { _mm512_storeu_si512(p, v); }
FT_INLINE Int load_line(const void* p) { return _mm512_load_si512(p); }
FT_INLINE void store_line(void* p, Int v) { _mm512_store_si512(p, v); }
FT_INLINE void store_bytes(void* p, __m128i v) { _mm_storeu_si128(static_cast<__m128i*>(p), v); }
FT_INLINE Halves load_halves(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
FT_INLINE void store_halves(void* p, Halves v) { _mm256_storeu_si256(static_cast<__m256i*>(p), v); }

// Lanes that the mask leaves out are neither read (they are 0, or other's) nor written.
FT_INLINE Vec load_lanes(Mask m, const float* p) { return _mm512_maskz_loadu_ps(m, p); }
FT_INLINE Vec load_lanes(Mask m, const float* p, Vec other) { return _mm512_mask_loadu_ps(other, m, p); }
FT_INLINE Int load_lanes(Mask m, const int32_t* p) { return _mm512_maskz_loadu_epi32(m, p); }
FT_INLINE void store_lanes(float* p, Mask m, Vec v) { _mm512_mask_storeu_ps(p, m, v); }
FT_INLINE void store_lanes(uint16_t* p, Mask m, Halves v) { _mm256_mask_storeu_epi16(p, m, v); }
// Every second element of 2 or 1 bytes, the odd ones or the even ones.
FT_INLINE void store_every_second(uint16_t* p, bool odd, Int v) { _mm512_mask_storeu_epi16(p, odd ? 0xaaaaaaaau : 0x55555555u, v); }
FT_INLINE void store_every_second(uint8_t* p, bool odd, Int v) {
  _mm512_mask_storeu_epi8(p, odd ? 0xaaaaaaaaaaaaaaaaull : 0x5555555555555555ull, v);
}
FT_INLINE void store_every_second(uint8_t* p, bool odd, Halves v) { _mm256_mask_storeu_epi8(p, odd ? 0xaaaaaaaau : 0x55555555u, v); }

// ---- floats (with the operators + - * /)

FT_INLINE Vec splat(float x) { return _mm512_set1_ps(x); }
FT_INLINE Vec zero() { return _mm512_setzero_ps(); }
FT_INLINE Vec mul_add(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }    // a b + c, rounded once
FT_INLINE Vec mul_sub(Vec a, Vec b, Vec c) { return _mm512_fmsub_ps(a, b, c); }    // a b - c
FT_INLINE Vec sub_mul(Vec a, Vec b, Vec c) { return _mm512_fnmadd_ps(a, b, c); }   // c - a b
FT_INLINE Vec abs_of(Vec v) { return _mm512_abs_ps(v); }
// a / b within two units of the last place, for b from 1 to 2^126: a division takes as long as sixteen products.
FT_INLINE Vec divided(Vec a, Vec b) {
  const Vec inverse = _mm512_rcp14_ps(b);
  return _mm512_mul_ps(a, _mm512_fmadd_ps(_mm512_fnmadd_ps(b, inverse, _mm512_set1_ps(1.0f)), inverse, inverse));
}
FT_INLINE Vec max_of(Vec a, Vec b) { return _mm512_max_ps(a, b); }  // b where either is NaN
FT_INLINE Vec min_of(Vec a, Vec b) { return _mm512_min_ps(a, b); }
FT_INLINE float max_lanes(Vec v) { return _mm512_reduce_max_ps(v); }

FT_INLINE __m256 fold_lanes(Vec v) { return _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1)); }

// Each of 16 rows of 16 lanes -> one lane: i with i + 8, then 4, 2, 1, all rows at once, half as many vectors at each step.
template <class Fold, class Alone>
FT_INLINE Vec fold_rows(const float* rows, int /*count*/, Fold fold, Alone&&) {
  const auto row = [rows](int m) { return _mm512_load_ps(rows + (m % 4 * 4 + m / 4) * 16); };  // so that they end up in order
  Vec eights[8], fours[4], twos[2];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    const Vec a = row(2 * i), b = row(2 * i + 1);
    eights[i] = fold(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const Vec a = eights[2 * i], b = eights[2 * i + 1];
    fours[i] = fold(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
  }
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i) {
    const __m512d a = _mm512_castps_pd(fours[2 * i]), b = _mm512_castps_pd(fours[2 * i + 1]);
    twos[i] = fold(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)), _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
  }
  return fold(_mm512_shuffle_ps(twos[0], twos[1], 0x88), _mm512_shuffle_ps(twos[0], twos[1], 0xdd));
}

// ---- integers

FT_INLINE Int splat_int(int x) { return _mm512_set1_epi32(x); }
FT_INLINE Int splat_byte(int8_t x) { return _mm512_set1_epi8(x); }
FT_INLINE Int zero_int() { return _mm512_setzero_si512(); }
FT_INLINE Int lane_numbers() { return _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0); }
FT_INLINE Int bits_and(Int a, Int b) { return _mm512_and_si512(a, b); }
FT_INLINE Int bits_or(Int a, Int b) { return _mm512_or_si512(a, b); }
FT_INLINE Int bits_xor(Int a, Int b) { return _mm512_xor_si512(a, b); }
FT_INLINE Int add(Int a, Int b) { return _mm512_add_epi32(a, b); }
FT_INLINE Int mul(Int a, Int b) { return _mm512_mullo_epi32(a, b); }
FT_INLINE Int shift_left(Int v, int bits) { return _mm512_slli_epi32(v, unsigned(bits)); }
FT_INLINE Int shift_right(Int v, int bits) { return _mm512_srli_epi32(v, unsigned(bits)); }  // zeros enter
FT_INLINE int32_t sum_lanes(Int v) { return _mm512_reduce_add_epi32(v); }
FT_INLINE int32_t sum_low_lanes(Int v) { return _mm512_mask_reduce_add_epi32(0x00ff, v); }
FT_INLINE int32_t sum_high_lanes(Int v) { return _mm512_mask_reduce_add_epi32(0xff00, v); }
FT_INLINE int32_t least_lane(Mask m, Int v) { return _mm512_mask_reduce_min_epi32(m, v); }
// Bytes that hold two numbers of 16 bits, or one of 8 bits each in 32, moved within those 16 bits.
FT_INLINE Int shift_bytes(Int v, bool up) { return up ? _mm512_slli_epi16(v, 8) : _mm512_srli_epi16(v, 8); }

// ---- from one type to another

FT_INLINE Vec as_floats(Int v) { return _mm512_castsi512_ps(v); }  // the same bits
FT_INLINE Int as_ints(Vec v) { return _mm512_castps_si512(v); }
FT_INLINE Vec to_floats(Int v) { return _mm512_cvtepi32_ps(v); }
FT_INLINE Int to_ints(Vec v) { return _mm512_cvtps_epi32(v); }     // to nearest even
FT_INLINE Int to_ints(Mask m, Vec v) { return _mm512_maskz_cvtps_epi32(m, v); }
FT_INLINE __m128i narrow_bytes(Int v) { return _mm512_cvtsepi32_epi8(v); }  // the nearest int8
FT_INLINE Halves narrow_shorts(Int v) { return _mm512_cvtsepi32_epi16(v); }
FT_INLINE Int widen(Halves v) { return _mm512_cvtepu16_epi32(v); }          // zeros above
FT_INLINE Int widen_bytes(const char* p) {                                   // 32 signed bytes to 16 bits each
  return _mm512_cvtepi8_epi16(_mm256_load_si256(reinterpret_cast<const __m256i*>(p)));
}

// ---- masks (with the operators & |): comparisons with NaN are false, but for unequal and unordered

FT_INLINE Mask first_lanes(int n) { return n >= 16 ? Mask(0xffff) : n <= 0 ? Mask(0) : Mask((1u << n) - 1); }
FT_INLINE Mask lanes_of(uint32_t bits) { return Mask(bits); }
FT_INLINE Mask lanes_but(Mask m) { return Mask(~m); }
FT_INLINE Mask no_lanes() { return 0; }
FT_INLINE bool any(Mask m) { return m != 0; }
FT_INLINE int first_of(Mask m) { return __builtin_ctz(m); }
FT_INLINE int count_of(Mask m) { return __builtin_popcount(m); }
FT_INLINE Mask less(Vec a, Vec b) { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ); }
FT_INLINE Mask greater(Vec a, Vec b) { return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ); }
FT_INLINE Mask at_least(Vec a, Vec b) { return _mm512_cmp_ps_mask(a, b, _CMP_GE_OQ); }
FT_INLINE Mask equal(Vec a, Vec b) { return _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ); }
FT_INLINE Mask unequal(Vec a, Vec b) { return _mm512_cmp_ps_mask(a, b, _CMP_NEQ_UQ); }
FT_INLINE Mask ordered(Vec a, Vec b) { return _mm512_cmp_ps_mask(a, b, _CMP_ORD_Q); }
FT_INLINE Mask unordered(Vec a, Vec b) { return _mm512_cmp_ps_mask(a, b, _CMP_UNORD_Q); }
// ... and of these lanes alone
FT_INLINE Mask less(Mask m, Vec a, Vec b) { return _mm512_mask_cmp_ps_mask(m, a, b, _CMP_LT_OQ); }
FT_INLINE Mask greater(Mask m, Vec a, Vec b) { return _mm512_mask_cmp_ps_mask(m, a, b, _CMP_GT_OQ); }
FT_INLINE Mask at_least(Mask m, Vec a, Vec b) { return _mm512_mask_cmp_ps_mask(m, a, b, _CMP_GE_OQ); }
FT_INLINE Mask equal(Mask m, Vec a, Vec b) { return _mm512_mask_cmp_ps_mask(m, a, b, _CMP_EQ_OQ); }
FT_INLINE Mask equal(Mask m, Int a, Int b) { return _mm512_mask_cmpeq_epi32_mask(m, a, b); }
FT_INLINE Mask at_most(Mask m, Int a, Int b) { return _mm512_mask_cmple_epi32_mask(m, a, b); }

FT_INLINE Vec select(Mask m, Vec a, Vec b) { return _mm512_mask_mov_ps(b, m, a); }  // a where the mask says so, else b
FT_INLINE Int select(Mask m, Int a, Int b) { return _mm512_mask_mov_epi32(b, m, a); }
FT_INLINE Vec only(Mask m, Vec v) { return _mm512_maskz_mov_ps(m, v); }             // else 0
// The lanes of the mask, one behind the other; behind them 0.
FT_INLINE Vec compressed(Mask m, Vec v) { return _mm512_maskz_compress_ps(m, v); }
FT_INLINE Int compressed(Mask m, Int v) { return _mm512_maskz_compress_epi32(m, v); }
// Operations on the lanes of the mask: the others are the last operand's, or 0.
FT_INLINE Vec add(Mask m, Vec a, Vec other) { return _mm512_mask_add_ps(other, m, other, a); }
FT_INLINE Vec min_of(Mask m, Vec a, Vec other) { return _mm512_mask_min_ps(other, m, other, a); }
FT_INLINE Vec max_of(Mask m, Vec a, Vec other) { return _mm512_mask_max_ps(other, m, other, a); }
FT_INLINE Vec mul_add(Mask m, Vec a, Vec b, Vec other) { return _mm512_mask3_fmadd_ps(a, b, other, m); }
FT_INLINE Vec mul_only(Mask m, Vec a, Vec b) { return _mm512_maskz_mul_ps(m, a, b); }
FT_INLINE Vec div_only(Mask m, Vec a, Vec b) { return _mm512_maskz_div_ps(m, a, b); }
FT_INLINE Int add(Mask m, Int a, Int b, Int other) { return _mm512_mask_add_epi32(other, m, a, b); }

// ---- doubles

FT_INLINE Doubles doubles(double x) { return _mm512_set1_pd(x); }
FT_INLINE Doubles no_doubles() { return _mm512_setzero_pd(); }
FT_INLINE Doubles load_doubles(const float* p) { return _mm512_cvtps_pd(_mm256_loadu_ps(p)); }
FT_INLINE void store_floats(float* p, Doubles v) { _mm256_storeu_ps(p, _mm512_cvtpd_ps(v)); }
FT_INLINE Doubles low_doubles(Int v) { return _mm512_cvtepu32_pd(_mm512_castsi512_si256(v)); }  // of 8 unsigned integers
FT_INLINE Doubles high_doubles(Int v) { return _mm512_cvtepu32_pd(_mm512_extracti64x4_epi64(v, 1)); }
FT_INLINE Doubles mul_add(Doubles a, Doubles b, Doubles c) { return _mm512_fmadd_pd(a, b, c); }
FT_INLINE Doubles sub_mul(Doubles a, Doubles b, Doubles c) { return _mm512_fnmadd_pd(a, b, c); }
FT_INLINE double sum_lanes(Doubles v) { return _mm512_reduce_add_pd(v); }
// v = 2^exponent * mantissa, mantissa in [1, 2), of normal v > 0
FT_INLINE Doubles exponent_of(Doubles v) { return _mm512_getexp_pd(v); }
FT_INLINE Doubles mantissa_of(Doubles v) { return _mm512_getmant_pd(v, _MM_MANT_NORM_1_2, _MM_MANT_SIGN_zero); }
FT_INLINE DoublesMask greater(Doubles a, Doubles b) { return _mm512_cmp_pd_mask(a, b, _CMP_GT_OQ); }
FT_INLINE DoublesMask low_lanes(Mask m) { return DoublesMask(m); }
FT_INLINE DoublesMask high_lanes(Mask m) { return DoublesMask(m >> 8); }
FT_INLINE Doubles add(DoublesMask m, Doubles a, Doubles other) { return _mm512_mask_add_pd(other, m, other, a); }
FT_INLINE Doubles mul(DoublesMask m, Doubles a, Doubles other) { return _mm512_mask_mul_pd(other, m, other, a); }

// ---- bfloat16

FT_INLINE Vec widen_bf16(Halves x) { return as_floats(shift_left(widen(x), 16)); }

FT_INLINE Halves to_bf16(Vec v) {  // to nearest even
#if FT_BF16
  return reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(v));
#else
  Int bits = as_ints(v);
  Int odd = bits_and(shift_right(bits, 16), splat_int(1));
  Int rounded = add(bits, add(odd, splat_int(0x7fff)));
  // a NaN whose payload would round away stays one
  return _mm512_cvtepi32_epi16(shift_right(select(unordered(v, v), splat_int(0x7fc00000), rounded), 16));
#endif
}

// ---- products

// sum + a[2 i] b[2 i] + a[2 i + 1] b[2 i + 1] in lane i: pairs of bfloat16
FT_INLINE Vec dot_bf16(Vec sum, Int a, Int b) {
#if FT_BF16
  return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b));
#else
  const Int high = splat_int(int(0xffff0000));
  sum = mul_add(as_floats(shift_left(a, 16)), as_floats(shift_left(b, 16)), sum);
  return mul_add(as_floats(bits_and(a, high)), as_floats(bits_and(b, high)), sum);
#endif
}

// sum + the four products of unsigned bytes of u with signed bytes of s in lane i, exact. (asm: gcc 12 takes its own function's vectors
// for ones of another type, and copies each sum before and after.)
FT_INLINE Int dot_u8s8(Int sum, Int u, Int s) {
#if FT_VNNI
  asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(u), "vm"(s));
  return sum;
#else
  // even and odd bytes as int16; VPMADDUBSW would saturate
  Int even = _mm512_madd_epi16(bits_and(u, _mm512_set1_epi16(0xff)), _mm512_srai_epi16(_mm512_slli_epi16(s, 8), 8));
  Int odd = _mm512_madd_epi16(_mm512_srli_epi16(u, 8), _mm512_srai_epi16(s, 8));
  return add(sum, add(even, odd));
#endif
}

// sum + the two products of int16 of a and b in lane i, exact
FT_INLINE Int dot_s16(Int sum, Int a, Int b) {
#if FT_VNNI
  asm("vpdpwssd %2, %1, %0" : "+v"(sum) : "v"(a), "vm"(b));
  return sum;
#else
  return add(sum, _mm512_madd_epi16(a, b));
#endif
}

// sum + s(a) * b in lane i, exact, for a in int16's range and 0 <= b < 2^15
FT_INLINE Int multiply_add_s16(Int sum, Int a, Int b) { return dot_s16(sum, a, b); }  // the upper halves of b are 0

// Sums of four signed bytes each.
FT_INLINE Int sums_of_quads(const int8_t* p) { return dot_u8s8(zero_int(), splat_byte(1), load_int(p)); }
