// Fuzzes the linear layer on emulated AMX tiles (-DFT_EMULATE_TILES) against its definition, one multiplication after the other.
// Every array is as large as promised and no larger, so that a sanitizer sees a step outside; what lies behind the last row is poison.
//
// Prints "ok", or the shape of the first case with a bit that differs.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include <immintrin.h>

#include "kernels.h"

#define FT_BF16 1
#define FT_VNNI 1
#define FT_AMX 1

namespace foretoken {
namespace {

#include "simd.h"
#include "ops/elementwise.h"
#include "ops/tiles.h"
#include "ops/linear.h"

}  // namespace
}  // namespace foretoken

using namespace foretoken;

namespace {

std::mt19937 rng(1);
int random_int(int low, int high) { return std::uniform_int_distribution<int>(low, high)(rng); }
float random_float() { return std::uniform_real_distribution<float>(-1, 1)(rng); }

struct Free {
  void operator()(void* p) const { std::free(p); }
};
using Memory = std::unique_ptr<char, Free>;
Memory aligned(size_t bytes) {
  void* p = nullptr;
  if (posix_memalign(&p, 64, bytes)) std::abort();
  return Memory(static_cast<char*>(p));
}

uint16_t random_bfloat16(bool tiny) {  // tiny: products, and at times numbers themselves, are denormal
  const float value = std::ldexp(random_float(), !tiny ? random_int(-4, 4) : random_int(0, 9) ? random_int(-70, -60) : -127);
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return uint16_t(bits >> 16);
}

float flushed(float x) { return std::fpclassify(x) == FP_SUBNORMAL ? std::copysign(0.0f, x) : x; }

float from_bfloat16(uint16_t x) {
  const uint32_t bits = uint32_t(x) << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return flushed(value);
}

int tile_bytes(Precision precision) { return has_codes(precision) ? code_tile_bytes(precision) : 1024; }

struct Case {
  Precision precision;
  int rows, inputs, panels;
  Memory weights, data;
  int64_t stride;
  std::vector<float> scales, row_scales, bias;
  std::vector<int32_t> input_sums;  // as PreparedRows has them

  int outputs() const { return panels * kPanel; }
  bool bfloat16() const { return precision == Precision::kBFloat16; }
  int sums_a_row() const { return has_codes(precision) ? inputs / kGroup : 1; }
  PackedLinear packed() const { return {precision, inputs, outputs(), weights.get(), scales.data(), bias.data()}; }

  const void* input(int row, int k) const { return data.get() + row * stride + k * (bfloat16() ? 2 : 1); }
  uint16_t weight16(int n, int k) const {
    const int64_t tile = int64_t(n / 16) * (inputs / 32) + k / 32;
    return reinterpret_cast<const uint16_t*>(weights.get())[tile * 512 + k % 32 / 2 * 32 + n % 16 * 2 + k % 2];
  }
  int weight8(int n, int k) const {
    const int of_tile = input_multiple(precision), quad = k % of_tile / 4, lane = n % 16 * 4 + k % 4;
    const int64_t tile = int64_t(n / 16) * (inputs / of_tile) + k / of_tile;
    if (precision == Precision::kInt8) return reinterpret_cast<const int8_t*>(weights.get())[tile * 1024 + quad * 64 + lane];
    const uint8_t* packed = reinterpret_cast<const uint8_t*>(weights.get()) + tile * tile_bytes(precision);
    const int byte = packed[quad % 8 * 64 + lane], group = quad / 8, scale = packed[512 + group * 16 + n % 16];
    return scale * (precision == Precision::kInt4 ? (byte >> 4 * group & 15) - 8 : 2 * (byte >> 2 * group & 3) - 3);
  }
};

Case random_case(Precision precision, int rows, int tiles, int panels) {
  const bool tiny = random_int(0, 3) == 0;
  const int multiple = input_multiple(precision), bytes = tile_bytes(precision);
  const int64_t stride = tiles * multiple * (precision == Precision::kBFloat16 ? 2 : 1) + random_int(0, 1) * 64;
  Case c = {precision, rows, tiles * multiple, panels, aligned(size_t(panels) * tiles * bytes), nullptr, stride,
            {}, {}, {}, {}};
  const size_t values = size_t(panels) * tiles * bytes / (c.bfloat16() ? 2 : 1);
  for (size_t i = 0; i < values; i++) {
    if (c.bfloat16()) reinterpret_cast<uint16_t*>(c.weights.get())[i] = random_bfloat16(tiny);
    else c.weights.get()[i] = char(random_int(has_codes(precision) ? 0 : -127, has_codes(precision) ? 255 : 127));
  }
  if (has_codes(precision)) {
    for (int tile = 0; tile < panels * tiles; tile++) {
      for (int i = 512; i < bytes; i++) c.weights.get()[tile * bytes + i] = char(random_int(1, 16));
    }
  }
  c.data = aligned(size_t(rows) * c.stride);
  for (int r = 0; r < rows; r++) {
    for (int k = 0; k < c.inputs; k++) {
      if (c.bfloat16()) reinterpret_cast<uint16_t*>(c.data.get() + r * c.stride)[k] = random_bfloat16(tiny);
      else c.data.get()[r * c.stride + k] = char(random_int(-127, 127));
    }
  }
  for (int n = 0; n < c.outputs(); n++) {
    c.scales.push_back(random_float());
    c.bias.push_back(tiny ? 0.0f : random_float());
  }
  for (int r = 0; r < rows; r++) {
    c.row_scales.push_back(random_float());
    for (int k = 0; k < c.inputs && !c.bfloat16(); k++) {
      if (k % (c.inputs / c.sums_a_row()) == 0) c.input_sums.push_back(0);
      c.input_sums.back() += *static_cast<const int8_t*>(c.input(r, k));
    }
  }
  return c;
}

// TDPBF16PS by its definition, tile by tile: even and odd inputs summed apart, fused, then together, then added to the sum.
float dot_bfloat16(const Case& c, int row, int n) {
  float sum = 0;
  for (int tile = 0; tile < c.inputs; tile += 32) {
    float part[2] = {0, 0};
    for (int k = tile; k < tile + 32; k++) {
      const float x = from_bfloat16(*static_cast<const uint16_t*>(c.input(row, k))), w = from_bfloat16(c.weight16(n, k));
      part[k % 2] = flushed(std::fma(x, w, part[k % 2]));
    }
    sum = flushed(sum + flushed(part[0] + part[1]));
  }
  return sum;
}

float expected(const Case& c, int row, int n) {
  if (c.bfloat16()) return dot_bfloat16(c, row, n) + c.bias[n];
  int32_t sum = 0;
  for (int k = 0; k < c.inputs; k++) sum += *static_cast<const int8_t*>(c.input(row, k)) * c.weight8(n, k);
  return float(sum) * c.scales[n] * c.row_scales[row] + c.bias[n];
}

std::vector<float> run(const Case& c, int first_row, int rows, int first_panel, int panels) {
  std::vector<float> out(size_t(rows) * c.outputs(), 55.0f);
  const Memory scratch = aligned(kLinearScratch), data = aligned(size_t(rows + 15) / 16 * 16 * c.stride);
  std::memset(data.get(), 0xff, size_t(rows + 15) / 16 * 16 * c.stride);  // NaN, or -1, behind the last row
  std::memcpy(data.get(), c.data.get() + first_row * c.stride, size_t(rows) * c.stride);
  const int32_t* input_sums = c.bfloat16() ? nullptr : c.input_sums.data() + int64_t(first_row) * c.sums_a_row();
  const PackedLinear w = c.packed();
  const PreparedRows x = {data.get(), c.stride, c.row_scales.data() + first_row, input_sums, rows};
  Epilogue epilogue = {};
  epilogue.scale = 1;
  epilogue.outputs = epilogue.out_stride = c.outputs();
  epilogue.out = out.data();
  linear(w, x, epilogue, first_panel, panels, {}, scratch.get());
  return out;
}

bool same(float a, float b) { return std::memcmp(&a, &b, 4) == 0; }

bool check(const Case& c) {
  const std::vector<float> whole = run(c, 0, c.rows, 0, c.panels);
  for (int r = 0; r < c.rows; r++) {
    const bool all = r % 16 == 0 || r + 1 == c.rows;  // the definition is slow: of the other rows some outputs
    for (int n = all ? 0 : r % 7; n < c.outputs(); n += all ? 1 : 7) {
      if (!same(whole[size_t(r) * c.outputs() + n], expected(c, r, n))) return false;
    }
  }
  for (int trial = 0; trial < 4; trial++) {  // some rows from anywhere, some panels
    const int first = random_int(0, c.rows - 1), rows = random_int(1, c.rows - first);
    const int panel = random_int(0, c.panels - 1), panels = random_int(1, c.panels - panel);
    const std::vector<float> part = run(c, first, rows, panel, panels);
    for (int r = 0; r < rows; r++) {
      for (int n = 0; n < c.outputs(); n++) {
        const bool computed = n >= panel * kPanel && n < (panel + panels) * kPanel;
        const float wanted = computed ? whole[size_t(first + r) * c.outputs() + n] : 55.0f;
        if (!same(part[size_t(r) * c.outputs() + n], wanted)) return false;
      }
    }
  }
  return true;
}

}  // namespace

int main() {
  struct Shape {
    int rows, tiles, panels;
  };
  // every blocking: one row; all four panels; two row tiles; a last single one; sums kept over several strips; more than wait together
  std::vector<Shape> shapes = {{1, 9, 5}, {16, 17, 4}, {17, 17, 3}, {32, 33, 2}, {33, 17, 3}, {64, 18, 2}, {80, 3, 1}, {261, 1, 2}};
  for (int i = 0; i < 12; i++) shapes.push_back({random_int(1, 80), random_int(1, 12), random_int(1, 7)});
  for (const Precision precision : {Precision::kBFloat16, Precision::kInt8, Precision::kInt4, Precision::kInt2}) {
    for (const Shape& s : shapes) {
      if (check(random_case(precision, s.rows, s.tiles, s.panels))) continue;
      std::printf("precision %d: %d rows, %d tiles, %d panels differ\n", int(precision), s.rows, s.tiles, s.panels);
      return 1;
    }
  }
  std::puts("ok");
}
