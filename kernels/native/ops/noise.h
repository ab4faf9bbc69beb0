// The noise of kernels/noise.py: exponentially distributed numbers under a key. Column j depends on the key and j only.

// -log(v) of doubles in (0, 1), to the last places: the method of fdlibm's e_log.c (Sun Microsystems 1993).
inline __m512d minus_log(__m512d v) {
  auto number = [](double x) { return _mm512_set1_pd(x); };
  // v = 2^k m, m from sqrt(1/2) to sqrt(2): near 1 nothing cancels, and rare tokens keep their exact small chances
  __m512d k = _mm512_getexp_pd(v);
  __m512d m = _mm512_getmant_pd(v, _MM_MANT_NORM_1_2, _MM_MANT_SIGN_zero);
  const __mmask8 upper = _mm512_cmp_pd_mask(m, number(1.4142135623730951), _CMP_GT_OQ);
  m = _mm512_mask_mul_pd(m, upper, m, number(0.5));
  k = _mm512_mask_add_pd(k, upper, k, number(1.0));
  const __m512d f = _mm512_sub_pd(m, number(1.0));
  const __m512d s = _mm512_div_pd(f, _mm512_add_pd(f, number(2.0)));
  const __m512d z = _mm512_mul_pd(s, s);
  __m512d r = number(1.479819860511658591e-01);
  r = _mm512_fmadd_pd(r, z, number(1.531383769920937332e-01));
  r = _mm512_fmadd_pd(r, z, number(1.818357216161805012e-01));
  r = _mm512_fmadd_pd(r, z, number(2.222219843214978396e-01));
  r = _mm512_fmadd_pd(r, z, number(2.857142874366239149e-01));
  r = _mm512_fmadd_pd(r, z, number(3.999999999940941908e-01));
  r = _mm512_mul_pd(z, _mm512_fmadd_pd(r, z, number(6.666666666666735130e-01)));
  const __m512d half_square = _mm512_mul_pd(_mm512_mul_pd(f, f), number(0.5));
  __m512d small = _mm512_fmadd_pd(k, number(1.90821492927058770002e-10), _mm512_mul_pd(s, _mm512_add_pd(half_square, r)));
  small = _mm512_sub_pd(_mm512_sub_pd(half_square, small), f);
  return _mm512_fnmadd_pd(k, number(6.93147180369123816490e-01), small);
}

inline __m512i mixed(__m512i x) {  // Wellons' lowbias32
  x = _mm512_xor_si512(x, _mm512_srli_epi32(x, 16));
  x = _mm512_mullo_epi32(x, _mm512_set1_epi32(0x7feb352d));
  x = _mm512_xor_si512(x, _mm512_srli_epi32(x, 15));
  x = _mm512_mullo_epi32(x, _mm512_set1_epi32(int(0x846ca68bu)));
  return _mm512_xor_si512(x, _mm512_srli_epi32(x, 16));
}

// Columns first .. first + count of key's noise; out is written up to the next multiple of 16.
void exponential(int64_t key, int first, int count, float* out) {
  const Int start = _mm512_set1_epi32(int(uint64_t(key)));
  const Int increment = _mm512_set1_epi32(int(uint64_t(key) >> 32 | 1));
  const Int lanes = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  auto of = [](__m256i x) {  // v = 1 - (x + 0.5) / 2^32, exactly
    const __m512d v = _mm512_sub_pd(_mm512_set1_pd(4294967295.5), _mm512_cvtepu32_pd(x));
    return _mm512_cvtpd_ps(minus_log(_mm512_mul_pd(v, _mm512_set1_pd(0x1p-32))));
  };
  for (int j = 0; j < count; j += 16) {
    const Int column = _mm512_add_epi32(_mm512_set1_epi32(first + j), lanes);
    const Int x = mixed(_mm512_add_epi32(_mm512_mullo_epi32(column, increment), start));
    _mm256_storeu_ps(out + j, of(_mm512_castsi512_si256(x)));
    _mm256_storeu_ps(out + j + 8, of(_mm512_extracti64x4_epi64(x, 1)));
  }
}
