#include "pack.h"

#include <cstring>
#include <vector>

#include "quantise.h"

namespace foretoken {
namespace {

// A row of a panel is a run of 4-byte words: a float, 2 bfloat16, 4 int8, 8 int4 or 16 int2 each.
int inputs_per_word(Precision precision) {
  constexpr int inputs[] = {1, 2, 4, 8, 16};  // compact panels are made of others
  return inputs[int(precision)];
}

uint16_t to_bfloat16(float value) {  // to nearest even; a NaN stays one
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  if ((bits & 0x7fffffff) > 0x7f800000) return uint16_t(bits >> 16 | 0x40);
  return uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

void read_floats(const SourceRows& source, int32_t row, float* out) {
  if (source.precision == Precision::kFloat32) {
    std::memcpy(out, static_cast<const float*>(source.data) + row * source.stride, size_t(source.width) * 4);
    return;
  }
  const uint16_t* values = static_cast<const uint16_t*>(source.data) + row * source.stride;
  for (int32_t k = 0; k < source.width; ++k) {
    const uint32_t bits = uint32_t(values[k]) << 16;
    std::memcpy(out + k, &bits, 4);
  }
}

// Panels of one weight, one at a time.
class PanelPacker {
 public:
  PanelPacker(const PackedLinear& w, const SourceRows& source)
      : w_(w),
        source_(source),
        words_(w.inputs / inputs_per_word(w.precision)),
        row_words_(words_ + 16),  // a stride of a power of two would put all rows in the same few cache lines
        rows_(size_t(row_words_) * kPanel),
        floats_(size_t(w.inputs)),
        group_scales_(has_codes(w.precision) ? size_t(w.inputs / kGroup) * kPanel : 0) {}

  // Rows first_row .. of the source, as many as there are up to 16, become panel `panel`.
  void pack(int32_t first_row, int64_t panel) {
    for (int lane = 0; lane < kPanel; ++lane) {
      const int32_t row = first_row + lane;
      if (row < source_.rows) {
        encode(row, lane, panel * kPanel + lane);
      } else {
        clear(lane, panel * kPanel + lane);
      }
    }
    char* out = static_cast<char*>(const_cast<void*>(w_.weights)) + panel * packed_bytes(w_.precision, w_.inputs, kPanel);
    if (!has_codes(w_.precision)) return interleave(0, words_, out);
    const int groups = groups_of_tile(w_.precision), tiles = w_.inputs / input_multiple(w_.precision);
    for (int tile = 0; tile < tiles; ++tile, out += code_tile_bytes(w_.precision)) {
      interleave(tile * 8, 8, out);
      for (int i = 0; i < groups * kPanel; ++i) out[512 + i] = char(group_scales_of(i % kPanel)[tile * groups + i / kPanel]);
    }
  }

 private:
  uint32_t* row_of(int lane) { return rows_.data() + size_t(lane) * row_words_; }
  uint8_t* group_scales_of(int lane) { return group_scales_.data() + size_t(lane) * (w_.inputs / kGroup); }
  float* scale_of(int64_t output) { return const_cast<float*>(w_.scales) + output; }

  void encode(int32_t row, int lane, int64_t output) {
    uint32_t* words = row_of(lane);
    if (w_.precision == Precision::kBFloat16 && source_.precision == Precision::kBFloat16) {  // bits as they are
      const uint16_t* values = static_cast<const uint16_t*>(source_.data) + row * source_.stride;
      std::memset(words + source_.width / 2, 0, size_t(words_ - source_.width / 2) * 4);
      std::memcpy(words, values, size_t(source_.width) * 2);
      return;
    }
    read_floats(source_, row, floats_.data());  // past the width floats_ stays 0
    switch (w_.precision) {
      case Precision::kFloat32:
        std::memcpy(words, floats_.data(), size_t(words_) * 4);
        break;
      case Precision::kBFloat16:
        for (int i = 0; i < words_; ++i) words[i] = to_bfloat16(floats_[2 * i]) | uint32_t(to_bfloat16(floats_[2 * i + 1])) << 16;
        break;
      case Precision::kInt8:
        *scale_of(output) = quantise_int8(floats_.data(), w_.inputs, reinterpret_cast<int8_t*>(words));
        break;
      case Precision::kInt4:
        *scale_of(output) = quantise_int4(floats_.data(), w_.inputs, reinterpret_cast<uint8_t*>(words), group_scales_of(lane));
        break;
      case Precision::kInt2:
        *scale_of(output) = quantise_int2(floats_.data(), w_.inputs, reinterpret_cast<uint8_t*>(words), group_scales_of(lane));
        break;
      case Precision::kCompact:
        break;  // made of bfloat16: compact.h
    }
  }

  // An output that does not exist: its scale of 0 makes its results exactly 0.
  void clear(int lane, int64_t output) {
    std::memset(row_of(lane), 0, size_t(words_) * 4);
    if (w_.scales) *scale_of(output) = 0.0f;
    if (has_codes(w_.precision)) std::memset(group_scales_of(lane), 0, size_t(w_.inputs / kGroup));
  }

  // Words first .. first + count - 1 of all rows, side by side.
  void interleave(int first, int count, char* out) {
    const uint32_t* in = rows_.data() + first;
    for (int i = 0; i < count; ++i, out += kPanel * 4) {
      uint32_t line[kPanel];
      for (int lane = 0; lane < kPanel; ++lane) line[lane] = in[size_t(lane) * row_words_ + i];
      std::memcpy(out, line, sizeof(line));
    }
  }

  const PackedLinear& w_;
  const SourceRows& source_;
  const int words_, row_words_;
  std::vector<uint32_t> rows_;          // [16][row_words_]
  std::vector<float> floats_;           // [inputs]
  std::vector<uint8_t> group_scales_;   // [16][inputs / kGroup]
};

}  // namespace

int64_t packed_bytes(Precision precision, int32_t inputs, int32_t outputs) {
  if (precision == Precision::kCompact) return int64_t(sizeof(CompactHead) + inputs / kCompactInputs * kCompactBlock) * (outputs / kPanel);
  if (has_codes(precision)) return int64_t(inputs / input_multiple(precision)) * code_tile_bytes(precision) * (outputs / kPanel);
  return int64_t(inputs) * outputs * 4 / inputs_per_word(precision);
}

void pack(const PackedLinear& w, const SourceRows& source, int32_t first_panel, int32_t panel_step) {
  PanelPacker packer(w, source);
  int64_t panel = first_panel;
  for (int32_t row = 0; row < source.rows; row += kPanel, panel += panel_step) packer.pack(row, panel);
}

}  // namespace foretoken
