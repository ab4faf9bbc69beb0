// Rounds: guess what a text says next from the text itself, a table or a draft model, verify, take what stands, and again, within one call.
//
// The guesses are those of proposers/ngram.py, proposers/prediction.py and proposers/ngram_cache.py; draft_chains.cpp has those of a
// network. A text is read instead of an index: one that was just computed is read in microseconds. What stands is decided as
// engine/verifier.py does, by the target's own token at each place.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <numeric>

#include "draft_chains.h"
#include "network.h"
#include "noise_key.h"

namespace foretoken {
namespace {

constexpr int kResyncSizes[] = {8, 4, 2};  // _RESYNC_SIZES of proposers/prediction.py

// The end of a run of `size` tokens equal to those at `recent` in the prediction: the first behind the cursor, else the last before it.
int end_in_prediction(const RoundsRow& row, const int32_t* recent, int size) {
  auto is_end = [&](int end) { return std::equal(recent, recent + size, row.prediction + end - size); };
  for (int end = std::max(row.cursor + 1, size); end <= row.num_predicted; ++end) {
    if (is_end(end)) return end;
  }
  for (int end = std::min(row.cursor, row.num_predicted); end >= size; --end) {
    if (is_end(end)) return end;
  }
  return -1;
}

// Moves the cursor along with the output tokens that have come since the last call.
void follow_prediction(RoundsRow& row) {
  if (!row.num_predicted) return;
  for (; row.num_followed < row.length(); ++row.num_followed) {
    const int at = row.num_followed;
    if (!row.is_lost && row.cursor < row.num_predicted && row.text[at] == row.prediction[row.cursor]) {
      ++row.cursor;
      continue;
    }
    row.is_lost = 1;
    for (int size : kResyncSizes) {
      if (at + 1 - row.num_prompt < size) continue;
      const int end = end_in_prediction(row, row.text + at + 1 - size, size);
      if (end < 0) continue;
      row.cursor = end;
      row.is_lost = 0;
      break;
    }
  }
}

// Place behind the earlier occurrence of the longest of the text's last n-grams; 0 = none. The first of them, or the latest.
int earlier_place(const RoundsRow& row) {
  const int32_t* text = row.text;
  const int length = row.length(), most = std::min(row.lookup_max, length - 1), last = text[length - 1];
  int best = row.lookup_min - 1, found = 0;
  auto look = [&](int place) {
    if (text[place - 1] != last) return false;
    int n = 1;
    while (n < most && n < place && text[place - 1 - n] == text[length - 1 - n]) ++n;
    if (n > best) {
      best = n;
      found = place;
    }
    return n == most;
  };
  if (row.latest) {
    for (int place = length - 1; place > 0; --place) {
      if (look(place)) break;
    }
  } else {
    for (int place = 1; place < length; ++place) {
      if (look(place)) break;
    }
  }
  return found;
}

constexpr int kMostChained = 64;  // MAX_NUM_SPECULATIVE_TOKENS of proposers/config_entry.py is not more

constexpr float kLeastChance = 0.05f;  // LEAST_CHANCE of proposers/ngram_cache.py

// What the table says, token by token, as far as it brings the most beyond its price.
struct Chain {
  int32_t text[NgramTable::kMostN + kMostChained];  // the row's last tokens, and the guess

  Guess follow(const NgramTable& table, const float* prices, const RoundsRow& row, int most) {
    int length = std::min(table.max_n, row.length());
    std::copy_n(row.text + row.length() - length, length, text);
    Guess guess{text + length, 0, kFromTable};
    float chance = 1.0f, expected = 0.0f;
    most = std::min(most, kMostChained);
    for (int count = 1; count <= most; ++count) {
      const int64_t place = table.find(text, length);
      if (place < 0) break;
      chance *= table.chances[place];
      if (chance < kLeastChance) break;
      expected += chance;
      text[length++] = table.token_ids[place];
      if (const float gain = row.trust * expected - prices[count]; gain > guess.gain) {
        guess.gain = gain;
        guess.count = count;
        guess.expected = expected;
      }
    }
    return guess;
  }
};

Guess guess_of(RoundsRow& row, int most, int vocab, const RoundsRequest& request, Chain& chain) {
  Guess guess;
  follow_prediction(row);
  if (!row.is_lost && row.cursor < row.num_predicted && row.predicted_k) {
    guess = {row.prediction + row.cursor, std::min({row.num_predicted - row.cursor, row.predicted_k, most}), kFromPrediction};
  } else {
    const int place = row.lookup_k ? earlier_place(row) : 0;
    if (row.table_k) guess = chain.follow(request.table, request.prices, row, std::min({row.table_k, most, request.num_prices - 1}));
    if (place && !(guess.count && guess.gain > row.text_gain)) {
      guess = {row.text + place, std::min({row.length() - place, row.lookup_k, most}), kFromText};
    }
  }
  for (int i = 0; i < guess.count; ++i) {
    if (guess.token_ids[i] < 0 || guess.token_ids[i] >= vocab) guess.count = i;
  }
  return guess;
}

bool ends(const RoundsRow& row, int32_t token) { return std::find(row.stops, row.stops + row.num_stops, token) != row.stops + row.num_stops; }

// One pass of the rows that go on: of each its last token and its guess, as a chain or, with alternates, as a tree.
struct RoundsBatch {
  std::vector<Guess> guesses;
  std::vector<Chain> chains;  // what guesses from the table point to
  std::vector<int64_t> token_ids, positions, slots, logits_indices, tree_mask;
  std::vector<int32_t> query_start, seq_lens, num_causal, tables, adapters;
  int table_width = 1;

  int tokens() const { return int(token_ids.size()); }
  int first_node(size_t i) const { return query_start[i]; }

  void lay_out(const RoundsRequest& request, const std::vector<int>& alive, const DraftChains& drafts, int vocab) {
    guesses.clear(), token_ids.clear(), positions.clear(), slots.clear(), seq_lens.clear(), num_causal.clear();
    adapters.clear(), tree_mask.clear();
    query_start.assign(1, 0);
    chains.resize(alive.size());
    int room = request.most_tokens - int(alive.size());  // for what is looked up
    for (size_t i = 0; i < alive.size(); ++i) {
      if (request.rows[alive[i]].draft_k) room -= drafts.count(i) + int(drafts.alternates(i).size());
    }
    for (int r : alive) {
      RoundsRow& row = request.rows[r];
      const int first = row.length() - 1;
      const size_t at = guesses.size();
      Guess guess;
      if (row.draft_k) {
        const std::vector<Alternate>& alternates = drafts.alternates(at);
        guess = {drafts.token_ids(at), drafts.count(at), kFromDraft};
        guess.alternates = alternates.data();
        guess.num_alternates = std::clamp(row.num_places - row.length() - guess.count, 0, int(alternates.size()));
      } else {
        guess = guess_of(row, std::max(0, std::min(room, row.room())), vocab, request, chains[at]);
        room -= guess.count;
      }
      // sees: how many guesses of the chain. Where there are alternates, nodes are fewer than a mask has bits.
      const auto add = [&](int32_t token, int position, int place, int sees) {
        token_ids.push_back(token);
        positions.push_back(position);
        slots.push_back(int64_t(row.table[place / kBlockSize]) * kBlockSize + place % kBlockSize);
        const int node = place - first - 1;
        tree_mask.push_back(guess.num_alternates && node >= 0 ? ((int64_t(1) << sees) - 1) | int64_t(1) << node : 0);
      };
      add(row.text[first], first, first, 0);
      for (int i = 0; i < guess.count; ++i) add(guess.token_ids[i], first + 1 + i, first + 1 + i, i);
      for (int i = 0; i < guess.num_alternates; ++i) {
        const auto& [token, place] = guess.alternates[i];
        add(token, first + 1 + place, first + 1 + guess.count + i, place);
      }
      guesses.push_back(guess);
      query_start.push_back(tokens());
      seq_lens.push_back(first + 1 + guess.count + guess.num_alternates);
      num_causal.push_back(guess.num_alternates ? 1 : guess.count + 1);
      adapters.push_back(row.adapter);
    }
    for (int i = int(logits_indices.size()); i < tokens(); ++i) logits_indices.push_back(i);
    if (tables.size() != alive.size() * size_t(table_width)) lay_out_tables(request, alive);
  }

  BatchView view() const {
    return {tokens(), int(guesses.size()), table_width, tokens(), token_ids.data(), positions.data(), slots.data(), query_start.data(),
            seq_lens.data(), tables.data(), num_causal.data(), tree_mask.data(), logits_indices.data(), nullptr, adapters.data(), nullptr};
  }

 private:
  void lay_out_tables(const RoundsRequest& request, const std::vector<int>& alive) {
    for (int r : alive) table_width = std::max(table_width, request.rows[r].num_blocks);
    tables.assign(alive.size() * size_t(table_width), 0);
    for (size_t i = 0; i < alive.size(); ++i) {
      const RoundsRow& row = request.rows[alive[i]];
      std::copy_n(row.table, row.num_blocks, tables.begin() + int64_t(i) * table_width);
    }
  }
};

// What stood of a guess, what lies behind the row's end included.
struct Grown {
  int accepted;
  int node;  // the last one: an alternate if there are fewer guesses
};

// The row grows by what the target says, as far as that was guessed, and one token more. chosen, top: of its nodes.
Grown grow(RoundsRow& row, const Guess& guess, const int64_t* chosen, const float* top) {
  // The node behind this one if the target says that, -1 = none: so behind all but the chain's.
  const auto following = [&](int node, int64_t token) {
    if (node < guess.count && guess.token_ids[node] == token) return node + 1;
    const Alternate *const first = guess.alternates, *const end = first + guess.num_alternates;
    const auto* const found = std::find_if(first, end, [&](const Alternate& one) { return one.place == node && one.token == token; });
    return found == end ? -1 : guess.count + 1 + int(found - first);
  };
  for (int accepted = 0, node = 0;; ++accepted) {
    if (chosen[node] < 0 || !std::isfinite(top[node])) {
      row.has_failed = 1;
      return {accepted, node};
    }
    const int next = following(node, chosen[node]);
    if (!row.has_ended) {
      const int32_t token = int32_t(chosen[node]);
      row.text[row.length()] = token;  // behind all that a guess is read from
      ++row.num_new;
      row.has_ended = ends(row, token) || row.num_new == row.most_new;
    }
    if (next < 0) return {accepted, node};
    node = next;
  }
}

}  // namespace

// Tokens of a row that draws, at each node that those before it lead to. logits: of its first one.
void Network::draw(const RoundsRow& row, const Guess& guess, const float* logits, int64_t* chosen) {
  std::vector<SampleRow> nodes;
  nodes.reserve(size_t(1 + guess.count + guess.num_alternates));
  const auto add = [&](int parent, int token) {
    SampleRow& node = nodes.emplace_back(row.sampling);
    node.logits = logits + int64_t(nodes.size() - 1) * vocab_size_;
    node.key = noise_key(row.sampling.key, row.length() + parent + 1);
    node.parent = parent;
    node.guess = token;
  };
  add(-1, -1);
  for (int i = 0; i < guess.count; ++i) add(i, guess.token_ids[i]);
  for (int i = 0; i < guess.num_alternates; ++i) add(guess.alternates[i].place, guess.alternates[i].token);
  kernels_.sample(nodes.data(), int(nodes.size()), vocab_size_, rounds_sampling_.get<char>(sample_scratch_bytes(vocab_size_)), chosen);
}

void Network::run_rounds(RoundsRequest& request) {
  using Clock = std::chrono::steady_clock;
  const auto seconds_since = [](Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); };
  const ThreadPool::Turn turn = ThreadPool::instance().take_turn();
  const auto* interrupt = reinterpret_cast<const std::atomic<int32_t>*>(request.interrupt);
  std::vector<int> alive(static_cast<size_t>(request.num_rows));
  std::iota(alive.begin(), alive.end(), 0);
  RoundsBatch batch;
  DraftChains drafts;
  std::vector<int64_t> chosen;
  std::vector<float> top;

  request.num_rounds = request.num_drafts = 0;
  const int at_once = most_at_once();
  const Clock::time_point began = Clock::now();
  bool goes_on = true;
  while (goes_on && !alive.empty() && request.num_rounds < request.most_rounds) {
    // 1. what a drafter guesses
    const Clock::time_point drafted = Clock::now();
    if (request.drafter) drafts.make(request, alive, at_once, turn);
    const Clock::time_point started = Clock::now();

    // 2. the pass, with whole logits of the rows that draw
    batch.lay_out(request, alive, drafts, vocab_size_);
    chosen.resize(size_t(batch.tokens())), top.resize(size_t(batch.tokens()));
    logits_rows_.assign(size_t(batch.tokens()), -1);
    int num_drawn = 0;
    for (size_t i = 0; i < alive.size(); ++i) {
      if (request.rows[alive[i]].sampling.temperature == 0.0f) continue;
      for (int node = batch.first_node(i); node < batch.first_node(i + 1); ++node) logits_rows_[size_t(node)] = num_drawn++;
    }
    logits_ = rounds_logits_.get<float>(size_t(num_drawn) * size_t(vocab_size_) + 1);
    wants_best_ = true;
    shortens_ = false;
    RunRequest pass{};
    pass.batch = batch.view();
    pass.cache = request.cache;
    pass.argmax = chosen.data();
    pass.top = top.data();
    start(pass, false);
    ThreadPool::instance().run(*this, turn);
    finish(pass);

    // 3. what stands of it
    size_t kept = 0;
    for (size_t i = 0; i < alive.size(); ++i) {
      const int r = alive[i], first_node = batch.first_node(i);
      RoundsRow& row = request.rows[r];
      const Guess& guess = batch.guesses[i];
      if (row.sampling.temperature != 0.0f) {
        const float* logits = logits_ + int64_t(logits_rows_[size_t(first_node)]) * vocab_size_;
        draw(row, guess, logits, chosen.data() + first_node);
      }
      const int before = row.num_new;
      const auto [accepted, last] = grow(row, guess, chosen.data() + first_node, top.data() + first_node);
      const bool is_alternate = last > guess.count;
      if (is_alternate) move_in_cache(batch.slots[size_t(first_node + last)], batch.slots[size_t(first_node + accepted)]);
      if (guess.count) {
        const int emitted = std::min(accepted, row.num_new - before);
        request.drafts[request.num_drafts++] = {r, guess.source, before, guess.count, accepted, emitted, guess.expected};
        if (row.draft_k) row.num_read += std::min({emitted, accepted - is_alternate, drafts.num_fed(i)});
      }
      // Without a place for its next token, or for all that a drafter is to guess, a row waits until others give theirs back.
      const int wanted = std::min(row.draft_k, row.most_new - row.num_new - 1);
      if (row.has_failed || (row.has_ended ? request.ends_with_row != 0 : row.length() + wanted > row.num_places)) goes_on = false;
      if (!row.has_ended) alive[kept++] = r;
    }
    alive.resize(kept);
    request.tokens[request.num_rounds] = batch.tokens();
    request.draft_seconds[request.num_rounds] = std::chrono::duration<float>(started - drafted).count();
    request.seconds[request.num_rounds++] = float(seconds_since(started));
    if (interrupt->load(std::memory_order_relaxed) || seconds_since(began) > request.most_seconds) goes_on = false;
  }
}

}  // namespace foretoken
