// Vectors of 16 numbers in two registers of 8: the functions of simd_avx512.h, which says what each does, for AVX2 with FMA. A mask is what
// comparisons leave: all bits of a lane or none. Included by simd.h.

struct Vec {
  __m256 low, high;
};
struct Int {
  __m256i low, high;
};
struct Mask {
  __m256i low, high;
};
struct Doubles {
  __m256d low, high;
};
struct DoublesMask {
  __m256d low, high;
};
using Halves = __m256i;

FT_INLINE __m256 mask_floats(__m256i m) { return _mm256_castsi256_ps(m); }
template <typename T>
FT_INLINE const __m256i* vectors_at(const T* p) { return reinterpret_cast<const __m256i*>(p); }
template <typename T>
FT_INLINE __m256i* vectors_at(T* p) { return reinterpret_cast<__m256i*>(p); }

// Lanes, for what is rare and has no instruction.
struct alignas(64) Lanes {
  int32_t of[16];
  FT_INLINE explicit Lanes(Int v) {
    _mm256_store_si256(vectors_at(of), v.low);
    _mm256_store_si256(vectors_at(of + 8), v.high);
  }
  FT_INLINE Int all() const { return {_mm256_load_si256(vectors_at(of)), _mm256_load_si256(vectors_at(of + 8))}; }
};

// ---- memory

FT_INLINE Vec load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
FT_INLINE void store(float* p, Vec v) {
  _mm256_storeu_ps(p, v.low);
  _mm256_storeu_ps(p + 8, v.high);
}
FT_INLINE void store_once(float* p, Vec v) {
  _mm256_stream_ps(p, v.low);
  _mm256_stream_ps(p + 8, v.high);
}
FT_INLINE Int load_int(const void* p) {
  const auto* from = static_cast<const __m256i*>(p);
  return {_mm256_loadu_si256(from), _mm256_loadu_si256(from + 1)};
}
FT_INLINE void store_int(void* p, Int v) {
  auto* to = static_cast<__m256i*>(p);
  _mm256_storeu_si256(to, v.low);
  _mm256_storeu_si256(to + 1, v.high);
}
FT_INLINE Int load_line(const void* p) {
  const auto* from = static_cast<const __m256i*>(p);
  return {_mm256_load_si256(from), _mm256_load_si256(from + 1)};
}
FT_INLINE void store_line(void* p, Int v) {
  auto* to = static_cast<__m256i*>(p);
  _mm256_store_si256(to, v.low);
  _mm256_store_si256(to + 1, v.high);
}
FT_INLINE void store_bytes(void* p, __m128i v) { _mm_storeu_si128(static_cast<__m128i*>(p), v); }
FT_INLINE Halves load_halves(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
FT_INLINE void store_halves(void* p, Halves v) { _mm256_storeu_si256(static_cast<__m256i*>(p), v); }

FT_INLINE Vec load_lanes(Mask m, const float* p) { return {_mm256_maskload_ps(p, m.low), _mm256_maskload_ps(p + 8, m.high)}; }
FT_INLINE Vec load_lanes(Mask m, const float* p, Vec other) {
  const Vec v = load_lanes(m, p);
  return {_mm256_blendv_ps(other.low, v.low, mask_floats(m.low)), _mm256_blendv_ps(other.high, v.high, mask_floats(m.high))};
}
FT_INLINE Int load_lanes(Mask m, const int32_t* p) { return {_mm256_maskload_epi32(p, m.low), _mm256_maskload_epi32(p + 8, m.high)}; }
FT_INLINE void store_lanes(float* p, Mask m, Vec v) {
  _mm256_maskstore_ps(p, m.low, v.low);
  _mm256_maskstore_ps(p + 8, m.high, v.high);
}

// ---- floats

FT_INLINE Vec operator+(Vec a, Vec b) { return {_mm256_add_ps(a.low, b.low), _mm256_add_ps(a.high, b.high)}; }
FT_INLINE Vec operator-(Vec a, Vec b) { return {_mm256_sub_ps(a.low, b.low), _mm256_sub_ps(a.high, b.high)}; }
FT_INLINE Vec operator*(Vec a, Vec b) { return {_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)}; }
FT_INLINE Vec operator/(Vec a, Vec b) { return {_mm256_div_ps(a.low, b.low), _mm256_div_ps(a.high, b.high)}; }
FT_INLINE Vec splat(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
FT_INLINE Vec zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
FT_INLINE Vec mul_add(Vec a, Vec b, Vec c) { return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)}; }
FT_INLINE Vec mul_sub(Vec a, Vec b, Vec c) { return {_mm256_fmsub_ps(a.low, b.low, c.low), _mm256_fmsub_ps(a.high, b.high, c.high)}; }
FT_INLINE Vec sub_mul(Vec a, Vec b, Vec c) { return {_mm256_fnmadd_ps(a.low, b.low, c.low), _mm256_fnmadd_ps(a.high, b.high, c.high)}; }
FT_INLINE Vec divided(Vec a, Vec b) { return a / b; }
FT_INLINE Vec abs_of(Vec v) {
  const __m256 sign = _mm256_set1_ps(-0.0f);
  return {_mm256_andnot_ps(sign, v.low), _mm256_andnot_ps(sign, v.high)};
}
FT_INLINE Vec max_of(Vec a, Vec b) { return {_mm256_max_ps(a.low, b.low), _mm256_max_ps(a.high, b.high)}; }
FT_INLINE Vec min_of(Vec a, Vec b) { return {_mm256_min_ps(a.low, b.low), _mm256_min_ps(a.high, b.high)}; }
FT_INLINE float max_lanes(Vec v) {
  const __m256 eight = _mm256_max_ps(v.low, v.high);
  __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  four = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(four, _mm_movehdup_ps(four)));
}
// Each of 16 rows of 16 lanes -> one lane. From `count` on a row's lanes are equal, and none changes another.
template <class Fold, class Alone>
FT_INLINE Vec fold_rows(const float* rows, int count, Fold&&, Alone alone) {
  alignas(64) float folded[16];
  for (int i = 0; i < 16; ++i) folded[i] = i < count ? alone(load(rows + i * 16)) : rows[i * 16];
  return load(folded);
}
FT_INLINE __m256 fold_lanes(Vec v) { return _mm256_add_ps(v.low, v.high); }

// ---- integers

FT_INLINE Int splat_int(int x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
FT_INLINE Int zero_int() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
FT_INLINE Int lane_numbers() { return {_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), _mm256_setr_epi32(8, 9, 10, 11, 12, 13, 14, 15)}; }
FT_INLINE Int bits_and(Int a, Int b) { return {_mm256_and_si256(a.low, b.low), _mm256_and_si256(a.high, b.high)}; }
FT_INLINE Int bits_or(Int a, Int b) { return {_mm256_or_si256(a.low, b.low), _mm256_or_si256(a.high, b.high)}; }
FT_INLINE Int bits_xor(Int a, Int b) { return {_mm256_xor_si256(a.low, b.low), _mm256_xor_si256(a.high, b.high)}; }
FT_INLINE Int add(Int a, Int b) { return {_mm256_add_epi32(a.low, b.low), _mm256_add_epi32(a.high, b.high)}; }
FT_INLINE Int mul(Int a, Int b) { return {_mm256_mullo_epi32(a.low, b.low), _mm256_mullo_epi32(a.high, b.high)}; }
FT_INLINE Int shift_left(Int v, int bits) { return {_mm256_slli_epi32(v.low, bits), _mm256_slli_epi32(v.high, bits)}; }
FT_INLINE Int shift_right(Int v, int bits) { return {_mm256_srli_epi32(v.low, bits), _mm256_srli_epi32(v.high, bits)}; }
FT_INLINE int32_t sum_of_8(__m256i v) {
  __m128i four = _mm_add_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
  four = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(four, _mm_shuffle_epi32(four, 0xb1)));
}
FT_INLINE int32_t sum_lanes(Int v) { return sum_of_8(_mm256_add_epi32(v.low, v.high)); }
FT_INLINE int32_t sum_low_lanes(Int v) { return sum_of_8(v.low); }
FT_INLINE int32_t sum_high_lanes(Int v) { return sum_of_8(v.high); }
FT_INLINE int32_t least_lane(Mask m, Int v) {
  const __m256i most = _mm256_set1_epi32(INT32_MAX);
  const __m256i eight = _mm256_min_epi32(_mm256_blendv_epi8(most, v.low, m.low), _mm256_blendv_epi8(most, v.high, m.high));
  __m128i four = _mm_min_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
  four = _mm_min_epi32(four, _mm_shuffle_epi32(four, 0x4e));
  return _mm_cvtsi128_si32(_mm_min_epi32(four, _mm_shuffle_epi32(four, 0xb1)));
}
FT_INLINE Int shift_bytes(Int v, bool up) {
  return up ? Int{_mm256_slli_epi16(v.low, 8), _mm256_slli_epi16(v.high, 8)} : Int{_mm256_srli_epi16(v.low, 8), _mm256_srli_epi16(v.high, 8)};
}

// ---- from one type to another

FT_INLINE Vec as_floats(Int v) { return {_mm256_castsi256_ps(v.low), _mm256_castsi256_ps(v.high)}; }
FT_INLINE Int as_ints(Vec v) { return {_mm256_castps_si256(v.low), _mm256_castps_si256(v.high)}; }
FT_INLINE Vec to_floats(Int v) { return {_mm256_cvtepi32_ps(v.low), _mm256_cvtepi32_ps(v.high)}; }
FT_INLINE Int to_ints(Vec v) { return {_mm256_cvtps_epi32(v.low), _mm256_cvtps_epi32(v.high)}; }
FT_INLINE Int to_ints(Mask m, Vec v) {
  const Int all = to_ints(v);
  return {_mm256_and_si256(all.low, m.low), _mm256_and_si256(all.high, m.high)};
}
FT_INLINE Halves narrow_shorts(Int v) {  // (packs work within 128 bits: the middle quarters change places)
  return _mm256_permute4x64_epi64(_mm256_packs_epi32(v.low, v.high), 0xd8);
}
FT_INLINE __m128i narrow_bytes(Int v) {
  const Halves shorts = narrow_shorts(v);
  return _mm_packs_epi16(_mm256_castsi256_si128(shorts), _mm256_extracti128_si256(shorts, 1));
}
FT_INLINE Int widen(Halves v) {
  return {_mm256_cvtepu16_epi32(_mm256_castsi256_si128(v)), _mm256_cvtepu16_epi32(_mm256_extracti128_si256(v, 1))};
}
FT_INLINE Int widen_bytes(const char* p) {
  const auto* from = reinterpret_cast<const __m128i*>(p);
  return {_mm256_cvtepi8_epi16(_mm_load_si128(from)), _mm256_cvtepi8_epi16(_mm_load_si128(from + 1))};
}

// ---- masks

FT_INLINE Mask mask_of(__m256 low, __m256 high) { return {_mm256_castps_si256(low), _mm256_castps_si256(high)}; }
FT_INLINE Mask operator&(Mask a, Mask b) { return {_mm256_and_si256(a.low, b.low), _mm256_and_si256(a.high, b.high)}; }
FT_INLINE Mask operator|(Mask a, Mask b) { return {_mm256_or_si256(a.low, b.low), _mm256_or_si256(a.high, b.high)}; }
FT_INLINE uint32_t bits_of(Mask m) {
  return uint32_t(_mm256_movemask_ps(mask_floats(m.low))) | uint32_t(_mm256_movemask_ps(mask_floats(m.high))) << 8;
}
FT_INLINE Mask first_lanes(int n) {
  const Int numbers = lane_numbers();
  const __m256i count = _mm256_set1_epi32(n);
  return {_mm256_cmpgt_epi32(count, numbers.low), _mm256_cmpgt_epi32(count, numbers.high)};
}
FT_INLINE Mask lanes_of(uint32_t bits) {
  const __m256i all = _mm256_set1_epi32(int(bits)), low = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128), high = _mm256_slli_epi32(low, 8);
  return {_mm256_cmpeq_epi32(_mm256_and_si256(all, low), low), _mm256_cmpeq_epi32(_mm256_and_si256(all, high), high)};
}
FT_INLINE Mask lanes_but(Mask m) {
  const __m256i all = _mm256_set1_epi32(-1);
  return {_mm256_xor_si256(m.low, all), _mm256_xor_si256(m.high, all)};
}
FT_INLINE Mask no_lanes() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
FT_INLINE bool any(Mask m) { return _mm256_movemask_ps(mask_floats(_mm256_or_si256(m.low, m.high))) != 0; }
FT_INLINE int first_of(Mask m) { return __builtin_ctz(bits_of(m)); }
FT_INLINE int count_of(Mask m) { return __builtin_popcount(bits_of(m)); }

template <int kHow>
FT_INLINE Mask compared(Vec a, Vec b) { return mask_of(_mm256_cmp_ps(a.low, b.low, kHow), _mm256_cmp_ps(a.high, b.high, kHow)); }
FT_INLINE Mask less(Vec a, Vec b) { return compared<_CMP_LT_OQ>(a, b); }
FT_INLINE Mask greater(Vec a, Vec b) { return compared<_CMP_GT_OQ>(a, b); }
FT_INLINE Mask at_least(Vec a, Vec b) { return compared<_CMP_GE_OQ>(a, b); }
FT_INLINE Mask equal(Vec a, Vec b) { return compared<_CMP_EQ_OQ>(a, b); }
FT_INLINE Mask unequal(Vec a, Vec b) { return compared<_CMP_NEQ_UQ>(a, b); }
FT_INLINE Mask ordered(Vec a, Vec b) { return compared<_CMP_ORD_Q>(a, b); }
FT_INLINE Mask unordered(Vec a, Vec b) { return compared<_CMP_UNORD_Q>(a, b); }
FT_INLINE Mask less(Mask m, Vec a, Vec b) { return m & less(a, b); }
FT_INLINE Mask greater(Mask m, Vec a, Vec b) { return m & greater(a, b); }
FT_INLINE Mask at_least(Mask m, Vec a, Vec b) { return m & at_least(a, b); }
FT_INLINE Mask equal(Mask m, Vec a, Vec b) { return m & equal(a, b); }
FT_INLINE Mask equal(Mask m, Int a, Int b) { return m & Mask{_mm256_cmpeq_epi32(a.low, b.low), _mm256_cmpeq_epi32(a.high, b.high)}; }
FT_INLINE Mask at_most(Mask m, Int a, Int b) {
  return {_mm256_andnot_si256(_mm256_cmpgt_epi32(a.low, b.low), m.low), _mm256_andnot_si256(_mm256_cmpgt_epi32(a.high, b.high), m.high)};
}

FT_INLINE Vec select(Mask m, Vec a, Vec b) {
  return {_mm256_blendv_ps(b.low, a.low, mask_floats(m.low)), _mm256_blendv_ps(b.high, a.high, mask_floats(m.high))};
}
FT_INLINE Int select(Mask m, Int a, Int b) { return {_mm256_blendv_epi8(b.low, a.low, m.low), _mm256_blendv_epi8(b.high, a.high, m.high)}; }
FT_INLINE Vec only(Mask m, Vec v) { return {_mm256_and_ps(v.low, mask_floats(m.low)), _mm256_and_ps(v.high, mask_floats(m.high))}; }
FT_INLINE Int compressed(Mask m, Int v) {
  const Lanes from(v);
  Lanes to(zero_int());
  int n = 0;
  for (uint32_t left = bits_of(m); left; left &= left - 1) to.of[n++] = from.of[__builtin_ctz(left)];
  return to.all();
}
FT_INLINE Vec compressed(Mask m, Vec v) { return as_floats(compressed(m, as_ints(v))); }
FT_INLINE Vec add(Mask m, Vec a, Vec other) { return select(m, other + a, other); }
FT_INLINE Vec min_of(Mask m, Vec a, Vec other) { return select(m, min_of(other, a), other); }
FT_INLINE Vec max_of(Mask m, Vec a, Vec other) { return select(m, max_of(other, a), other); }
FT_INLINE Vec mul_add(Mask m, Vec a, Vec b, Vec other) { return select(m, mul_add(a, b, other), other); }
FT_INLINE Vec mul_only(Mask m, Vec a, Vec b) { return only(m, a * b); }
FT_INLINE Vec div_only(Mask m, Vec a, Vec b) { return only(m, a / b); }
FT_INLINE Int add(Mask m, Int a, Int b, Int other) { return select(m, add(a, b), other); }

// Two and one bytes have no masked store, and others write what lies between them: one by one.
FT_INLINE void store_lanes(uint16_t* p, Mask m, Halves v) {
  alignas(32) uint16_t all[16];
  _mm256_store_si256(vectors_at(all), v);
  for (uint32_t lanes = bits_of(m); lanes; lanes &= lanes - 1) p[__builtin_ctz(lanes)] = all[__builtin_ctz(lanes)];
}
FT_INLINE void store_every_second(uint16_t* p, bool odd, Int v) {
  const Lanes all(v);
  for (int i = 0; i < 16; ++i) p[2 * i + odd] = uint16_t(uint32_t(all.of[i]) >> 16 * odd);
}
FT_INLINE void store_every_second(uint8_t* p, bool odd, Halves v) {
  alignas(32) uint8_t all[32];
  _mm256_store_si256(vectors_at(all), v);
  for (int i = odd; i < 32; i += 2) p[i] = all[i];
}
FT_INLINE void store_every_second(uint8_t* p, bool odd, Int v) {
  store_every_second(p, odd, v.low);
  store_every_second(p + 32, odd, v.high);
}

// ---- doubles

FT_INLINE Doubles operator+(Doubles a, Doubles b) { return {_mm256_add_pd(a.low, b.low), _mm256_add_pd(a.high, b.high)}; }
FT_INLINE Doubles operator-(Doubles a, Doubles b) { return {_mm256_sub_pd(a.low, b.low), _mm256_sub_pd(a.high, b.high)}; }
FT_INLINE Doubles operator*(Doubles a, Doubles b) { return {_mm256_mul_pd(a.low, b.low), _mm256_mul_pd(a.high, b.high)}; }
FT_INLINE Doubles operator/(Doubles a, Doubles b) { return {_mm256_div_pd(a.low, b.low), _mm256_div_pd(a.high, b.high)}; }
FT_INLINE Doubles doubles(double x) { return {_mm256_set1_pd(x), _mm256_set1_pd(x)}; }
FT_INLINE Doubles no_doubles() { return {_mm256_setzero_pd(), _mm256_setzero_pd()}; }
FT_INLINE Doubles load_doubles(const float* p) { return {_mm256_cvtps_pd(_mm_loadu_ps(p)), _mm256_cvtps_pd(_mm_loadu_ps(p + 4))}; }
FT_INLINE void store_floats(float* p, Doubles v) {
  _mm_storeu_ps(p, _mm256_cvtpd_ps(v.low));
  _mm_storeu_ps(p + 4, _mm256_cvtpd_ps(v.high));
}
// Of 4 unsigned integers, by the bits of 2^52 + x, exactly.
FT_INLINE __m256d unsigned_doubles(__m128i x) {
  const __m256d base = _mm256_set1_pd(0x1p52);
  return _mm256_sub_pd(_mm256_or_pd(base, _mm256_castsi256_pd(_mm256_cvtepu32_epi64(x))), base);
}
FT_INLINE Doubles unsigned_doubles(__m256i v) {
  return {unsigned_doubles(_mm256_castsi256_si128(v)), unsigned_doubles(_mm256_extracti128_si256(v, 1))};
}
FT_INLINE Doubles low_doubles(Int v) { return unsigned_doubles(v.low); }
FT_INLINE Doubles high_doubles(Int v) { return unsigned_doubles(v.high); }
FT_INLINE Doubles mul_add(Doubles a, Doubles b, Doubles c) { return {_mm256_fmadd_pd(a.low, b.low, c.low), _mm256_fmadd_pd(a.high, b.high, c.high)}; }
FT_INLINE Doubles sub_mul(Doubles a, Doubles b, Doubles c) { return {_mm256_fnmadd_pd(a.low, b.low, c.low), _mm256_fnmadd_pd(a.high, b.high, c.high)}; }
FT_INLINE double sum_lanes(Doubles v) {
  const __m256d four = _mm256_add_pd(v.low, v.high);
  const __m128d two = _mm_add_pd(_mm256_castpd256_pd128(four), _mm256_extractf128_pd(four, 1));
  return _mm_cvtsd_f64(_mm_add_sd(two, _mm_unpackhi_pd(two, two)));
}
// The exponent's 11 bits, as the lowest of 2^52 + x.
FT_INLINE __m256d exponent_of(__m256d v) {
  const __m256i bits = _mm256_srli_epi64(_mm256_castpd_si256(v), 52), base = _mm256_castpd_si256(_mm256_set1_pd(0x1p52));
  return _mm256_sub_pd(_mm256_castsi256_pd(_mm256_or_si256(bits, base)), _mm256_set1_pd(0x1p52 + 1023));
}
FT_INLINE __m256d mantissa_of(__m256d v) {
  const __m256d fraction = _mm256_castsi256_pd(_mm256_set1_epi64x(0x000fffffffffffff));
  return _mm256_or_pd(_mm256_and_pd(v, fraction), _mm256_set1_pd(1.0));
}
FT_INLINE Doubles exponent_of(Doubles v) { return {exponent_of(v.low), exponent_of(v.high)}; }
FT_INLINE Doubles mantissa_of(Doubles v) { return {mantissa_of(v.low), mantissa_of(v.high)}; }
FT_INLINE DoublesMask greater(Doubles a, Doubles b) {
  return {_mm256_cmp_pd(a.low, b.low, _CMP_GT_OQ), _mm256_cmp_pd(a.high, b.high, _CMP_GT_OQ)};
}
FT_INLINE DoublesMask wide_lanes(__m256i v) {
  return {_mm256_castsi256_pd(_mm256_cvtepi32_epi64(_mm256_castsi256_si128(v))), _mm256_castsi256_pd(_mm256_cvtepi32_epi64(_mm256_extracti128_si256(v, 1)))};
}
FT_INLINE DoublesMask low_lanes(Mask m) { return wide_lanes(m.low); }
FT_INLINE DoublesMask high_lanes(Mask m) { return wide_lanes(m.high); }
FT_INLINE Doubles select(DoublesMask m, Doubles a, Doubles b) { return {_mm256_blendv_pd(b.low, a.low, m.low), _mm256_blendv_pd(b.high, a.high, m.high)}; }
FT_INLINE Doubles add(DoublesMask m, Doubles a, Doubles other) { return select(m, other + a, other); }
FT_INLINE Doubles mul(DoublesMask m, Doubles a, Doubles other) { return select(m, other * a, other); }

// ---- bfloat16

FT_INLINE Vec widen_bf16(Halves x) { return as_floats(shift_left(widen(x), 16)); }

FT_INLINE Halves to_bf16(Vec v) {  // to nearest even
  const Int bits = as_ints(v);
  const Int odd = bits_and(shift_right(bits, 16), splat_int(1));
  const Int rounded = add(bits, add(odd, splat_int(0x7fff)));
  // a NaN whose payload would round away stays one
  const Int high = shift_right(select(unordered(v, v), splat_int(0x7fc00000), rounded), 16);
  return _mm256_permute4x64_epi64(_mm256_packus_epi32(high.low, high.high), 0xd8);
}

// ---- products

FT_INLINE Vec dot_bf16(Vec sum, Int a, Int b) {
  const Int high = splat_int(int(0xffff0000));
  sum = mul_add(as_floats(shift_left(a, 16)), as_floats(shift_left(b, 16)), sum);
  return mul_add(as_floats(bits_and(a, high)), as_floats(bits_and(b, high)), sum);
}

FT_INLINE Int dot_s16(Int sum, Int a, Int b) { return add(sum, {_mm256_madd_epi16(a.low, b.low), _mm256_madd_epi16(a.high, b.high)}); }

FT_INLINE Int sums_of_quads(const int8_t* p) {  // of bytes in -127..127, as prepared rows have them
  const Int v = load_int(p);
  const __m256i ones = _mm256_set1_epi8(1), one = _mm256_set1_epi16(1);
  return {_mm256_madd_epi16(_mm256_maddubs_epi16(ones, v.low), one), _mm256_madd_epi16(_mm256_maddubs_epi16(ones, v.high), one)};
}
