// What the tokens of a tile see of one segment of kSegment places.

constexpr int kTile = 16;  // query vectors

struct Segment {
  int tokens, heads, vectors;      // of the tile; heads: of the group
  int first_head;                  // the first token's vectors begin with it
  int low[kTile], high[kTile];     // of each token: it sees places [low, high) of the segment, 0 and 0 = none
  int first, end;                  // the blocks they lie in
  int whole_first, whole_end;      // of these, those that all tokens see whole
  int64_t k_bytes, v_bytes, v_row; // of a block's keys and values, and of one row of values
  const char* keys[kSegmentBlocks];
  const char* values[kSegmentBlocks];
  const float* scales[kSegmentBlocks];

  // Of the tile's vectors, those of a token.
  int begin_of(int token) const { return max_of(token * heads - first_head, 0); }
  int end_of(int token) const { return min_of((token + 1) * heads - first_head, vectors); }
  int first_block(int token) const { return low[token] / kBlockSize; }
  int end_block(int token) const { return (high[token] + kBlockSize - 1) / kBlockSize; }
};
