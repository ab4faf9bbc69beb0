// Reading texts of token ids, which takes less than keeping an index of them.
#include <algorithm>
#include <cstdint>

namespace {

constexpr int kRun = 64;  // tokens compared without asking in between: in vectors

}  // namespace

#define EXPORT extern "C" __attribute__((visibility("default")))

// Whether the last n tokens, at least one, stand before the text's end, too. The nearest places come first: who repeats himself has
// often just done so.
EXPORT bool ft_ends_with_repeat(const int32_t* text, int32_t length, int32_t n) {
  const int32_t last = length ? text[length - 1] : 0;
  for (int end = length - 1; end >= n;) {  // places from here on are done
    const int begin = std::max(end - kRun, n - 1);
    int same = 0;
    for (int place = begin; place < end; ++place) same += text[place] == last;
    for (int place = end - 1; same && place >= begin; --place) {
      if (text[place] != last) continue;
      --same;
      if (std::equal(text + place + 1 - n, text + place, text + length - n)) return true;
    }
    end = begin;
  }
  return false;
}

// found[i]: of texts[i], which has lengths[i] tokens.
EXPORT void ft_end_with_repeats(const int32_t* const* texts, const int32_t* lengths, int32_t count, int32_t n, uint8_t* found) {
  for (int i = 0; i < count; ++i) found[i] = ft_ends_with_repeat(texts[i], lengths[i], n);
}
