// The C ABI of sampling. One thread does a call; places that depend on no common parent can be split among threads.
#include "cpu.h"
#include "kernels.h"
#include "sampling.h"

#include <cstdlib>

namespace foretoken {
namespace {

// Memory of the calling thread, which only grows.
class SampleScratch {
 public:
  ~SampleScratch() { std::free(memory_); }
  void* of(int vocab) {
    const size_t bytes = (sample_scratch_bytes(vocab) + 63) / 64 * 64;
    if (bytes > bytes_) {
      std::free(memory_);
      memory_ = std::aligned_alloc(64, bytes);
      bytes_ = memory_ ? bytes : 0;
    }
    return memory_;
  }

 private:
  void* memory_ = nullptr;
  size_t bytes_ = 0;
};

}  // namespace
}  // namespace foretoken

// tokens[i] of rows[i], i < count: see SampleRow. False: out of memory.
extern "C" __attribute__((visibility("default"))) bool ft_sample(const foretoken::SampleRow* rows, int count, int vocab, int64_t* tokens) {
  static thread_local foretoken::SampleScratch scratch;
  void* memory = scratch.of(vocab);
  if (memory) foretoken::best_kernels()->sample(rows, count, vocab, memory, tokens);
  return memory != nullptr;
}
