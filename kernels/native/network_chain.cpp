// Chains: a network's own tokens fed back to it, pass after pass within one call.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "network.h"
#include "noise_key.h"
#include "pack.h"

namespace foretoken {
namespace {

constexpr int kFetchedAhead = 2;  // panels

}  // namespace

void Network::run_chain(const ChainRequest& request) {
  if (!request.run.batch.num_logits) return run(request.run);
  run_chain(request, ThreadPool::instance().take_turn());
}

void Network::run_chain(const ChainRequest& request, const ThreadPool::Turn& turn, bool wants_confidence, const NextBest& next_best) {
  const BatchView& first = request.run.batch;
  const int chains = first.num_logits, steps = request.steps;

  // The row, position and place behind each chain's last token.
  std::vector<int> alive(static_cast<size_t>(chains)), rows(static_cast<size_t>(chains));
  for (int n = 0; n < chains; ++n) {
    alive[size_t(n)] = n;
    const int32_t* begin = first.query_start + 1;
    rows[size_t(n)] = int(std::upper_bound(begin, begin + first.num_rows, int32_t(first.logits_indices[n])) - begin);
  }
  std::vector<int64_t> token_ids, positions, slots, logits_indices, tree_mask;
  std::vector<int32_t> query_start, seq_lens, tables, num_causal, first_places;
  std::vector<int32_t> sources, targets, nowhere;
  std::vector<int64_t> nothing;
  RowStates states{};
  wants_best_ = false;
  shortens_ = shortlist_ != nullptr;
  choosable_ = request.choosable;
  token_map_ = request.token_map;
  wants_confidence_ = wants_confidence || token_map_;  // what has no column scores -inf, which is no mistake there
  limits_columns_ = request.limits_columns != 0;
  num_next_best_ = next_best.count;
  RunRequest pass = request.run;

  // A network that only reads its cache has all of a chain's tokens where the first one is.
  const int advance = std::any_of(ops_.begin(), ops_.end(), [this](const Op& op) { return is_frozen(op); }) ? 0 : 1;

  // A recurrent network: its state comes out of every pass, and goes in again but for the first.
  const bool recurs = request.state >= 0;
  std::vector<int32_t> bound(pass.bound, pass.bound + pass.num_bound);
  std::vector<float*> bound_memory(pass.bound_memory, pass.bound_memory + pass.num_bound);
  const size_t state_width = recurs ? size_t(width(request.state)) : 0;
  std::vector<int64_t> state_rows(first.logits_indices, first.logits_indices + chains);  // of the chains alive, in the last pass
  if (recurs) {
    bound.push_back(request.state);
    bound_memory.push_back(chain_states_.get<float>(size_t(first.num_tokens) * state_width));
    pass.num_bound = int(bound.size());
    pass.bound = bound.data();
    pass.bound_memory = bound_memory.data();
  }
  for (int step = 0; step < steps; ++step) {
    if (step) {
      // One row of one token for every chain that wants more.
      size_t kept = 0;
      for (size_t i = 0; i < alive.size(); ++i) {
        if (request.counts[alive[i]] <= step) continue;
        alive[kept] = alive[i];
        state_rows[kept++] = state_rows[i];
      }
      alive.resize(kept);
      const int count = int(kept);
      if (recurs) {
        float* states = bound_memory.back();
        float* inputs = chain_inputs_.get<float>(kept * state_width);
        for (size_t i = 0; i < kept; ++i) {
          std::memcpy(inputs + i * state_width, states + size_t(state_rows[i]) * state_width, state_width * sizeof(float));
          state_rows[i] = int64_t(i);
        }
        bound = {request.input, request.state};
        bound_memory = {inputs, states};
        pass.num_bound = 2;
        pass.bound = bound.data();
        pass.bound_memory = bound_memory.data();
      }
      token_ids.clear(), positions.clear(), slots.clear(), logits_indices.clear(), query_start.clear(), seq_lens.clear(), tables.clear();
      first_places.clear(), sources.clear(), targets.clear();
      for (int i = 0; i < count; ++i) {
        const int n = alive[size_t(i)], row = rows[size_t(n)];
        const int place = first.seq_lens[row] + advance * step - 1;
        const int32_t* table = first.block_tables + int64_t(row) * first.table_width;
        token_ids.push_back(request.token_ids[int64_t(n) * steps + step - 1]);
        positions.push_back(first.positions[first.logits_indices[n]] + advance * step);
        slots.push_back(int64_t(table[place / kBlockSize]) * kBlockSize + place % kBlockSize);
        logits_indices.push_back(i);
        query_start.push_back(i);
        seq_lens.push_back(place + 1);
        tables.insert(tables.end(), table, table + first.table_width);
        first_places.push_back(first.first_places ? first.first_places[row] : 0);
        if (!first.states) continue;
        const int32_t* turns = first.states->chain_slots + 2 * row;
        sources.push_back(step == 1 ? first.states->targets[row] : turns[step % 2]);
        targets.push_back(step + 1 < request.counts[n] ? turns[(step + 1) % 2] : -1);  // behind the last one nobody goes on
      }
      query_start.push_back(count);
      num_causal.assign(size_t(count), 1);
      tree_mask.assign(size_t(count), 0);
      if (first.states) {
        nowhere.assign(size_t(count), -1);
        nothing.assign(size_t(count), 0);
        states = {sources.data(), targets.data(), nothing.data(), num_causal.data(), nowhere.data(), nowhere.data(), nullptr};
      }
      pass.batch = {count, count, first.table_width, count, token_ids.data(), positions.data(), slots.data(), query_start.data(),
                    seq_lens.data(), tables.data(), num_causal.data(), tree_mask.data(), logits_indices.data(),
                    first_places.data(), nullptr, first.states ? &states : nullptr};
    }
    const int count = int(alive.size());
    logits_ = chain_logits_.get<float>(size_t(count) * size_t(vocab_size_));
    logits_rows_.resize(size_t(count));
    for (int i = 0; i < count; ++i) logits_rows_[size_t(i)] = i;
    links_.resize(size_t(count));
    shortlisted_.resize(size_t(count));
    next_best_.resize(size_t(count) * size_t(num_next_best_));
    for (int i = 0; i < count; ++i) {
      const int n = alive[size_t(i)];
      links_[size_t(i)] = {0, 0.0f, request.temperatures ? request.temperatures[n] : 0.0f, 0};
      if (request.streams) links_[size_t(i)].key = noise_key(request.streams[n], request.first_positions[n] + step);
    }
    start(pass, true);
    ThreadPool::instance().run(*this, turn);
    for (int i = 0; i < count; ++i) {
      const int64_t at = int64_t(alive[size_t(i)]) * steps + step;
      request.token_ids[at] = links_[size_t(i)].token;
      request.confidence[at] = links_[size_t(i)].confidence;
      std::copy_n(next_best_.begin() + i * num_next_best_, num_next_best_, next_best.token_ids + at * num_next_best_);
      if (request.logits) {
        std::memcpy(request.logits + at * vocab_size_, logits_ + int64_t(i) * vocab_size_, size_t(vocab_size_) * sizeof(float));
      }
    }
  }
}

// Scores of these panels that come from the shortlist: anew, from the head itself.
void Network::refine(int row, const int32_t* panels, int count, Worker& worker) {
  const Op& op = *std::find_if(ops_.begin(), ops_.end(), [](const Op& one) { return one.is_head != 0; });
  const PackedLinear& weights = *op.weights;
  const float* input = buffer(op.inputs[0]) + int64_t(row) * width(op.inputs[0]);
  PreparedRows x{input, 0, nullptr, nullptr, 1};
  if (weights.precision != Precision::kFloat32 || op.normalise) {
    x = prepared_memory(weights, 1, worker.prepared, worker.scales, worker.input_sums);
    prepare_rows(op, weights, input, 0, 1, x, nullptr);
    worker.prepared_op = -1;
  }
  Epilogue epilogue = epilogue_of(op);
  if (epilogue.residual) epilogue.residual += row * epilogue.residual_stride;
  epilogue.out = logits_ + int64_t(row) * vocab_size_;
  epilogue.out_stride = vocab_size_;
  const int64_t bytes = packed_bytes(weights.precision, weights.inputs, kPanel);
  const auto fetch = [&](int i) {  // they lie anywhere
    if (i >= count) return;
    const char* const panel = static_cast<const char*>(weights.weights) + panels[i] * bytes;
    for (int64_t line = 0; line < bytes; line += 64) __builtin_prefetch(panel + line);
  };
  for (int i = 0; i < kFetchedAhead; ++i) fetch(i);
  for (int i = 0; i < count; ++i) {
    fetch(i + kFetchedAhead);
    kernels_.linear(weights, x, epilogue, panels[i], 1, {}, worker.linear.get<char>(0));
  }
}

// Panels of the tokens among which the second round of a draw chose this one, at most kRaceBlock. Returns how many.
int Network::raced_with(int64_t token, int32_t* panels) const {
  const int64_t block = token / kRaceBlock;
  int count = 0;
  const auto add = [&](int column) {
    if (!count || panels[count - 1] != column / kPanel) panels[count++] = column / kPanel;
  };
  if (!token_map_) {
    const int first = int(block) * kRaceBlock, end = std::min(first + kRaceBlock, vocab_size_);
    for (int column = first; column < end; column += kPanel) add(column);
  } else {
    for (int column = 0; column < vocab_size_; ++column) {
      if (token_map_[column] / kRaceBlock == block) add(column);
    }
  }
  return count;
}

// Scores of all that may be chosen. Noise belongs to token ids: to race under it, scores stand where their tokens do. Else columns stay, so
// that the first of equals wins.
Network::Choosable Network::choosable(int row, Worker& worker) const {
  const float* const logits = logits_ + int64_t(row) * vocab_size_;
  if (!token_map_) return {logits, choosable_};
  if (links_[size_t(row)].temperature != 0.0f) {
    float* const by_token = worker.by_token.get<float>(size_t(choosable_));
    std::fill_n(by_token, choosable_, -INFINITY);
    for (int i = 0; i < vocab_size_; ++i) {
      if (token_map_[i] < choosable_) by_token[token_map_[i]] = logits[i];
    }
    return {by_token, choosable_};
  }
  if (!limits_columns_) return {logits, vocab_size_};
  float* const kept = worker.by_token.get<float>(size_t(vocab_size_));
  for (int i = 0; i < vocab_size_; ++i) kept[i] = token_map_[i] < choosable_ ? logits[i] : -INFINITY;
  return {kept, vocab_size_};
}

// The token that wins under the link's noise, -1 where scores are not finite.
int64_t Network::draw(const Choosable& from, const Link& link, Worker& worker) {
  SampleRow place{};
  place.logits = from.scores;
  place.key = link.key;
  place.top_p = 1.0;
  place.parent = place.guess = -1;
  place.top_k = from.count;
  place.temperature = link.temperature;
  place.log_min_p = -INFINITY;
  place.repetition = 1.0f;
  int64_t token = -1;
  kernels_.sample(&place, 1, from.count, worker.sampling.get<char>(sample_scratch_bytes(from.count)), &token);
  return token;
}

void Network::plan_links() {
  const auto add = [&](PhaseKind kind, int units_of_row) {
    phases_.push_back({kind, 0, 0, false, Deal::kMostReserved, uint32_t(batch_.num_logits * units_of_row), 1});
  };
  if (shortens_) {
    add(PhaseKind::kShorten, 1);
    add(PhaseKind::kRefine, Shortlisted::kMost / Shortlisted::kRun);
  }
  add(PhaseKind::kChoose, 1);
}

void Network::shorten(int row) {
  Shortlisted& best = shortlisted_[size_t(row)];
  const int columns = token_map_ ? vocab_size_ : choosable_;
  best.count = kernels_.best_panels(logits_ + int64_t(row) * vocab_size_, columns, Shortlisted::kMost, best.panels);
}

void Network::refine_run(int unit, Worker& worker) {
  constexpr int kRuns = Shortlisted::kMost / Shortlisted::kRun;
  const Shortlisted& best = shortlisted_[size_t(unit / kRuns)];
  const int first = unit % kRuns * Shortlisted::kRun, count = std::min(best.count - first, Shortlisted::kRun);
  if (count > 0) refine(unit / kRuns, best.panels + first, count, worker);
}

void Network::choose(int row, Worker& worker) {
  Link& link = links_[size_t(row)];
  const bool draws = link.temperature != 0.0f;
  for (int64_t refined = -1; shortens_ && draws;) {  // until the draw ends among scores of the head itself, nearly always the next time
    int32_t* const panels = worker.panels.get<int32_t>(kRaceBlock);
    const int64_t token = draw(choosable(row, worker), link, worker), block = token / kRaceBlock;
    if (token < 0 || block == refined) break;
    refine(row, panels, raced_with(token, panels), worker);
    refined = block;
  }
  const Choosable from = choosable(row, worker);
  Best best{-INFINITY, 0.0f, 0, 0};
  kernels_.best_of_row(from.scores, from.count, &best, wants_confidence_ ? &link.confidence : nullptr);
  if (!wants_confidence_) link.confidence = std::isfinite(best.value + best.poison) ? 1.0f : NAN;
  link.token = token_map_ && !draws ? int(token_map_[best.index]) : best.index;
  const int64_t token = draws ? draw(from, link, worker) : -1;
  if (token >= 0) {  // else greedy; or logits that are not finite: their best will do for a guess
    link.token = int(token);
    link.confidence *= std::exp(from.scores[token] - best.value);
  }
  if (num_next_best_) find_next_best(row, from, link.token);
}

// Of a network without a token map, and from the shortlist where there is one.
void Network::find_next_best(int row, const Choosable& from, int chosen) {
  int32_t* const found = next_best_.data() + row * num_next_best_;
  std::fill_n(found, num_next_best_, -1);
  Shortlisted& among = shortlisted_[size_t(row)];
  if (!shortens_) among.count = kernels_.best_panels(from.scores, from.count, num_next_best_ + 1, among.panels);
  std::sort(among.panels, among.panels + among.count);  // of equals the first is the better one
  for (int i = 0; i < among.count; ++i) {
    const int first = among.panels[i] * kPanel, end = std::min(first + kPanel, from.count);
    for (int column = first; column < end; ++column) {
      if (column == chosen) continue;
      int at = num_next_best_;
      while (at > 0 && (found[at - 1] < 0 || from.scores[column] > from.scores[found[at - 1]])) --at;
      if (at == num_next_best_) continue;
      std::copy_backward(found + at, found + num_next_best_ - 1, found + num_next_best_);
      found[at] = column;
    }
  }
}

}  // namespace foretoken
