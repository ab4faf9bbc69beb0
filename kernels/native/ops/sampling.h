// From a row of logits to a token: the native side of engine/sampler.py and kernels/noise.py, which say what is meant.
//
// A row is read in the blocks of the race, 128 ids each, and the best of every block is known after one pass. It tells which
// blocks a later pass can skip: those below the cut of a filter, and those that could not win the race with all their
// tokens as good as the best. Nothing is sorted but a few tokens around a cut.

constexpr float kCannotWin = -50.0f;
// nats below the best. 128 such tokens weigh 2.5e-20; noise lies between 1.1e-10 and 23, so that against the best token,
// which weighs 1, they would lose even with the luckiest draw against the unluckiest.

inline Int ids_from(int first) {
  return add(splat_int(first), lane_numbers());
}

// Logits after the edits, as scores: nats from the best one, after temperature. Padded to whole blocks with -inf.
struct Scores {
  const float* logits;
  const float* tail;  // the last block
  int blocks;
  float peak, temperature;
  float* tops;        // [blocks padded to 16] the best score of each

  const float* block(int b) const { return b + 1 < blocks ? logits + b * kRaceBlock : tail; }
  Vec of(Vec x) const { return (x - splat(peak)) / splat(temperature); }
};

// Finds the peak, with tops still logits. false: a NaN, or no finite best.
bool find_peak(Scores& row) {
  Mask nan = no_lanes();
  Vec peak = splat(kOut);
  for (int b = 0; b < row.blocks; ++b) {
    const float* x = row.block(b);
    Vec top = splat(kOut);
    for (int i = 0; i < kRaceBlock; i += 32) {
      const Vec low = load(x + i), high = load(x + i + 16);
      nan = nan | unordered(low, high);
      top = max_of(top, max_of(low, high));
    }
    row.tops[b] = max_lanes(top);
    peak = max_of(peak, top);
  }
  row.peak = max_lanes(peak);
  return !any(nan) && row.peak > kOut && row.peak < -kOut;
}

int first_best(const Scores& row) {
  int b = 0;
  while (row.tops[b] != row.peak) ++b;
  for (int i = 0;; i += 16) {
    const Mask best = equal(load(row.block(b) + i), splat(row.peak));
    if (any(best)) return b * kRaceBlock + i + first_of(best);
  }
}

// Those that score at least `floor` of the tokens that `cut` keeps. Returns the weight e^score of all that it keeps, 0 if not weighed.
template <bool kWeighed>
double collect(const Scores& row, Cut cut, float floor, Candidates& found) {
  double total = 0;
  int n = 0;
  for (int b = 0; b < row.blocks; ++b) {
    if (row.tops[b] < cut.score || (!kWeighed && row.tops[b] < floor)) continue;
    const float* x = row.block(b);
    const bool has_candidates = row.tops[b] >= floor;
    Vec sum = zero();
    for (int i = 0; i < kRaceBlock; i += 16) {
      const Vec scores = row.of(load(x + i));
      const Int ids = ids_from(b * kRaceBlock + i);
      Mask kept = keeps(cut, scores, ids);
      Vec weights = zero();
      if (kWeighed) {
        weights = only(kept, exp_of(scores));
        sum = sum + weights;
      }
      if (!has_candidates) continue;
      kept = kept & at_least(scores, splat(floor));
      if (!any(kept)) continue;
      // compressed in a register: straight into memory is microcode, hundreds of cycles, on Zen 4
      store(found.scores + n, compressed(kept, scores));
      if (kWeighed) store(found.weights + n, compressed(kept, weights));
      store_int(found.ids + n, compressed(kept, ids));
      n += count_of(kept);
    }
    if (kWeighed) total += sum_lanes(sum);
  }
  found.count = n;
  return total;
}

// A score that the k best tokens reach: that of the k-th best block, since k blocks have as many tokens as good as that.
float reached_by(int k, const Scores& row, Candidates& scratch) {
  int n = 0;
  for (int b = 0; b < row.blocks; ++b) {
    scratch.scores[n] = row.tops[b];
    scratch.ids[n] = b;
    n += row.tops[b] >= kCannotWin;
  }
  scratch.count = n;
  return n < k ? kCannotWin : last_within<false>(scratch, k).score;
}

// top_k, then top_p on what it left, then min_p.
Cut filtered(const SampleRow& params, const Scores& row, int vocab, Candidates& found) {
  const Cut everything = {kCannotWin, INT32_MAX};
  Cut cut = everything;
  if (params.top_k < vocab) {
    const float floor = reached_by(params.top_k, row, found);
    collect<false>(row, everything, floor, found);
    cut = found.count > params.top_k ? last_within<false>(found, params.top_k) : Cut{floor, INT32_MAX};
  }
  if (params.top_p < 1.0) {
    // All tokens that weigh less than (1 - top_p) / vocab of the whole, which is at least 1, weigh less than 1 - top_p of it
    // together, so that the rest reaches top_p without them; 0.01 nats cover the rounding.
    const float floor = float(__builtin_log((1.0 - params.top_p) / vocab)) - 0.01f;
    const double whole = collect<true>(row, cut, floor > cut.score ? floor : cut.score, found);
    cut = stricter(cut, last_within<true>(found, params.top_p * whole));
  }
  return stricter(cut, {params.log_min_p, INT32_MAX});
}

inline Vec weights_at(const Scores& row, Cut cut, int b, int i) {
  const Vec scores = row.of(load(row.block(b) + i));
  return only(keeps(cut, scores, ids_from(b * kRaceBlock + i)), exp_of(scores));
}

inline float weight_of_block(const Scores& row, Cut cut, int b) {
  Vec sum = zero();
  for (int i = 0; i < kRaceBlock; i += 16) sum = sum + weights_at(row, cut, b, i);
  return sum_lanes(sum);
}

// First round: the block with the greatest weight / noise, the first among equals. noise, bounds: [blocks padded to 16], free to use.
int winning_block(const Scores& row, Cut cut, int64_t key, float* noise, float* bounds) {
  exponential(key, kRaceBlock, row.blocks, noise);
  // with every token as good as the best, and a little for rounding
  int lead = 0;
  for (int b = 0; b < row.blocks; b += 16) {
    const Vec tops = load(row.tops + b);
    const Mask kept = at_least(tops, splat(cut.score)) & first_lanes(row.blocks - b);
    const Vec most = exp_of(tops) * splat(kRaceBlock * 1.001f);
    store(bounds + b, div_only(kept, most, load(noise + b)));
  }
  for (int b = 1; b < row.blocks; ++b) lead = bounds[b] > bounds[lead] ? b : lead;
  int winner = lead;
  float best = weight_of_block(row, cut, lead) / noise[lead];
  bounds[lead] = -1;
  for (int b = 0; b < row.blocks; ++b) {
    if (bounds[b] < best) continue;
    const float value = weight_of_block(row, cut, b) / noise[b];
    if (value > best || (value == best && b < winner)) {
      best = value;
      winner = b;
    }
  }
  return winner;
}

// Second round: inside a block, the first among equals.
int winner_within(const Scores& row, Cut cut, int64_t key, int b, float* noise) {
  exponential(key, 0, kRaceBlock, noise);
  Vec best = splat(-1.0f);
  Int at = zero_int();
  for (int i = 0; i < kRaceBlock; i += 16) {
    const Vec values = weights_at(row, cut, b, i) / load(noise + i);
    const Mask better = greater(values, best);
    best = select(better, values, best);
    at = select(better, ids_from(b * kRaceBlock + i), at);
  }
  const Mask winners = equal(best, splat(max_lanes(best)));
  return least_lane(winners, at);
}

// -1: the row has a NaN or no finite best.
int64_t sample_row(const SampleRow& params, int vocab, char* scratch) {
  auto floats = [&](size_t n) {
    float* memory = reinterpret_cast<float*>(scratch);
    scratch += 4 * n;
    return memory;
  };
  const size_t padded = size_t((vocab + 2 * kRaceBlock - 1) / kRaceBlock * kRaceBlock);  // a vector may be stored behind the last
  float* tail = floats(kRaceBlock);
  float* inner_noise = floats(kRaceBlock);
  float* tops = floats(padded);
  float* noise = floats(padded);
  float* bounds = floats(padded);
  float* copy = floats(padded);
  Candidates found = {floats(padded), floats(padded), reinterpret_cast<int32_t*>(floats(padded)), 0};

  const float* logits = edited(params, vocab, copy, found.ids, found.scores, found.weights);
  Scores row = {logits, tail, (vocab + kRaceBlock - 1) / kRaceBlock, 0, params.temperature, tops};
  const int first = (row.blocks - 1) * kRaceBlock;
  for (int i = 0; i < kRaceBlock; i += 16) {
    const Mask lanes = first_lanes(max_of(0, vocab - first - i));
    store(tail + i, load_lanes(lanes, logits + first + i, splat(kOut)));
  }
  if (!find_peak(row)) return -1;
  if (params.temperature == 0) return first_best(row);
  for (int b = 0; b < row.blocks; b += 16) store(tops + b, row.of(load(tops + b)));
  const Cut cut = filtered(params, row, vocab, found);
  return winner_within(row, cut, params.key, winning_block(row, cut, params.key, noise, bounds), inner_noise);
}

// scratch: sample_scratch_bytes(vocab). A place whose parent has another token than its guess gets -1 as well.
void sample(const SampleRow* rows, int count, int vocab, void* scratch, int64_t* tokens) {
  for (int i = 0; i < count; ++i) {
    const bool matters = rows[i].parent < 0 || tokens[rows[i].parent] == rows[i].guess;
    tokens[i] = matters ? sample_row(rows[i], vocab, static_cast<char*>(scratch)) : -1;
  }
}
