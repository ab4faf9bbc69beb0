// What a draft model guesses in a round: of each row that wants guesses a chain behind its last token.
#pragma once

#include <cstdint>
#include <vector>

#include "network.h"

namespace foretoken {

class DraftChains {
 public:
  // The chains of request.rows[alive[i]], as far as they have room and a draft_k. Of these the drafter's cache has all tokens afterwards.
  // most_at_once: of the target. turn: held by the caller.
  void make(const RoundsRequest& request, const std::vector<int>& alive, int most_at_once, const ThreadPool::Turn& turn);

  const int32_t* token_ids(size_t i) const { return guesses_.data() + first_guess(i); }
  // What may stand instead of its guesses, as far as the pass has rows for it.
  const std::vector<Alternate>& alternates(size_t i) const { return chain_of_[i] < 0 ? nothing_ : alternates_[size_t(chain_of_[i])]; }
  int count(size_t i) const { return chain_of_[i] < 0 ? 0 : lengths_[size_t(chain_of_[i])]; }
  // Leading guesses whose entries are in the drafter's cache, behind those of the text.
  int num_fed(size_t i) const { return chain_of_[i] < 0 ? 0 : int(counts_[size_t(chain_of_[i])]) - 1; }

 private:
  size_t first_guess(size_t i) const { return chain_of_[i] < 0 ? 0 : size_t(chain_of_[i]) * size_t(steps_); }
  void read(const RoundsRow& row, int count);
  void take_alternates(size_t chain, int most, const NextBest& next);

  std::vector<int> chain_of_;    // [alive] -1 = none
  std::vector<int64_t> counts_;  // [chains] tokens asked for ...
  std::vector<int> lengths_;     // ... and left of them
  std::vector<int32_t> guesses_;  // [chains][steps]
  int steps_ = 0;                // the largest count
  std::vector<std::vector<Alternate>> alternates_;  // [chains]
  const std::vector<Alternate> nothing_;
  Scratch next_best_;            // [chains][steps] some tokens each

  // of the pass that reads
  std::vector<int64_t> token_ids_, positions_, slots_, logits_indices_, tree_mask_;
  std::vector<int32_t> query_start_, seq_lens_, num_causal_, tables_;

  // of the chains, as they are asked for and come
  std::vector<float> temperatures_, confidence_;
  std::vector<int64_t> streams_, first_positions_, chosen_;
};

}  // namespace foretoken
