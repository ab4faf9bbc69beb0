// Blocks of the cache, and which of them a thread will read next: to be fetched while something else is computed, for they lie anywhere, and
// the processor cannot guess the next. Included by isa_table.h.

constexpr int kSegmentBlocks = kSegment / kBlockSize;
constexpr int kSegmentsAhead = 2;  // of a run are fetched at most before they are read: all that is fetched must find room in L2

inline const char* cache_block(const AttentionOp& op, const BatchView& batch, int row, int kv_head, int index) {
  const int64_t block = batch.block_tables[int64_t(row) * batch.table_width + index];
  return op.cache.base + block * op.cache.block_bytes + kv_head * op.cache.head_bytes;
}

// Of a unit of attention, then of what comes after attention.
struct NextLines {
  static constexpr int kCount = kBlockSize;

  const AttentionOp& op;
  const BatchView& batch;
  CacheAhead& ahead;
  int last_run = 0;             // whose blocks may be fetched, and ...
  int end = 0;                  // ... where to stop in the one before it, which is being read

  void go_to(int run) {
    ahead.run = run;
    ahead.block = ahead.runs[run].first;
    ahead.offset = 0;
  }

  // Before the blocks of a segment are read. Returns how many of its blocks are fetched; of the others whoever asks takes care.
  int reach(int run, int segment) {
    const int first = segment * kSegmentBlocks;
    last_run = run + 1;
    end = first + (1 + kSegmentsAhead) * kSegmentBlocks;
    if (ahead.run > run) return kSegmentBlocks;
    if (ahead.run < run) go_to(run);
    const int fetched = max_of(min_of(ahead.block - first, kSegmentBlocks), 0);
    const int until = min_of(first + kSegmentBlocks, ahead.runs[run].end);
    if (ahead.block < until) ahead.block = until, ahead.offset = 0;
    return fetched;
  }

  // kCount lines, or null.
  const char* take() {
    constexpr int bytes = kCount * 64;
    if (ahead.run < last_run && ahead.run + 1 < ahead.num_runs && ahead.block >= ahead.runs[ahead.run].end) go_to(ahead.run + 1);
    if (ahead.num_runs) {
      const CacheRun& run = ahead.runs[ahead.run];
      if (ahead.block < min_of(run.end, ahead.run < last_run ? end : run.first + kSegmentsAhead * kSegmentBlocks)) {
        const char* const lines = cache_block(op, batch, run.row, run.kv_head, ahead.block) + ahead.offset;
        ahead.offset += bytes;
        if (ahead.offset >= op.cache.head_bytes) ahead.offset = 0, ++ahead.block;
        return lines;
      }
    }
#if !FT_AVX2  // not measured there
    if (op.ahead) return foretoken::take(*op.ahead, bytes);
#endif
    return nullptr;
  }

  void fetch() {
    const char* const lines = take();
    for (int i = 0; lines && i < kCount; ++i) prefetch_line(lines + i * 64);
  }
};

// A line for each block from `first` on of a segment that something else is computed of.
struct FetchedLines {
  const char* lines;

  FetchedLines(NextLines& next, int first) : lines(next.take()) {
    static_assert(NextLines::kCount == kSegmentBlocks);
    if (lines) lines -= first * 64;
  }

  void fetch(int block) const {
    if (lines) prefetch_line(lines + block * 64);
  }
};
