// A draft model in rounds: one pass over what its cache lacks of each text, and a chain behind each (proposers/drafting.py says what is
// read, proposers/guessing.py what is guessed).
#include "draft_chains.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace foretoken {
namespace {

// More than this were hardly ever right, and then took as long as they brought.
constexpr int kMostNextBest = 4, kAlternatesPerGuess = 2;

// Guesses that the drafter may make for the row; 0 if it cannot read its text.
int most_of(const RoundsDrafter& drafter, const RoundsRow& row, int room) {
  const int most = std::min({room, row.room(), row.draft_k, drafter.max_length - row.length()});
  if (most <= 0) return 0;
  return std::all_of(row.text + row.num_read, row.text + row.length(), [&](int32_t token) { return token < drafter.readable; }) ? most : 0;
}

}  // namespace

void DraftChains::make(const RoundsRequest& request, const std::vector<int>& alive, int most_at_once, const ThreadPool::Turn& turn) {
  const RoundsDrafter& drafter = *request.drafter;
  token_ids_.clear(), positions_.clear(), slots_.clear(), logits_indices_.clear(), seq_lens_.clear(), num_causal_.clear();
  counts_.clear(), temperatures_.clear(), streams_.clear(), first_positions_.clear();
  query_start_.assign(1, 0);
  chain_of_.assign(alive.size(), -1);
  int room = request.most_tokens - int(alive.size()), width = 1;
  for (size_t i = 0; i < alive.size(); ++i) {
    RoundsRow& row = request.rows[alive[i]];
    const int most = most_of(drafter, row, room);
    if (!most) continue;
    chain_of_[i] = int(counts_.size());
    room -= most;
    read(row, most);
    row.num_read = row.length();
    width = std::max(width, row.num_blocks);
  }
  if (counts_.empty()) return;

  const size_t chains = counts_.size();
  tables_.assign(chains * size_t(width), 0);
  for (size_t i = 0; i < alive.size(); ++i) {
    const RoundsRow& row = request.rows[alive[i]];
    if (chain_of_[i] >= 0) std::copy_n(row.table, row.num_blocks, tables_.begin() + int64_t(chain_of_[i]) * width);
  }
  tree_mask_.assign(token_ids_.size(), 0);
  steps_ = int(*std::max_element(counts_.begin(), counts_.end()));
  chosen_.resize(chains * size_t(steps_)), confidence_.resize(chosen_.size());

  ChainRequest chain{};
  chain.run.batch = {int(token_ids_.size()), int(chains), width, int(chains), token_ids_.data(), positions_.data(), slots_.data(),
                     query_start_.data(), seq_lens_.data(), tables_.data(), num_causal_.data(), tree_mask_.data(), logits_indices_.data(),
                     nullptr, nullptr, nullptr};
  chain.run.cache = drafter.cache;
  chain.counts = counts_.data();
  chain.steps = steps_;
  chain.token_ids = chosen_.data();
  chain.confidence = confidence_.data();
  chain.choosable = drafter.choosable;
  if (drafter.samples) {
    chain.temperatures = temperatures_.data();
    chain.streams = streams_.data();
    chain.first_positions = first_positions_.data();
  }
  chain.input = chain.state = -1;

  // Tokens of the pass that cost little, shared by the chains.
  const int guessed = int(std::accumulate(counts_.begin(), counts_.end(), int64_t(0)));
  const int spare = std::max(0, std::min(most_at_once, request.most_tokens) - int(alive.size()) - guessed) / int(chains);
  const NextBest next{std::min(spare, kMostNextBest), next_best_.get<int32_t>(chosen_.size() * kMostNextBest)};
  drafter.network->run_chain(chain, turn, drafter.threshold > 0.0f, next);

  guesses_.assign(chosen_.begin(), chosen_.end());
  lengths_.resize(chains), alternates_.resize(chains);
  for (size_t n = 0; n < chains; ++n) {
    const float* likely = confidence_.data() + n * size_t(steps_);
    const float* doubted = std::find_if(likely, likely + counts_[n] - 1, [&](float p) { return p < drafter.threshold; });
    lengths_[n] = std::isfinite(*likely) ? int(doubted - likely) + 1 : 0;  // of scores that are no numbers nothing is the best
    take_alternates(n, std::min(spare, kAlternatesPerGuess * lengths_[n]), next);
  }
}

// At most so many for a chain, the likeliest first: a place further on is reached about as much less often as the next token of one is right.
void DraftChains::take_alternates(size_t chain, int most, const NextBest& next) {
  std::vector<Alternate>& taken = alternates_[chain];
  taken.clear();
  const int length = lengths_[chain];
  for (int sum = 0; sum < length + next.count && int(taken.size()) < most; ++sum) {
    for (int place = std::min(sum, length - 1); place >= 0 && sum - place < next.count; --place) {
      const int32_t token = next.token_ids[(int64_t(chain) * steps_ + place) * next.count + sum - place];
      if (token >= 0 && int(taken.size()) < most) taken.push_back({token, place});
    }
  }
}

// Adds what the drafter's cache lacks of the row's text to the pass, and a chain of so many guesses.
void DraftChains::read(const RoundsRow& row, int count) {
  const int length = row.length();
  for (int place = row.num_read; place < length; ++place) {
    token_ids_.push_back(row.text[place]);
    positions_.push_back(place);
    slots_.push_back(int64_t(row.table[place / kBlockSize]) * kBlockSize + place % kBlockSize);
  }
  logits_indices_.push_back(int64_t(token_ids_.size()) - 1);
  query_start_.push_back(int32_t(token_ids_.size()));
  seq_lens_.push_back(length);
  num_causal_.push_back(length - row.num_read);
  counts_.push_back(count);
  temperatures_.push_back(row.sampling.temperature);
  streams_.push_back(row.sampling.key);
  first_positions_.push_back(length);
}

}  // namespace foretoken
