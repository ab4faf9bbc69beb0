// From the scores of a query vector to the weights of the values: scales, softcap, what is seen, 2^x; for an int8 cache also the
// int16 that its products take.

constexpr float kInfinity = __builtin_inff();
constexpr float kLargest = 32767.0f;  // int16 of the products: see ByteLane

// Lanes outside [low, high) of a segment's scores become -inf: both ends lie in blocks of their own or in one.
inline void mask_edges(float* scores, int low, int high) {
  const int ends[] = {low, high - 1};
  for (const int place : ends) {
    const int block = place / kBlockSize * kBlockSize;
    if (low <= block && block + kBlockSize <= high) continue;
    const Mask seen = first_lanes(high - block) & lanes_but(first_lanes(low - block));
    store(scores + block, select(seen, load(scores + block), splat(-kInfinity)));
  }
}

// 16 weights as the products read them, from x in [0, 1]; int16 from x in [0, 2^15).
inline void store_weights(FloatLane, char* to, Vec x) { store(reinterpret_cast<float*>(to), x); }
inline void store_weights(PairLane, char* to, Vec x) { store_bf16(reinterpret_cast<uint16_t*>(to), x); }
inline void store_weights(ByteLane, char* to, Vec x) {
  store_halves(to, narrow_shorts(to_ints(x)));
}
inline void store_weights_of_two(PairLane, char* to, Vec x, Vec next) { store_bf16_of_two(reinterpret_cast<uint16_t*>(to), x, next); }
inline void store_weights_of_two(FloatLane, char* to, Vec x, Vec next) {
  store_weights(FloatLane{}, to, x);
  store_weights(FloatLane{}, to + 64, next);
}

// The scales of an int8 cache: those of the keys, by place, and of the query belong to the scores, those of the values to the weights.
struct Scales {
  const float* const* blocks;   // of K [16], then of V [16]
  int own;                      // blocks from this one on have theirs ...
  const float* own_blocks;      // ... here
  float query;

  const float* of(int block) const { return block < own ? blocks[block] : own_blocks + (block - own) * 2 * kBlockSize; }
};

inline void scale_scores(const Scales& scales, float* scores, int first, int end) {
  for (int b = first; b < end; ++b) {
    const Vec scale = load(scales.of(b)) * splat(scales.query);
    store(scores + b * kBlockSize, load(scores + b * kBlockSize) * scale);
  }
}

// Float weights, in the memory of the scores -> int16. Returns the scale of the result; NaN if a place that is seen has no finite scale.
inline float quantise_weights(const Scales& scales, float* x, char* weights, int first, int end) {
  Vec greatest = zero();
  Mask poison = no_lanes();
  for (int b = first; b < end; ++b) {
    const Vec w = load(x + b * kBlockSize);
    // A slot that nobody has written may hold any scale.
    const Vec scaled = mul_only(unequal(w, zero()), w, load(scales.of(b) + kBlockSize));
    poison = poison | unordered(scaled, scaled);
    greatest = max_of(greatest, scaled);
    store(x + b * kBlockSize, scaled);
  }
  const float most = max_lanes(greatest);
  const Vec inverse = splat(most > 0.0f ? kLargest / most : 0.0f);
  for (int b = first; b < end; ++b) {
    const Vec w = min_of(load(x + b * kBlockSize) * inverse, splat(kLargest));
    store_weights(ByteLane{}, weights + b * kBlockSize * 2, w);
  }
  return any(poison) ? __builtin_nanf("") : most / kLargest;
}

// One vector's scores of a segment, places [low, high) of it seen -> scores that are final. Returns the greatest of each lane.
template <class Lane>
inline Vec settle_scores(const AttentionOp& op, float* scores, int low, int high, const Scales& scales) {
  const int first = low / kBlockSize, end = (high + kBlockSize - 1) / kBlockSize;
  if (Lane::kBytes == 2) scale_scores(scales, scores, first, end);
  if (op.softcap > 0.0f) {
    const Vec cap = splat(op.softcap), inverse = splat(1.0f / op.softcap);
    for (int b = first; b < end; ++b) {
      store(scores + b * kBlockSize, tanh_of(load(scores + b * kBlockSize) * inverse) * cap);
    }
  }
  mask_edges(scores, low, high);
  Vec greatest[4];  // none waits for the one before it
  for (Vec& most : greatest) most = splat(-kInfinity);
  const auto take = [scores](Vec& most, int b) { most = max_of(most, load(scores + b * kBlockSize)); };
  int b = first;
  for (; b + 4 <= end; b += 4) {
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) take(greatest[i], b + i);
  }
  for (; b < end; ++b) take(greatest[0], b);
  return max_of(max_of(greatest[0], greatest[1]), max_of(greatest[2], greatest[3]));
}

// Then -> weights; m is the state's. Returns the sum of each lane. scale: the weights'. What is rounded to bfloat16, by up to 2e-3, need not be
// known within 3e-7.
template <class Lane>
inline Vec soften(float* scores, int low, int high, const Scales& scales, float m, float* scale, NextLines& next) {
  constexpr bool kScaled = Lane::kBytes == 2;
  const int first = low / kBlockSize, end = (high + kBlockSize - 1) / kBlockSize;
  const Vec shift = splat(m);
  const FetchedLines lines(next, first);
  char* const weights = reinterpret_cast<char*>(scores);  // never ahead of the scores
  const auto weight_of = [&](int b) {
    lines.fetch(b);
    return exp2_of<Lane::kPlaces == 2 && Lane::kBytes == 4>(mul_sub(load(scores + b * kBlockSize), splat(kLog2E), shift));
  };
  Vec sum = zero();
  int b = first;
  if constexpr (kScaled) {
    for (; b < end; ++b) {
      const Vec x = weight_of(b);
      sum = sum + x;
      store(scores + b * kBlockSize, x);
    }
    *scale = quantise_weights(scales, scores, weights, first, end);
  } else {
    const auto place = [&](int block) { return weights + block * kBlockSize * 4 / Lane::kPlaces; };
    for (; b + 2 <= end; b += 2) {
      const Vec x = weight_of(b), other = weight_of(b + 1);
      sum = sum + x + other;
      store_weights_of_two(Lane{}, place(b), x, other);
    }
    if (b < end) {
      const Vec x = weight_of(b);
      sum = sum + x;
      store_weights(Lane{}, place(b), x);
    }
    *scale = 1.0f;
  }
  return sum;
}

// What a query's numbers may be in an int8 cache's products, for their sums to be int32.
inline float most_of_query(int k_pad) { return float(min_of(32767, 0x7fffffff / (127 * k_pad))); }

// Queries of an int8 cache: from bfloat16 to int16 with a scale each, NaN for one that is not finite.
inline void quantise_queries(const uint16_t* from, int vectors, int k_pad, int16_t* to, float* scales) {
  const float limit = most_of_query(k_pad);
  for (int i = 0; i < vectors; ++i, from += k_pad, to += k_pad) {
    Vec greatest = zero(), poison = zero();
    for (int d = 0; d < k_pad; d += 16) {
      const Vec x = load_bf16(from + d);
      greatest = max_of(greatest, abs_of(x));
      poison = poison + (x - x);
    }
    const float most = max_lanes(greatest);
    scales[i] = most / limit + sum_lanes(poison);
    const Vec inverse = splat(most > 0.0f ? limit / most : 0.0f);
    for (int d = 0; d < k_pad; d += 16) {
      const Int q = to_ints(load_bf16(from + d) * inverse);
      store_halves(to + d, narrow_shorts(q));
    }
  }
}
