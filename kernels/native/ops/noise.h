// The noise of kernels/noise.py: exponentially distributed numbers under a key. Column j depends on the key and j only.

// -log(v) of doubles in (0, 1), to the last places: the method of fdlibm's e_log.c (Sun Microsystems 1993).
inline Doubles minus_log(Doubles v) {
  // v = 2^k m, m from sqrt(1/2) to sqrt(2): near 1 nothing cancels, and rare tokens keep their exact small chances
  Doubles k = exponent_of(v);
  Doubles m = mantissa_of(v);
  const DoublesMask upper = greater(m, doubles(1.4142135623730951));
  m = mul(upper, doubles(0.5), m);
  k = add(upper, doubles(1.0), k);
  const Doubles f = m - doubles(1.0);
  const Doubles s = f / (f + doubles(2.0));
  const Doubles z = s * s;
  Doubles r = doubles(1.479819860511658591e-01);
  r = mul_add(r, z, doubles(1.531383769920937332e-01));
  r = mul_add(r, z, doubles(1.818357216161805012e-01));
  r = mul_add(r, z, doubles(2.222219843214978396e-01));
  r = mul_add(r, z, doubles(2.857142874366239149e-01));
  r = mul_add(r, z, doubles(3.999999999940941908e-01));
  r = z * mul_add(r, z, doubles(6.666666666666735130e-01));
  const Doubles half_square = f * f * doubles(0.5);
  Doubles small = mul_add(k, doubles(1.90821492927058770002e-10), s * (half_square + r));
  small = half_square - small - f;
  return sub_mul(k, doubles(6.93147180369123816490e-01), small);
}

inline Int mixed(Int x) {  // Wellons' lowbias32
  x = bits_xor(x, shift_right(x, 16));
  x = mul(x, splat_int(0x7feb352d));
  x = bits_xor(x, shift_right(x, 15));
  x = mul(x, splat_int(int(0x846ca68bu)));
  return bits_xor(x, shift_right(x, 16));
}

// Columns first .. first + count of key's noise; out is written up to the next multiple of 16.
void exponential(int64_t key, int first, int count, float* out) {
  const Int start = splat_int(int(uint64_t(key)));
  const Int increment = splat_int(int(uint64_t(key) >> 32 | 1));
  auto of = [](Doubles x) {  // v = 1 - (x + 0.5) / 2^32, exactly
    const Doubles v = doubles(4294967295.5) - x;
    return minus_log(v * doubles(0x1p-32));
  };
  for (int j = 0; j < count; j += 16) {
    const Int column = add(splat_int(first + j), lane_numbers());
    const Int x = mixed(add(mul(column, increment), start));
    store_floats(out + j, of(low_doubles(x)));
    store_floats(out + j + 8, of(high_doubles(x)));
  }
}
