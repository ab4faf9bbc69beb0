// Ops on rows of floats that multiply by no matrix: RMSNorm, activations, softcap, the best of a row. Included by isa_table.h.

// ---- RMSNorm

// Summed in four interleaved runs: one order for every row, and no wait for each addition. add(v, n, sum): the first n columns of v.
template <class Add>
inline float sum_of_row(const float* x, int width, Add&& add) {
  Vec sums[4] = {zero(), zero(), zero(), zero()};
  int i = 0;
  for (; i + 64 <= width; i += 64) {
    for (int j = 0; j < 4; ++j) sums[j] = add(load(x + i + 16 * j), 16, sums[j]);
  }
  for (int j = 0; i < width; i += 16, ++j) sums[j] = add(load_some(x + i, width - i), width - i, sums[j]);
  return sum_lanes(sums[0] + sums[1] + (sums[2] + sums[3]));
}

// (x - mean) * inverse: of an RMSNorm the mean is 0, of a layer norm the row's own.
struct Spread {
  Vec mean, inverse;
};

inline Spread spread_of(const float* x, int width, bool centred, float eps) {
  const auto inverse = [&](float squares) { return splat(1.0f / __builtin_sqrtf(squares / float(width) + eps)); };
  if (!centred) return {zero(), inverse(sum_of_row(x, width, [](Vec v, int, Vec sum) { return mul_add(v, v, sum); }))};
  const Vec mean = splat(sum_of_row(x, width, [](Vec v, int, Vec sum) { return v + sum; }) / float(width));
  return {mean, inverse(sum_of_row(x, width, [&](Vec v, int n, Vec sum) {
            v = only(first_lanes(n), v - mean);
            return mul_add(v, v, sum);
          }))};
}

// Columns i .. i + 15 of a row, normalised; columns from width on are 0. Null weight = ones, null bias = none.
inline Vec normalised(const float* x, int i, int width, const Spread& spread, const float* weight, const float* bias) {
  const int n = width - i;
  Vec v = only(first_lanes(n), load_some(x + i, n) - spread.mean) * spread.inverse;
  if (weight) v = v * load_some(weight + i, n);
  if (bias) v = v + load_some(bias + i, n);
  return v;
}

inline void rms_norm(const float* x, int64_t x_stride, int width, bool centred, const float* weight, const float* bias, float eps,
                     float* out, int64_t out_stride, int rows) {
  for (int r = 0; r < rows; ++r, x += x_stride, out += out_stride) {
    const Spread spread = spread_of(x, width, centred, eps);
    for (int i = 0; i < width; i += 16) store_some(out + i, normalised(x, i, width, spread, weight, bias), width - i);
  }
}

// ---- activations

// A quotient of polynomials; beyond 4 the error function is 1 in float.
inline Vec erf_of(Vec x) {
  x = min_of(splat(4.0f), max_of(splat(-4.0f), x));  // x second: a NaN is passed on
  const Vec s = x * x;
  Vec p = splat(-2.72614225801306e-10f);
  p = mul_add(p, s, splat(2.77068142495902e-08f));
  p = mul_add(p, s, splat(-2.10102402082508e-06f));
  p = mul_add(p, s, splat(-5.69250639462346e-05f));
  p = mul_add(p, s, splat(-7.34990630326855e-04f));
  p = mul_add(p, s, splat(-2.95459980854025e-03f));
  p = mul_add(p, s, splat(-1.60960333262415e-02f));
  Vec q = splat(-1.45660718464996e-05f);
  q = mul_add(q, s, splat(-2.13374055278905e-04f));
  q = mul_add(q, s, splat(-1.68282697438203e-03f));
  q = mul_add(q, s, splat(-7.37332916720468e-03f));
  q = mul_add(q, s, splat(-1.42647390514189e-02f));
  return x * p / q;
}

inline Vec function_of(Function function, Vec x) {
  const Vec one = splat(1.0f), half_x = splat(0.5f) * x;
  switch (function) {
    case Function::kNone:
      return x;
    case Function::kSilu:  // x / (1 + e^-x)
      return divided_by_one_and_exp(x, zero() - x);
    case Function::kGelu:  // x / 2 (1 + erf(x / sqrt 2))
      return half_x * (one + erf_of(x * splat(0.70710678f)));
    case Function::kGeluTanh: {  // x / 2 (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))
      const Vec cube = x * x * x;
      const Vec inner = splat(0.79788456f) * mul_add(splat(0.044715f), cube, x);
      return half_x * (one + tanh_of(inner));
    }
    case Function::kRelu:
      return max_of(zero(), x);  // x second: a NaN is passed on
    case Function::kRelu2: {
      const Vec kept = max_of(zero(), x);
      return kept * kept;
    }
    case Function::kSigmoid:
      return divided_by_one_and_exp(one, zero() - x);
    case Function::kClamped:
      break;
  }
  return x;
}

// function(gate) * up; kClamped (gpt-oss): gate * sigmoid(1.702 gate) * (up + 1) of what is clamped, where a NaN is passed on.
inline Vec gated_of(Function function, Vec gate, Vec up) {
  if (function != Function::kClamped) return function_of(function, gate) * up;
  const Vec one = splat(1.0f), limit = splat(7.0f);
  gate = min_of(limit, gate);
  up = min_of(limit, max_of(splat(-7.0f), up));
  return divided_by_one_and_exp(gate, splat(-1.702f) * gate) * (up + one);
}

inline Vec softcapped(Vec x, Vec cap) { return cap * tanh_of(x / cap); }

inline void activate(Function function, const float* gate, const float* up, float* out, int count) {
  for (int i = 0; i < count; i += 16) {
    const Vec v = load_some(gate + i, count - i);
    store_some(out + i, up ? gated_of(function, v, load_some(up + i, count - i)) : function_of(function, v), count - i);
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
    poison = mul_add(v, zero(), poison);  // 0 but for NaN and the infinite
    const Vec candidate = select(first_lanes(count - i), v, splat(lowest));
    greatest = max_of(candidate, greatest);  // of a NaN and another, the second operand
  }
  best->poison += sum_lanes(poison);
  const float value = max_lanes(greatest);
  if (value < best->value) return;
  for (int i = 0; i < count; i += 16) {
    const Mask found = equal(first_lanes(count - i), load_some(x + i, count - i), splat(value));
    if (!any(found)) continue;
    const int index = first + i + first_of(found);
    if (value > best->value || index < best->index) *best = {value, best->poison, index, 0};
    return;
  }
}

inline int best_panels(const float* x, int count, int most, int32_t* panels) {
  constexpr int kMost = 64;
  alignas(64) float negated[kMost];  // the greatest value of each panel taken, negated: the greatest of these is given up first
  for (int i = 0; i < kMost; i += 16) store(negated + i, splat(-__builtin_inff()));
  most = most < kMost ? most : kMost;
  int taken = 0;
  float least = -__builtin_inff();
  for (int i = 0; i < count; i += kPanel) {
    const Vec values = select(first_lanes(count - i), load_some(x + i, count - i), splat(-__builtin_inff()));
    if (taken == most && !any(greater(values, splat(least)))) continue;  // nearly always
    int at = taken;
    if (taken == most) {
      at = -1;
      for (int first = 0; first < most; first += 16) {
        if (!any(equal(first_lanes(most - first), load(negated + first), splat(-least)))) continue;
        for (int j = first; j < min_of(first + 16, most); ++j) {
          if (-negated[j] == least && (at < 0 || panels[j] > panels[at])) at = j;  // of equals the last
        }
      }
    } else {
      ++taken;
    }
    negated[at] = -max_lanes(max_of(values, splat(-__builtin_inff())));  // of a NaN and another, the second operand
    panels[at] = i / kPanel;
    if (taken < most) continue;
    Vec greatest = load(negated);
    for (int j = 16; j < kMost; j += 16) greatest = max_of(greatest, load(negated + j));
    least = -max_lanes(greatest);
  }
  return taken;
}

inline void best_of_row(const float* x, int count, Best* best, float* probability) {
  *best = {-__builtin_inff(), 0.0f, 0, 0};
  take_best(x, 0, count, best);
  if (!probability) return;
  Vec sum = zero();
  for (int i = 0; i < count; i += 16) {
    const Vec e = exp_of(load_some(x + i, count - i) - splat(best->value));
    sum = add(first_lanes(count - i), e, sum);
  }
  *probability = 1.0f / sum_lanes(sum);
}
