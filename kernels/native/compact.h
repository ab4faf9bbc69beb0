// Packed bfloat16 -> compact panels (CompactHead of kernels.h), in less memory and without loss. Runs on any processor; calls for different
// panels may run at the same time.
//
// Weights of a network have few exponents: of normal numbers each next smaller one is half as frequent. That they take 11 bits without loss
// is known from DFloat11 (Zhang et al. 2025), whose Huffman codes are dear to read; codes of four bits are nearly as short, and two table
// lookups in registers undo them.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels.h"

namespace foretoken {

// Fifteen exponents of a panel in a row, those that most of its weights have, and the blocks that need others. 0 has a code of its own.
struct PanelCodes {
  int first;
  std::vector<int32_t> raw;

  int64_t raw_bytes() const { return raw_list_bytes(int64_t(raw.size())) + int64_t(raw.size()) * kRawBlock; }
};

// Panels of packed bfloat16, one behind the other, on their way.
class Compaction {
 public:
  Compaction(const uint16_t* packed, int32_t inputs, int32_t count);

  // Bytes that their raw blocks take, with their numbers.
  int64_t raw_bytes() const;
  // They become panels first_panel + i * panel_step from `weights` on. raw: raw_bytes, 64-byte aligned; they stay where they are.
  void make(char* weights, int32_t first_panel, int32_t panel_step, char* raw) const;

 private:
  const uint16_t* packed_;
  int32_t inputs_;
  std::vector<PanelCodes> panels_;
};

}  // namespace foretoken
