// What a request adds to, scales in or forbids from a row of logits: the native side of engine/logit_edits.py, the same
// operations in the same order, so that both give the same bits.

constexpr float kOut = -__builtin_inff();  // the logit of a token that cannot be chosen

inline bool is_allowed(const SampleRow& row, int token) { return !row.allowed || (row.allowed[token / 32] >> token % 32 & 1); }

inline bool all_out(const float* x, int vocab) {
  for (int i = 0; i < vocab; i += 16) {
    const int n = min_of(16, vocab - i);
    if (any(greater(first_lanes(n), load_some(x + i, n), splat(kOut)))) return false;
  }
  return true;
}

void copy_allowed(const SampleRow& row, int vocab, float* x) {
  for (int i = 0; i < vocab; i += 16) {
    const int n = min_of(16, vocab - i);
    Vec v = load_some(row.logits + i, n);
    if (row.allowed) v = select(lanes_of(row.allowed[i / 32] >> i % 32), v, splat(kOut));
    store_some(x + i, v, n);
  }
}

inline float penalised(const SampleRow& row, float x, float count) {
  x = x > 0 ? x / row.repetition : x * row.repetition;
  x = x - count * row.frequency;
  return x - (count > 0 ? row.presence : 0.0f);
}

// Place of token in ids [n], -1 = not there.
inline int find(const int32_t* ids, int n, int32_t token) {
  for (int i = 0; i < n; i += 16) {
    const Mask lanes = first_lanes(min_of(16, n - i));
    const Mask same = equal(lanes, load_lanes(lanes, ids + i), splat_int(token));
    if (any(same)) return i + first_of(same);
  }
  return -1;
}

// ids, values, counts: [vocab] each, free to use.
void penalise(const SampleRow& row, int vocab, float* x, int32_t* ids, float* values, float* counts) {
  // what the path adds to the counts comes from the row's own values, so these are kept before the rest is changed
  int n = 0;
  for (int j = 0; j < row.path_length; ++j) {
    const int32_t token = row.path[j];
    if (uint32_t(token) >= uint32_t(vocab)) continue;
    int i = find(ids, n, token);
    if (i < 0) {
      i = n++;
      ids[i] = token;
      values[i] = x[token];
      counts[i] = 0;
    }
    counts[i] += 1;
  }
  for (int i = 0; i < row.num_seen; ++i) {
    const int32_t token = row.seen[i];
    if (uint32_t(token) < uint32_t(vocab)) x[token] = penalised(row, x[token], row.counts[i]);
  }
  for (int i = 0; i < n; ++i) {
    const int place = find(row.seen, row.num_seen, ids[i]);
    x[ids[i]] = penalised(row, values[i], counts[i] + (place < 0 ? 0 : row.counts[place]));
  }
}

// The row's logits if nothing changes them, else `copy` [vocab] with the changed ones. ids, values, counts: [vocab] each, free to use.
const float* edited(const SampleRow& row, int vocab, float* copy, int32_t* ids, float* values, float* counts) {
  if (!row.allowed && !row.num_banned && !row.num_bias && !row.seen) return row.logits;
  copy_allowed(row, vocab, copy);
  for (int i = 0; i < row.num_banned; ++i) copy[row.banned[i]] = kOut;
  if (row.num_banned && all_out(copy, vocab)) {  // rather the best allowed token than none
    for (int i = 0; i < row.num_banned; ++i) {
      if (is_allowed(row, row.banned[i])) copy[row.banned[i]] = row.logits[row.banned[i]];
    }
  }
  for (int i = 0; i < row.num_bias; ++i) copy[row.bias_ids[i]] += row.bias[i];
  if (row.seen) penalise(row, vocab, copy, ids, values, counts);
  return copy;
}
