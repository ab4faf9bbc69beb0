// A block's values in the order in which a tree token sees its places.

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

// source[i] is the place in the cache of lane i of the block at `to`, -1 = none: 0.
template <class Lane>
inline void gather_values(const AttentionOp& op, const BatchView& batch, const AttentionTask& task, const Segment& s, const int* source, char* to) {
  __builtin_memset(to, 0, size_t(s.v_bytes));
  for (int i = 0; i < kBlockSize; ++i) {
    if (source[i] < 0) continue;
    const int lane = source[i] % kBlockSize;
    const char* const block = cache_block(op, batch, task.row, task.kv_head, source[i] / kBlockSize);
    const char* const from = block + s.k_bytes + lane / Lane::kPlaces * s.v_row;
    char* const row = to + i / Lane::kPlaces * s.v_row;
    if (Lane::kPlaces == 1 || (i % 2 == 0 && lane % 2 == 0 && source[i + 1] == source[i] + 1)) {
      __builtin_memcpy(row, from, size_t(s.v_row));
      i += Lane::kPlaces - 1;
    } else {
      take_values<Lane::kBytes == 2>(from, lane & 1, row, i & 1, int(s.v_row));
    }
  }
}
