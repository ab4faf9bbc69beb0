// From a row of logits to a token: the native side of engine/sampler.py and kernels/noise.py, which say what is meant.
//
// A row is read in the blocks of the race, 128 ids each, and the best of every block is known after one pass. It tells which
// blocks a later pass can skip: those below the cut of a filter, and those that could not win the race with all their
// tokens as good as the best. Nothing is sorted but a few tokens around a cut.

constexpr float kCannotWin = -50.0f;
// nats below the best. 128 such tokens weigh 2.5e-20; noise lies between 1.1e-10 and 23, so that against the best token,
// which weighs 1, they would lose even with the luckiest draw against the unluckiest.

inline Int ids_from(int first) {
  return _mm512_add_epi32(_mm512_set1_epi32(first), lane_numbers());
}

// Logits after the edits, as scores: nats from the best one, after temperature. Padded to whole blocks with -inf.
struct Scores {
  const float* logits;
  const float* tail;  // the last block
  int blocks;
  float peak, temperature;
  float* tops;        // [blocks padded to 16] the best score of each

  const float* block(int b) const { return b + 1 < blocks ? logits + b * kRaceBlock : tail; }
  Vec of(Vec x) const { return _mm512_div_ps(_mm512_sub_ps(x, splat(peak)), splat(temperature)); }
};

// Finds the peak, with tops still logits. false: a NaN, or no finite best.
bool find_peak(Scores& row) {
  __mmask16 nan = 0;
  Vec peak = splat(kOut);
  for (int b = 0; b < row.blocks; ++b) {
    const float* x = row.block(b);
    Vec top = splat(kOut);
    for (int i = 0; i < kRaceBlock; i += 32) {
      const Vec low = load(x + i), high = load(x + i + 16);
      nan |= _mm512_cmp_ps_mask(low, high, _CMP_UNORD_Q);
      top = _mm512_max_ps(top, _mm512_max_ps(low, high));
    }
    row.tops[b] = max_lanes(top);
    peak = _mm512_max_ps(peak, top);
  }
  row.peak = max_lanes(peak);
  return !nan && row.peak > kOut && row.peak < -kOut;
}

int first_best(const Scores& row) {
  int b = 0;
  while (row.tops[b] != row.peak) ++b;
  for (int i = 0;; i += 16) {
    const __mmask16 best = _mm512_cmp_ps_mask(load(row.block(b) + i), splat(row.peak), _CMP_EQ_OQ);
    if (best) return b * kRaceBlock + i + __builtin_ctz(best);
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
      __mmask16 kept = keeps(cut, scores, ids);
      Vec weights = zero();
      if (kWeighed) {
        weights = _mm512_maskz_mov_ps(kept, exp_of(scores));
        sum = _mm512_add_ps(sum, weights);
      }
      if (!has_candidates) continue;
      kept &= _mm512_cmp_ps_mask(scores, splat(floor), _CMP_GE_OQ);
      if (!kept) continue;
      // compressed in a register: straight into memory is microcode, hundreds of cycles, on Zen 4
      store(found.scores + n, _mm512_maskz_compress_ps(kept, scores));
      if (kWeighed) store(found.weights + n, _mm512_maskz_compress_ps(kept, weights));
      _mm512_storeu_si512(found.ids + n, _mm512_maskz_compress_epi32(kept, ids));
      n += __builtin_popcount(kept);
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
  return _mm512_maskz_mov_ps(keeps(cut, scores, ids_from(b * kRaceBlock + i)), exp_of(scores));
}

inline float weight_of_block(const Scores& row, Cut cut, int b) {
  Vec sum = zero();
  for (int i = 0; i < kRaceBlock; i += 16) sum = _mm512_add_ps(sum, weights_at(row, cut, b, i));
  return sum_lanes(sum);
}

// First round: the block with the greatest weight / noise, the first among equals. noise, bounds: [blocks padded to 16], free to use.
int winning_block(const Scores& row, Cut cut, int64_t key, float* noise, float* bounds) {
  exponential(key, kRaceBlock, row.blocks, noise);
  // with every token as good as the best, and a little for rounding
  int lead = 0;
  for (int b = 0; b < row.blocks; b += 16) {
    const Vec tops = load(row.tops + b);
    const __mmask16 kept = _mm512_cmp_ps_mask(tops, splat(cut.score), _CMP_GE_OQ) & first_lanes(row.blocks - b);
    const Vec most = _mm512_mul_ps(exp_of(tops), splat(kRaceBlock * 1.001f));
    store(bounds + b, _mm512_maskz_div_ps(kept, most, load(noise + b)));
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
  Vec best = splat(-1);
  Int at = _mm512_setzero_si512();
  for (int i = 0; i < kRaceBlock; i += 16) {
    const Vec values = _mm512_div_ps(weights_at(row, cut, b, i), load(noise + i));
    const __mmask16 better = _mm512_cmp_ps_mask(values, best, _CMP_GT_OQ);
    best = _mm512_mask_mov_ps(best, better, values);
    at = _mm512_mask_mov_epi32(at, better, ids_from(b * kRaceBlock + i));
  }
  const __mmask16 winners = _mm512_cmp_ps_mask(best, splat(max_lanes(best)), _CMP_EQ_OQ);
  return _mm512_mask_reduce_min_epi32(winners, at);
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
    const __mmask16 lanes = first_lanes(max_of(0, vocab - first - i));
    store(tail + i, _mm512_mask_loadu_ps(splat(kOut), lanes, logits + first + i));
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
