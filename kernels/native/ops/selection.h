// Where a filter cuts: the last token of a ranking that a count or a mass still reaches, found without sorting. Tokens rank by
// score, and among equals by id, the lowest first.

// A token is kept if its score is better than this, or equal with an id up to this.
struct Cut {
  float score;
  int32_t id;
};

inline Cut stricter(Cut a, Cut b) { return a.score > b.score || (a.score == b.score && a.id < b.id) ? a : b; }

inline Mask keeps(Cut cut, Vec scores, Int ids) {
  return greater(scores, splat(cut.score)) |
         at_most(equal(scores, splat(cut.score)), ids, splat_int(cut.id));
}

// Some tokens in the order of their ids.
struct Candidates {
  float* scores;
  float* weights;
  int32_t* ids;
  int count;
};

constexpr int kPivots = 3;

// Per pivot, the sum of the weights of the candidates that score at least that.
template <bool kWeighed>
void weigh(const Candidates& of, const float* pivots, double* sums) {
  Doubles low[kPivots], high[kPivots];
  int64_t number[kPivots];
  for (int p = 0; p < kPivots; ++p) {
    low[p] = high[p] = no_doubles();
    number[p] = 0;
  }
  for (int i = 0; i < of.count; i += 16) {
    const Mask lanes = first_lanes(of.count - i);
    const Vec scores = load(of.scores + i);
    for (int p = 0; p < kPivots; ++p) {
      const Mask above = at_least(lanes, scores, splat(pivots[p]));
      if (kWeighed) {  // as doubles, so that the order in which they are added decides nothing
        low[p] = add(low_lanes(above), load_doubles(of.weights + i), low[p]);
        high[p] = add(high_lanes(above), load_doubles(of.weights + i + 8), high[p]);
      } else {
        number[p] += count_of(above);
      }
    }
  }
  for (int p = 0; p < kPivots; ++p) sums[p] = kWeighed ? sum_lanes(low[p] + high[p]) : double(number[p]);
}

// Leaves those that score at least `floor` and less than `ceiling`, in their order.
template <bool kWeighed>
void keep_between(Candidates& of, float floor, float ceiling) {
  int n = 0;
  for (int i = 0; i < of.count; i += 16) {
    const Vec scores = load(of.scores + i);
    const Mask above = at_least(first_lanes(of.count - i), scores, splat(floor));
    const Mask kept = less(above, scores, splat(ceiling));
    // in place: what is written lies at or before what has been read
    if (kWeighed) store(of.weights + n, compressed(kept, load(of.weights + i)));
    store_int(of.ids + n, compressed(kept, load_int(of.ids + i)));
    store(of.scores + n, compressed(kept, scores));
    n += count_of(kept);
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
// weighs 1 if not kWeighed). The range of scores is quartered until few are left. Candidates, at least one, are used up.
template <bool kWeighed>
Cut last_within(Candidates& of, double limit) {
  double before = 0;  // weight of those that are better than all that are left
  while (of.count > 32) {
    Vec low = splat(-kOut), high = splat(kOut);
    for (int i = 0; i < of.count; i += 16) {
      const Mask lanes = first_lanes(of.count - i);
      low = min_of(lanes, load(of.scores + i), low);
      high = max_of(lanes, load(of.scores + i), high);
    }
    const float least = -max_lanes(zero() - low), greatest = max_lanes(high);
    if (least == greatest) {
      const double weight = kWeighed ? double(of.weights[0]) : 1.0;
      int n = max_of(1, int(__builtin_fmin(of.count, (limit - before) / weight)));
      while (n > 1 && before + (n - 1) * weight >= limit) --n;
      while (n < of.count && before + n * weight < limit) ++n;
      return {greatest, of.ids[n - 1]};
    }
    float pivots[kPivots];  // quarters of the range; neighbouring numbers have none, then the greatest alone is parted from the rest
    for (int p = 0; p < kPivots; ++p) pivots[p] = least + (greatest - least) * (0.25f * float(p + 1));
    if (!(pivots[0] > least)) pivots[0] = pivots[1] = pivots[2] = greatest;
    double above[kPivots];
    weigh<kWeighed>(of, pivots, above);
    int p = 0;  // the first that less than the limit lies above
    while (p < kPivots && before + above[p] >= limit) ++p;
    keep_between<kWeighed>(of, p > 0 ? pivots[p - 1] : kOut, p < kPivots ? pivots[p] : -kOut);
    if (p < kPivots) before += above[p];
  }
  sort_few<kWeighed>(of);
  int last = 0;
  for (; last + 1 < of.count; ++last) {
    before += kWeighed ? double(of.weights[last]) : 1.0;
    if (before >= limit) break;
  }
  return {of.scores[last], of.ids[last]};
}
