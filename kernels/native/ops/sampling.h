// From a row of logits to a token: the native side of engine/sampler.py and kernels/noise.py, which say what is meant.
//
// A row is read in the blocks of the race, 128 ids each, and the best of every block is known after one pass. It tells which
// blocks a later pass can skip: those below the cut of a filter, and those that could not win the race with all their
// tokens as good as the best. Nothing is sorted but a few tokens around a cut.

constexpr float kCannotWin = -50.0f;
// nats below the best. 128 such tokens weigh 2.5e-20; noise lies between 1.1e-10 and 23, so that against the best token,
// which weighs 1, they would lose even with the luckiest draw against the unluckiest.

// A token is kept if its score is better than this, or equal with an id up to this.
struct Cut {
  float score;
  int32_t id;
};

inline Cut stricter(Cut a, Cut b) { return a.score > b.score || (a.score == b.score && a.id < b.id) ? a : b; }

inline __mmask16 keeps(Cut cut, Vec scores, Int ids) {
  return _mm512_cmp_ps_mask(scores, splat(cut.score), _CMP_GT_OQ) |
         _mm512_mask_cmple_epi32_mask(_mm512_cmp_ps_mask(scores, splat(cut.score), _CMP_EQ_OQ), ids, _mm512_set1_epi32(cut.id));
}

inline Int ids_from(int first) {
  return _mm512_add_epi32(_mm512_set1_epi32(first), _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0));
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

// Some tokens in the order of their ids.
struct Candidates {
  float* scores;
  float* weights;
  int32_t* ids;
  int count;
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

// Sum of the weights of those that score at least `pivot`.
template <bool kWeighed>
double weight_from(const Candidates& of, float pivot) {
  __m512d low = _mm512_setzero_pd(), high = _mm512_setzero_pd();
  int64_t number = 0;
  for (int i = 0; i < of.count; i += 16) {
    const __mmask16 lanes = first_lanes(of.count - i);
    const __mmask16 above = _mm512_mask_cmp_ps_mask(lanes, load(of.scores + i), splat(pivot), _CMP_GE_OQ);
    if (kWeighed) {  // as doubles, so that the order in which they are added decides nothing
      low = _mm512_mask_add_pd(low, __mmask8(above), low, _mm512_cvtps_pd(_mm256_loadu_ps(of.weights + i)));
      high = _mm512_mask_add_pd(high, __mmask8(above >> 8), high, _mm512_cvtps_pd(_mm256_loadu_ps(of.weights + i + 8)));
    } else {
      number += __builtin_popcount(above);
    }
  }
  return kWeighed ? _mm512_reduce_add_pd(_mm512_add_pd(low, high)) : double(number);
}

// Leaves those that score at least `pivot` (upper) or less, in their order.
template <bool kWeighed>
void keep_part(Candidates& of, float pivot, bool upper) {
  int n = 0;
  for (int i = 0; i < of.count; i += 16) {
    const __mmask16 lanes = first_lanes(of.count - i);
    const Vec scores = load(of.scores + i);
    const __mmask16 above = _mm512_mask_cmp_ps_mask(lanes, scores, splat(pivot), _CMP_GE_OQ);
    const __mmask16 kept = upper ? above : __mmask16(lanes & ~above);
    // in place: what is written lies at or before what has been read
    if (kWeighed) store(of.weights + n, _mm512_maskz_compress_ps(kept, load(of.weights + i)));
    _mm512_storeu_si512(of.ids + n, _mm512_maskz_compress_epi32(kept, _mm512_loadu_si512(of.ids + i)));
    store(of.scores + n, _mm512_maskz_compress_ps(kept, scores));
    n += __builtin_popcount(kept);
  }
  of.count = n;
}

// Insertion sort, best first: equals stay in the order of their ids.
template <bool kWeighed>
void sort_few(Candidates& of) {
  for (int i = 1; i < of.count; ++i) {
    const float score = of.scores[i], weight = kWeighed ? of.weights[i] : 1.0f;
    const int32_t id = of.ids[i];
    int j = i;
    for (; j > 0 && of.scores[j - 1] < score; --j) {
      of.scores[j] = of.scores[j - 1];
      if (kWeighed) of.weights[j] = of.weights[j - 1];
      of.ids[j] = of.ids[j - 1];
    }
    of.scores[j] = score;
    if (kWeighed) of.weights[j] = weight;
    of.ids[j] = id;
  }
}

// The last candidate, from the best down and lowest ids first among equals, before which less than `limit` has been weighed (each
// weighs 1 if not kWeighed). The range of scores is halved until few are left. Candidates, at least one, are used up.
template <bool kWeighed>
Cut last_within(Candidates& of, double limit) {
  double before = 0;  // weight of those that are better than all that are left
  while (of.count > 32) {
    Vec low = splat(-kOut), high = splat(kOut);
    for (int i = 0; i < of.count; i += 16) {
      const __mmask16 lanes = first_lanes(of.count - i);
      low = _mm512_mask_min_ps(low, lanes, low, load(of.scores + i));
      high = _mm512_mask_max_ps(high, lanes, high, load(of.scores + i));
    }
    const float least = -max_lanes(_mm512_sub_ps(zero(), low)), greatest = max_lanes(high);
    if (least == greatest) {
      const double weight = kWeighed ? double(of.weights[0]) : 1.0;
      int n = max_of(1, int(__builtin_fmin(of.count, (limit - before) / weight)));
      while (n > 1 && before + (n - 1) * weight >= limit) --n;
      while (n < of.count && before + n * weight < limit) ++n;
      return {greatest, of.ids[n - 1]};
    }
    float pivot = least + (greatest - least) * 0.5f;
    if (!(pivot > least)) pivot = greatest;  // neighbouring numbers have no middle
    const double above = weight_from<kWeighed>(of, pivot);
    const bool upper = before + above >= limit;
    if (!upper) before += above;
    keep_part<kWeighed>(of, pivot, upper);
  }
  sort_few<kWeighed>(of);
  int last = 0;
  for (; last + 1 < of.count; ++last) {
    before += kWeighed ? double(of.weights[last]) : 1.0;
    if (before >= limit) break;
  }
  return {of.scores[last], of.ids[last]};
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
