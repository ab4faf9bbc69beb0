// Cuts the attention of a batch into units that threads claim. The plan depends on the batch and on how heads are grouped, not on the layer,
// and it changes no bit of the result (ops/attention.h). Knows no instruction set.
#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "kernels.h"

namespace foretoken {

class AttentionPlan {
 public:
  // dims: numbers of a key and its value.
  void build(const BatchView& batch, int heads_per_kv, int kv_heads, int dims, int window, int threads);

  // A unit is some tasks, and about as much work as any other. All units of an op must have run before another op with this plan starts.
  int num_units() const { return int(units_.size()); }
  // Whether all of a head is so little that to share it among threads would take longer. Then a unit is a kv head.
  bool is_short() const { return is_short_; }
  // Floats that `run` needs at partials, 64-byte aligned and shared by the threads.
  size_t partial_floats(int v_dim) const;
  // What a unit reads, nothing of it fetched yet.
  CacheAhead ahead_of(int unit) const;
  // Safe from several threads for different units. Whoever finishes the last task of a group folds the states of all.
  void run(const Kernels& kernels, const AttentionOp& op, const BatchView& batch, int unit, CacheAhead& ahead, float* partials, void* scratch);

 private:
  struct Tile {
    AttentionTask all;                  // for kv head 0
    int low, high;                      // places [low, high): what it sees lies there
  };
  // Neighbouring tiles [first, end) of a row, and the segments in which they see something.
  struct Item {
    int first, end;
    int first_segment, end_segment;
  };
  // Segments that belong to a unit.
  struct Piece {
    int unit;
    int first_segment, end_segment;
  };
  // Tasks that divide the segments of a tile.
  struct Group {
    int num_tasks;
    int first_segment, num_segments;
    int64_t first_state, first_vector;  // of its states among all
  };
  struct Unit {
    int end_task, end_run;              // the first are where those of the unit before it end
  };

  void find_tiles(const BatchView& batch, int heads_per_kv, int window, int most_vectors);
  int64_t longest_effort() const;
  void find_items(int most_tiles);
  int64_t effort_of(const Item& item, int first_segment, int end_segment) const;
  void end_units_before(int unit);
  void add_item(const Item& item, int kv_head);
  void add_task(const Tile& tile, int kv_head, int first_segment, int end_segment, int group);

  bool is_short_ = false;
  std::vector<Tile> tiles_;
  std::vector<Item> items_;
  std::vector<Piece> pieces_;                       // of the item that is added
  std::vector<AttentionTask> tasks_;
  std::vector<CacheRun> runs_;
  std::vector<Unit> units_;
  std::vector<Group> groups_;
  int64_t states_ = 0, state_vectors_ = 0;          // segments, and vectors summed over segments, of all groups
  std::unique_ptr<std::atomic<int>[]> finished_;    // [groups] tasks done, 0 between ops
  size_t num_finished_ = 0;
};

}  // namespace foretoken
