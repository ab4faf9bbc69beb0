// The C ABI of the cache (KVTensors in Python) and of a lone attention op (tests).
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <numeric>
#include <random>
#include <vector>

#include "attention_plan.h"
#include "cache.h"
#include "cpu.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

using foretoken::AttentionOp;
using foretoken::AttentionPlan;
using foretoken::BatchView;
using foretoken::CacheType;
using foretoken::Kernels;

// A layer is named by its CacheType, kv heads, dims and, for its slots, the address of block 0, 64-byte aligned.

EXPORT int ft_cache_block_bytes(int type, int kv_heads, int k_dim, int v_dim) {
  return int(foretoken::make_cache_layer(CacheType(type), kv_heads, k_dim, v_dim, nullptr).block_bytes);
}

// k [n, kv_heads, k_dim] and v [n, kv_heads, v_dim] are float32; slot -1 is written nowhere.
EXPORT void ft_cache_write(int type, int kv_heads, int k_dim, int v_dim, char* base, int n, const int64_t* slots, const float* k,
                           const float* v) {
  foretoken::cache_write(foretoken::make_cache_layer(CacheType(type), kv_heads, k_dim, v_dim, base), slots, n, k, v);
}

EXPORT void ft_cache_gather(int type, int kv_heads, int k_dim, int v_dim, char* base, int n, const int64_t* slots, float* k, float* v) {
  foretoken::cache_gather(foretoken::make_cache_layer(CacheType(type), kv_heads, k_dim, v_dim, base), slots, n, k, v);
}

// As if all were read before any is written.
EXPORT void ft_cache_move(int type, int kv_heads, int k_dim, int v_dim, char* base, int n, const int64_t* src, const int64_t* dst) {
  foretoken::cache_move(foretoken::make_cache_layer(CacheType(type), kv_heads, k_dim, v_dim, base), src, dst, n);
}

// One attention op over a batch as `threads` threads would divide it, its units run here one by one, shuffled unless seed is 0.
// op->queries is not used. False if the instruction set does not run on this machine.
EXPORT bool ft_attention(int isa, const AttentionOp* op, const BatchView* batch, int threads, int seed) {
  const Kernels* kernels = foretoken::kernels_of(isa);
  if (!kernels) return false;
  AttentionOp own = *op;
  const foretoken::CacheLayer& cache = own.cache;
  AttentionPlan plan;
  if (own.num_heads) plan.build(*batch, own.num_heads / cache.kv_heads, cache.kv_heads, cache.k_dim + cache.v_dim, own.window, threads);
  std::vector<int> units(size_t(plan.num_units()));
  std::iota(units.begin(), units.end(), 0);
  if (seed) std::shuffle(units.begin(), units.end(), std::minstd_rand(unsigned(seed)));

  // All bits set: NaN to whoever reads memory that it has not written.
  auto memory = [](size_t bytes) {
    bytes = (bytes + 64) / 64 * 64;
    return std::unique_ptr<char, void (*)(void*)>(static_cast<char*>(std::memset(std::aligned_alloc(64, bytes), 0xff, bytes)), std::free);
  };
  const auto scratch = memory(foretoken::kAttentionScratch), partials = memory(plan.partial_floats(cache.v_dim) * sizeof(float));
  const auto queries = memory(size_t(batch->num_tokens + 15) / 16 * 16 * size_t(own.num_heads) * size_t(cache.k_pad) * sizeof(float));
  own.queries = queries.get();
  foretoken::CacheAhead nothing{};
  for (int token = 0; token < batch->num_tokens; ++token) {
    for (int head = 0; head < cache.kv_heads; ++head) kernels->rotate_and_write(own, *batch, token, head, nothing);
  }
  for (const int unit : units) {
    foretoken::CacheAhead ahead = plan.ahead_of(unit);
    plan.run(*kernels, own, *batch, unit, ahead, reinterpret_cast<float*>(partials.get()), scratch.get());
  }
  return true;
}
