// Rows of a packed weight as floats: the token embeddings of a model whose head is tied to them. Included by isa_table.h.

// One output of a packed weight; inputs are visited in their order in memory, a 4-byte word for each step.
struct PackedRow {
  const PackedLinear& w;
  const char* panel;
  int lane;

  PackedRow(const PackedLinear& weights, int64_t output, int64_t panel_bytes)
      : w(weights), panel(static_cast<const char*>(w.weights) + output / kPanel * panel_bytes), lane(int(output % kPanel)) {}

  const char* word(int64_t index) const { return panel + index * 64 + lane * 4; }
};

inline void unpack_float32(const PackedRow& row, int width, float scale, float* out) {
  for (int k = 0; k < width; ++k) {
    float value;
    __builtin_memcpy(&value, row.word(k), 4);
    out[k] = value * scale;
  }
}

inline void unpack_bfloat16(const PackedRow& row, int width, float scale, float* out) {
  for (int k = 0; k < width; ++k) {
    uint16_t value;
    __builtin_memcpy(&value, row.word(k / 2) + k % 2 * 2, 2);
    out[k] = from_bf16(value) * scale;
  }
}

inline void unpack_compact(const PackedLinear& w, int64_t output, int width, float scale, float* out) {
  const PackedRow row(w, output, int64_t(sizeof(CompactHead)) + int64_t(w.inputs / kCompactInputs) * kCompactBlock);
  const auto& head = *reinterpret_cast<const CompactHead*>(row.panel);
  const char* const raw = reinterpret_cast<const char*>(head.raw) + raw_list_bytes(head.num_raw);
  int next = 0;
  for (int k = 0; k < width; ++k) {
    const int block = k / kCompactInputs, vector = k % kCompactInputs / 2, number = row.lane * 2 + k % 2;
    while (head.raw[next] < block) ++next;
    uint16_t value;
    if (head.raw[next] == block) {
      __builtin_memcpy(&value, raw + int64_t(next) * kRawBlock + vector * 64 + number * 2, 2);
    } else {
      const char* const bytes = row.panel + sizeof(head) + int64_t(block) * kCompactBlock;
      const int at = number / 8 * 16 + vector % 2 * 8 + number % 8;
      const int code = uint8_t(bytes[at]) >> (vector < 2 ? 0 : 4) & 15, rest = uint8_t(bytes[64 + vector / 2 * 64 + at]);
      value = uint16_t(((rest & 0x80) | head.high[code]) << 8 | (rest & 0x7f) | head.low[code]);
    }
    out[k] = from_bf16(value) * scale;
  }
}

inline void unpack_int8(const PackedRow& row, int width, float scale, float* out) {
  for (int k = 0; k < width; ++k) out[k] = float(static_cast<signed char>(row.word(k / 4)[k % 4])) * scale;
}

template <typename Of>
inline void unpack_codes(const PackedLinear& w, int64_t output, int width, float scale, float* out) {
  const PackedRow row(w, output, int64_t(w.inputs / Of::kInputs) * Of::kTileBytes);
  for (int k = 0; k < width; ++k) {
    const char* tile = row.panel + int64_t(k / Of::kInputs) * Of::kTileBytes;
    const int group = k / kGroup % Of::kGroups, within = k % kGroup;
    const int byte = uint8_t(tile[within / 4 * 64 + row.lane * 4 + within % 4]);
    const int code = byte >> (group * Of::kBits) & ((1 << Of::kBits) - 1);
    const int group_scale = uint8_t(tile[512 + group * kPanel + row.lane]);
    out[k] = float(group_scale * ((code << Of::kDoublings) - Of::kLess)) * scale;
  }
}

inline void unpack_rows(const PackedLinear& w, const int64_t* ids, int count, int width, float scale, float* out,
                        int64_t out_stride) {
  for (int i = 0; i < count; ++i, out += out_stride) {
    switch (w.precision) {
      case Precision::kFloat32:
        unpack_float32(PackedRow(w, ids[i], int64_t(w.inputs) * 64), width, scale, out);
        break;
      case Precision::kBFloat16:
        unpack_bfloat16(PackedRow(w, ids[i], int64_t(w.inputs) * 32), width, scale, out);
        break;
      case Precision::kCompact:
        unpack_compact(w, ids[i], width, scale, out);
        break;
      case Precision::kInt8:
        unpack_int8(PackedRow(w, ids[i], int64_t(w.inputs) * 16), width, scale * w.scales[ids[i]], out);
        break;
      case Precision::kInt4:
        unpack_codes<Codes<Precision::kInt4>>(w, ids[i], width, scale * w.scales[ids[i]], out);
        break;
      case Precision::kInt2:
        unpack_codes<Codes<Precision::kInt2>>(w, ids[i], width, scale * w.scales[ids[i]], out);
        break;
    }
  }
}
