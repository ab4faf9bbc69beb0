// What sampling asks of an instruction set: the places where tokens are wanted, as plain data. Knows no requests.
#pragma once

#include <cstddef>
#include <cstdint>

namespace foretoken {

// One place where a token is wanted, and all that decides it; ROW in kernels/sampling.py is its mirror. In the order of
// application: allowed, banned, bias, penalties; then the best if temperature is 0, else temperature, top_k, top_p, min_p and chance.
struct SampleRow {
  const float* logits;          // [vocab], not changed
  const uint32_t* allowed;      // bit t % 32 of word t / 32: whether token t may be chosen; null = all may
  const int32_t* banned;        // [num_banned]; not applied if nothing else is allowed
  const int32_t* bias_ids;      // [num_bias] distinct
  const float* bias;            // [num_bias]
  const int32_t* seen;          // [num_seen] the distinct tokens of prompt and output; null = no penalties
  const float* counts;          // [num_seen] how often each is in the output
  const int32_t* path;          // [path_length] draft tokens before this place: penalties count them as output
  int64_t key;                  // of the noise
  double top_p;                 // 1 = off
  int32_t num_banned, num_bias, num_seen, path_length;
  int32_t parent;               // a place before this one in the same call, -1 = none: this place matters only if ...
  int32_t guess;                // ... the parent's token is this
  int32_t top_k;                // at least the vocabulary = off
  float temperature;            // 0 = greedy
  float log_min_p;              // -inf = off
  float repetition, frequency, presence;  // 1, 0, 0 = off
};
static_assert(sizeof(SampleRow) == 128, "kernels/sampling.py lays it out the same way");

constexpr int kRaceBlock = 128;  // token ids raced together in the second round (BLOCK in kernels/noise.py)

// Memory of one call, 64-byte aligned.
constexpr size_t sample_scratch_bytes(int vocab) {
  return 4 * (size_t(7) * (size_t(vocab) + 2 * kRaceBlock) + 2 * kRaceBlock);
}

}  // namespace foretoken
