// Attention of a tile of query vectors over runs of segments of the paged cache.
//
// Every segment of kSegment places gives a vector a state: the greatest score, as m = score * log2(e); l = sum of 2^(score * log2(e) - m);
// sums = the same sum with each place's v as a factor. States are folded from left to right. Which segments, tiles and threads there
// are changes no bit: a place that a token does not see weighs exactly nothing, and a segment without a place that it sees gives the
// neutral state.

#include "attention_places.h"
#include "attention_segment.h"
#include "attention_blocks.h"
#include "attention_products.h"
#if FT_AMX
#include "attention_tiles.h"
#endif
#include "attention_weights.h"

constexpr int kTreeBlocks = (kMaxTree + 2 * (kBlockSize - 1)) / kBlockSize;  // that kMaxTree places can touch

// States of a tile: m [16], l [16], sums [vectors][v_pad].
inline int64_t state_floats(int vectors, int v_pad) { return 2 * kTile + int64_t(vectors) * v_pad; }

inline void clear_state(float* state, int vectors, int v_pad) {
  store(state, splat(-kInfinity));
  for (int64_t i = kTile; i < state_floats(vectors, v_pad); i += 16) store(state + i, zero());
}

// state = state, then next. exp2_of(0) is 1 and exp2_of(-inf) is 0, so a neutral state changes nothing on either side.
inline void fold_state(float* state, const float* next, int vectors, int v_pad) {
  const Vec m = load(state), n = load(next);
  const Vec greatest = max_of(m, n);
  // both -inf: nothing seen yet
  const Vec base = select(equal(greatest, splat(-kInfinity)), zero(), greatest);
  const Vec old_weight = exp2_of(m - base), new_weight = exp2_of(n - base);
  store(state, greatest);
  store(state + kTile, mul_add(load(next + kTile), new_weight, load(state + kTile) * old_weight));
  alignas(64) float old_weights[kTile], new_weights[kTile];
  store(old_weights, old_weight);
  store(new_weights, new_weight);
  for (int i = 0; i < vectors; ++i) {
    float* sums = state + 2 * kTile + int64_t(i) * v_pad;
    const float* next_sums = next + 2 * kTile + int64_t(i) * v_pad;
    const Vec a = splat(old_weights[i]), b = splat(new_weights[i]);
    for (int d = 0; d < v_pad; d += 16) store(sums + d, mul_add(load(next_sums + d), b, load(sums + d) * a));
  }
}

// What the sums of each vector are multiplied by in the end. A sink joins here: once, whatever the places before were cut into.
inline Vec inverse_totals(const AttentionOp& op, const AttentionTask& task, const float* state) {
  const Vec l = load(state + kTile), one = splat(1.0f);
  if (!op.sinks) return select(equal(l, zero()), zero(), one / l);
  alignas(64) float sinks[kTile] = {};
  const int group = op.num_heads / op.cache.kv_heads;
  for (int i = 0; i < task.num_vectors; ++i) sinks[i] = op.sinks[task.kv_head * group + (task.first_head + i) % group];
  const Vec sink = load(sinks) * splat(kLog2E), m = load(state);
  const Vec greatest = max_of(sink, m);  // m second: a NaN is passed on
  const Vec weight = exp2_of(m - greatest);
  return weight / mul_add(l, weight, exp2_of(sink - greatest));
}

inline void store_outputs(const AttentionOp& op, const BatchView& batch, const AttentionTask& task, const float* state) {
  const int v_dim = op.cache.v_dim, group = op.num_heads / op.cache.kv_heads;
  alignas(64) float inverses[kTile];
  store(inverses, inverse_totals(op, task, state));
  for (int i = 0; i < task.num_vectors; ++i) {
    const int head = task.first_head + i, token = task.first_token + head / group;
    if (batch.slots[token] < 0) continue;  // padding: set to zero elsewhere
    const Vec inverse = splat(inverses[i]);
    const float* sums = state + 2 * kTile + int64_t(i) * op.cache.v_pad;
    const int64_t place = token * op.out_stride + int64_t(task.kv_head * group + head % group) * v_dim;
    for (int d = 0; d < v_dim; d += 16) {
      // + 0: a sum of products that underflowed may be -0, by how many zeros were added to it
      store_output(op, place + d, mul_add(load(sums + d), inverse, zero()), v_dim - d);
    }
  }
}

// What a task works on, and its part of the scratch memory.
struct Tile {
  int tokens;                   // that it has vectors of
  Places seen[kTile];           // of each token
  int tree_block = 1 << 30;     // blocks from this one on are copies in logical order
  const char* queries;
  int64_t query_bytes;          // of one vector
  float* scores;                // [16][kScoresRow]; then the weights, each row's where its scores begin: less to find room for in L1
  float* state;                 // of one segment
  float* folded;                // of those before
  char* tree_blocks;            // [kTreeBlocks][head_bytes]
  float query_scales[kTile] = {};  // int8
};

constexpr size_t kWidestTile = kTile * kScoresRow * 4 + 2 * 4 * (2 * kTile + kTile * kMaxHeadDim) + kTile * kMaxHeadDim * 2;
static_assert(2 * kWidestTile <= kAttentionScratch && kWidestTile + kTreeBlocks * 2 * kMaxHeadDim * kBlockSize * 4 <= kAttentionScratch,
              "heads of kMaxHeadDim must fit");

// memory: goes on behind what the tile takes of it.
inline Tile make_tile(const AttentionOp& op, const BatchView& batch, const AttentionTask& task, char*& memory) {
  Tile tile;
  const CacheLayer& cache = op.cache;
  const int64_t state_bytes = state_floats(kTile, cache.v_pad) * 4;
  auto take = [&](int64_t bytes) {
    char* part = memory;
    memory += bytes;
    return part;
  };
  tile.scores = reinterpret_cast<float*>(take(kTile * kScoresRow * 4));
  tile.state = reinterpret_cast<float*>(take(state_bytes));
  tile.folded = reinterpret_cast<float*>(take(state_bytes));
  tile.tree_blocks = task.tree ? take(kTreeBlocks * cache.head_bytes) : nullptr;

  const int64_t rows = (batch.num_tokens + 15) / 16 * 16, group = op.num_heads / cache.kv_heads;
  tile.tokens = int((task.first_head + task.num_vectors - 1) / group) + 1;
  tile.query_bytes = int64_t(cache.k_pad) * (cache.type == CacheType::kFloat32 ? 4 : 2);
  tile.queries = static_cast<const char*>(op.queries) + ((task.kv_head * rows + task.first_token) * group + task.first_head) * tile.query_bytes;
  if (cache.type == CacheType::kInt8) {
    auto* narrow = reinterpret_cast<int16_t*>(take(kTile * tile.query_bytes));
    const auto* wide = reinterpret_cast<const uint16_t*>(tile.queries);
    quantise_queries(wide, task.num_vectors, cache.k_pad, narrow, tile.query_scales);
    tile.queries = reinterpret_cast<const char*>(narrow);
  }

  if (!task.tree) {
    for (int t = 0; t < tile.tokens; ++t) tile.seen[t] = causal_places(batch, task.row, task.first_token + t, op.window);
    return tile;
  }
  int order[kMaxTree];
  const int count = tree_order(batch, task.row, task.first_token, order), start = tree_start(batch, task.row);
  tile.seen[0] = tree_places(batch, task.row, task.first_token, op.window, order, count);
  tile.tree_block = start / kBlockSize;
  const int first = max_of(tile.tree_block, task.first_segment * kSegmentBlocks), end = task.end_segment * kSegmentBlocks;
  for (int b = first; b < end && b * kBlockSize < start + count; ++b) {
    int source[kBlockSize];
    for (int i = 0; i < kBlockSize; ++i) {
      const int place = b * kBlockSize + i;
      source[i] = place < start ? place : place < start + count ? start + order[place - start] : -1;
    }
    gather_block(op, batch, task.row, task.kv_head, source, tile.tree_blocks + (b - tile.tree_block) * cache.head_bytes);
  }
  return tile;
}

// The places of a segment that each token of a tile sees, and the blocks they lie in; first == end if there are none.
template <class Lane>
inline Segment look_at(const AttentionOp& op, const BatchView& batch, const AttentionTask& task, const Tile& tile, int segment) {
  const CacheLayer& cache = op.cache;
  Segment s{};
  s.tokens = tile.tokens;
  s.heads = op.num_heads / cache.kv_heads;
  s.vectors = task.num_vectors;
  s.first_head = task.first_head;
  s.first = kSegmentBlocks;
  s.whole_end = kSegmentBlocks;
  for (int t = 0; t < s.tokens; ++t) {
    s.low[t] = max_of(tile.seen[t].low - segment * kSegment, 0);
    s.high[t] = min_of(tile.seen[t].high - segment * kSegment, kSegment);
    if (s.low[t] >= s.high[t]) s.low[t] = s.high[t] = 0;
    if (s.low[t] < s.high[t]) s.first = min_of(s.first, s.first_block(t));
    s.end = max_of(s.end, s.end_block(t));
    s.whole_first = max_of(s.whole_first, (s.low[t] + kBlockSize - 1) / kBlockSize);
    s.whole_end = min_of(s.whole_end, s.high[t] / kBlockSize);
  }
  if (s.first >= s.end) s.first = s.end = 0;
  if (s.whole_first >= s.whole_end) s.whole_first = s.whole_end = s.end;

  s.k_bytes = int64_t(cache.k_pad) / Lane::kPlaces * kBlockSize * Lane::kBytes;
  s.v_row = int64_t(cache.v_pad) * Lane::kBytes;
  s.v_bytes = kBlockSize / Lane::kPlaces * s.v_row;
  for (int b = s.first; b < s.end; ++b) {
    const int index = segment * kSegmentBlocks + b;
    s.keys[b] = index >= tile.tree_block ? tile.tree_blocks + (index - tile.tree_block) * cache.head_bytes
                                         : cache_block(op, batch, task.row, task.kv_head, index);
    s.values[b] = s.keys[b] + s.k_bytes;
    s.scales[b] = reinterpret_cast<const float*>(s.values[b] + s.v_bytes);  // int8 only
  }
  return s;
}

// Scores -> weights, and the states' m and l. scales: what the sums are to be multiplied by in the end.
template <class Lane>
inline void make_weights(const AttentionOp& op, const Tile& tile, const Segment& s, NextLines& next, float* scales) {
  alignas(64) float lanes[kTile * 16];
  const auto begin_with = [&](Vec v) {
    for (int i = 0; i < kTile; ++i) store(lanes + i * 16, v);
  };
  // (vector by vector, but nobody waits for the greatest of one before the scores of the next are looked at)
  const auto of_each = [&](auto&& act) {
    for (int t = 0; t < s.tokens; ++t) {
      for (int i = s.begin_of(t), end = s.end_of(t); i < end && s.low[t] < s.high[t]; ++i) store(lanes + i * 16, act(i, s.low[t], s.high[t]));
    }
  };
  begin_with(splat(-kInfinity));
  of_each([&](int i, int low, int high) {
    return settle_scores<Lane>(op, tile.scores + i * kScoresRow, low, high, {s.scales, tile.query_scales[i]});
  });
  store(tile.state, maxima_of_rows(lanes, s.vectors) * splat(kLog2E));
  begin_with(zero());
  of_each([&](int i, int low, int high) {
    if (i % 4 == 3) stay_awake<Lane>();
    return soften<Lane>(tile.scores + i * kScoresRow, low, high, {s.scales, tile.query_scales[i]}, tile.state[i], scales + i, next);
  });
  store(tile.state + kTile, sums_of_rows(lanes, s.vectors));
}

// The state of one segment, in tile.state. fetched: blocks of it that need not be.
template <class Lane>
inline void attend_segment(const AttentionOp& op, const Tile& tile, const Segment& s, int fetched, NextLines& next) {
  const CacheLayer& cache = op.cache;
  const int key_rows = (cache.k_dim + Lane::kPlaces - 1) / Lane::kPlaces;
  float scales[kTile] = {};
  begin_products<Lane>(s.vectors);
  score_blocks<Lane>(tile.queries, tile.query_bytes, s, key_rows, fetched, tile.scores, next);
  make_weights<Lane>(op, tile, s, next, scales);
  float* sums = tile.state + 2 * kTile;
  weigh_segment<Lane>(reinterpret_cast<char*>(tile.scores), s, cache.v_dim, sums, cache.v_pad, next);
  if (Lane::kBytes == 2) {
    for (int i = 0; i < s.vectors; ++i) {
      float* x = sums + int64_t(i) * cache.v_pad;
      for (int d = 0; d < cache.v_pad; d += 16) store(x + d, Lane::value(Lane::read(x + d)) * splat(scales[i]));
    }
  }
}

// The same of two tiles of one row and head, where their products are made together.
template <class Lane>
inline void attend_two(const AttentionOp& op, const Tile* tiles, const Segment* s, int fetched, NextLines& next) {
  if constexpr (kTakesTwo<Lane>) {
    const int64_t v_pad = op.cache.v_pad;
    float scales[kTile];
    score_two<Lane>(tiles[0].queries, tiles[1].queries, tiles[0].query_bytes, s, fetched, tiles[0].scores, tiles[1].scores);
    for (int i = 0; i < 2; ++i) make_weights<Lane>(op, tiles[i], s[i], next, scales);
    weigh_two<Lane>(tiles[0].scores, tiles[1].scores, s, tiles[0].state + 2 * kTile, tiles[1].state + 2 * kTile, v_pad, next);
  }
}

// One task, or two of one row and head without a tree.
template <class Lane>
inline void attend_segments(const AttentionOp& op, const BatchView& batch, const AttentionTask* tasks, int count, CacheAhead& ahead,
                            float* const* partials, void* scratch) {
  const int v_pad = op.cache.v_pad;
  char* memory = static_cast<char*>(scratch);
  Tile tiles[2];
  bool is_first[2] = {true, true};
  int first = tasks[0].first_segment, end = tasks[0].end_segment;
  for (int i = 0; i < count; ++i) {
    tiles[i] = make_tile(op, batch, tasks[i], memory);
    first = min_of(first, tasks[i].first_segment);
    end = max_of(end, tasks[i].end_segment);
  }
  NextLines next{op, batch, ahead};
  Segment s[2];
  for (int segment = first; segment < end; ++segment) {
    bool sees[2] = {};
    for (int i = 0; i < count; ++i) {
      if (segment < tasks[i].first_segment || segment >= tasks[i].end_segment) continue;
      s[i] = look_at<Lane>(op, batch, tasks[i], tiles[i], segment);
      sees[i] = s[i].first < s[i].end;
    }
    const int fetched = sees[0] || sees[1] ? next.reach(tasks[0].run, segment) : 0;
    if (sees[0] && sees[1] && join(s[0], s[1])) {
      attend_two<Lane>(op, tiles, s, fetched, next);
    } else {
      for (int i = 0; i < count; ++i) {
        if (sees[i]) attend_segment<Lane>(op, tiles[i], s[i], fetched, next);
      }
    }
    for (int i = 0; i < count; ++i) {
      Tile& tile = tiles[i];
      const int vectors = tasks[i].num_vectors, number = segment - tasks[i].first_segment;
      if (partials[i]) {
        if (number < 0 || segment >= tasks[i].end_segment) continue;
        if (!sees[i]) clear_state(tile.state, vectors, v_pad);
        const int64_t size = state_floats(vectors, v_pad);
        __builtin_memcpy(partials[i] + number * size, tile.state, size_t(size) * 4);
      } else if (sees[i]) {
        if (is_first[i]) {
          float* const state = tile.state;
          tile.state = tile.folded, tile.folded = state;
        } else {
          fold_state(tile.folded, tile.state, vectors, v_pad);
        }
        is_first[i] = false;
      }
    }
  }
  end_products<Lane>();
  for (int i = 0; i < count; ++i) {
    if (partials[i]) continue;
    if (is_first[i]) clear_state(tiles[i].folded, tasks[i].num_vectors, v_pad);
    store_outputs(op, batch, tasks[i], tiles[i].folded);
  }
}

template <class Lane>
inline void attend_tasks(const AttentionOp& op, const BatchView& batch, const AttentionTask* tasks, int count, CacheAhead& ahead,
                         float* const* partials, void* scratch) {
  const int together = kTakesTwo<Lane> ? count : 1;
  for (int i = 0; i < count; i += together) attend_segments<Lane>(op, batch, tasks + i, together, ahead, partials + i, scratch);
}

// partials[i] null: the finished output of task i. Else the state of each of its segments, one behind the other: folding those of a run first
// would round differently from folding all in order.
inline void attend(const AttentionOp& op, const BatchView& batch, const AttentionTask* tasks, int count, CacheAhead& ahead,
                   float* const* partials, void* scratch) {
  if (op.cache.type == CacheType::kFloat32) {
    attend_tasks<FloatLane>(op, batch, tasks, count, ahead, partials, scratch);
  } else if (op.cache.type == CacheType::kInt8) {
    attend_tasks<ByteLane>(op, batch, tasks, count, ahead, partials, scratch);
  } else {
    attend_tasks<PairLane>(op, batch, tasks, count, ahead, partials, scratch);
  }
}

// partials: the states of all segments of the task's tile in order.
inline void fold(const AttentionOp& op, const BatchView& batch, const AttentionTask& task, int segments, const float* partials) {
  alignas(64) float folded[2 * kTile + kTile * kMaxHeadDim];
  const int vectors = task.num_vectors, v_pad = op.cache.v_pad;
  const int64_t size = state_floats(vectors, v_pad);
  __builtin_memcpy(folded, partials, size_t(size) * 4);
  for (int s = 1; s < segments; ++s) fold_state(folded, partials + s * size, vectors, v_pad);
  store_outputs(op, batch, task, folded);
}
