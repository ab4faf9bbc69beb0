// Blocks of the cache's layout made for one tree token: the places that it sees, copied in logical order.

// Lanes of block `to` that come from one block `from`: lane i is lane index[i] of it, where `lanes` says so.
template <bool Bytes>
inline void take_keys(const char* from, char* to, int rows, Int index, __mmask16 lanes) {
  for (int i = 0; i < rows; ++i) {
    if (Bytes) {  // 16 lanes of 2 bytes
      auto* place = reinterpret_cast<__m256i*>(to + i * 32);
      const __m256i row = _mm256_load_si256(reinterpret_cast<const __m256i*>(from + i * 32));
      *place = _mm256_mask_permutexvar_epi16(*place, lanes, _mm512_cvtepi32_epi16(index), row);
    } else {
      const Int row = _mm512_load_si512(from + i * 64);
      _mm512_store_si512(to + i * 64, _mm512_mask_permutexvar_epi32(_mm512_load_si512(to + i * 64), lanes, index, row));
    }
  }
}

// Half `odd` of each pair in `from` (bfloat16 or bytes, count lanes of 2 or 1 bytes) to half `to_odd` of the pairs in `to`.
template <bool Bytes>
inline void take_values(const char* from, int odd, char* to, int to_odd, int bytes) {
  for (int i = 0; i < bytes; i += 64) {
    Int x = _mm512_load_si512(from + i);
    if (Bytes) {
      if (odd != to_odd) x = odd ? _mm512_srli_epi16(x, 8) : _mm512_slli_epi16(x, 8);
      _mm512_mask_storeu_epi8(to + i, to_odd ? 0xaaaaaaaaaaaaaaaaull : 0x5555555555555555ull, x);
    } else {
      if (odd != to_odd) x = odd ? _mm512_srli_epi32(x, 16) : _mm512_slli_epi32(x, 16);
      _mm512_mask_storeu_epi16(to + i, to_odd ? 0xaaaaaaaau : 0x55555555u, x);
    }
  }
}

// Logical places 16 * index .. + 15 of a token's row as one block at `to`. source[i] is the place in the cache of lane i, -1 = none:
// such lanes are left as they are, nobody sees them.
inline void gather_block(const AttentionOp& op, const BatchView& batch, int row, int kv_head, const int* source, char* to) {
  const CacheLayer& cache = op.cache;
  const bool bytes = cache.type == CacheType::kInt8, floats = cache.type == CacheType::kFloat32;
  const int element = floats ? 4 : bytes ? 1 : 2;
  const int64_t v_offset = int64_t(cache.k_pad) * kBlockSize * element, v_row = int64_t(cache.v_pad) * element * (floats ? 1 : 2);
  const int64_t scales = v_offset + int64_t(cache.v_pad) * kBlockSize * element;
  alignas(64) int lane_of[16];
  uint32_t left = 0;
  for (int i = 0; i < kBlockSize; ++i) {
    lane_of[i] = source[i] & (kBlockSize - 1);
    if (source[i] >= 0) left |= 1u << i;
  }
  const Int index = _mm512_load_si512(lane_of);
  while (left) {
    const int from_index = source[__builtin_ctz(left)] / kBlockSize;
    const char* from = cache_block(op, batch, row, kv_head, from_index);
    uint32_t lanes = 0;
    for (uint32_t rest = left; rest; rest &= rest - 1) {
      const int i = __builtin_ctz(rest);
      if (source[i] / kBlockSize != from_index) continue;
      lanes |= 1u << i;
      if (floats) {
        __builtin_memcpy(to + v_offset + i * v_row, from + v_offset + lane_of[i] * v_row, size_t(v_row));
        continue;
      }
      const char* pairs = from + v_offset + lane_of[i] / 2 * v_row;
      char* to_pairs = to + v_offset + i / 2 * v_row;
      if (bytes) {
        take_values<true>(pairs, lane_of[i] & 1, to_pairs, i & 1, int(v_row));
        for (int part = 0; part < 2; ++part) {
          const int64_t offset = scales + part * kBlockSize * 4;
          __builtin_memcpy(to + offset + i * 4, from + offset + lane_of[i] * 4, 4);
        }
      } else {
        take_values<false>(pairs, lane_of[i] & 1, to_pairs, i & 1, int(v_row));
      }
    }
    if (bytes) {
      take_keys<true>(from, to, cache.k_pad / 2, index, __mmask16(lanes));
    } else {
      take_keys<false>(from, to, floats ? cache.k_pad : cache.k_pad / 2, index, __mmask16(lanes));
    }
    left &= ~lanes;
  }
}
