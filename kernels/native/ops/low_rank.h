// What an adapter adds to a product: (x @ down.T) @ up, for rows that have the same one. Included by isa_table.h.
//
// A row's sums are made in one order, whatever rows are beside it: along the inputs in each lane, then the lanes; along the ranks.

// Where nothing is added: it leaves every number as it is, -0 too.
constexpr float kNothing = -0.0f;

// Rows taken together, and the ranks or panels that they meet: as many sums as registers hold.
constexpr int kLowRankRows = FT_AVX2 ? 2 : 4, kLowRankSide = FT_AVX2 ? 2 : 4;

// Factors i .. i + n - 1; the other lanes are 0.
FT_INLINE Vec factors_at(const float* p, int n) { return load_some(p, n); }
FT_INLINE Vec factors_at(const uint16_t* p, int n) {
  if (n >= 16) return load_bf16(p);
  uint16_t some[16] = {};
  __builtin_memcpy(some, p, size_t(n) * sizeof(uint16_t));
  return load_bf16(some);
}

// Rows of factors into the core's own cache, if it is few rows of inputs that wait for them: pieces too short for the processor's prefetch.
inline void fetch_factors(const void* from, int count, int64_t stride, int64_t bytes, int rows) {
  const auto* at = static_cast<const char*>(from);
  for (int i = 0; i < count && rows < kLowRankRows; ++i, at += stride) {
    for (int64_t line = 0; line < bytes; line += 64) prefetch_line(at + line);
  }
}

// Leading rows of a weight's factors that count.
inline int rank_of(const LowRank& w, int weight, int slot) { return slot ? w.ranks[weight * w.num_slots + slot - 1] : 0; }

// sums[r][k] of row r of x and row k of down.
template <int kRows, int kRanks, typename T>
inline void multiply_down(const T* down, int inputs, const float* x, float* sums, int sums_stride) {
  Vec lanes[kRows][kRanks];
  for (int r = 0; r < kRows; ++r) {
    for (int k = 0; k < kRanks; ++k) lanes[r][k] = zero();
  }
  const auto add = [&](int i, int n) __attribute__((always_inline)) {
    Vec factors[kRanks];
#pragma GCC unroll 4
    for (int k = 0; k < kRanks; ++k) factors[k] = factors_at(down + int64_t(k) * inputs + i, n);
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      const Vec v = load_some(x + int64_t(r) * inputs + i, n);
#pragma GCC unroll 4
      for (int k = 0; k < kRanks; ++k) lanes[r][k] = mul_add(v, factors[k], lanes[r][k]);
    }
  };
  int i = 0;
  for (; i + 16 <= inputs; i += 16) add(i, 16);
  if (i < inputs) add(i, inputs - i);
  for (int r = 0; r < kRows; ++r) {
    for (int k = 0; k < kRanks; ++k) sums[r * sums_stride + k] = sum_lanes(lanes[r][k]);
  }
}

template <typename T>
inline void low_rank_down_as(const LowRank& w, int slot, const float* x, int rows, int first, int end, float* inner) {
  const int stride = w.num_weights * w.rank;
  for (int weight = 0; weight < w.num_weights; ++weight) {
    const int start = weight * w.rank, begin = max_of(first - start, 0), last = min_of(end - start, rank_of(w, weight, slot));
    if (begin >= last) continue;
    const T* const down = static_cast<const T*>(w.down) + int64_t(weight * w.num_slots + slot - 1) * w.rank * w.inputs;
    const int64_t row_bytes = w.inputs * int64_t(sizeof(T));
    fetch_factors(down + int64_t(begin) * w.inputs, last - begin, row_bytes, row_bytes, rows);
    for (int k = begin, side; k < last; k += side) {
      side = last - k >= kLowRankSide ? kLowRankSide : 1;
      const T* const from = down + int64_t(k) * w.inputs;
      for (int r = 0, tile; r < rows; r += tile) {
        tile = rows - r >= kLowRankRows ? kLowRankRows : 1;
        const auto multiply = tile > 1 ? (side > 1 ? multiply_down<kLowRankRows, kLowRankSide, T> : multiply_down<kLowRankRows, 1, T>)
                                       : (side > 1 ? multiply_down<1, kLowRankSide, T> : multiply_down<1, 1, T>);
        multiply(from, w.inputs, x + int64_t(r) * w.inputs, inner + int64_t(r) * stride + start + k, stride);
      }
    }
  }
}

inline void low_rank_down(const LowRank& w, int slot, const float* x, int rows, int first, int end, float* inner) {
  w.precision == Precision::kFloat32 ? low_rank_down_as<float>(w, slot, x, rows, first, end, inner)
                                     : low_rank_down_as<uint16_t>(w, slot, x, rows, first, end, inner);
}

// Some columns on their way out: of one weight, from a column that begins a panel of it.
struct UpColumns {
  int rank, up_stride, inner_stride, out_stride;
  int half;  // 0: columns stand in order; else how many gates there are
  int column;  // of the first, among those of all weights

  // Where the panel that begins at a column stands.
  int place(int panel) const {
    const int at = column + panel * kPanel;
    return half ? at % half * 2 + at / half * kPanel : at;
  }
};

// exist: columns of a lone panel; several are whole.
template <int kRows, int kPanels, typename T>
inline void multiply_up(const UpColumns& c, const T* up, const float* inner, const float* residual, int exist, float* out) {
  const int n = kPanels > 1 ? kPanel : exist;
  Vec sums[kRows][kPanels];
  for (int r = 0; r < kRows; ++r) {
    for (int p = 0; p < kPanels; ++p) sums[r][p] = splat(kNothing);
  }
  for (int k = 0; k < c.rank; ++k) {
    Vec factors[kPanels];
#pragma GCC unroll 4
    for (int p = 0; p < kPanels; ++p) factors[p] = factors_at(up + int64_t(k) * c.up_stride + p * kPanel, n);
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      const Vec v = splat(inner[r * c.inner_stride + k]);
#pragma GCC unroll 4
      for (int p = 0; p < kPanels; ++p) sums[r][p] = mul_add(v, factors[p], sums[r][p]);
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int p = 0; p < kPanels; ++p) {
      const int64_t row = int64_t(r) * c.out_stride;
      const Vec v = residual ? load_some(residual + row + c.column + p * kPanel, n) + sums[r][p] : sums[r][p];
      store_some(out + row + c.place(p), v, n);
    }
  }
}

template <typename T>
inline void low_rank_up_as(const LowRank& w, int slot, const float* inner, int rows, const float* residual, int first, int end, float* out) {
  UpColumns c = {};
  for (int weight = 0; weight < w.num_weights; ++weight) c.out_stride += w.outputs[weight];
  c.inner_stride = w.num_weights * w.rank;
  c.half = w.gated ? c.out_stride / 2 : 0;
  for (int weight = 0, start = 0; weight < w.num_weights; start += w.outputs[weight++]) {
    const int begin = max_of(first - start, 0), last = min_of(end - start, w.outputs[weight]);
    if (begin >= last) continue;
    c.rank = rank_of(w, weight, slot), c.up_stride = w.outputs[weight];
    const T* const up = static_cast<const T*>(w.ups[weight]) + int64_t(slot ? slot - 1 : 0) * w.rank * c.up_stride;
    fetch_factors(up + begin, c.rank, c.up_stride * int64_t(sizeof(T)), (last - begin) * int64_t(sizeof(T)), rows);
    for (int at = begin, side; at < last; at += side * kPanel) {
      side = last - at >= kLowRankSide * kPanel ? kLowRankSide : 1;
      c.column = start + at;
      for (int r = 0, tile; r < rows; r += tile) {
        tile = rows - r >= kLowRankRows ? kLowRankRows : 1;
        const auto multiply = tile > 1 ? (side > 1 ? multiply_up<kLowRankRows, kLowRankSide, T> : multiply_up<kLowRankRows, 1, T>)
                                       : (side > 1 ? multiply_up<1, kLowRankSide, T> : multiply_up<1, 1, T>);
        const int64_t row = int64_t(r) * c.out_stride;
        multiply(c, up + at, inner + int64_t(r) * c.inner_stride + weight * w.rank, residual ? residual + row : nullptr,
                 last - at, out + row);
      }
    }
  }
}

inline void low_rank_up(const LowRank& w, int slot, const float* inner, int rows, const float* residual, int first, int end, float* out) {
  w.precision == Precision::kFloat32 ? low_rank_up_as<float>(w, slot, inner, rows, residual, first, end, out)
                                     : low_rank_up_as<uint16_t>(w, slot, inner, rows, residual, first, end, out);
}
