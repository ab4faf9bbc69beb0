// bfloat16 weights times a few rows in vectors, to the bit what tiles make of them: a product of tiles sums even and odd inputs of 32 apart,
// from zero on, with fused multiply-adds, then adds the two sums, then that to the sum so far; denormals are zeros to it. Included by linear.h.
//
// A row or two take as long either way where a thread has its core to itself. But a core's other thread may be a neighbour's, who multiplies
// tiles, too: then one row takes a tenth to a sixth less in vectors (SmolLM2-135M's shape).

constexpr int kVectorRows = 2;

// Denormals are zeros.
class FlushedFloatMode {
 public:
  FlushedFloatMode() : saved_(_mm_getcsr()) { _mm_setcsr(saved_ | 0x8040); }
  ~FlushedFloatMode() { _mm_setcsr(saved_); }
  FlushedFloatMode(const FlushedFloatMode&) = delete;

 private:
  unsigned saved_;
};

template <int kRows>
inline void multiply_as_tiles(const Pass& pass) {
  const char* weights = pass.weights;
  const float* rows = reinterpret_cast<const float*>(pass.rows);
  const int64_t row_floats = pass.row_stride / int64_t(sizeof(float));
  Vec sums[kRows];
#pragma GCC unroll 2
  for (int r = 0; r < kRows; ++r) sums[r] = zero();
  for (int step = 0; step < pass.steps; ++step, weights += kTileBytes, rows += 32) {
    Vec even[kRows], odd[kRows];
#pragma GCC unroll 2
    for (int r = 0; r < kRows; ++r) even[r] = odd[r] = zero();
#pragma GCC unroll 16
    for (int pair = 0; pair < 16; ++pair) {
      const Int both = load_line(weights + pair * 64);
      prefetch_line(weights + kMiddleAhead + pair * 64);
      const Vec first = as_floats(shift_left(both, 16)), second = as_floats(bits_and(both, splat_int(int(0xffff0000))));
#pragma GCC unroll 2
      for (int r = 0; r < kRows; ++r) {
        even[r] = mul_add(splat(rows[r * row_floats + 2 * pair]), first, even[r]);
        odd[r] = mul_add(splat(rows[r * row_floats + 2 * pair + 1]), second, odd[r]);
      }
    }
#pragma GCC unroll 2
    for (int r = 0; r < kRows; ++r) sums[r] = sums[r] + (even[r] + odd[r]);
  }
#pragma GCC unroll 2
  for (int r = 0; r < kRows; ++r) store(pass.sums + r * pass.sum_stride, sums[r]);
}

struct AsTiles : WidenedRows {
  using Mode = FlushedFloatMode;
  static constexpr int kStepInputs = 32, kStepBytes = kTileBytes, kPassRows = kVectorRows, kFewestRows = 1, kSide = 1, kSideRows = kPassRows;
  static constexpr Multiply multiply[kVectorRows] = {multiply_as_tiles<1>, multiply_as_tiles<2>};
  static constexpr auto &multiply_alone = multiply, &multiply_side = multiply;
};
