#include "attention_plan.h"

#include <algorithm>
#include <limits>

namespace foretoken {
namespace {

#include "ops/attention_places.h"

constexpr int kTileVectors = 16;
// Units per thread that a step is cut into, where it can be: claimed one by one, they leave a thread idle for a quarter at most. (With twice
// as many eight tokens behind 512 took a tenth longer: the states of segments must be kept, and folded by who comes last.)
constexpr int kUnitsPerThread = 2;

// To read the keys and values of a segment takes as long as so many vectors' products with them; some ten microseconds take ...
constexpr int kReadingEffort = 8;
constexpr int64_t kShortEffort = 128;

constexpr int div_up(int n, int by) { return (n + by - 1) / by; }

}  // namespace

void AttentionPlan::build(const BatchView& batch, int heads_per_kv, int kv_heads, int window, int threads) {
  kv_heads_ = kv_heads;
  tasks_.clear();
  groups_.clear();
  states_ = state_vectors_ = 0;

  // 1. tiles: vectors of one row, each over all its segments
  std::vector<AttentionTask> tiles;
  int64_t work = 0, effort = 0;  // vectors times segments; that, and what reading a segment takes
  const auto add_tiles = [&](int row, int first, int tokens, int tree, auto&& seen_by) {
    const int vectors = tokens * heads_per_kv;
    for (int vector = 0; vector < vectors; vector += kTileVectors) {
      const int count = std::min(kTileVectors, vectors - vector);
      const int token = first + vector / heads_per_kv, last = first + (vector + count - 1) / heads_per_kv;
      if (std::all_of(batch.slots + token, batch.slots + last + 1, [](int64_t slot) { return slot < 0; })) continue;
      const Places seen = seen_by(token, last);
      const int first_segment = seen.low / kSegment, end_segment = seen.low < seen.high ? div_up(seen.high, kSegment) : first_segment;
      tiles.push_back({row, token, vector % heads_per_kv, count, first_segment, end_segment, 0, tree});
      work += int64_t(end_segment - first_segment) * count;
      effort += int64_t(end_segment - first_segment) * (count + kReadingEffort);
    }
  };
  for (int row = 0; row < batch.num_rows && heads_per_kv; ++row) {
    const int start = batch.query_start[row], end = batch.query_start[row + 1], tree = std::min(start + batch.num_causal[row], end);
    add_tiles(row, start, tree - start, 0, [&](int token, int last) {
      return Places{causal_places(batch, row, token, window).low, causal_places(batch, row, last, window).high};
    });
    for (int token = tree; token < end; ++token) {
      int order[kMaxTree];
      const int count = tree_order(batch, row, token, order);
      add_tiles(row, token, 1, 1, [&](int, int) { return tree_places(batch, row, token, window, order, count); });
    }
  }

  // 2. tiles that are too large a share of the work are cut between segments
  const bool is_one_task = tiles.size() == 1 && tiles[0].end_segment - tiles[0].first_segment <= 1;  // a head cannot be shared anyway
  is_short_ = is_one_task || (kv_heads % threads == 0 && effort <= kShortEffort);
  const int64_t most_work = threads > 1 && !is_short_ ? work * kv_heads / (threads * kUnitsPerThread) : std::numeric_limits<int64_t>::max();
  for (const AttentionTask& tile : tiles) {
    add_group(tile, int(std::clamp<int64_t>(most_work / tile.num_vectors, 1, 1 << 20)));
  }

  const size_t counters = groups_.size() * size_t(kv_heads);
  if (counters > num_finished_) {
    finished_ = std::make_unique<std::atomic<int>[]>(counters);
    num_finished_ = counters;
  }
  for (size_t i = 0; i < counters; ++i) finished_[i].store(0, std::memory_order_relaxed);
}

void AttentionPlan::add_group(const AttentionTask& whole, int segments_per_task) {
  const int segments = whole.end_segment - whole.first_segment, count = std::max(1, div_up(segments, segments_per_task));
  const int vectors = whole.num_vectors;
  groups_.push_back({int(tasks_.size()), count, vectors, states_, state_vectors_});
  for (int i = 0; i < count; ++i) {
    AttentionTask task = whole;
    task.group = int(groups_.size()) - 1;
    // even runs: 5 segments among 2 tasks are 2 and 3
    task.first_segment = whole.first_segment + int(int64_t(segments) * i / count);
    task.end_segment = whole.first_segment + int(int64_t(segments) * (i + 1) / count);
    tasks_.push_back(task);
  }
  if (count > 1) {
    states_ += segments;
    state_vectors_ += int64_t(segments) * vectors;
  }
}

// A state is m [16], l [16] and v_pad sums a vector.
size_t AttentionPlan::partial_floats(int v_dim) const {
  const int64_t v_pad = div_up(v_dim, 32) * 32;
  return size_t(kv_heads_ * (states_ * 2 * kTileVectors + state_vectors_ * v_pad));
}

void AttentionPlan::run(const Kernels& kernels, const AttentionOp& op, const BatchView& batch, int unit, float* partials, void* scratch) {
  // Tasks of one kv head follow each other: those of a row share its keys and values in the core's own cache.
  const int num_tasks = int(tasks_.size()), kv_head = unit / num_tasks;
  const AttentionTask& task = tasks_[size_t(unit % num_tasks)];
  const Group& group = groups_[size_t(task.group)];
  if (group.num_tasks == 1) return kernels.attend(op, batch, task, kv_head, nullptr, scratch);

  const AttentionTask* tasks = &tasks_[size_t(group.first_task)];
  const int64_t v_pad = op.cache.v_pad;
  auto floats = [&](int64_t states, int64_t vectors) { return states * 2 * kTileVectors + vectors * v_pad; };
  float* states = partials + kv_head * floats(states_, state_vectors_) + floats(group.first_state, group.first_vector);
  const int64_t before = task.first_segment - tasks[0].first_segment;
  kernels.attend(op, batch, task, kv_head, states + floats(before, before * group.vectors), scratch);
  std::atomic<int>& finished = finished_[size_t(kv_head) * groups_.size() + size_t(task.group)];
  if (finished.fetch_add(1, std::memory_order_acq_rel) + 1 < group.num_tasks) return;
  finished.store(0, std::memory_order_relaxed);  // the next op starts behind a barrier
  kernels.fold(op, batch, tasks, group.num_tasks, kv_head, states);
}

}  // namespace foretoken
