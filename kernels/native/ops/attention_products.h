// The two products of attention over cache blocks, for a few query vectors at a time. A score adds over dimensions in order, an
// output over places in order, whichever other vectors and blocks are computed with it.

// What a 4-byte lane of the products holds, and how 16 of them are read from the cache: a float, a pair of bfloat16, or a pair of
// int16 whose counterparts in the cache are int8. Sums of the latter are exact: see most_of_query, and 2^15 * 2^7 * kSegment is below 2^31.
struct FloatLane {
  using Sum = Vec;
  static constexpr int kPlaces = 1;  // of a row of V, and dimensions of a row of K
  static constexpr int kBytes = 4;   // of a lane in the cache
  static Int lanes(const char* p) { return load_line(p); }
  static Sum multiply_add(Sum sum, Int a, Int b) { return mul_add(as_floats(a), as_floats(b), sum); }
  static Vec value(Sum sum) { return sum; }
  static Sum read(const float* p) { return load(p); }
};
struct PairLane {
  using Sum = Vec;
  static constexpr int kPlaces = 2;
  static constexpr int kBytes = 4;
  static Int lanes(const char* p) { return load_line(p); }
  static Sum multiply_add(Sum sum, Int a, Int b) { return dot_bf16(sum, a, b); }
  static Vec value(Sum sum) { return sum; }
  static Sum read(const float* p) { return load(p); }
};
struct ByteLane {
  using Sum = Int;
  static constexpr int kPlaces = 2;
  static constexpr int kBytes = 2;
  static Int lanes(const char* p) { return widen_bytes(p); }
  static Sum multiply_add(Sum sum, Int a, Int b) { return dot_s16(sum, a, b); }
  static Vec value(Sum sum) { return to_floats(sum); }
  static Sum read(const float* p) { return load_int(p); }
};

// Blocks of keys, or vectors of columns, that are multiplied by up to four queries at a time: as many as registers hold sums of.
constexpr int kTogether = FT_AVX2 ? 1 : 4;

constexpr int64_t kWeightsRow = kScoresRow * 4;  // bytes from one vector's weights to the next one's

// Whether products of two tiles are made together: on AMX, of a bfloat16 cache. So that each key and value is loaded once for both.
template <class Lane>
constexpr bool kTakesTwo = false;
template <class Lane>
void score_two(const char* q0, const char* q1, int64_t q_stride, const Segment* s, int fetched, float* scores0, float* scores1);
template <class Lane>
void weigh_two(float* scores0, float* scores1, const Segment* s, float* sums0, float* sums1, int64_t stride, NextLines& next);

// Products of so many queries and blocks fetch what is read next on the way, a line with each row of keys and two with each of values:
// memory would be idle meanwhile, and many lines at once would hold up what they load themselves.
template <int Q, int B>
constexpr bool fetches_between() {
  return Q == 4 && B == 4;
}

// scores[i][16 b + lane] = query i . key (b, lane), Q queries of stride q_stride bytes, B blocks; a row of scores is kScoresRow long.
template <class Lane, int Q, int B>
inline void score_tile(const char* q, int64_t q_stride, const char* const* keys, int rows, float* scores, NextLines& next) {
  typename Lane::Sum sum[Q][B];
#pragma GCC unroll 8
  for (int i = 0; i < Q; ++i) {
#pragma GCC unroll 8
    for (int b = 0; b < B; ++b) sum[i][b] = typename Lane::Sum{};
  }
  const char* key[B];
#pragma GCC unroll 8
  for (int b = 0; b < B; ++b) key[b] = keys[b];
  const char* lines = nullptr;
  for (int r = 0; r < rows; ++r) {
    if (fetches_between<Q, B>()) {
      if (r % NextLines::kCount == 0) lines = next.take();
      if (lines) prefetch_line(lines + r % NextLines::kCount * 64);
    }
    Int k[B];
#pragma GCC unroll 8
    for (int b = 0; b < B; ++b) k[b] = Lane::lanes(key[b] + r * 16 * Lane::kBytes);
#pragma GCC unroll 8
    for (int i = 0; i < Q; ++i) {
      const Int x = splat_bits(q + i * q_stride + r * 4);
#pragma GCC unroll 8
      for (int b = 0; b < B; ++b) sum[i][b] = Lane::multiply_add(sum[i][b], x, k[b]);
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < Q; ++i) {
#pragma GCC unroll 8
    for (int b = 0; b < B; ++b) store(scores + i * kScoresRow + b * kBlockSize, Lane::value(sum[i][b]));
  }
}

template <class Lane, int B>
inline void score_queries(const char* q, int count, int64_t q_stride, const char* const* keys, int rows, float* scores,
                          NextLines& next) {
  while (count > 0) {
    const int take = count > 4 && count < 7 ? 3 : min_of(count, 4);  // 5 = 3 + 2, 6 = 3 + 3, 9 = 4 + 3 + 2
    switch (take) {
      case 1: score_tile<Lane, 1, B>(q, q_stride, keys, rows, scores, next); break;
      case 2: score_tile<Lane, 2, B>(q, q_stride, keys, rows, scores, next); break;
      case 3: score_tile<Lane, 3, B>(q, q_stride, keys, rows, scores, next); break;
      default: score_tile<Lane, 4, B>(q, q_stride, keys, rows, scores, next); break;
    }
    q += take * q_stride;
    scores += take * kScoresRow;
    count -= take;
  }
}

// What a tile's products need around them: nothing, but on AMX.
template <class Lane>
inline void begin_products(int /*vectors*/) {}
template <class Lane>
inline void end_products() {}
template <class Lane>
inline void stay_awake() {}  // now and then, where something else is computed in between

// The scores of all blocks of a segment, `rows` rows of keys each. On the way the values of each block are fetched, but of those before block
// `fetched` (see cache_lines.h), and some of what is read next.
template <class Lane>
inline void score_blocks(const char* q, int64_t q_stride, const Segment& s, int rows, int fetched, float* scores,
                         NextLines& next) {
  const int count = s.vectors;
  int b = s.first;
  for (; b + kTogether <= s.end; b += kTogether) {
    for (int i = max_of(b, fetched); i < b + kTogether; ++i) {
      for (int64_t at = 0; at < s.v_bytes; at += 64) prefetch_line(s.values[i] + at);
    }
    score_queries<Lane, kTogether>(q, count, q_stride, s.keys + b, rows, scores + b * kBlockSize, next);
  }
  if (kTogether > 2 && s.end - b >= 2) {
    score_queries<Lane, 2>(q, count, q_stride, s.keys + b, rows, scores + b * kBlockSize, next);
    b += 2;
  }
  if (b < s.end) score_queries<Lane, 1>(q, count, q_stride, s.keys + b, rows, scores + b * kBlockSize, next);
}

// Values of one layer's blocks: where they are and how long their rows.
struct ValueRows {
  const char* const* blocks;
  int64_t row_bytes;
};

// Sums of int16 products stay integers in memory until the segment is done.
inline void write_sum(float* p, Vec x) { store(p, x); }
inline void write_sum(float* p, Int x) { store_int(p, x); }

// sums[i] += weights[i] @ V over blocks [first, end), C vectors of columns from `column` on. Masked: places outside [low, high) count as
// zero whatever bits lie there; their weights are zero, but a NaN would not care.
template <class Lane, int Q, int C, bool Masked>
inline void weigh_tile(const char* weights, const ValueRows& v, int first, int end, int low, int high, int column, float* sums,
                       int64_t stride, NextLines& next) {
  constexpr int kRows = kBlockSize / Lane::kPlaces, kLinesOfRow = NextLines::kCount / kRows;
  typename Lane::Sum sum[Q][C];
#pragma GCC unroll 8
  for (int i = 0; i < Q; ++i) {
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) sum[i][c] = Lane::read(sums + i * stride + column + c * 16);
  }
  for (int b = first; b < end; ++b) {
    const char* row = v.blocks[b] + column * Lane::kBytes;
    const char* const lines = fetches_between<Q, C>() && !Masked ? next.take() : nullptr;
    for (int r = 0; r < kRows; ++r, row += v.row_bytes) {
      for (int i = 0; lines && i < kLinesOfRow; ++i) prefetch_line(lines + (r * kLinesOfRow + i) * 64);
      Int value[C];
      const int place = b * kBlockSize + r * Lane::kPlaces;
      if (Masked && (place >= high || place + Lane::kPlaces <= low)) continue;
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) value[c] = Lane::lanes(row + c * 16 * Lane::kBytes);
      if (Masked && Lane::kPlaces == 2) {
        const uint32_t keep = (place >= low ? 0xffffu : 0) | (place + 1 < high ? 0xffff0000u : 0);
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c) value[c] = bits_and(value[c], splat_int(int(keep)));
      }
#pragma GCC unroll 8
      for (int i = 0; i < Q; ++i) {
        const Int x = splat_bits(weights + i * kWeightsRow + (b * kRows + r) * 4);
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c) sum[i][c] = Lane::multiply_add(sum[i][c], x, value[c]);
      }
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < Q; ++i) {
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) write_sum(sums + i * stride + column + c * 16, sum[i][c]);
  }
}

template <class Lane, int C, bool Masked>
inline void weigh_queries(const char* weights, int count, const ValueRows& v, int first, int end, int low, int high, int column,
                          float* sums, int64_t stride, NextLines& next) {
  while (count > 0) {
    const int take = count > 4 && count < 7 ? 3 : min_of(count, 4);
    switch (take) {
      case 1: weigh_tile<Lane, 1, C, Masked>(weights, v, first, end, low, high, column, sums, stride, next); break;
      case 2: weigh_tile<Lane, 2, C, Masked>(weights, v, first, end, low, high, column, sums, stride, next); break;
      case 3: weigh_tile<Lane, 3, C, Masked>(weights, v, first, end, low, high, column, sums, stride, next); break;
      default: weigh_tile<Lane, 4, C, Masked>(weights, v, first, end, low, high, column, sums, stride, next); break;
    }
    weights += take * kWeightsRow;
    sums += take * stride;
    count -= take;
  }
}

// All columns: sums [count][stride] += weights @ V. Masked as in weigh_tile.
template <class Lane, bool Masked>
inline void weigh_blocks(const char* weights, int count, const ValueRows& v, int first, int end, int low, int high, int v_dim, float* sums,
                         int64_t stride, NextLines& next) {
  if (first >= end) return;
  const int vectors = (v_dim + 15) / 16;
  int c = 0;
  for (; c + kTogether <= vectors; c += kTogether) {
    weigh_queries<Lane, kTogether, Masked>(weights, count, v, first, end, low, high, c * 16, sums, stride, next);
  }
  if (kTogether > 2 && vectors - c >= 2) {
    weigh_queries<Lane, 2, Masked>(weights, count, v, first, end, low, high, c * 16, sums, stride, next);
    c += 2;
  }
  if (c < vectors) weigh_queries<Lane, 1, Masked>(weights, count, v, first, end, low, high, c * 16, sums, stride, next);
}

// sums [vectors][stride] = weights @ V over a segment, or += if it goes on: blocks that all tokens see whole together, those around them token by
// token.
template <class Lane>
inline void weigh_segment(const char* weights, const Segment& s, int v_dim, float* sums, int64_t stride,
                          NextLines& next) {
  const ValueRows rows{s.values, s.v_row};
  for (int64_t i = 0; i < s.vectors * stride && !s.goes_on; i += 16) store(sums + i, zero());
  auto weigh_edges = [&](int from, int to) {
    for (int t = 0; t < s.tokens; ++t) {
      const int begin = max_of(from, s.first_block(t)), stop = min_of(to, s.end_block(t));
      const int i = s.begin_of(t);
      weigh_blocks<Lane, true>(weights + i * kWeightsRow, s.end_of(t) - i, rows, begin, stop, s.low[t], s.high[t], v_dim, sums + i * stride,
                               stride, next);
    }
  };
  weigh_edges(s.first, s.whole_first);
  weigh_blocks<Lane, false>(weights, s.vectors, rows, s.whole_first, s.whole_end, 0, 0, v_dim, sums, stride, next);
  weigh_edges(s.whole_end, s.end);
}
