// Attention's two products over a bfloat16 cache on AMX tiles: a row of a tile is a query vector. A block holds keys and values in the
// order of the second operand. Keys are loaded from where they lie, past L1, where the scores must find room. Specialises what
// attention_products.h does with vectors.
//
// A tile takes 32 places, and a block has 16 of them: the values of two, one after the other, are copied below each other. Which two does not
// depend on what is seen, for a tile's sum is rounded before it is added to the others.
//
// A vector's result does not depend on which others share its tile, and blocks that it does not see add exact zeros: its weights
// there are 0. But 0 times infinity is NaN, so where blocks at the edges of what is seen hold such a value, each token has them by itself.

// Of two tiles of vectors: sums 0 and 1 of the first, 2 and 3 of the second, queries or weights 4 and 5, keys or values 6 and 7.
inline void begin_two(int vectors, int others) {
  TileShapes shapes;
  for (int i = 0; i < 2; ++i) {
    for (const int tile : {2 * i, 2 * i + 1, 4 + i}) shapes.set(tile, i ? others : vectors);
    shapes.set(6 + i, 16);
  }
  configure_tiles(shapes);
}
// Of one: sums 0-3, queries 4, weights 5, keys 6, values 7.
template <>
inline void begin_products<PairLane>(int vectors) {
  begin_two(vectors, vectors);
}
template <>
inline void end_products<PairLane>() {
  release_tiles();
}
template <>
inline void stay_awake<PairLane>() {
  dot_tiles_bf16<0, 4, 6>();  // of whatever they hold: sums begin at zero
}

template <int kCount, int kFirst = 0>
inline void zero_sum_tiles() {
  zero_tile<kFirst>();
  if constexpr (kFirst + 1 < kCount) zero_sum_tiles<kCount, kFirst + 1>();
}
template <int kCount, int kFirst = 0>
inline void load_sum_tiles(const float* from, int64_t stride) {
  load_tile<kFirst>(from + kFirst * 16, stride);
  if constexpr (kFirst + 1 < kCount) load_sum_tiles<kCount, kFirst + 1>(from, stride);
}
template <int kCount, int kFirst = 0>
inline void store_sum_tiles(float* to, int64_t stride) {
  store_tile<kFirst>(to + kFirst * 16, stride);
  if constexpr (kFirst + 1 < kCount) store_sum_tiles<kCount, kFirst + 1>(to, stride);
}

template <int kBlocks, int kFirst = 0>
inline void multiply_keys(const char* const* keys, int64_t at) {
  load_tile_past_l1<6>(keys[kFirst] + at, 64);
  dot_tiles_bf16<kFirst, 4, 6>();
  if constexpr (kFirst + 1 < kBlocks) multiply_keys<kBlocks, kFirst + 1>(keys, at);
}

template <int kBlocks>
inline void score_some(const char* q, int64_t q_stride, const char* const* keys, int64_t k_bytes, float* scores) {
  zero_sum_tiles<kBlocks>();
  for (int64_t at = 0; at < k_bytes; at += kTileBytes, q += 64) {
    load_tile<4>(q, q_stride);
    multiply_keys<kBlocks>(keys, at);
  }
  store_sum_tiles<kBlocks>(scores, kScoresRow * 4);
}

// Tile loads hardly wake the hardware's prefetchers: the keys of four blocks further on, and the values of this one.
inline void fetch_around(const Segment& s, int block, int fetched) {
  if (block + 4 < s.end && block + 4 >= fetched) {
    for (int64_t at = 0; at < s.k_bytes; at += 64) prefetch_line(s.keys[block + 4] + at);
  }
  for (int64_t at = 0; at < s.v_bytes && block >= fetched; at += 64) prefetch_line(s.values[block] + at);
}

template <>
inline void score_blocks<PairLane>(const char* q, int64_t q_stride, const Segment& s, int /*rows*/, int fetched, float* scores,
                                   NextLines& /*next*/) {
  int b = s.first;
  for (; b + 4 <= s.end; b += 4) {
    for (int i = b; i < b + 4; ++i) fetch_around(s, i, fetched);
    score_some<4>(q, q_stride, s.keys + b, s.k_bytes, scores + b * kBlockSize);
  }
  for (; b < s.end; ++b) score_some<1>(q, q_stride, s.keys + b, s.k_bytes, scores + b * kBlockSize);
}

template <>
constexpr bool kTakesTwo<PairLane> = true;

template <>
inline void score_two<PairLane>(const char* q0, const char* q1, int64_t q_stride, const Segment* s, int fetched, float* scores0, float* scores1) {
  begin_two(s[0].vectors, s[1].vectors);
  for (int b = s->first; b < s->end; b += 2) {
    const bool alone = b + 1 == s->end;
    fetch_around(*s, b, fetched);
    if (!alone) fetch_around(*s, b + 1, fetched);
    const char *key0 = s->keys[b], *key1 = s->keys[alone ? b : b + 1];
    zero_sum_tiles<4>();
    for (int64_t at = 0; at < s->k_bytes; at += kTileBytes) {
      load_tile<4>(q0 + at / 16, q_stride);
      load_tile_past_l1<6>(key0 + at, 64);
      dot_tiles_bf16<0, 4, 6>();
      load_tile<5>(q1 + at / 16, q_stride);
      dot_tiles_bf16<2, 5, 6>();
      if (alone) continue;
      load_tile_past_l1<7>(key1 + at, 64);
      dot_tiles_bf16<1, 4, 7>();
      dot_tiles_bf16<3, 5, 7>();
    }
    store_tile<0>(scores0 + b * kBlockSize, kScoresRow * 4);
    store_tile<2>(scores1 + b * kBlockSize, kScoresRow * 4);
    if (alone) break;
    store_tile<1>(scores0 + (b + 1) * kBlockSize, kScoresRow * 4);
    store_tile<3>(scores1 + (b + 1) * kBlockSize, kScoresRow * 4);
  }
}

inline bool is_finite_bf16(const char* p, int64_t bytes) {
  const Int exponent = _mm512_set1_epi16(0x7f80);
  __mmask32 found = 0;
  for (int64_t i = 0; i < bytes; i += 64) {
    found |= _mm512_cmpeq_epi16_mask(_mm512_and_si512(_mm512_load_si512(p + i), exponent), exponent);
  }
  return !found;
}

// Of blocks 2 * two and the next, so many columns: pairs of places as rows. What lies outside [first, end) is 0.
template <int kTiles>
inline void take_values_of_two(const Segment& s, int two, int64_t column, char* to) {
  for (int b = 2 * two; b < 2 * two + 2; ++b) {
    const bool is_there = b >= s.first && b < s.end;
    const char* from = is_there ? s.values[b] + column : nullptr;
    for (int r = 0; r < kBlockSize / 2; ++r, from += s.v_row, to += kTiles * 64) {
#pragma GCC unroll 4
      for (int i = 0; i < kTiles * 64; i += 64) _mm512_store_si512(to + i, is_there ? _mm512_load_si512(from + i) : _mm512_setzero_si512());
    }
  }
}

template <int kTiles, int kFirst = 0>
inline void multiply_values(const char* values) {
  load_tile<7>(values + kFirst * 64, kTiles * 64);
  dot_tiles_bf16<kFirst, 5, 7>();
  if constexpr (kFirst + 1 < kTiles) multiply_values<kTiles, kFirst + 1>(values);
}

// Two blocks of which each token takes what it sees, and nothing else whatever they hold.
template <int kTiles>
inline void weigh_token_by_token(const Segment& s, int two, const char* all) {
  constexpr int kColumns = kTiles * 16;
  alignas(64) char values[kBlockSize * kTiles * 64];
  alignas(64) float before[kTile * kColumns], with_token[kTile * kColumns], after[kTile * kColumns];
  store_sum_tiles<kTiles>(before, kColumns * 4);
  for (int t = 0; t < s.tokens; ++t) {
    for (int r = 0; r < kBlockSize; ++r) {
      const int place = 2 * (two * kBlockSize + r);
      const uint32_t keep = (place >= s.low[t] && place < s.high[t] ? 0xffffu : 0) |
                            (place + 1 >= s.low[t] && place + 1 < s.high[t] ? 0xffff0000u : 0);
      for (int i = r * kTiles * 64; i < (r + 1) * kTiles * 64; i += 64) {
        _mm512_store_si512(values + i, _mm512_and_si512(_mm512_load_si512(all + i), _mm512_set1_epi32(int(keep))));
      }
    }
    load_sum_tiles<kTiles>(before, kColumns * 4);
    multiply_values<kTiles>(values);
    store_sum_tiles<kTiles>(with_token, kColumns * 4);
    const int first = s.begin_of(t), count = s.end_of(t) - first;
    __builtin_memcpy(after + first * kColumns, with_token + first * kColumns, size_t(count) * kColumns * 4);
  }
  load_sum_tiles<kTiles>(after, kColumns * 4);
}

// kTiles * 16 columns, the first of them `column` bytes into a row of values. odd: blocks with a value that is not finite, seen by some.
template <int kTiles>
inline void weigh_columns(const char* weights, const Segment& s, uint32_t odd, int64_t column, float* sums, int64_t stride,
                          NextLines& next) {
  alignas(64) char values[2][kBlockSize * kTiles * 64];
  if (s.goes_on) {
    load_sum_tiles<kTiles>(sums + column / 4, stride * 4);
  } else {
    zero_sum_tiles<kTiles>();
  }
  for (int two = s.first / 2; 2 * two < s.end; ++two) {
    char* const of_two = values[two & 1];
    take_values_of_two<kTiles>(s, two, column, of_two);
    next.fetch();
    load_tile<5>(weights + two * 64, kWeightsRow);
    if (odd >> 2 * two & 3) {
      weigh_token_by_token<kTiles>(s, two, of_two);
    } else {
      multiply_values<kTiles>(of_two);
    }
  }
  store_sum_tiles<kTiles>(sums + column / 4, stride * 4);
}

// Blocks of the edges that hold a value that is not finite.
inline uint32_t odd_blocks(const Segment& s) {
  uint32_t odd = 0;
  for (int b = s.first; b < s.end; ++b) {
    const bool whole = b >= s.whole_first && b < s.whole_end;
    if (!whole && !is_finite_bf16(s.values[b], s.v_bytes)) odd |= 1u << b;
  }
  return odd;
}

// What is not seen of two blocks that somebody sees weighs nothing.
inline void clear_unseen(char* weights, const Segment& s) {
  for (int t = 0; t < s.tokens; ++t) {
    for (int i = s.begin_of(t); i < s.end_of(t); ++i) {
      char* row = weights + i * kWeightsRow;
      const auto clear = [row](int from, int to) {
        for (int b = from; b < to; ++b) _mm256_storeu_si256(reinterpret_cast<__m256i*>(row + b * 32), _mm256_setzero_si256());
      };
      const int first = s.first & ~1, end = (s.end + 1) & ~1;
      clear(first, min_of(s.first_block(t), end));
      clear(max_of(s.end_block(t), first), end);
    }
  }
}

template <>
inline void weigh_segment<PairLane>(const char* weights, const Segment& s, int /*v_dim*/, float* sums, int64_t stride,
                                    NextLines& next) {
  const uint32_t odd = odd_blocks(s);
  clear_unseen(const_cast<char*>(weights), s);
  int64_t column = 0;
  for (; column + 4 * 64 <= s.v_row; column += 4 * 64) weigh_columns<4>(weights, s, odd, column, sums, stride, next);
  for (; column < s.v_row; column += 2 * 64) weigh_columns<2>(weights, s, odd, column, sums, stride, next);  // v_pad is a multiple of 32
}

template <>
inline void weigh_two<PairLane>(float* scores0, float* scores1, const Segment* s, float* sums0, float* sums1, int64_t stride, NextLines& next) {
  char *const weights0 = reinterpret_cast<char*>(scores0), *const weights1 = reinterpret_cast<char*>(scores1);
  if (odd_blocks(*s)) {
    begin_products<PairLane>(s[0].vectors);
    weigh_segment<PairLane>(weights0, s[0], 0, sums0, stride, next);
    begin_products<PairLane>(s[1].vectors);
    weigh_segment<PairLane>(weights1, s[1], 0, sums1, stride, next);
    return;
  }
  clear_unseen(weights0, s[0]);
  clear_unseen(weights1, s[1]);
  alignas(64) char values[2][kBlockSize * 2 * 64];
  for (int64_t column = 0; column < s->v_row; column += 2 * 64) {
    zero_sum_tiles<4>();
    for (int two = s->first / 2; 2 * two < s->end; ++two) {
      char* const of_two = values[two & 1];
      take_values_of_two<2>(*s, two, column, of_two);
      next.fetch();
      load_tile<4>(weights0 + two * 64, kWeightsRow);
      load_tile<6>(of_two, 2 * 64);
      dot_tiles_bf16<0, 4, 6>();
      load_tile<7>(of_two + 64, 2 * 64);
      dot_tiles_bf16<1, 4, 7>();
      load_tile<5>(weights1 + two * 64, kWeightsRow);
      dot_tiles_bf16<2, 5, 6>();
      dot_tiles_bf16<3, 5, 7>();
    }
    store_sum_tiles<2>(sums0 + column / 4, stride * 4);
    store_tile<2>(sums1 + column / 4, stride * 4);
    store_tile<3>(sums1 + column / 4 + 16, stride * 4);
  }
}
