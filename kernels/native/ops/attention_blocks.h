// Blocks of the cache's layout made for one tree token: the places that it sees, copied in logical order.

// Lanes of block `to` that come from one block `from`: lane i is lane index[i] of it, where `lanes` says so.
template <bool Bytes>
inline void take_keys(const char* from, char* to, int rows, Int index, Mask lanes) {
  for (int i = 0; i < rows; ++i) {
    if (Bytes) {  // 16 lanes of 2 bytes
      store_halves(to + i * 32, permuted(lanes, index, load_halves(from + i * 32), load_halves(to + i * 32)));
    } else {
      store_line(to + i * 64, permuted(lanes, index, load_line(from + i * 64), load_line(to + i * 64)));
    }
  }
}

// Half `odd` of each pair in `from` (bfloat16 or bytes, count lanes of 2 or 1 bytes) to half `to_odd` of the pairs in `to`.
template <bool Bytes>
inline void take_values(const char* from, int odd, char* to, int to_odd, int bytes) {
  for (int i = 0; i < bytes; i += 64) {
    Int x = load_line(from + i);
    if (Bytes) {
      if (odd != to_odd) x = shift_bytes(x, !odd);
      store_every_second(reinterpret_cast<uint8_t*>(to + i), to_odd, x);
    } else {
      if (odd != to_odd) x = odd ? shift_right(x, 16) : shift_left(x, 16);
      store_every_second(reinterpret_cast<uint16_t*>(to + i), to_odd, x);
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
  const Int index = load_line(lane_of);
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
      take_keys<true>(from, to, cache.k_pad / 2, index, lanes_of(lanes));
    } else {
      take_keys<false>(from, to, floats ? cache.k_pad : cache.k_pad / 2, index, lanes_of(lanes));
    }
    left &= ~lanes;
  }
}
