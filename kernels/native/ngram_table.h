// What follows short runs of tokens: the table of kernels/ngram_table.py, read where it lies.
#pragma once
#include <algorithm>
#include <cstdint>

namespace foretoken {

// NativeTable of kernels/native_abi.py is its mirror.
struct NgramTable {
  static constexpr int kMostN = 8;

  const uint64_t* keys;      // ascending; each at the place that its first bits say, or behind it
  const int32_t* token_ids;  // -1 = an empty place; the last one is
  const float* chances;
  int32_t shift;
  int32_t max_n;             // at most kMostN; 0 = no table

  // Place of what follows the longest known run that the text ends with; -1 = it ends with none.
  int64_t find(const int32_t* text, int length) const {
    uint64_t key = 0;
    int64_t found = -1;
    for (int n = 1; n <= std::min(max_n, length); ++n) {
      key = (key ^ (uint64_t(uint32_t(text[length - n])) + 1)) * 0xD6E8FEB86659FD93u;
      key ^= key >> 32;
      int64_t place = int64_t(key >> shift);
      while (keys[place] < key && token_ids[place] >= 0) ++place;
      if (keys[place] == key && token_ids[place] >= 0) found = place;
    }
    return found;
  }
};

}  // namespace foretoken
