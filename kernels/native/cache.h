// The paged cache of one layer: its geometry, and slots written, read and moved from outside a pass.
// Knows no rows and no attention; passes write their own slots (ops/rotate.h), in the same layout and with the same rounding.
#pragma once

#include "kernels.h"

namespace foretoken {

// The geometry for these dims over memory at base (null to ask for sizes only). k_dim and v_dim are at most kMaxHeadDim.
CacheLayer make_cache_layer(CacheType type, int kv_heads, int k_dim, int v_dim, char* base);

// Store k [n, kv_heads, k_dim] and v [n, kv_heads, v_dim] at slots [n]; slot -1 is written nowhere.
void cache_write(const CacheLayer& layer, const int64_t* slots, int n, const float* k, const float* v);
// The reverse; slots must exist.
void cache_gather(const CacheLayer& layer, const int64_t* slots, int n, float* k, float* v);
// Copy slots src [n] to dst [n] bit by bit, as if all were read before any is written.
void cache_move(const CacheLayer& layer, const int64_t* src, const int64_t* dst, int n);

}  // namespace foretoken
