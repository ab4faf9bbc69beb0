#pragma once

#include <cstdint>

namespace foretoken {

// `keys` of kernels/noise.py for one place.
inline int64_t noise_key(int64_t stream, int64_t position) {
  uint64_t z = uint64_t(stream) + uint64_t(position) * 0x9e3779b97f4a7c15u;
  z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
  z = (z ^ z >> 27) * 0x94d049bb133111ebu;
  return int64_t(z ^ z >> 31);
}

}  // namespace foretoken
