// The linear layer on AMX tiles: 16 rows x 16 outputs of sums, to which one product adds 64 bytes of each row's inputs times a
// tile of weights. bfloat16 as it is; int8 with signed activations; int4 and int2 dequantised to int8 tiles. Included by linear.h.
//
// On Sapphire Rapids a product takes the tile unit 16 cycles, a tile load that hits L1 the load ports 8. Two panels side by side, and up to two
// tiles of rows: 3 loads for 2 products, or 4 for 4. (Four panels would take 5 loads for 4 products of up to 16 rows, but four places of memory
// that are fetched at once are too many where a neighbour's thread shares the core: 4 rows took a quarter longer, 16 a twelfth.)
// The weights of a group of panels are walked in strips along the inputs, small enough to stay in L1 while all rows pass over
// them, 32 at a time, the rows themselves coming from L2 (32 bytes a cycle) and leaving no trace in L1: they would take the weights'
// place. Between strips sums stay in tiles where one pass has all rows, else in memory. A single pass fetches the next strip on the
// way, for tile loads hardly wake the hardware's prefetchers; with several it would keep the rows waiting for as long as it saves.
//
// None of this shows in the result: a sum takes its inputs in ascending order, 64 bytes a product, and keeping it in memory rounds
// nothing. (TDPBF16PS itself rounds otherwise than AVX-512's VDPBF16PS. Integer sums are exact and equal those of every other path.)

constexpr int kStripBytes = 40 * 1024;
constexpr int kRowBytes = 1280 * 1024;  // of rows that stay in L2 while all panels pass over them
constexpr int kMaxRows = 256;           // whose sums wait together
constexpr size_t kSumBytes = kMaxRows * 2 * kPanel * sizeof(float);
static_assert(kSumBytes + kStripBytes + kMaxRows * sizeof(LaneBests) <= kLinearScratch,
              "sums, then a strip of dequantised weights, then the best of each row");

// Where rows of int8 take no more of L1, their weights are fetched into the rest of it, so many tiles of each panel before they are multiplied: fetched a
// strip before, into L2, one row of M2 takes 4 to 8 % longer (three tiles before: as much where L3 is far). 8 rows gain or lose 2 % by processor, 16
// lose up to 3 %. bfloat16's are better off a strip before.
constexpr int kNearBytes = 8000, kTilesAhead = 5;

// Up to so many rows codes are multiplied in vectors, as they are: cheaper than making tiles for so little use.
constexpr int kCodeRows = 4;

// Tiles 0-3 are sums (row tile i, panel p: 2 i + p), 4 and 5 rows, 6 and 7 weights.
constexpr int kRowTile = 4;

inline void configure_linear(int rows) {
  TileShapes shapes;
  for (int tile = 0; tile < 8; ++tile) shapes.set(tile, 16);
  if (rows <= 16) {
    for (int tile = 0; tile <= kRowTile; ++tile) shapes.set(tile, rows);
  } else if (rows <= 32) {
    shapes.set(2, rows - 16);
    shapes.set(3, rows - 16);
    shapes.set(kRowTile + 1, rows - 16);
  }  // else up to 15 rows past the last are computed in the last pass and dropped
  configure_tiles(shapes);
}

template <int kRowTiles, int kPanels, int kP = 0>
inline void zero_sums() {
  zero_tile<kP>();
  if constexpr (kRowTiles == 2) zero_tile<2 + kP>();
  if constexpr (kP + 1 < kPanels) zero_sums<kRowTiles, kPanels, kP + 1>();
}

// In memory: rows of kPanels * 16.
template <int kRowTiles, int kPanels, int kP = 0>
inline void load_sums(const float* sums) {
  constexpr int kStride = kPanels * kPanel;
  load_tile<kP>(sums + kP * kPanel, kStride * 4);
  if constexpr (kRowTiles == 2) load_tile<2 + kP>(sums + 16 * kStride + kP * kPanel, kStride * 4);
  if constexpr (kP + 1 < kPanels) load_sums<kRowTiles, kPanels, kP + 1>(sums);
}

template <int kRowTiles, int kPanels, int kP = 0>
inline void store_sums(float* sums) {
  constexpr int kStride = kPanels * kPanel;
  store_tile<kP>(sums + kP * kPanel, kStride * 4);
  if constexpr (kRowTiles == 2) store_tile<2 + kP>(sums + 16 * kStride + kP * kPanel, kStride * 4);
  if constexpr (kP + 1 < kPanels) store_sums<kRowTiles, kPanels, kP + 1>(sums);
}

template <bool kInteger, int kC, int kA, int kB>
inline void dot_tiles() {
  if constexpr (kInteger) {
    dot_tiles_s8s8<kC, kA, kB>();
  } else {
    dot_tiles_bf16<kC, kA, kB>();
  }
}

template <bool kPastL1, int kTile>
inline void load_tile_of(const char* p, int64_t stride) {
  if constexpr (kPastL1) {
    load_tile_past_l1<kTile>(p, stride);
  } else {
    load_tile<kTile>(p, stride);
  }
}

// The row tiles that are loaded times one tile of weights of each panel.
template <bool kInteger, bool kOnce, int kRowTiles, int kPanels, int kP = 0>
inline void multiply_weights(const char* weights, int64_t panel_bytes) {
  constexpr int kWeights = 6 + kP;
  load_tile_of<kOnce, kWeights>(weights + kP * panel_bytes, 64);
  dot_tiles<kInteger, kP, kRowTile, kWeights>();
  if constexpr (kRowTiles == 2) dot_tiles<kInteger, 2 + kP, kRowTile + 1, kWeights>();
  if constexpr (kP + 1 < kPanels) multiply_weights<kInteger, kOnce, kRowTiles, kPanels, kP + 1>(weights, panel_bytes);
}

// Weights of kPanels panels over a run of inputs.
struct TileStrip {
  const char* weights;       // tiles of the first panel in a row, those of the next at + panel_bytes
  int64_t panel_bytes;
  int tiles;
  const char* const* next;   // of each panel: for a single pass to prefetch, as much. Null = nothing at all
  bool is_last;              // of a run: next is for later
  bool is_near;              // a single pass fetches what it multiplies itself, a little before
};

// While tile `tile` of a panel is multiplied.
inline void fetch_ahead(const TileStrip& strip, int panel, int tile) {
  const char* const next = strip.next ? strip.next[panel] : nullptr;
  if (strip.is_near) {
    const int to = tile + kTilesAhead, beyond = to - strip.tiles;
    const char* at = strip.is_last || !next ? nullptr : next + beyond * kTileBytes;
    if (beyond < 0) at = strip.weights + panel * strip.panel_bytes + to * kTileBytes;
    for (int line = 0; at && line < kTileBytes; line += 64) fetch_line(reinterpret_cast<const float*>(at + line));
    if (!strip.is_last) return;
  }
  for (int line = 0; next && line < kTileBytes; line += 64) prefetch_line(next + tile * kTileBytes + line);
}

// One pass of 1 or 2 row tiles over a strip.
struct TilePass {
  const char* rows;          // from the strip's first input on
  int64_t row_stride;
  float* sums;               // in memory
  bool zero, load, store;    // what to do with the sums in tiles, before and after
};

// A group of panels whose sums are made: what becomes of them, some rows at a time.
struct MadeSums {
  int rows;
  int finished = 0;            // of them
  GroupFinish group{};         // the next group's sums come to the same place when all rows are finished

  void finish(int until) {
    if (finished >= until) return;
    group(finished, until);
    finished = until;
  }

  // Where no product is on its way. Tiles hold nothing that is needed.
  template <bool kInteger>
  void finish_all() {
    while (finished < rows) {
      finish(min_of(finished + 16, rows));
      dot_tiles<kInteger, 0, kRowTile, kRowTile + 2>();  // for the unit to stay awake
    }
  }
};

// kOnce: no other pass reads the weights, else none reads the rows so soon: L1 keeps the others. Weights that are read once are waited for:
// meanwhile the group before is finished.
template <bool kInteger, bool kOnce, int kRowTiles, int kPanels>
__attribute__((noinline)) void multiply_strip_tiles(const TileStrip& strip, const TilePass& pass, MadeSums* before) {  // wants all registers
  if (pass.zero) zero_sums<kRowTiles, kPanels>();
  if (pass.load) load_sums<kRowTiles, kPanels>(pass.sums);
  const char *rows = pass.rows, *weights = strip.weights;
  const int64_t row_stride = pass.row_stride, panel_bytes = strip.panel_bytes;
  const int tiles = strip.tiles;
  // The group before is finished evenly over the tiles (rows that are due, times tiles), a single row in the middle: right behind its sums' way
  // to memory, or before the next ones', it would wait for stores.
  int due = tiles / 2;
  for (int tile = 0; tile < tiles; ++tile, rows += 64, weights += kTileBytes) {
    load_tile_of<!kOnce, kRowTile>(rows, row_stride);
    if constexpr (kRowTiles == 2) load_tile_of<!kOnce, kRowTile + 1>(rows + 16 * row_stride, row_stride);
    multiply_weights<kInteger, kOnce, kRowTiles, kPanels>(weights, panel_bytes);
    for (int p = 0; kOnce && p < kPanels; ++p) fetch_ahead(strip, p, tile);
    if (!kOnce) continue;
    int until = before->finished;
    for (due += before->rows; due >= tiles; due -= tiles) ++until;
    before->finish(min_of(until, before->rows));
  }
  if (pass.store) store_sums<kRowTiles, kPanels>(pass.sums);
}

// A tile of codes as one of int8, or two in a row: group_scale * (doubled code - kLess), byte by byte. There is no multiplication of bytes,
// but neither needs it: code * scale is at most 240, so that a 16-bit multiplication of two codes carries nothing from one byte to the other.
// next: as much that comes after this strip.
template <typename Of>
inline void dequantise_tile(const char* packed, char* tile, const char* next) {
  const Int most = _mm512_set1_epi8(Of::kMost);
  Int scale[Of::kGroups], less[Of::kGroups];
  for (int group = 0; group < Of::kGroups; ++group) {
    const __m128i scales = _mm_loadu_si128(reinterpret_cast<const __m128i*>(packed + 512 + 16 * group));  // one an output: of 4 bytes
    const Int wide = _mm512_cvtepu8_epi32(scales);
    scale[group] = _mm512_or_si512(wide, _mm512_slli_epi32(wide, 16));
    const Int times_less = _mm512_mullo_epi16(scale[group], _mm512_set1_epi16(Of::kLess));
    less[group] = _mm512_or_si512(times_less, _mm512_slli_epi16(times_less, 8));
  }
  for (int quad = 0; quad < 8; ++quad) {
    const Int packed_quad = _mm512_loadu_si512(packed + quad * 64);
#pragma GCC unroll 4
    for (int group = 0; group < Of::kGroups; ++group) {
      const int height = Of::height(group);
      const Int codes = _mm512_and_si512(height < 0 ? _mm512_slli_epi16(packed_quad, -height) : _mm512_srli_epi16(packed_quad, height), most);
      _mm512_store_si512(tile + (8 * group + quad) * 64, _mm512_sub_epi8(_mm512_mullo_epi16(codes, scale[group]), less[group]));
    }
    prefetch_line(next + quad * 64);
  }
  prefetch_line(next + 512);
}

// What is read of a weight for some tiles, and how many those are.
template <Precision kPrecision>
struct PackedTiles {
  static constexpr int kTiles = has_codes(kPrecision) ? groups_of_tile(kPrecision) / 2 : 1;
  static constexpr int kBytes = has_codes(kPrecision) ? code_tile_bytes(kPrecision) : kTileBytes;
};

// All rows [first_row, + rows) times kPanels panels from `weights` on, into memory: sums[row - first_row][kPanels * 16]. behind: null = the
// panels behind them, or nothing is known.
template <Precision kPrecision, int kPanels>
inline void multiply_panels(const PackedLinear& w, const PreparedRows& x, int first_row, int rows, const char* weights, const ReadBehind* behind,
                            float* sums, char* dequantised, MadeSums& before) {
  using Packed = PackedTiles<kPrecision>;
  constexpr bool kInteger = is_integer(kPrecision), kCodes = has_codes(kPrecision);
  constexpr int kStripTiles = kStripBytes / kTileBytes / kPanels / Packed::kTiles, kPackedTile = Packed::kBytes;  // counted as packed
  const int tiles = w.inputs / input_multiple(kPrecision), strips = (tiles + kStripTiles - 1) / kStripTiles;
  const int64_t panel_bytes = int64_t(tiles) * kPackedTile;
  const int passes = (rows + 31) / 32;

  for (int s = 0; s < strips; ++s) {
    const int begin = int(int64_t(tiles) * s / strips), end = int(int64_t(tiles) * (s + 1) / strips);
    const bool last = s + 1 == strips;
    const char* here = weights + int64_t(begin) * kPackedTile;
    const char* next[kPanels];
    for (int p = 0; p < kPanels; ++p) {
      next[p] = last ? weights + (kPanels + p) * panel_bytes : weights + p * panel_bytes + int64_t(end) * kPackedTile;
      if (last && behind) {
        const int beyond = p - behind->panels;
        next[p] = beyond < 0 ? behind->more + p * panel_bytes : behind->then + int64_t(beyond) * (end - begin) * kPackedTile;
      }
    }
    const bool known = !last || !behind || behind->then;
    TileStrip strip = {here, panel_bytes, end - begin, known ? next : nullptr, last && behind, kInteger && rows * x.stride <= kNearBytes};
    if constexpr (kCodes) {
      constexpr int kMadeBytes = Packed::kTiles * kTileBytes;
      strip = {dequantised, int64_t(kStripTiles) * kMadeBytes, (end - begin) * Packed::kTiles, nullptr, false, false};
      for (int p = 0; p < kPanels; ++p) {
        for (int tile = 0; tile < end - begin; ++tile) {
          const int64_t at = int64_t(tile) * kPackedTile;
          dequantise_tile<Codes<kPrecision>>(here + p * panel_bytes + at, dequantised + p * strip.panel_bytes + tile * kMadeBytes, next[p] + at);
        }
      }
    }
    for (int row = 0; row < rows; row += 32) {
      const char* from = static_cast<const char*>(x.data) + (first_row + row) * x.stride + int64_t(begin) * Packed::kTiles * 64;
      const TilePass pass = {from, x.stride, sums + int64_t(row) * kPanels * kPanel, s == 0, s > 0 && passes > 1, last || passes > 1};
      const bool once = passes == 1 && !kCodes;
      const auto multiply = [&](auto row_tiles) {
        constexpr int kRowTiles = decltype(row_tiles)::value;
        once ? multiply_strip_tiles<kInteger, true, kRowTiles, kPanels>(strip, pass, &before)
             : multiply_strip_tiles<kInteger, false, kRowTiles, kPanels>(strip, pass, nullptr);
      };
      rows - row > 16 ? multiply(std::integral_constant<int, 2>{}) : multiply(std::integral_constant<int, 1>{});
    }
  }
}

template <Precision kPrecision>
inline void multiply_rows(const PackedLinear& w, const PreparedRows& x, const Epilogue& e, int first_panel, int num_panels,
                          const ReadBehind& behind, char* scratch) {
  const int64_t panel_bytes = w.inputs / input_multiple(kPrecision) * int64_t(PackedTiles<kPrecision>::kBytes);
  const int most_rows = x.rows <= 32 ? 32 : max_of(32, min_of(kMaxRows, int(kRowBytes / x.stride) / 32 * 32));
  float* sums = reinterpret_cast<float*>(scratch);
  char* dequantised = scratch + kSumBytes;
  auto* bests = reinterpret_cast<LaneBests*>(dequantised + kStripBytes);

  for (int first_row = 0; first_row < x.rows; first_row += most_rows) {
    const int rows = min_of(most_rows, x.rows - first_row);
    if (e.best) clear_bests(bests, rows);
    MadeSums made = {rows, rows};
    for (int panel = first_panel, end = first_panel + num_panels, panels; panel < end; panel += panels) {
      const char* weights = static_cast<const char*>(w.weights) + panel * panel_bytes;
      const int left = end - panel;
      panels = min_of(left, 2);
      const ReadBehind* is_last = panels == left && first_row + rows == x.rows ? &behind : nullptr;
      if (rows > 32) {
        made.finish_all<is_integer(kPrecision)>();
      } else if (has_codes(kPrecision)) {
        made.finish(rows);
      }
      panels == 2 ? multiply_panels<kPrecision, 2>(w, x, first_row, rows, weights, is_last, sums, dequantised, made)
                  : multiply_panels<kPrecision, 1>(w, x, first_row, rows, weights, is_last, sums, dequantised, made);
      made = {rows, 0, finish_of_group(w, x, e, first_row, panel, panels, sums, panels * kPanel, bests)};
    }
    made.finish(rows);
    if (e.best) take_bests(bests, rows, e.best + first_row);
  }
}

inline void linear_tiles(const PackedLinear& w, const PreparedRows& x, const Epilogue& e, int first_panel, int num_panels,
                         const ReadBehind& behind, void* scratch) {
  if (x.rows <= 0) return;
  if (has_codes(w.precision) && x.rows <= kCodeRows) {
    float* const tile = static_cast<float*>(scratch);
    return w.precision == Precision::kInt4 ? linear_panels<CodeFormat<Precision::kInt4>>(w, x, e, first_panel, num_panels, tile)
                                           : linear_panels<CodeFormat<Precision::kInt2>>(w, x, e, first_panel, num_panels, tile);
  }
  if (w.precision == Precision::kBFloat16 && x.rows <= kVectorRows) {
    return linear_panels<AsTiles>(w, x, e, first_panel, num_panels, static_cast<float*>(scratch));
  }
  configure_linear(x.rows);
  switch (w.precision) {
    case Precision::kBFloat16:
      multiply_rows<Precision::kBFloat16>(w, x, e, first_panel, num_panels, behind, static_cast<char*>(scratch));
      break;
    case Precision::kInt8:
      multiply_rows<Precision::kInt8>(w, x, e, first_panel, num_panels, behind, static_cast<char*>(scratch));
      break;
    case Precision::kInt4:
      multiply_rows<Precision::kInt4>(w, x, e, first_panel, num_panels, behind, static_cast<char*>(scratch));
      break;
    case Precision::kInt2:
      multiply_rows<Precision::kInt2>(w, x, e, first_panel, num_panels, behind, static_cast<char*>(scratch));
      break;
    case Precision::kFloat32:
    case Precision::kCompact:
      break;  // have no tiles
  }
  release_tiles();
}
