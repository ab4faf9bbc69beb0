#include "attention_plan.h"

#include <algorithm>

namespace foretoken {
namespace {

#include "ops/attention_places.h"

constexpr int kTileVectors = 16;
// Where threads would be idle and there is so much to do in a segment (its effort times the numbers of a place), as where all heads share wide keys, a
// tile has fewer vectors, down to so many. Each tile reads all places, so it gains less than it divides.
constexpr int kFewestVectors = 4;
constexpr int64_t kLongEffort = 4 << 20;
// Tiles of a row that stay together, so that their keys and values are read from memory once: up to so many, if that leaves so many segments
// of such items for each thread.
constexpr int kItemTiles = 4, kItemSegments = 2;
// Units per thread: one where there are few items, which are then cut between segments for all units to be equal; where there are many, more, to
// make up for threads of unequal speed, and only items of twice a unit's work are cut.
constexpr int kManyItems = 8, kManyUnits = 8;

// To read the keys and values of a place takes as long as so many vectors' products with them; some ten microseconds take ...
constexpr int kReadingEffort = 16;
constexpr int64_t kShortEffort = 160 * kSegment;

constexpr int div_up(int n, int by) { return (n + by - 1) / by; }
// Places [low, high) that lie in segments [first, end).
constexpr int within(int low, int high, int first, int end) {
  return std::max(std::min(high, end * kSegment) - std::max(low, first * kSegment), 0);
}

bool go_together(const AttentionTask& a, const AttentionTask& b) {
  return a.row == b.row && a.kv_head == b.kv_head && a.run == b.run;
}

}  // namespace

// Vectors of one row, each over all its segments.
void AttentionPlan::find_tiles(const BatchView& batch, int heads_per_kv, int window, int most_vectors) {
  tiles_.clear();
  for (int row = 0; row < batch.num_rows && heads_per_kv; ++row) {
    const int first = batch.query_start[row], vectors = (batch.query_start[row + 1] - first) * heads_per_kv;
    for (int vector = 0; vector < vectors; vector += most_vectors) {
      const int count = std::min(most_vectors, vectors - vector);
      const int token = first + vector / heads_per_kv, last = first + (vector + count - 1) / heads_per_kv;
      if (std::all_of(batch.slots + token, batch.slots + last + 1, [](int64_t slot) { return slot < 0; })) continue;
      Places seen{};
      for (int t = token, order[kMaxTree]; t <= last; ++t) {
        const Places own = places_of(batch, row, t, window, order);
        if (own.low >= own.high) continue;
        seen = seen.low < seen.high ? Places{std::min(seen.low, own.low), std::max(seen.high, own.high)} : own;
      }
      const int first_segment = seen.low / kSegment, end_segment = seen.low < seen.high ? div_up(seen.high, kSegment) : first_segment;
      tiles_.push_back({{row, token, vector % heads_per_kv, count, first_segment, end_segment, 0, -1, 0}, seen.low, seen.high});
    }
  }
}

// Of a tile in a segment.
int64_t AttentionPlan::longest_effort() const {
  int64_t longest = 0;
  for (const Tile& tile : tiles_) {
    longest = std::max(longest, int64_t(tile.all.num_vectors + kReadingEffort) * std::min(tile.high - tile.low, kSegment));
  }
  return longest;
}

void AttentionPlan::find_items(int most_tiles) {
  items_.clear();
  for (int i = 0; i < int(tiles_.size()); ++i) {
    const AttentionTask& tile = tiles_[size_t(i)].all;
    const bool joins = !items_.empty() && i - items_.back().first < most_tiles && tiles_[size_t(i - 1)].all.row == tile.row;
    if (!joins) items_.push_back({i, i, tile.first_segment, tile.end_segment});
    Item& item = items_.back();
    item.end = i + 1;
    item.first_segment = std::min(item.first_segment, tile.first_segment);
    item.end_segment = std::max(item.end_segment, tile.end_segment);
  }
}

// Vectors times places.
int64_t AttentionPlan::effort_of(const Item& item, int first_segment, int end_segment) const {
  int64_t effort = 0;
  int low = tiles_[size_t(item.first)].low, high = 0;
  for (int i = item.first; i < item.end; ++i) {
    const Tile& tile = tiles_[size_t(i)];
    effort += int64_t(tile.all.num_vectors) * within(tile.low, tile.high, first_segment, end_segment);
    low = std::min(low, tile.low);
    high = std::max(high, tile.high);
  }
  return effort + int64_t(kReadingEffort) * within(low, high, first_segment, end_segment);
}

void AttentionPlan::build(const BatchView& batch, int heads_per_kv, int kv_heads, int dims, int window, int threads) {
  tasks_.clear();
  runs_.clear();
  units_.clear();
  groups_.clear();
  states_ = state_vectors_ = 0;
  int64_t segments = 0, total = 0;
  for (int vectors = kTileVectors; vectors >= kFewestVectors; vectors /= 2) {
    find_tiles(batch, heads_per_kv, window, vectors);
    segments = 0;
    for (const Tile& tile : tiles_) segments += tile.all.end_segment - tile.all.first_segment;
    if (2 * segments * kv_heads > threads || longest_effort() * dims < kLongEffort) break;
  }
  find_items(int(std::clamp<int64_t>(segments * kv_heads / (threads * kItemSegments), 1, kItemTiles)));
  for (const Item& item : items_) total += effort_of(item, item.first_segment, item.end_segment);
  const bool is_one_task = tiles_.size() == 1 && segments <= 1;  // a head cannot be shared anyway
  is_short_ = is_one_task || (kv_heads % threads == 0 && total <= kShortEffort);
  total *= kv_heads;
  const bool many = int64_t(items_.size()) * kv_heads >= kManyItems * threads;
  const int units = tiles_.empty() ? 0 : is_short_ ? kv_heads : many ? kManyUnits * threads : threads;

  int64_t done = 0;
  const auto unit_at = [&](int64_t effort) { return int(std::min<int64_t>(effort * units / std::max<int64_t>(total, 1), units - 1)); };
  for (int head = 0; head < kv_heads && units; ++head) {
    for (const Item& item : items_) {
      const int64_t whole = effort_of(item, item.first_segment, item.end_segment);
      pieces_.clear();
      const bool sees_nothing = item.first_segment == item.end_segment;
      if (is_short_ || sees_nothing || (many && whole * units < 2 * total)) {
        pieces_.push_back({is_short_ ? head : unit_at(done + whole / 2), item.first_segment, item.end_segment});
        done += whole;
      } else {
        for (int segment = item.first_segment; segment < item.end_segment; ++segment) {
          const int64_t effort = effort_of(item, segment, segment + 1);
          const int unit = unit_at(done + effort / 2);
          if (pieces_.empty() || pieces_.back().unit != unit) pieces_.push_back({unit, segment, segment});
          pieces_.back().end_segment = segment + 1;
          done += effort;
        }
      }
      add_item(item, head);
    }
  }
  end_units_before(units);

  if (groups_.size() > num_finished_) {
    finished_ = std::make_unique<std::atomic<int>[]>(groups_.size());
    num_finished_ = groups_.size();
  }
  for (size_t i = 0; i < groups_.size(); ++i) finished_[i].store(0, std::memory_order_relaxed);
}

void AttentionPlan::end_units_before(int unit) {
  while (int(units_.size()) < unit) units_.push_back({int(tasks_.size()), int(runs_.size())});
}

void AttentionPlan::add_item(const Item& item, int kv_head) {
  const size_t first_group = groups_.size();
  const bool is_cut = pieces_.size() > 1;
  for (int i = item.first; i < item.end && is_cut; ++i) {
    const AttentionTask& tile = tiles_[size_t(i)].all;
    const int segments = tile.end_segment - tile.first_segment;
    groups_.push_back({0, tile.first_segment, segments, states_, state_vectors_});
    states_ += segments;
    state_vectors_ += int64_t(segments) * tile.num_vectors;
  }
  for (const Piece& piece : pieces_) {
    end_units_before(piece.unit);
    for (int i = item.first; i < item.end; ++i) {
      const Tile& tile = tiles_[size_t(i)];
      const int first = std::max(tile.all.first_segment, piece.first_segment), end = std::min(tile.all.end_segment, piece.end_segment);
      const bool sees_nothing = tile.all.first_segment == tile.all.end_segment;
      if (!is_cut || (sees_nothing && &piece == &pieces_.front())) {
        add_task(tile, kv_head, tile.all.first_segment, tile.all.end_segment, -1);
      } else if (first < end) {
        const size_t group = first_group + size_t(i - item.first);
        ++groups_[group].num_tasks;
        add_task(tile, kv_head, first, end, int(group));
      }
    }
  }
}

void AttentionPlan::add_task(const Tile& tile, int kv_head, int first_segment, int end_segment, int group) {
  AttentionTask task = tile.all;
  task.first_segment = first_segment;
  task.end_segment = end_segment;
  task.kv_head = kv_head;
  task.group = group;
  const int first = std::max(tile.low, first_segment * kSegment) / kBlockSize;
  const int end = div_up(std::min(tile.high, end_segment * kSegment), kBlockSize), first_run = units_.empty() ? 0 : units_.back().end_run;
  if (int(runs_.size()) > first_run && runs_.back().row == task.row && runs_.back().kv_head == kv_head) {
    runs_.back().first = std::min(runs_.back().first, first);
    runs_.back().end = std::max(runs_.back().end, end);
  } else {
    runs_.push_back({task.row, kv_head, first, end});
  }
  task.run = int(runs_.size()) - 1 - first_run;
  tasks_.push_back(task);
}

// A state is m [16], l [16] and v_pad sums a vector.
size_t AttentionPlan::partial_floats(int v_dim) const {
  const int64_t v_pad = div_up(v_dim, 32) * 32;
  return size_t(states_ * 2 * kTileVectors + state_vectors_ * v_pad);
}

CacheAhead AttentionPlan::ahead_of(int unit) const {
  const int first = unit ? units_[size_t(unit - 1)].end_run : 0, count = units_[size_t(unit)].end_run - first;
  return {runs_.data() + first, count, 0, count ? runs_[size_t(first)].first : 0, 0};
}

void AttentionPlan::run(const Kernels& kernels, const AttentionOp& op, const BatchView& batch, int unit, CacheAhead& ahead, float* partials,
                        void* scratch) {
  const int end = units_[size_t(unit)].end_task;
  for (int i = unit ? units_[size_t(unit - 1)].end_task : 0, count; i < end; i += count) {
    const AttentionTask* const tasks = &tasks_[size_t(i)];
    count = i + 1 < end && go_together(tasks[0], tasks[1]) ? 2 : 1;
    float* states[2] = {};  // of all segments of the task's group
    float* own[2] = {};     // of its own
    for (int j = 0; j < count; ++j) {
      if (tasks[j].group < 0) continue;
      const Group& group = groups_[size_t(tasks[j].group)];
      const int64_t before = tasks[j].first_segment - group.first_segment;
      states[j] = partials + group.first_state * 2 * kTileVectors + group.first_vector * op.cache.v_pad;
      own[j] = states[j] + before * (2 * kTileVectors + tasks[j].num_vectors * op.cache.v_pad);
    }
    kernels.attend(op, batch, tasks, count, ahead, own, scratch);
    for (int j = 0; j < count; ++j) {
      if (!states[j]) continue;
      const Group& group = groups_[size_t(tasks[j].group)];
      std::atomic<int>& finished = finished_[size_t(tasks[j].group)];
      if (finished.fetch_add(1, std::memory_order_acq_rel) + 1 < group.num_tasks) continue;
      finished.store(0, std::memory_order_relaxed);  // the next op starts behind a barrier
      kernels.fold(op, batch, tasks[j], group.num_segments, states[j]);
    }
  }
}

}  // namespace foretoken
