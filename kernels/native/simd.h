// Vectors of 16 floats for the instruction set of the including translation unit, and the few functions the ops share.
// Included inside the translation unit's anonymous namespace, after <immintrin.h>. FT_BF16, FT_VNNI: see isa_*.cpp.

using Vec = __m512;
using Int = __m512i;

inline Vec load(const float* p) { return _mm512_loadu_ps(p); }
inline void store(float* p, Vec v) { _mm512_storeu_ps(p, v); }
inline Vec splat(float x) { return _mm512_set1_ps(x); }
inline Vec zero() { return _mm512_setzero_ps(); }
inline __mmask16 first_lanes(int n) { return n >= 16 ? __mmask16(0xffff) : n <= 0 ? __mmask16(0) : __mmask16((1u << n) - 1); }
// Lanes past n are 0 and not read, or not written. Whole vectors without a mask: what a masked store wrote, a load cannot take from the
// store before it has reached the cache.
inline Vec load_some(const float* p, int n) { return n >= 16 ? load(p) : _mm512_maskz_loadu_ps(first_lanes(n), p); }
inline void store_some(float* p, Vec v, int n) {
  if (n >= 16) {
    store(p, v);
  } else {
    _mm512_mask_storeu_ps(p, first_lanes(n), v);
  }
}
inline Int lane_numbers() { return _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0); }
inline int min_of(int a, int b) { return a < b ? a : b; }
inline int max_of(int a, int b) { return a > b ? a : b; }

// Sum of the lanes in a fixed tree (lane i with i + 8, then 4, 2, 1): written out, so that no compiler chooses another order.
inline float sum_lanes(Vec v) {
  __m256 a = _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
  __m128 b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  b = _mm_add_ps(b, _mm_movehl_ps(b, b));
  return _mm_cvtss_f32(_mm_add_ss(b, _mm_movehdup_ps(b)));
}
inline float max_lanes(Vec v) { return _mm512_reduce_max_ps(v); }

// ---- bfloat16: 16 of them in 256 bits

inline float from_bf16(uint16_t x) {
  uint32_t bits = uint32_t(x) << 16;
  float f;
  __builtin_memcpy(&f, &bits, 4);
  return f;
}
inline Vec widen_bf16(__m256i x) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16)); }
inline Vec load_bf16(const uint16_t* p) { return widen_bf16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }

inline __m256i to_bf16(Vec v) {  // to nearest even
#if FT_BF16
  return reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(v));
#else
  Int bits = _mm512_castps_si512(v);
  Int odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  Int rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  // a NaN whose payload would round away stays one
  __mmask16 nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_mask_mov_epi32(rounded, nan, _mm512_set1_epi32(0x7fc00000)), 16));
#endif
}
inline void store_bf16(uint16_t* p, Vec v) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), to_bf16(v)); }

// sum + a[2 i] b[2 i] + a[2 i + 1] b[2 i + 1] in lane i: pairs of bfloat16
inline Vec dot_bf16(Vec sum, Int a, Int b) {
#if FT_BF16
  return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b));
#else
  Int high = _mm512_set1_epi32(int(0xffff0000));
  sum = _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_slli_epi32(a, 16)), _mm512_castsi512_ps(_mm512_slli_epi32(b, 16)), sum);
  return _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_and_si512(a, high)), _mm512_castsi512_ps(_mm512_and_si512(b, high)), sum);
#endif
}

// sum + the four products of unsigned bytes of u with signed bytes of s in lane i, exact. (asm: gcc 12 takes its own function's vectors
// for ones of another type, and copies each sum before and after.)
inline Int dot_u8s8(Int sum, Int u, Int s) {
#if FT_VNNI
  asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(u), "vm"(s));
  return sum;
#else
  // even and odd bytes as int16; VPMADDUBSW would saturate
  Int even = _mm512_madd_epi16(_mm512_and_si512(u, _mm512_set1_epi16(0xff)), _mm512_srai_epi16(_mm512_slli_epi16(s, 8), 8));
  Int odd = _mm512_madd_epi16(_mm512_srli_epi16(u, 8), _mm512_srai_epi16(s, 8));
  return _mm512_add_epi32(sum, _mm512_add_epi32(even, odd));
#endif
}

// sum + the two products of int16 of a and b in lane i, exact
inline Int dot_s16(Int sum, Int a, Int b) {
#if FT_VNNI
  asm("vpdpwssd %2, %1, %0" : "+v"(sum) : "v"(a), "vm"(b));
  return sum;
#else
  return _mm512_add_epi32(sum, _mm512_madd_epi16(a, b));
#endif
}

// sum + s(a) * b in lane i, exact, for a in int16's range and 0 <= b < 2^15
inline Int multiply_add_s16(Int sum, Int a, Int b) { return dot_s16(sum, a, b); }  // the upper halves of b are 0

inline Int splat_bits(const void* p) {  // 4 bytes in every lane
  int32_t bits;
  __builtin_memcpy(&bits, p, 4);
  return _mm512_set1_epi32(bits);
}
// Prefetches: into L1; into L2; into L1 but so that it is evicted first, for what is read once. They are asm because gcc 12 takes a function
// that only calls _mm_prefetch for one without effect, and drops the call.
inline void fetch_line(const float* p) { asm volatile("prefetcht0 %0" ::"m"(*p)); }
inline void prefetch_line(const char* p) { asm volatile("prefetcht1 %0" ::"m"(*p)); }
inline void prefetch_line_once(const char* p) { asm volatile("prefetchnta %0" ::"m"(*p)); }

inline void fetch_some(ReadAhead* ahead, int lines) {
#if FT_AMX  // whose loops read memory faster than what is between them leaves it idle; elsewhere not measured
  for (; ahead && lines && ahead->at < ahead->end; --lines, ahead->at += 64) prefetch_line(ahead->at);
#else
  (void)ahead, (void)lines;
#endif
}

// ---- functions, all within a few units of the last place of float

// Rounds to the nearest integer by a great number, that leaves it in the lowest bits, where power_of_2 wants it: the instructions made for
// either step take several times as long. For |x| up to 2^21.
constexpr float kRounder = 12582912.0f;  // 1.5 * 2^23
inline Vec shifted_to_integer(Vec x) { return _mm512_add_ps(x, splat(kRounder)); }
inline Vec integer_of(Vec shifted) { return _mm512_sub_ps(shifted, splat(kRounder)); }
// 2 to the integer, from -127 (which gives 0) to 127.
inline Vec power_of_2(Vec shifted) {
  return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_slli_epi32(_mm512_castps_si512(shifted), 23), _mm512_set1_epi32(0x3f800000)));
}

// e^x up to x = 88, from there on e^88; exp_of(0) is exactly 1, below -87.3 it is 0 (so that a masked score of -inf weighs nothing). NaN
// stays NaN.
inline Vec exp_of(Vec x) {
  x = _mm512_min_ps(splat(88.0f), _mm512_max_ps(splat(-88.0f), x));  // a NaN in the second operand is passed on
  const __mmask16 vanishes = _mm512_cmp_ps_mask(x, splat(-87.3f), _CMP_LT_OQ);
  const Vec shifted = shifted_to_integer(_mm512_mul_ps(x, splat(1.44269504f))), n = integer_of(shifted);
  Vec f = _mm512_fnmadd_ps(n, splat(0.693359375f), x);
  f = _mm512_fnmadd_ps(n, splat(-2.12194440e-4f), f);
  Vec p = splat(1.9875691500e-4f);
  p = _mm512_fmadd_ps(p, f, splat(1.3981999507e-3f));
  p = _mm512_fmadd_ps(p, f, splat(8.3334519073e-3f));
  p = _mm512_fmadd_ps(p, f, splat(4.1665795894e-2f));
  p = _mm512_fmadd_ps(p, f, splat(1.6666665459e-1f));
  p = _mm512_fmadd_ps(p, f, splat(5.0000001201e-1f));
  p = _mm512_add_ps(_mm512_fmadd_ps(_mm512_mul_ps(f, f), p, f), splat(1.0f));
  return _mm512_mask_mov_ps(_mm512_mul_ps(p, power_of_2(shifted)), vanishes, zero());
}

// (e^2|x| - 1) / (e^2|x| + 1) with x's sign; a series where that would cancel
inline Vec tanh_of(Vec x) {
  Vec size = _mm512_abs_ps(x);
  Vec e = exp_of(_mm512_mul_ps(_mm512_min_ps(splat(20.0f), size), splat(2.0f)));
  Vec large = _mm512_sub_ps(splat(1.0f), _mm512_div_ps(splat(2.0f), _mm512_add_ps(e, splat(1.0f))));
  Vec s = _mm512_mul_ps(size, size);
  Vec p = splat(-5.70498872745e-3f);
  p = _mm512_fmadd_ps(p, s, splat(2.06390887954e-2f));
  p = _mm512_fmadd_ps(p, s, splat(-5.37397155531e-2f));
  p = _mm512_fmadd_ps(p, s, splat(1.33314422036e-1f));
  p = _mm512_fmadd_ps(p, s, splat(-3.33332819422e-1f));
  Vec small = _mm512_fmadd_ps(_mm512_mul_ps(p, s), size, size);
  Vec y = _mm512_mask_mov_ps(large, _mm512_cmp_ps_mask(size, splat(0.625f), _CMP_LT_OQ), small);
  const Int sign = _mm512_set1_epi32(int(0x80000000));
  return _mm512_castsi512_ps(_mm512_or_si512(_mm512_castps_si512(y), _mm512_and_si512(_mm512_castps_si512(x), sign)));
}
