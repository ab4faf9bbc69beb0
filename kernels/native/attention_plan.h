// Cuts the attention of a batch into tasks that threads claim one by one. The plan depends on the batch and on how heads are grouped,
// not on the layer, and it changes no bit of the result (ops/attention.h). Knows no instruction set.
#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "kernels.h"

namespace foretoken {

class AttentionPlan {
 public:
  void build(const BatchView& batch, int heads_per_kv, int kv_heads, int window, int threads);

  // A unit is one task for one kv head. All units of an op must have run before another op with this plan starts.
  int num_units() const { return int(tasks_.size()) * kv_heads_; }
  int units_of_head() const { return int(tasks_.size()); }
  // Whether all of a head is so little that to share it among threads would take longer.
  bool is_short() const { return is_short_; }
  // Floats that `run` needs at partials, 64-byte aligned and shared by the threads.
  size_t partial_floats(int v_dim) const;
  // Safe from several threads for different units. Whoever finishes the last task of a group folds the states of all.
  void run(const Kernels& kernels, const AttentionOp& op, const BatchView& batch, int unit, float* partials, void* scratch);

 private:
  // Tasks first_task .. that share their tokens and divide the segments.
  struct Group {
    int first_task, num_tasks;
    int vectors;
    int64_t first_state, first_vector;  // of its states among those of one kv head; alone in its group a task needs none
  };

  void add_group(const AttentionTask& whole, int segments_per_task);

  int kv_heads_ = 0;
  bool is_short_ = false;
  std::vector<AttentionTask> tasks_;
  std::vector<Group> groups_;
  int64_t states_ = 0, state_vectors_ = 0;          // segments, and vectors summed over segments, of one kv head
  std::unique_ptr<std::atomic<int>[]> finished_;    // [kv_heads][groups] tasks done, 0 between ops
  size_t num_finished_ = 0;
};

}  // namespace foretoken
