// Ops on rows of floats that multiply by no matrix: RMSNorm, activations, softcap, the best of a row. Included by isa_table.h.

// ---- RMSNorm

// Squares summed in four interleaved runs: one order for every row, and no wait for each addition.
inline float inverse_rms(const float* x, int width, float eps) {
  Vec sums[4] = {zero(), zero(), zero(), zero()};
  int i = 0;
  for (; i + 64 <= width; i += 64) {
    for (int j = 0; j < 4; ++j) {
      const Vec v = load(x + i + 16 * j);
      sums[j] = _mm512_fmadd_ps(v, v, sums[j]);
    }
  }
  for (int j = 0; i < width; i += 16, ++j) {
    const Vec v = load_some(x + i, width - i);
    sums[j] = _mm512_fmadd_ps(v, v, sums[j]);
  }
  const float sum = sum_lanes(_mm512_add_ps(_mm512_add_ps(sums[0], sums[1]), _mm512_add_ps(sums[2], sums[3])));
  return 1.0f / __builtin_sqrtf(sum / float(width) + eps);
}

// Columns i .. i + 15 of a row, normalised; columns from width on are 0. Null weight = ones, null bias = none.
inline Vec normalised(const float* x, int i, int width, Vec inverse, const float* weight, const float* bias) {
  const int n = width - i;
  Vec v = _mm512_mul_ps(load_some(x + i, n), inverse);
  if (weight) v = _mm512_mul_ps(v, load_some(weight + i, n));
  if (bias) v = _mm512_add_ps(v, load_some(bias + i, n));
  return v;
}

inline void rms_norm(const float* x, int64_t x_stride, int width, const float* weight, const float* bias, float eps, float* out,
                     int64_t out_stride, int rows) {
  for (int r = 0; r < rows; ++r, x += x_stride, out += out_stride) {
    const Vec inverse = splat(inverse_rms(x, width, eps));
    for (int i = 0; i < width; i += 16) store_some(out + i, normalised(x, i, width, inverse, weight, bias), width - i);
  }
}

// ---- activations

// A quotient of polynomials; beyond 4 the error function is 1 in float.
inline Vec erf_of(Vec x) {
  x = _mm512_min_ps(splat(4.0f), _mm512_max_ps(splat(-4.0f), x));  // x second: a NaN is passed on
  const Vec s = _mm512_mul_ps(x, x);
  Vec p = splat(-2.72614225801306e-10f);
  p = _mm512_fmadd_ps(p, s, splat(2.77068142495902e-08f));
  p = _mm512_fmadd_ps(p, s, splat(-2.10102402082508e-06f));
  p = _mm512_fmadd_ps(p, s, splat(-5.69250639462346e-05f));
  p = _mm512_fmadd_ps(p, s, splat(-7.34990630326855e-04f));
  p = _mm512_fmadd_ps(p, s, splat(-2.95459980854025e-03f));
  p = _mm512_fmadd_ps(p, s, splat(-1.60960333262415e-02f));
  Vec q = splat(-1.45660718464996e-05f);
  q = _mm512_fmadd_ps(q, s, splat(-2.13374055278905e-04f));
  q = _mm512_fmadd_ps(q, s, splat(-1.68282697438203e-03f));
  q = _mm512_fmadd_ps(q, s, splat(-7.37332916720468e-03f));
  q = _mm512_fmadd_ps(q, s, splat(-1.42647390514189e-02f));
  return _mm512_div_ps(_mm512_mul_ps(x, p), q);
}

inline Vec function_of(Function function, Vec x) {
  const Vec one = splat(1.0f), half_x = _mm512_mul_ps(splat(0.5f), x);
  switch (function) {
    case Function::kNone:
      return x;
    case Function::kSilu:  // x / (1 + e^-x)
      return _mm512_div_ps(x, _mm512_add_ps(one, exp_of(_mm512_sub_ps(zero(), x))));
    case Function::kGelu:  // x / 2 (1 + erf(x / sqrt 2))
      return _mm512_mul_ps(half_x, _mm512_add_ps(one, erf_of(_mm512_mul_ps(x, splat(0.70710678f)))));
    case Function::kGeluTanh: {  // x / 2 (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))
      const Vec cube = _mm512_mul_ps(_mm512_mul_ps(x, x), x);
      const Vec inner = _mm512_mul_ps(splat(0.79788456f), _mm512_fmadd_ps(splat(0.044715f), cube, x));
      return _mm512_mul_ps(half_x, _mm512_add_ps(one, tanh_of(inner)));
    }
    case Function::kRelu:
      return _mm512_max_ps(zero(), x);  // x second: a NaN is passed on
  }
  return x;
}

inline Vec softcapped(Vec x, Vec cap) { return _mm512_mul_ps(cap, tanh_of(_mm512_div_ps(x, cap))); }

inline void activate(Function function, const float* gate, const float* up, float* out, int count) {
  for (int i = 0; i < count; i += 16) {
    Vec v = function_of(function, load_some(gate + i, count - i));
    if (up) v = _mm512_mul_ps(v, load_some(up + i, count - i));
    store_some(out + i, v, count - i);
  }
}

inline void softcap(float cap, const float* x, float* out, int count) {
  for (int i = 0; i < count; i += 16) store_some(out + i, softcapped(load_some(x + i, count - i), splat(cap)), count - i);
}

// ---- the best of a row

// Takes columns first .. first + count - 1 of a row into best: the greatest, the lowest index among equals. NaN is never greater.
inline void take_best(const float* x, int first, int count, Best* best) {
  const float lowest = -__builtin_inff();
  Vec greatest = splat(lowest), poison = zero();
  for (int i = 0; i < count; i += 16) {
    const Vec v = load_some(x + i, count - i);
    poison = _mm512_fmadd_ps(v, zero(), poison);  // 0 but for NaN and the infinite
    const Vec candidate = _mm512_mask_mov_ps(splat(lowest), first_lanes(count - i), v);
    greatest = _mm512_max_ps(candidate, greatest);  // of a NaN and another, the second operand
  }
  best->poison += sum_lanes(poison);
  const float value = max_lanes(greatest);
  if (value < best->value) return;
  for (int i = 0; i < count; i += 16) {
    const __mmask16 equal = _mm512_mask_cmp_ps_mask(first_lanes(count - i), load_some(x + i, count - i), splat(value), _CMP_EQ_OQ);
    if (!equal) continue;
    const int index = first + i + __builtin_ctz(equal);
    if (value > best->value || index < best->index) *best = {value, best->poison, index, 0};
    return;
  }
}

inline int best_panels(const float* x, int count, int most, int32_t* panels) {
  constexpr int kMost = 64;
  float least_first[kMost];  // greatest values of the panels taken, in ascending order
  most = most < kMost ? most : kMost;
  int taken = 0;
  for (int i = 0; i < count; i += kPanel) {
    const Vec values = _mm512_mask_mov_ps(splat(-__builtin_inff()), first_lanes(count - i), load_some(x + i, count - i));
    const float greatest = max_lanes(_mm512_max_ps(values, splat(-__builtin_inff())));  // of a NaN and another, the second operand
    if (taken == most && !(greatest > least_first[0])) continue;
    int at = taken == most ? 1 : taken;  // the least of them goes
    if (taken == most) {
      for (; at < most && least_first[at] < greatest; ++at) {
        least_first[at - 1] = least_first[at];
        panels[at - 1] = panels[at];
      }
      --at;
    } else {
      for (; at > 0 && least_first[at - 1] >= greatest; --at) {
        least_first[at] = least_first[at - 1];
        panels[at] = panels[at - 1];
      }
      ++taken;
    }
    least_first[at] = greatest;
    panels[at] = i / kPanel;
  }
  return taken;
}

inline void best_of_row(const float* x, int count, Best* best, float* probability) {
  *best = {-__builtin_inff(), 0.0f, 0, 0};
  take_best(x, 0, count, best);
  if (!probability) return;
  Vec sum = zero();
  for (int i = 0; i < count; i += 16) {
    const Vec e = exp_of(_mm512_sub_ps(load_some(x + i, count - i), splat(best->value)));
    sum = _mm512_mask_add_ps(sum, first_lanes(count - i), sum, e);
  }
  *probability = 1.0f / sum_lanes(sum);
}
