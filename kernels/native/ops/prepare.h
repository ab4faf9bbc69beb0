// Rows of floats -> the rows a packed weight of some precision multiplies, with a norm on the way. Included by isa_table.h.

// One row: 16 columns at a time as they enter the product, from width on 0.
template <bool kNormalise, bool kHasBias>
struct RowReader {
  const float* x;
  int width;
  Spread spread;
  const float* weight;
  const float* bias;

  Vec whole(int i) const {  // all 16 columns exist
    Vec v = load(x + i);
    if (kNormalise) v = (v - spread.mean) * spread.inverse;
    if (kNormalise && weight) v = v * load(weight + i);
    if (kNormalise && kHasBias) v = v + load(bias + i);
    return v;
  }
  Vec operator()(int i) const {
    if (i + 16 <= width) return whole(i);
    return kNormalise ? normalised(x, i, width, spread, weight, kHasBias ? bias : nullptr) : load_some(x + i, width - i);
  }
};

// The row's scale; *inverse is what to multiply by before rounding. A row with a NaN or an infinity gets the scale NaN, which
// every product of it inherits. (Neither the greatest nor whether all are finite depends on an order: four runs, none of which waits.)
template <class Row>
inline float scale_of(const Row& row, float* inverse) {
  Vec greatest[4] = {zero(), zero(), zero(), zero()}, poison[4] = {zero(), zero(), zero(), zero()};
  const auto take = [&](int run, Vec v) {
    greatest[run] = max_of(abs_of(v), greatest[run]);
    poison[run] = mul_add(v, zero(), poison[run]);
  };
  int i = 0;
  for (; i + 64 <= row.width; i += 64) {
#pragma GCC unroll 4
    for (int run = 0; run < 4; ++run) take(run, row.whole(i + 16 * run));
  }
  for (; i < row.width; i += 16) take(0, row(i));
  const auto fold = [](const Vec* v, auto&& with) { return with(with(v[0], v[1]), with(v[2], v[3])); };
  const float bound = max_lanes(fold(greatest, [](Vec a, Vec b) { return max_of(a, b); }));
  const float not_finite = sum_lanes(fold(poison, [](Vec a, Vec b) { return a + b; }));
  const bool usable = bound > 1e-30f && not_finite == 0.0f;  // else 127 / bound is not finite
  *inverse = usable ? 127.0f / bound : 0.0f;
  return (usable ? bound / 127.0f : 0.0f) + not_finite;
}

template <class Row>
inline void quantise_row(const Row& row, int inputs, float inverse, int8_t* out) {
  if (inverse == 0.0f) {  // a NaN times 0 would round to INT_MIN
    for (int i = 0; i < inputs; i += 16) store_bytes(out + i, narrow_bytes(zero_int()));
    return;
  }
  const Vec factor = splat(inverse);
  int i = 0;
  for (; i + 16 <= min_of(row.width, inputs); i += 16) store_bytes(out + i, narrow_bytes(to_ints(row.whole(i) * factor)));
  for (; i < inputs; i += 16) store_bytes(out + i, narrow_bytes(to_ints(row(i) * factor)));
}

inline int32_t sum_row(const int8_t* row, int inputs) {
  Int quads = zero_int();
  for (int i = 0; i < inputs; i += 64) quads = add(quads, sums_of_quads(row + i));
  return sum_lanes(quads);
}

inline void sum_groups(const int8_t* row, int inputs, int32_t* sums) {
  for (int i = 0; i < inputs; i += 64) {
    const Int quads = sums_of_quads(row + i);
    sums[i / kGroup] = sum_low_lanes(quads);
    sums[i / kGroup + 1] = sum_high_lanes(quads);
  }
}

template <bool kNormalise, bool kHasBias>
inline void prepare_as(const Prepare& p, int first, int count) {
  for (int r = first; r < first + count; ++r) {
    const float* x = p.x + r * p.x_stride;
    // the next row: half of it, or more, was written by other cores
    for (int i = 0; i < p.width && r + 1 < first + count; i += 16) fetch_line(x + p.x_stride + i);
    fetch_some(p.ahead, 32);
    char* out = static_cast<char*>(p.data) + r * p.stride;
    const Spread spread = kNormalise ? spread_of(x, p.width, p.centred, p.eps) : Spread{};
    const RowReader<kNormalise, kHasBias> row = {x, p.width, spread, p.norm_weight, p.norm_bias};
    switch (p.precision) {
      case Precision::kFloat32:
        for (int i = 0; i < p.inputs; i += 16) store_some(reinterpret_cast<float*>(out) + i, row(i), p.inputs - i);
        break;
      case Precision::kBFloat16:
      case Precision::kCompact:
        for (int i = 0; i < p.inputs; i += 16) store_bf16(reinterpret_cast<uint16_t*>(out) + i, row(i));
        break;
      case Precision::kInt8:
      case Precision::kInt4:
      case Precision::kInt2: {
        float to_integers;
        p.scales[r] = scale_of(row, &to_integers);
        quantise_row(row, p.inputs, to_integers, reinterpret_cast<int8_t*>(out));
        if (has_codes(p.precision)) {
          sum_groups(reinterpret_cast<int8_t*>(out), p.inputs, p.input_sums + int64_t(r) * (p.inputs / kGroup));
        } else if (!FT_AMX) {  // whose products take signed inputs
          p.input_sums[r] = sum_row(reinterpret_cast<int8_t*>(out), p.inputs);
        }
        break;
      }
    }
  }
}

inline void prepare(const Prepare& p, int first, int count) {
  if (!p.normalise) return prepare_as<false, false>(p, first, count);
  p.norm_bias ? prepare_as<true, true>(p, first, count) : prepare_as<true, false>(p, first, count);
}
