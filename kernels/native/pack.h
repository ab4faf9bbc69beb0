// Packing: a plain matrix [outputs, inputs] -> the order in which a PackedLinear is read, rounded or quantised on the way.
// Runs on any processor. Knows no files and no threads; calls for different panels may run at the same time.
#pragma once

#include <cstdint>

#include "kernels.h"

namespace foretoken {

// Rows of a matrix as a checkpoint holds them.
struct SourceRows {
  const void* data;
  Precision precision;          // kFloat32 or kBFloat16
  int32_t rows, width;
  int64_t stride;               // elements from row to row
};

// Bytes of a packed weight of these padded sizes.
int64_t packed_bytes(Precision precision, int32_t inputs, int32_t outputs);

// Rows 16 i .. 16 i + 15 become panel first_panel + i * panel_step of w (2: a gate, or what it gates). Whole panels are written,
// with zeros where there is no row and past source.width, and so are their scales and column sums.
void pack(const PackedLinear& w, const SourceRows& source, int32_t first_panel, int32_t panel_step);

}  // namespace foretoken
