// Which places of its row a token sees. Plain integers: the planner and every instruction set include their own copy, inside an
// anonymous namespace.
//
// Places are logical: up to the tree they are those of the cache; a tree token finds the tree tokens that it sees sorted by position
// right behind, each in the place to which it would move if that path were accepted. So it computes what a token of a chain does.

struct Places {
  int low, high;  // [low, high), all of them seen
};

inline int first_place(const BatchView& batch, int row) {
  return batch.seq_lens[row] - (batch.query_start[row + 1] - batch.query_start[row]);
}
// Nobody sees a place before it: a row of a drafter may have no entries there.
inline int lowest_place(const BatchView& batch, int row) { return batch.first_places ? batch.first_places[row] : 0; }
inline int tree_start(const BatchView& batch, int row) { return first_place(batch, row) + batch.num_causal[row]; }

inline Places causal_places(const BatchView& batch, int row, int token, int window) {
  const int place = first_place(batch, row) + token - batch.query_start[row];
  const int low = window > 0 && place >= window ? place - window + 1 : 0, lowest = lowest_place(batch, row);
  return {low > lowest ? low : lowest, place + 1};
}

// The tree tokens that tree token `token` sees, as indices into the row's tree, sorted by position, then index. Returns how many.
inline int tree_order(const BatchView& batch, int row, int token, int* order) {
  const int tree = batch.query_start[row] + batch.num_causal[row];
  const int size = batch.query_start[row + 1] - tree;
  const uint64_t seen = uint64_t(batch.tree_mask[token]);
  int count = 0;
  for (int i = 0; i < size && i < kMaxTree; ++i) {
    if (!(seen >> i & 1)) continue;
    int at = count++;
    for (; at > 0 && batch.positions[tree + order[at - 1]] > batch.positions[tree + i]; --at) order[at] = order[at - 1];
    order[at] = i;
  }
  return count;
}

inline Places tree_places(const BatchView& batch, int row, int token, int window, const int* order, int count) {
  const int tree = batch.query_start[row] + batch.num_causal[row], start = tree_start(batch, row);
  const int lowest = lowest_place(batch, row);
  Places places{lowest, start + count};
  if (window <= 0) return places;
  // Places are sorted by position, so those within the window are a run.
  const int64_t position = batch.positions[token];
  if (position - window + 1 < start) {
    places.low = position - window + 1 > lowest ? int(position - window + 1) : lowest;
  } else {
    places.low = start;
    while (places.low < places.high && batch.positions[tree + order[places.low - start]] <= position - window) ++places.low;
  }
  while (places.high > places.low && places.high > start && batch.positions[tree + order[places.high - 1 - start]] >= position + window) {
    --places.high;
  }
  return places;
}

// Of a causal or a tree token. order: of the latter, as tree_order fills it.
inline Places places_of(const BatchView& batch, int row, int token, int window, int* order) {
  if (token < batch.query_start[row] + batch.num_causal[row]) return causal_places(batch, row, token, window);
  const int count = tree_order(batch, row, token, order);
  return tree_places(batch, row, token, window, order, count);
}
