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

constexpr int kOwnBlocks = (kMaxTree + 3 * kBlockSize - 2) / kBlockSize;  // that a token can have: see Tile

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
//
// Tokens of a row see the same blocks up to the tree. From there on each sees places of its own: there the scores of all places are computed at
// once, each token takes its own in its order, and has products of its own with values in that order. This begins with an even block, for
// AMX multiplies the values of two at once.
struct Tile {
  int tokens;                   // that it has vectors of
  Places seen[kTile];           // of each token
  int own_block = 1 << 30;      // blocks from this one on are each token's own; never, if none is of a tree
  int tree_start = 0;
  const char* queries;
  int64_t query_bytes;          // of one vector
  float* scores;                // [16][kScoresRow]; then the weights, each row's where its scores begin: less to find room for in L1
  float* state;                 // of one segment
  float* folded;                // of those before
  int (*order)[kMaxTree];       // of each token's tree
  float query_scales[kTile] = {};  // int8

  // The place in the cache of what token t sees at a logical one.
  int source(int t, int place) const { return place < tree_start ? place : tree_start + order[t][place - tree_start]; }
};

// Scratch memory for a segment with blocks of the tokens' own.
struct OwnBlocks {
  float scores[kTile][kScoresRow];                      // of the places from own_block on, as they lie in the cache
  float scales[kTile][kOwnBlocks * 2 * kBlockSize];     // int8: of each token's keys and values
  char values[kOwnBlocks * kBlockSize * kMaxHeadDim * 4];  // of one token
};

constexpr size_t kWidestTile = kTile * kScoresRow * 4 + 2 * 4 * (2 * kTile + kTile * kMaxHeadDim) + kTile * kMaxHeadDim * 2 +
                                kTile * kMaxTree * 4;
static_assert(2 * kWidestTile + sizeof(OwnBlocks) <= kAttentionScratch, "heads of kMaxHeadDim must fit");

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
  tile.order = reinterpret_cast<int(*)[kMaxTree]>(take(kTile * kMaxTree * 4));

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

  for (int t = 0; t < tile.tokens; ++t) tile.seen[t] = places_of(batch, task.row, task.first_token + t, op.window, tile.order[t]);
  if (task.first_token + tile.tokens > batch.query_start[task.row] + batch.num_causal[task.row]) {
    tile.tree_start = tree_start(batch, task.row);
    tile.own_block = tile.tree_start / kBlockSize & ~1;
  }
  return tile;
}

// The places of a segment that each token of a tile sees, and the blocks they lie in; first == end if there are none.
template <class Lane>
inline Segment look_at(const AttentionOp& op, const BatchView& batch, const AttentionTask& task, const Tile& tile, int segment) {
  const CacheLayer& cache = op.cache;
  Segment s{};
  s.number = segment;
  s.tokens = tile.tokens;
  s.heads = op.num_heads / cache.kv_heads;
  s.vectors = task.num_vectors;
  s.first_head = task.first_head;
  s.own = max_of(min_of(tile.own_block - segment * kSegmentBlocks, kSegmentBlocks), 0);
  for (int t = 0; t < s.tokens; ++t) {
    s.low[t] = max_of(tile.seen[t].low - segment * kSegment, 0);
    s.high[t] = min_of(tile.seen[t].high - segment * kSegment, kSegment);
  }
  s.find_blocks();

  s.k_bytes = int64_t(cache.k_pad) / Lane::kPlaces * kBlockSize * Lane::kBytes;
  s.v_row = int64_t(cache.v_pad) * Lane::kBytes;
  s.v_bytes = kBlockSize / Lane::kPlaces * s.v_row;
  for (int b = s.first; b < s.end; ++b) {
    s.keys[b] = cache_block(op, batch, task.row, task.kv_head, segment * kSegmentBlocks + b);
    s.values[b] = s.keys[b] + s.k_bytes;
    s.scales[b] = reinterpret_cast<const float*>(s.values[b] + s.v_bytes);  // int8 only
  }
  return s;
}

// What all tokens see of a segment before blocks of their own.
inline Segment shared_part(const Segment& s) {
  Segment shared = s;
  for (int t = 0; t < s.tokens; ++t) shared.high[t] = min_of(s.high[t], s.own * kBlockSize);
  shared.find_blocks();
  return shared;
}

// A token's own part of a segment, its values in the order in which it sees them; first == end if there is none.
template <class Lane>
inline Segment own_part(const AttentionOp& op, const BatchView& batch, const AttentionTask& task, const Tile& tile, const Segment& s,
                        int t, char* values) {
  Segment own = s;
  own.tokens = 1;
  own.heads = own.vectors = s.end_of(t) - s.begin_of(t);
  own.first_head = 0;
  own.low[0] = max_of(s.low[t], s.own * kBlockSize);
  own.high[0] = s.high[t];
  own.goes_on = true;
  own.find_blocks();
  for (int b = own.first; b < own.end; ++b, values += s.v_bytes) {
    const int before = s.number * kSegment, place = b * kBlockSize;
    if (before + min_of(place + kBlockSize, own.high[0]) <= tile.tree_start) continue;
    int source[kBlockSize];
    for (int i = 0; i < kBlockSize; ++i) {
      source[i] = place + i >= own.low[0] && place + i < own.high[0] ? tile.source(t, before + place + i) : -1;
    }
    gather_values<Lane>(op, batch, task, s, source, values);
    own.values[b] = values;
  }
  return own;
}

// The scores of the tokens' own parts of a segment, and for int8 the scales.
template <class Lane>
inline void score_own(const AttentionOp& op, const BatchView& batch, const AttentionTask& task, const Tile& tile, const Segment& s,
                      int key_rows, OwnBlocks& own, NextLines& next) {
  int last = 0;
  const auto of_places = [&](auto&& act) {
    for (int t = 0; t < s.tokens; ++t) {
      for (int place = max_of(s.low[t], s.own * kBlockSize); place < s.high[t]; ++place) {
        act(t, place, tile.source(t, s.number * kSegment + place) - tile.own_block * kBlockSize);
      }
    }
  };
  of_places([&](int, int, int source) { last = max_of(last, source); });
  Segment all = s;
  all.first = 0;
  all.end = last / kBlockSize + 1;
  for (int b = 0; b < all.end; ++b) {
    all.keys[b] = cache_block(op, batch, task.row, task.kv_head, tile.own_block + b);
    all.values[b] = all.keys[b] + s.k_bytes;
    all.scales[b] = reinterpret_cast<const float*>(all.values[b] + s.v_bytes);
  }
  score_blocks<Lane>(tile.queries, tile.query_bytes, all, key_rows, 0, own.scores[0], next);
  of_places([&](int t, int place, int source) {
    for (int i = s.begin_of(t), end = s.end_of(t); i < end; ++i) tile.scores[i * kScoresRow + place] = own.scores[i][source];
    if (Lane::kBytes > 2) return;
    const float* const from = all.scales[source / kBlockSize] + source % kBlockSize;
    float* const to = own.scales[t] + (place / kBlockSize - s.own) * 2 * kBlockSize + place % kBlockSize;
    to[0] = from[0], to[kBlockSize] = from[kBlockSize];
  });
}

// Scores -> weights, and the states' m and l. scales: what the sums are to be multiplied by in the end.
template <class Lane>
inline void make_weights(const AttentionOp& op, const Tile& tile, const Segment& s, const OwnBlocks& own, NextLines& next, float* scales) {
  alignas(64) float lanes[kTile * 16];
  const auto begin_with = [&](Vec v) {
    for (int i = 0; i < kTile; ++i) store(lanes + i * 16, v);
  };
  // (vector by vector, but nobody waits for the greatest of one before the scores of the next are looked at)
  const auto of_each = [&](auto&& act) {
    for (int t = 0; t < s.tokens; ++t) {
      for (int i = s.begin_of(t), end = s.end_of(t); i < end && s.low[t] < s.high[t]; ++i) {
        store(lanes + i * 16, act(i, s.low[t], s.high[t], Scales{s.scales, s.own, own.scales[t], tile.query_scales[i]}));
      }
    }
  };
  begin_with(splat(-kInfinity));
  of_each([&](int i, int low, int high, const Scales& of) { return settle_scores<Lane>(op, tile.scores + i * kScoresRow, low, high, of); });
  store(tile.state, maxima_of_rows(lanes, s.vectors) * splat(kLog2E));
  begin_with(zero());
  of_each([&](int i, int low, int high, const Scales& of) {
    if (i % 4 == 3) stay_awake<Lane>();
    return soften<Lane>(tile.scores + i * kScoresRow, low, high, of, tile.state[i], scales + i, next);
  });
  store(tile.state + kTile, sums_of_rows(lanes, s.vectors));
}

// The state of one segment, in tile.state. fetched: blocks of it that need not be.
template <class Lane>
inline void attend_segment(const AttentionOp& op, const BatchView& batch, const AttentionTask& task, const Tile& tile, const Segment& s,
                           int fetched, OwnBlocks& own, NextLines& next) {
  const CacheLayer& cache = op.cache;
  const int key_rows = (cache.k_dim + Lane::kPlaces - 1) / Lane::kPlaces;
  float scales[kTile] = {};
  begin_products<Lane>(s.vectors);
  float* const sums = tile.state + 2 * kTile;
  const auto score = [&](const Segment& part) {
    score_blocks<Lane>(tile.queries, tile.query_bytes, part, key_rows, fetched, tile.scores, next);
  };
  const auto weigh = [&](const Segment& part, int vector) {
    char* const weights = reinterpret_cast<char*>(tile.scores) + vector * kWeightsRow;
    weigh_segment<Lane>(weights, part, cache.v_dim, sums + int64_t(vector) * cache.v_pad, cache.v_pad, next);
  };
  if (s.end <= s.own) {
    score(s);
    make_weights<Lane>(op, tile, s, own, next, scales);
    weigh(s, 0);
  } else {
    const Segment shared = shared_part(s);
    score(shared);
    score_own<Lane>(op, batch, task, tile, s, key_rows, own, next);
    make_weights<Lane>(op, tile, s, own, next, scales);
    weigh(shared, 0);
    for (int t = 0; t < s.tokens; ++t) {
      const Segment part = own_part<Lane>(op, batch, task, tile, s, t, own.values);
      if (part.first == part.end) continue;
      begin_products<Lane>(part.vectors);
      weigh(part, s.begin_of(t));
    }
  }
  if (Lane::kBytes == 2) {
    for (int i = 0; i < s.vectors; ++i) {
      float* x = sums + int64_t(i) * cache.v_pad;
      for (int d = 0; d < cache.v_pad; d += 16) store(x + d, Lane::value(Lane::read(x + d)) * splat(scales[i]));
    }
  }
}

// The same of two tiles of one row and head, where their products are made together.
template <class Lane>
inline void attend_two(const AttentionOp& op, const Tile* tiles, const Segment* s, int fetched, const OwnBlocks& own, NextLines& next) {
  if constexpr (kTakesTwo<Lane>) {
    const int64_t v_pad = op.cache.v_pad;
    float scales[kTile];
    score_two<Lane>(tiles[0].queries, tiles[1].queries, tiles[0].query_bytes, s, fetched, tiles[0].scores, tiles[1].scores);
    for (int i = 0; i < 2; ++i) make_weights<Lane>(op, tiles[i], s[i], own, next, scales);
    weigh_two<Lane>(tiles[0].scores, tiles[1].scores, s, tiles[0].state + 2 * kTile, tiles[1].state + 2 * kTile, v_pad, next);
  }
}

// One task, or two of one row and head.
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
  OwnBlocks& own = *reinterpret_cast<OwnBlocks*>(memory);
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
    if (sees[0] && sees[1] && s[0].end <= s[0].own && s[1].end <= s[1].own && join(s[0], s[1])) {
      attend_two<Lane>(op, tiles, s, fetched, own, next);
    } else {
      for (int i = 0; i < count; ++i) {
        if (sees[i]) attend_segment<Lane>(op, batch, tasks[i], tiles[i], s[i], fetched, own, next);
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
