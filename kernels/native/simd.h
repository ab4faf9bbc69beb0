// Vectors of 16 numbers for the instruction set of the including translation unit, and the few functions the ops share.
// Included inside the translation unit's anonymous namespace, after <immintrin.h>. FT_AVX2, FT_BF16, FT_VNNI, FT_AMX: see isa_*.cpp.

#define FT_INLINE inline __attribute__((always_inline))
#if FT_AVX2
#include "simd_avx2.h"
#else
#include "simd_avx512.h"
#endif

constexpr int min_of(int a, int b) { return a < b ? a : b; }
constexpr int max_of(int a, int b) { return a > b ? a : b; }

// Lanes past n are 0 and not read, or not written. Whole vectors without a mask: what a masked store wrote, a load cannot take from the
// store before it has reached the cache.
inline Vec load_some(const float* p, int n) { return n >= 16 ? load(p) : load_lanes(first_lanes(n), p); }
inline void store_some(float* p, Vec v, int n) {
  if (n >= 16) {
    store(p, v);
  } else {
    store_lanes(p, first_lanes(n), v);
  }
}

inline void finish_stores() { _mm_sfence(); }

// Sum of the lanes in a fixed tree (lane i with i + 8, then 4, 2, 1): written out, so that no compiler chooses another order.
inline float sum_lanes(Vec v) {
  __m256 a = fold_lanes(v);
  __m128 b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  b = _mm_add_ps(b, _mm_movehl_ps(b, b));
  return _mm_cvtss_f32(_mm_add_ss(b, _mm_movehdup_ps(b)));
}

// Of 16 rows of 16 lanes each, in the same tree; rows from `count` on hold zeros, or -inf.
inline Vec sums_of_rows(const float* rows, int count) {
  return fold_rows(rows, count, [](Vec a, Vec b) { return a + b; }, [](Vec row) { return sum_lanes(row); });
}
inline Vec maxima_of_rows(const float* rows, int count) {
  return fold_rows(rows, count, [](Vec a, Vec b) { return max_of(a, b); }, [](Vec row) { return max_lanes(row); });
}

inline void store_some(uint16_t* p, Halves v, int n) {
  if (n >= 16) {
    store_halves(p, v);
  } else {
    store_lanes(p, first_lanes(n), v);
  }
}

inline float from_bf16(uint16_t x) {
  uint32_t bits = uint32_t(x) << 16;
  float f;
  __builtin_memcpy(&f, &bits, 4);
  return f;
}
inline Vec load_bf16(const uint16_t* p) { return widen_bf16(load_halves(p)); }
inline void store_bf16(uint16_t* p, Vec v) { store_halves(p, to_bf16(v)); }
// 32 numbers. (An instruction rounds two vectors in the time of one.)
inline void store_bf16_of_two(uint16_t* p, Vec v, Vec next) {
#if FT_BF16
  _mm512_storeu_si512(p, Int(_mm512_cvtne2ps_pbh(next, v)));
#else
  store_bf16(p, v);
  store_bf16(p + 16, next);
#endif
}

inline Int splat_bits(const void* p) {  // 4 bytes in every lane
  int32_t bits;
  __builtin_memcpy(&bits, p, 4);
  return splat_int(bits);
}
// Prefetches: into L1; into L2; into L1 but so that it is evicted first, for what is read once. They are asm because gcc 12 takes a function
// that only calls _mm_prefetch for one without effect, and drops the call.
inline void fetch_line(const float* p) { asm volatile("prefetcht0 %0" ::"m"(*p)); }
inline void prefetch_line(const char* p) { asm volatile("prefetcht1 %0" ::"m"(*p)); }
inline void prefetch_line_once(const char* p) { asm volatile("prefetchnta %0" ::"m"(*p)); }

#include "ops/read_ahead.h"

inline void fetch_some(ReadAhead* ahead, int lines) {
#if FT_AMX  // whose loops read memory faster than what is between them leaves it idle; on AVX-512 alone it gains nothing
  for (; ahead && lines; --lines) {
    const char* const line = take(*ahead, 64);
    if (!line) break;
    prefetch_line(line);
  }
#else
  (void)ahead, (void)lines;
#endif
}

// ---- functions, all within a few units of the last place of float

// Rounds to the nearest integer by a great number, that leaves it in the lowest bits, where power_of_2 wants it: the instructions made for
// either step take several times as long. (Both steps by them are another matter: see exp2_of.) For |x| up to 2^21.
constexpr float kRounder = 12582912.0f;  // 1.5 * 2^23
inline Vec shifted_to_integer(Vec x) { return x + splat(kRounder); }
inline Vec integer_of(Vec shifted) { return shifted - splat(kRounder); }
// 2 to the integer, from -127 (which gives 0) to 127.
inline Vec power_of_2(Vec shifted) {
  return as_floats(add(shift_left(as_ints(shifted), 23), splat_int(0x3f800000)));
}

constexpr float kLog2E = 1.44269504f;

// 2^f, within 2e-7 for f up to a half; roughly: within 1.1e-4.
template <bool kRoughly = false>
inline Vec exp2_of_fraction(Vec f) {
  Vec p;
  if (kRoughly) {
    p = mul_add(splat(5.50090578e-2f), f, splat(0.242210975f));
    p = mul_add(p, f, splat(0.693282898f));
  } else {
    p = mul_add(splat(1.3264727e-3f), f, splat(9.671513e-3f));
    p = mul_add(p, f, splat(5.5507336e-2f));
    p = mul_add(p, f, splat(0.24022242f));
    p = mul_add(p, f, splat(0.693147f));
  }
  return mul_add(p, f, splat(1.0f));
}
// 2^(f + the integer)
template <bool kRoughly = false>
inline Vec exp2_of_parts(Vec f, Vec shifted) {
  return exp2_of_fraction<kRoughly>(f) * power_of_2(shifted);
}

// 2^x for x up to 127, within 3e-7 or, roughly, 1.1e-4; exactly 1 at 0, 0 at -inf and from -127 on 0 or as good as. NaN stays NaN.
template <bool kRoughly = false>
inline Vec exp2_of(Vec x) {
#if FT_AMX  // where these two instructions take a third of the time off; of -inf the fraction is 0
  if (kRoughly) {
    const Vec f = _mm512_reduce_ps(x, 0);
    return _mm512_scalef_ps(exp2_of_fraction<kRoughly>(f), x - f);
  }
#endif
  x = max_of(splat(-127.0f), x);  // a NaN in the second operand is passed on
  const Vec shifted = shifted_to_integer(x);
  return exp2_of_parts<kRoughly>(x - integer_of(shifted), shifted);
}

// a / (1 + e^x), within 5e-7 for x up to 10 and 1.5e-6 for x up to 87, from where on it stays
inline Vec divided_by_one_and_exp(Vec a, Vec x) {
  x = min_of(splat(87.0f), max_of(splat(-88.0f), x));  // a NaN in the second operand is passed on
  const Vec shifted = shifted_to_integer(x * splat(kLog2E));
  return divided(a, splat(1.0f) + exp2_of_parts(mul_sub(x, splat(kLog2E), integer_of(shifted)), shifted));
}

// e^x up to x = 88, from there on e^88; exp_of(0) is exactly 1, below -87.3 it is 0 (so that a masked score of -inf weighs nothing). NaN
// stays NaN.
inline Vec exp_of(Vec x) {
  x = min_of(splat(88.0f), max_of(splat(-88.0f), x));  // a NaN in the second operand is passed on
  const Mask vanishes = less(x, splat(-87.3f));
  const Vec shifted = shifted_to_integer(x * splat(1.44269504f)), n = integer_of(shifted);
  Vec f = sub_mul(n, splat(0.693359375f), x);
  f = sub_mul(n, splat(-2.12194440e-4f), f);
  Vec p = splat(1.9875691500e-4f);
  p = mul_add(p, f, splat(1.3981999507e-3f));
  p = mul_add(p, f, splat(8.3334519073e-3f));
  p = mul_add(p, f, splat(4.1665795894e-2f));
  p = mul_add(p, f, splat(1.6666665459e-1f));
  p = mul_add(p, f, splat(5.0000001201e-1f));
  p = mul_add(f * f, p, f) + splat(1.0f);
  return select(vanishes, zero(), p * power_of_2(shifted));
}

// (e^2|x| - 1) / (e^2|x| + 1) with x's sign; a series where that would cancel
inline Vec tanh_of(Vec x) {
  Vec size = abs_of(x);
  Vec e = exp_of(min_of(splat(20.0f), size) * splat(2.0f));
  Vec large = splat(1.0f) - divided(splat(2.0f), e + splat(1.0f));
  Vec s = size * size;
  Vec p = splat(-5.70498872745e-3f);
  p = mul_add(p, s, splat(2.06390887954e-2f));
  p = mul_add(p, s, splat(-5.37397155531e-2f));
  p = mul_add(p, s, splat(1.33314422036e-1f));
  p = mul_add(p, s, splat(-3.33332819422e-1f));
  Vec small = mul_add(p * s, size, size);
  Vec y = select(less(size, splat(0.625f)), small, large);
  const Int sign = splat_int(int(0x80000000));
  return as_floats(bits_or(as_ints(y), bits_and(as_ints(x), sign)));
}
