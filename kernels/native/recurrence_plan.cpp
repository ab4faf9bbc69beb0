#include "recurrence_plan.h"

#include <algorithm>
#include <stdexcept>

namespace foretoken {

void RecurrencePlan::build(const BatchView& batch, bool keeps_states, int num_guesses) {
  num_tokens_ = batch.num_tokens;
  num_buffers_ = 1;
  rows_.clear(), accepted_.clear(), steps_.clear();
  row_of_.assign(size_t(num_tokens_), 0);
  before_.assign(size_t(num_tokens_), -1);
  for (int row = 0; row < batch.num_rows; ++row) {
    if (batch.query_start[row] < batch.query_start[row + 1]) add_row(batch, row, keeps_states, num_guesses);
  }
}

void RecurrencePlan::add_row(const BatchView& batch, int number, bool keeps_states, int num_guesses) {
  const int first = batch.query_start[number], end = batch.query_start[number + 1];
  Row row{first, end, end, -1, -1, -1, -1, -1, int(steps_.size()), 0};
  const int first_accepted = int(before_.size());
  int copied_behind = 0;  // sure entries
  if (const RowStates* states = batch.states) {
    row.guesses = std::min(first + states->num_known[number], end);
    row.source = states->sources[number];
    row.target = states->targets[number];
    row.copy_slot = states->copy_slots[number];
    if (!keeps_states && std::max({row.source, row.target, row.copy_slot}) >= 0) throw std::invalid_argument("the cache keeps no states");
    if (row.target >= 0 && end - row.guesses > num_guesses) throw std::invalid_argument("more guesses than the cache keeps");
    if (row.guesses <= first) throw std::invalid_argument("a row's first new token is a guess");
    for (uint64_t left = row.source < 0 ? 0 : uint64_t(states->accepted[number]); left; left &= left - 1) {
      accepted_.push_back({row.source, __builtin_ctzll(left)});
      before_.push_back(-1);
    }
    const int held = batch.seq_lens[number] - (end - first) - (int(before_.size()) - first_accepted);  // places that the source holds
    if (row.copy_slot >= 0) copied_behind = states->copy_places[number] - held;
  }
  std::fill(row_of_.begin() + first, row_of_.begin() + end, int(rows_.size()));
  add_sure_steps(row, first_accepted, copied_behind);
  add_guesses(row, batch, number);
  row.end_step = int(steps_.size());
  rows_.push_back(row);
}

void RecurrencePlan::add_sure_steps(Row& row, int first_accepted, int copied_behind) {
  const int accepted = int(before_.size()) - first_accepted, sure = accepted + row.guesses - row.first;
  int last = -1;
  for (int i = 0; i < sure; ++i) {
    const int entry = i < accepted ? first_accepted + i : row.first + i - accepted;
    const bool is_last = i + 1 == sure, is_copied = i + 1 == copied_behind;
    if (is_copied) row.last_copied = entry;
    if (is_last && row.target >= 0) row.last = entry;
    before_[size_t(entry)] = last;
    last = entry;
    Step step{entry, i || row.source < 0 ? 0 : kFromSource, 0, is_last && row.target >= 0, is_copied};
    if (is_last && row.guesses == row.end && !is_copied) {  // nobody goes on from a buffer
      step.to = row.target >= 0 ? kToTarget : kToNowhere;
      step.leaves_target = false;
    }
    steps_.push_back(step);
  }
}

void RecurrencePlan::add_guesses(const Row& row, const BatchView& batch, int number) {
  const int causal = row.first + batch.num_causal[number], known = row.guesses - row.first;
  parents_.clear();
  for (int token = row.guesses; token < row.end; ++token) {
    int before = token - 1;
    if (token >= causal) {
      const uint64_t ancestors = uint64_t(batch.tree_mask[token]) & ((uint64_t(1) << (token - causal)) - 1);
      before = causal - 1 + (ancestors ? 64 - __builtin_clzll(ancestors) : 0);
    }
    before_[size_t(token)] = before;
    parents_.push_back(std::max(before - row.first - known, -1));
  }
  sizes_.assign(parents_.size(), 1);
  for (size_t i = parents_.size(); i-- > 0;) {
    if (parents_[i] >= 0) sizes_[size_t(parents_[i])] += sizes_[i];
  }
  walk(row, -1, 0, 1);
}

// What goes on from the memory in a buffer, depth first: nobody behind may change it before all have read it, but for the last. free_buffer
// and those behind it are not in use. The largest part comes last, so that the buffers in use are at most the logarithm of all guesses.
void RecurrencePlan::walk(const Row& row, int parent, int buffer, int free_buffer) {
  std::vector<int> children;
  for (int i = parent + 1; i < int(parents_.size()); ++i) {
    if (parents_[size_t(i)] == parent) children.push_back(i);
  }
  std::stable_sort(children.begin(), children.end(), [this](int a, int b) { return sizes_[size_t(a)] < sizes_[size_t(b)]; });
  for (const int child : children) {
    const bool is_leaf = sizes_[size_t(child)] == 1, is_last = child == children.back();
    const int to = is_leaf ? kToNowhere : is_last ? buffer : free_buffer;
    steps_.push_back({row.guesses + child, buffer, to, false, false});
    if (is_leaf) continue;
    num_buffers_ = std::max(num_buffers_, to + 1);
    walk(row, child, to, is_last ? free_buffer : free_buffer + 1);
  }
}

}  // namespace foretoken
