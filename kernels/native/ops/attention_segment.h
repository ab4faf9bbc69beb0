// What the tokens of a tile see of one segment of kSegment places.

constexpr int kTile = 16;  // query vectors
constexpr int kScoresRow = kSegment + 16;  // of a vector: rows that begin 1 KB apart would fall into four sets of L1

struct Segment {
  int number;                      // of the row's
  int tokens, heads, vectors;      // of the tile; heads: of the group
  int first_head;                  // the first token's vectors begin with it
  int low[kTile], high[kTile];     // of each token: it sees places [low, high) of the segment, 0 and 0 = none
  int first, end;                  // the blocks they lie in
  int whole_first, whole_end;      // of these, those that all tokens see whole
  int64_t k_bytes, v_bytes, v_row; // of a block's keys and values, and of one row of values
  const char* keys[kSegmentBlocks];
  const char* values[kSegmentBlocks];
  const float* scales[kSegmentBlocks];
  int own = kSegmentBlocks;        // blocks from this one on are each token's own: see Tile
  bool goes_on = false;            // sums are added to those that are there

  // Of the tile's vectors, those of a token.
  int begin_of(int token) const { return max_of(token * heads - first_head, 0); }
  int end_of(int token) const { return min_of((token + 1) * heads - first_head, vectors); }
  int first_block(int token) const { return low[token] / kBlockSize; }
  int end_block(int token) const { return (high[token] + kBlockSize - 1) / kBlockSize; }

  // first, end and what is whole, from what the tokens see.
  void find_blocks() {
    first = whole_end = kSegmentBlocks;
    end = whole_first = 0;
    for (int t = 0; t < tokens; ++t) {
      if (low[t] >= high[t]) low[t] = high[t] = 0;
      if (low[t] < high[t]) first = min_of(first, first_block(t));
      end = max_of(end, end_block(t));
      whole_first = max_of(whole_first, (low[t] + kBlockSize - 1) / kBlockSize);
      whole_end = min_of(whole_end, high[t] / kBlockSize);
    }
    if (first >= end) first = end = 0;
    if (whole_first >= whole_end) whole_first = whole_end = end;
  }

  void take_blocks(const Segment& other) {
    for (int b = other.first; b < other.end; ++b) {
      if (b < first || b >= end) keys[b] = other.keys[b], values[b] = other.values[b];
    }
  }
};

// Of two tiles without scales: both have the blocks of either, and as whole ones those that are whole to both. False if some lie between.
inline bool join(Segment& a, Segment& b) {
  if (a.end < b.first || b.end < a.first) return false;
  a.take_blocks(b);
  b.take_blocks(a);
  a.first = b.first = min_of(a.first, b.first);
  a.end = b.end = max_of(a.end, b.end);
  const int whole_first = max_of(a.whole_first, b.whole_first), whole_end = min_of(a.whole_end, b.whole_end);
  const bool any = whole_first < whole_end;
  a.whole_first = b.whole_first = any ? whole_first : a.end;
  a.whole_end = b.whole_end = any ? whole_end : a.end;
  return true;
}
