// What the tokens of a tile see of one segment of kSegment places.

constexpr int kTile = 16;  // query vectors
constexpr int kSegmentBlocks = kSegment / kBlockSize;

struct Segment {
  int tokens, heads;               // of the tile: vector i is head i % heads of token i / heads
  int low[kTile], high[kTile];     // of each token: it sees places [low, high) of the segment, 0 and 0 = none
  int first, end;                  // the blocks they lie in
  int whole_first, whole_end;      // of these, those that all tokens see whole
  int64_t k_bytes, v_bytes, v_row; // of a block's keys and values, and of one row of values
  const char* keys[kSegmentBlocks];
  const char* values[kSegmentBlocks];
  const float* scales[kSegmentBlocks];

  int vectors() const { return tokens * heads; }
  int first_block(int token) const { return low[token] / kBlockSize; }
  int end_block(int token) const { return (high[token] + kBlockSize - 1) / kBlockSize; }
};
