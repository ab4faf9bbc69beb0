// Rows of weights -> integers and their scales. Knows no memory layout but the codes within a byte (see kernels.h).
#pragma once

#include <cstdint>

namespace foretoken {

// values [count] -> out, within -127..127. Returns the scale: values[i] is about scale * out[i].
float quantise_int8(const float* values, int32_t count, int8_t* out);

// values [count, a multiple of 64] -> for every 64 of them 32 bytes in out (low nibbles the first 32, high nibbles the second) and
// 2 group scales of 1..16. Returns the scale: values[i] is about scale * group_scales[i / 32] * (nibble - 8).
float quantise_int4(const float* values, int32_t count, uint8_t* out, uint8_t* group_scales);

// values [count, a multiple of 128] -> for every 128 of them 32 bytes in out (the lowest two bits the first 32, the highest the last) and
// 4 group scales of 0..16. Returns the scale: values[i] is about scale * group_scales[i / 32] * (2 * code - 3).
float quantise_int2(const float* values, int32_t count, uint8_t* out, uint8_t* group_scales);

}  // namespace foretoken
