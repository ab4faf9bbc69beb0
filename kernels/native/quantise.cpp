#include "quantise.h"

#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "kernels.h"

namespace foretoken {
namespace {

constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it leaves a float's nearest integer in the lowest bits

int32_t to_integer(float value) {  // to nearest even, |value| < 2^22; unlike lrint, compilers vectorise it everywhere
  const float shifted = value + kRound;
  int32_t bits;
  std::memcpy(&bits, &shifted, 4);
  return bits - 0x4b400000;
}

// The greatest absolute value; NaN if a value is not finite. Compared as integers, which floats without their sign also order.
float bound_of(const float* values, int32_t count) {
  int32_t greatest = 0;
  for (int32_t i = 0; i < count; ++i) {
    int32_t bits;
    std::memcpy(&bits, values + i, 4);
    bits &= 0x7fffffff;
    greatest = bits > greatest ? bits : greatest;
  }
  float bound;
  std::memcpy(&bound, &greatest, 4);
  return std::isfinite(bound) ? bound : std::numeric_limits<float>::quiet_NaN();
}

constexpr float kSmallest = 1e-30f;  // a row of less is zeros: dividing by its scale would overflow

// Four values at a time: with every accumulation in four lanes, sums vectorise without leave to reorder them.
typedef float Float4 __attribute__((vector_size(16)));

Float4 load4(const float* p) {
  Float4 v;
  std::memcpy(&v, p, 16);
  return v;
}
float sum4(Float4 v) { return (v[0] + v[2]) + (v[1] + v[3]); }
Float4 nibble4(Float4 v) {  // nearest of -8..7
  v = v > 7.0f ? Float4{7, 7, 7, 7} : v;
  v = v < -8.0f ? Float4{-8, -8, -8, -8} : v;
  return (v + kRound) - kRound;
}

Float4 size4(Float4 v) { return v < 0.0f ? -v : v; }
Float4 odd4(Float4 size, float step) {  // the nearer of 1 and 3
  return size < 2.0f * step ? Float4{1, 1, 1, 1} : Float4{3, 3, 3, 3};
}

float squared_error(const float* group, float step) {
  const float inverse = 1.0f / step;
  Float4 error = {};
  for (int i = 0; i < kGroup; i += 4) {
    const Float4 v = load4(group + i), d = v - nibble4(v * inverse) * step;
    error += d * d;
  }
  return sum4(error);
}

// Largest step worth trying: no value is clipped.
float widest_step(const float* group) {
  float least = 0.0f, greatest = 0.0f;
  for (int i = 0; i < kGroup; ++i) {
    least = group[i] < least ? group[i] : least;
    greatest = group[i] > greatest ? group[i] : greatest;
  }
  return std::fmax(greatest / 7.5f, -least / 8.5f);  // the outermost values round inwards
}

// The best group scale for this scale: from what clips nothing down to where clipping costs more than finer steps gain.
uint8_t choose_group_scale(const float* group, float widest, float scale) {
  const int most = int(std::fmin(16.0f, std::fmax(1.0f, std::ceil(widest / scale))));
  const int least = int(std::fmax(1.0f, std::floor(0.7f * widest / scale)));
  int best = most;
  float least_error = std::numeric_limits<float>::max();
  for (int candidate = most; candidate >= least; --candidate) {
    const float error = squared_error(group, scale * float(candidate));
    if (error < least_error) least_error = error, best = candidate;
  }
  return uint8_t(best);
}

}  // namespace

float quantise_int8(const float* values, int32_t count, int8_t* out) {
  const float bound = bound_of(values, count);
  const float inverse = bound > kSmallest ? 127.0f / bound : 0.0f;
  if (inverse == 0.0f) {
    std::memset(out, 0, size_t(count));
  } else {
    for (int32_t i = 0; i < count; ++i) out[i] = int8_t(to_integer(values[i] * inverse));
  }
  return inverse == 0.0f && bound == bound ? 0.0f : bound / 127.0f;
}

float quantise_int4(const float* values, int32_t count, uint8_t* out, uint8_t* group_scales) {
  const int32_t groups = count / kGroup;
  std::memset(out, 0x88, size_t(count) / 2);
  std::memset(group_scales, 1, size_t(groups));
  const float bound = bound_of(values, count);
  if (!(bound > kSmallest)) return bound == bound ? 0.0f : bound;

  // 1. The scale: a sixteenth of the step of the widest group. Then the groups' own.
  std::vector<float> widest(static_cast<size_t>(groups));
  float scale = 0.0f;
  for (int32_t g = 0; g < groups; ++g) {
    widest[size_t(g)] = widest_step(values + g * kGroup);
    scale = std::fmax(scale, widest[size_t(g)] / 16.0f);
  }
  for (int32_t g = 0; g < groups; ++g) group_scales[g] = choose_group_scale(values + g * kGroup, widest[size_t(g)], scale);

  // 2. The nibbles, and with them fixed the scale of least squares.
  float products = 0.0f, squares = 0.0f;
  for (int32_t g = 0; g < groups; ++g) {
    const float* group = values + g * kGroup;
    const float inverse = 1.0f / (scale * float(group_scales[g]));
    Float4 group_products = {}, group_squares = {};
    uint8_t* bytes = out + g / 2 * kGroup;
    for (int i = 0; i < kGroup; i += 4) {
      const Float4 v = load4(group + i), q = nibble4(v * inverse);
      group_products += v * q;
      group_squares += q * q;
      for (int j = 0; j < 4; ++j) {
        const int nibble = int(q[j]) + 8;
        bytes[i + j] = g % 2 ? uint8_t((bytes[i + j] & 0x0f) | nibble << 4) : uint8_t((bytes[i + j] & 0xf0) | nibble);
      }
    }
    products += float(group_scales[g]) * sum4(group_products);
    squares += float(group_scales[g]) * float(group_scales[g]) * sum4(group_squares);
  }
  return squares > 0.0f ? products / squares : scale;
}

float quantise_int2(const float* values, int32_t count, uint8_t* out, uint8_t* group_scales) {
  const int32_t groups = count / kGroup;
  std::memset(out, 0, size_t(count) / 4);
  std::memset(group_scales, 0, size_t(groups));
  const float bound = bound_of(values, count);
  if (!(bound > kSmallest)) return bound == bound ? 0.0f : bound;

  // 1. Each group's own step: levels are 1 and 3 of it, and a few turns of assigning levels and fitting the step to them settle both
  //    (Lloyd 1982). Then a scale of which sixteen are the widest group's.
  std::vector<float> steps(static_cast<size_t>(groups));
  float scale = 0.0f;
  for (int32_t g = 0; g < groups; ++g) {
    const float* const group = values + g * kGroup;
    float step = 0.0f;
    for (int turn = 0; turn < 4; ++turn) {
      Float4 products = {}, squares = {};
      for (int i = 0; i < kGroup; i += 4) {
        const Float4 v = size4(load4(group + i)), level = turn ? odd4(v, step) : Float4{1.6f, 1.6f, 1.6f, 1.6f};  // a normal spread's middle
        products += v * level;
        squares += level * level;
      }
      step = sum4(products) / sum4(squares);
    }
    steps[size_t(g)] = step;
    scale = std::fmax(scale, step / 16.0f);
  }
  if (scale == 0.0f) return 0.0f;

  // 2. The codes, and with them fixed the scale of least squares.
  float products = 0.0f, squares = 0.0f;
  for (int32_t g = 0; g < groups; ++g) {
    const float* const group = values + g * kGroup;
    const auto units = float(to_integer(std::fmin(steps[size_t(g)] / scale, 16.0f)));  // of a NaN 16
    group_scales[g] = uint8_t(units);
    Float4 group_products = {}, group_squares = {};
    uint8_t* const bytes = out + g / 4 * kGroup;
    for (int i = 0; i < kGroup; i += 4) {
      const Float4 v = load4(group + i), level = odd4(size4(v), units * scale);
      group_products += size4(v) * level;
      group_squares += level * level;
      for (int j = 0; j < 4; ++j) {
        const int code = (3 + (v[j] < 0.0f ? -int(level[j]) : int(level[j]))) / 2;
        bytes[i + j] = uint8_t(bytes[i + j] | code << (2 * (g % 4)));
      }
    }
    products += units * sum4(group_products);
    squares += units * units * sum4(group_squares);
  }
  return squares > 0.0f ? products / squares : scale;
}

}  // namespace foretoken
