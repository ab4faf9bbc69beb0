// What becomes of a product: sums of a tile of rows x panels -> bias, residual, scale, softcap, activation, store, best.
// Whatever computed the sums, they pass through here: one formula for all (a quotient rounds otherwise on AVX2). Included by isa_table.h.

// Exact int32 sums -> floats. The one formula for all integer products.
inline Vec dequantised(Int sums, Vec weight_scales, float row_scale) {
  return to_floats(sums) * weight_scales * splat(row_scale);
}

// The best of a row's columns in each lane: no lane has to be compared with another while columns come in, in ascending order.
struct LaneBests {
  float values[kPanel];
  float poison[kPanel];
  int32_t columns[kPanel];
};

inline void clear_bests(LaneBests* bests, int rows) {
  for (int r = 0; r < rows; ++r) {
    store(bests[r].values, splat(-__builtin_inff()));
    store(bests[r].poison, zero());
  }
}

// Of equals the lowest column, whichever of the two has it.
inline void take_bests(const LaneBests* bests, int rows, Best* to) {
  for (int r = 0; r < rows; ++r, ++bests, ++to) {
    const Vec values = load(bests->values);
    to->poison += sum_lanes(load(bests->poison));
    const float value = max_lanes(values);
    if (value < to->value || value == -__builtin_inff()) continue;
    const Mask equals = equal(values, splat(value));
    const int column = least_lane(equals, load_int(bests->columns));
    if (value > to->value || column < to->index) *to = {value, to->poison, column, 0};
  }
}

// The sums of a group of panels on their way out, some rows at a time. Pointers are to the first row and column; strides are of floats.
struct Finish {
  const Epilogue* e;
  const float* sums;
  int sum_stride;
  int first_row;
  int first_column, columns;   // of the result: those that exist
  const float* weight_scales;  // integer products: of the first panel, and ...
  const float* row_scales;     // ... of the first row
  const float* bias;           // of the first panel, or null
  LaneBests* bests;            // of the first row, or null
};

// Rows [from, end), counted from the first one.
using FinishRows = void (*)(const Finish&, int from, int end);

// How results are made, chosen once for all rows. The usual ones are known to the compiler: with all choices inside the loops
// a panel of 16 rows would spend an eighth of its time here.
struct PlainEnding {
  static constexpr bool kGated = false, kWhole = true, kAdds = true;
  static Vec function(const Epilogue&, Vec v) { return v; }
  static Vec gated(const Epilogue&, Vec v, Vec) { return v; }
  static Vec temper(const Epilogue&, Vec v) { return v; }
};
struct SwiGluEnding {
  static constexpr bool kGated = true, kWhole = true, kAdds = false;
  static Vec function(const Epilogue&, Vec v) { return v; }
  static Vec gated(const Epilogue&, Vec gate, Vec up) { return gated_of(Function::kSilu, gate, up); }
  static Vec temper(const Epilogue&, Vec v) { return v; }
};
template <bool kIsGated>
struct AnyEnding {
  static constexpr bool kGated = kIsGated, kWhole = false, kAdds = true;
  static Vec function(const Epilogue& e, Vec v) { return function_of(e.function, v); }
  static Vec gated(const Epilogue& e, Vec gate, Vec up) { return gated_of(e.function, gate, up); }
  static Vec temper(const Epilogue& e, Vec v) {
    if (e.scale != 1.0f) v = v * splat(e.scale);
    if (e.softcap != 0.0f) v = softcapped(v, splat(e.softcap));
    return v;
  }
};

template <bool kInteger, typename Ending>
__attribute__((noinline)) void finish_as(const Finish& of, int from, int end) {
  const Finish f = of;  // copies: the compiler would read both again behind every store
  const Epilogue e = *f.e;
  for (int r = from; r < end; ++r) {
    const int row = f.first_row + r, place = e.out_rows ? e.out_rows[row] : row;
    const float* const sums = f.sums + int64_t(r) * f.sum_stride;
    const float row_scale = kInteger ? f.row_scales[r] : 1.0f;
    const int first_sum = Ending::kGated ? 2 * f.first_column : f.first_column;
    const float* const residual = Ending::kAdds && e.residual ? e.residual + row * e.residual_stride + first_sum : nullptr;
    const int64_t at_row = place * e.out_stride + f.first_column;
    float* const out = e.out && place >= 0 ? e.out + at_row : nullptr;
    uint16_t* const narrow = e.narrow_out && place >= 0 ? e.narrow_out + at_row : nullptr;
    LaneBests* const bests = f.bests ? f.bests + r : nullptr;
    Vec greatest = zero(), poison = zero();
    Int at = zero_int();
    if (bests) {
      greatest = load(bests->values), poison = load(bests->poison);
      at = load_int(bests->columns);
    }
    for (int c = 0; c < f.columns; c += kPanel) {
      const int exist = Ending::kWhole ? kPanel : f.columns - c;
      const auto finished = [&](int at_sum) {
        Vec v = load(sums + at_sum);
        if (kInteger) v = dequantised(as_ints(v), load(f.weight_scales + at_sum), row_scale);
        if (f.bias) v = v + load(f.bias + at_sum);
        if (residual) v = v + load_some(residual + at_sum, exist);
        return Ending::temper(e, v);
      };
      const Vec v = Ending::kGated ? Ending::gated(e, finished(2 * c), finished(2 * c + kPanel)) : Ending::function(e, finished(c));
      if (out) store_some(out + c, v, exist);
      if (narrow) store_some(narrow + c, to_bf16(v), exist);
      if (!bests) continue;
      poison = mul_add(first_lanes(exist), v, zero(), poison);  // 0 but for NaN and the infinite
      const Mask better = greater(first_lanes(exist), v, greatest);  // a NaN never is
      greatest = select(better, v, greatest);
      at = add(better, splat_int(f.first_column + c), lane_numbers(), at);
    }
    if (!bests) continue;
    store(bests->values, greatest);
    store(bests->poison, poison);
    store_int(bests->columns, at);
  }
}

inline void finish_nothing(const Finish& /*f*/, int /*from*/, int /*end*/) {}

template <bool kInteger>
inline FinishRows finish_of(const Finish& f) {
  const Epilogue& e = *f.e;
  if (f.columns <= 0) return finish_nothing;
  const bool plain = e.scale == 1.0f && e.softcap == 0.0f && f.columns % kPanel == 0;
  if (e.gated) {
    return plain && e.function == Function::kSilu && !e.residual ? finish_as<kInteger, SwiGluEnding> : finish_as<kInteger, AnyEnding<true>>;
  }
  return plain && e.function == Function::kNone ? finish_as<kInteger, PlainEnding> : finish_as<kInteger, AnyEnding<false>>;
}

// What finishes rows of a group of panels.
struct GroupFinish {
  Finish of{};
  FinishRows rows = finish_nothing;

  void operator()(int from, int end) const { rows(of, from, end); }
};

// Of panels [first_panel, + num_panels), rows counted from first_row on. tile[r * tile_stride + 16 p] is the first sum of row first_row + r and
// panel first_panel + p: float32, or int32 for an integer weight (less the offset of unsigned operands). With e.gated first_panel and
// num_panels are even. bests: of these rows; unused without e.best.
inline GroupFinish finish_of_group(const PackedLinear& w, const PreparedRows& x, const Epilogue& e, int first_row, int first_panel,
                                   int num_panels, const float* tile, int tile_stride, LaneBests* bests) {
  const int parts = e.gated ? 2 : 1, column = first_panel * kPanel;
  const bool integer = is_integer(w.precision);
  const Finish of = {&e, tile, tile_stride, first_row, column / parts, min_of(num_panels * kPanel, e.outputs - column) / parts,
                     integer ? w.scales + column : nullptr, integer ? x.scales + first_row : nullptr, w.bias ? w.bias + column : nullptr,
                     e.best ? bests : nullptr};
  return {of, integer ? finish_of<true>(of) : finish_of<false>(of)};
}
