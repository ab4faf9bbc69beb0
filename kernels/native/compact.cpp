#include "compact.h"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "pack.h"

namespace foretoken {
namespace {

constexpr int kBlockWeights = kRawBlock / 2, kCodes = 15;  // without 0's

int exponent_of(uint16_t weight) { return weight >> 7 & 255; }

PanelCodes codes_of(const uint16_t* packed, int32_t blocks) {
  int32_t frequency[256] = {}, others[256] = {};  // two counts: one alone would wait for itself
  const int64_t weights = int64_t(blocks) * kBlockWeights;
  for (int64_t i = 0; i < weights; i += 2) ++frequency[exponent_of(packed[i])], ++others[exponent_of(packed[i + 1])];
  for (int e = 0; e < 256; ++e) frequency[e] += others[e];
  PanelCodes codes{1, {}};
  int64_t most = -1;
  for (int first = 1; first + kCodes <= 256; ++first) {
    const int64_t covered = std::accumulate(frequency + first, frequency + first + kCodes, int64_t(0));
    if (covered > most) most = covered, codes.first = first;
  }
  for (int32_t block = 0; block < blocks; ++block, packed += kBlockWeights) {
    bool is_raw = false;
    for (int i = 0; i < kBlockWeights; ++i) {
      const int exponent = exponent_of(packed[i]);
      is_raw |= exponent && unsigned(exponent - codes.first) >= kCodes;
    }
    if (is_raw) codes.raw.push_back(block);
  }
  return codes;
}

// Runs of 8 weights: of the first two vectors by turns, then of the other two, whose codes are the upper ones. What a raw block gets here
// is not read.
void make_block(const uint16_t* weights, int first, uint8_t* out) {
  std::memset(out, 0, 64);
  for (int run = 0; run < 16; ++run) {
    const int half = run / 8, lane = run % 8 / 2, vector = 2 * half + run % 2;
    const uint16_t* const from = weights + vector * 32 + lane * 8;
    uint8_t* const packed = out + run % 8 * 8;
    uint8_t* const rest = out + 64 + run * 8;
    for (int i = 0; i < 8; ++i) {
      const int exponent = exponent_of(from[i]), code = exponent ? (exponent - first + 1) & 15 : 0;
      packed[i] = uint8_t(packed[i] | code << 4 * half);
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
    for (int code = 1; code <= kCodes; ++code) {
      head.high[code] = uint8_t((codes.first + code - 1) >> 1);
      head.low[code] = uint8_t((codes.first + code - 1) << 7);
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
      make_block(packed, codes.first, reinterpret_cast<uint8_t*>(out) + sizeof(head) + int64_t(block) * kCompactBlock);
    }
    out += panel_step * panel_bytes;
  }
}

}  // namespace foretoken
