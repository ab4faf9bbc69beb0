#include "compact.h"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "pack.h"

namespace foretoken {
namespace {

constexpr int kBlockWeights = kRawBlock / 2, kCodes = 16;

int exponent_of(uint16_t weight) { return weight >> 7 & 255; }

PanelCodes codes_of(const uint16_t* packed, int32_t blocks) {
  int32_t frequency[4][256] = {};  // four counts: one alone would wait for itself
  for (int64_t i = 0; i < int64_t(blocks) * kBlockWeights; i += 4) {
    for (int j = 0; j < 4; ++j) ++frequency[j][exponent_of(packed[i + j])];
  }
  for (int e = 0; e < 256; ++e) frequency[0][e] += frequency[1][e] + frequency[2][e] + frequency[3][e];
  int order[255];  // 0 has a code of its own
  std::iota(order, order + 255, 1);
  std::stable_sort(order, order + 255, [&](int a, int b) { return frequency[0][a] > frequency[0][b]; });

  PanelCodes codes{};
  bool has_none[256];
  std::fill_n(has_none, 256, true);
  has_none[0] = false;
  for (int code = 1; code < kCodes; ++code) {
    const int exponent = codes.exponents[code] = order[code - 1];
    codes.codes[exponent] = uint8_t(code);
    has_none[exponent] = false;
  }
  for (int32_t block = 0; block < blocks; ++block, packed += kBlockWeights) {
    bool is_raw = false;
    for (int i = 0; i < kBlockWeights; ++i) is_raw |= has_none[exponent_of(packed[i])];
    if (is_raw) codes.raw.push_back(block);
  }
  return codes;
}

// Runs of 8 weights: of the first two vectors by turns, then of the other two, whose codes are the upper ones.
void make_block(const uint16_t* weights, const uint8_t (&codes)[256], uint8_t* out) {
  std::memset(out, 0, 64);
  for (int run = 0; run < 16; ++run) {
    const int half = run / 8, lane = run % 8 / 2, vector = 2 * half + run % 2;
    const uint16_t* const from = weights + vector * 32 + lane * 8;
    uint8_t* const packed = out + run % 8 * 8;
    uint8_t* const rest = out + 64 + run * 8;
    for (int i = 0; i < 8; ++i) {
      packed[i] = uint8_t(packed[i] | codes[exponent_of(from[i])] << 4 * half);
      rest[i] = uint8_t((from[i] >> 8 & 0x80) | (from[i] & 0x7f));
    }
  }
}

}  // namespace

Compaction::Compaction(const uint16_t* packed, int32_t inputs, int32_t count) : packed_(packed), inputs_(inputs) {
  panels_.reserve(size_t(count));
  for (int64_t panel = 0; panel < count; ++panel) panels_.push_back(codes_of(packed + panel * inputs * kPanel, inputs / kCompactInputs));
}

int64_t Compaction::raw_bytes() const {
  return std::accumulate(panels_.begin(), panels_.end(), int64_t(0), [](int64_t sum, const PanelCodes& codes) { return sum + codes.raw_bytes(); });
}

void Compaction::make(char* weights, int32_t first_panel, int32_t panel_step, char* raw) const {
  const int64_t panel_bytes = packed_bytes(Precision::kCompact, inputs_, kPanel);
  const uint16_t* packed = packed_;
  char* out = weights + first_panel * panel_bytes;
  for (const PanelCodes& codes : panels_) {
    CompactHead head{};
    for (int code = 0; code < kCodes; ++code) {
      head.high[code] = uint8_t(codes.exponents[code] >> 1);
      head.low[code] = uint8_t(codes.exponents[code] << 7);
    }
    auto* const numbers = reinterpret_cast<int32_t*>(raw);
    head.raw = numbers;
    head.num_raw = int32_t(codes.raw.size());
    char* const blocks = raw + raw_list_bytes(head.num_raw);
    std::fill(numbers, reinterpret_cast<int32_t*>(blocks), kNoBlock);
    for (int32_t i = 0; i < head.num_raw; ++i) {
      numbers[i] = codes.raw[size_t(i)];
      std::memcpy(blocks + int64_t(i) * kRawBlock, packed + int64_t(numbers[i]) * kBlockWeights, kRawBlock);
    }
    raw += codes.raw_bytes();

    std::memcpy(out, &head, sizeof(head));
    for (int32_t block = 0; block < inputs_ / kCompactInputs; ++block, packed += kBlockWeights) {
      make_block(packed, codes.codes, reinterpret_cast<uint8_t*>(out) + sizeof(head) + int64_t(block) * kCompactBlock);
    }
    out += panel_step * panel_bytes;
  }
}

}  // namespace foretoken
