// AMX: eight tile registers of up to 16 rows x 64 bytes, and products of two tiles added to a third.
//
// Tile numbers are template parameters, for they are part of an instruction's encoding. Each instruction is its own asm:
// gcc 12's intrinsics say nothing of the memory they read, so that a store before them (of the configuration, of a buffer just
// filled) may be dropped or moved behind them. With FT_EMULATE_TILES the same functions work on arrays, on any AVX-512 machine.

struct alignas(64) TileShapes {  // the operand of LDTILECFG
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};

  void set(int tile, int num_rows) {
    rows[tile] = uint8_t(num_rows);
    row_bytes[tile] = 64;
  }
};
static_assert(sizeof(TileShapes) == 64, "LDTILECFG reads 64 bytes");

constexpr int kTileBytes = 1024;  // 16 rows of 64

#if FT_EMULATE_TILES
#include "tiles_emulated.h"
#else

// Also clears all tiles. Not free: once a call.
inline void configure_tiles(const TileShapes& shapes) { asm volatile("ldtilecfg (%0)" ::"r"(&shapes) : "memory"); }
// Back to the initial state, in which a switch of threads saves no tiles.
inline void release_tiles() { asm volatile("tilerelease"); }

template <int kTile>
inline void zero_tile() {
  asm volatile("tilezero %%tmm%c0" ::"i"(kTile));
}
// As many rows as the tile has, and as wide, from addresses `stride` bytes apart.
template <int kTile>
inline void load_tile(const void* p, int64_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(p), "r"(stride), "i"(kTile) : "memory");
}
// The same, but what comes from L2 leaves the lines of L1 to others.
template <int kTile>
inline void load_tile_past_l1(const void* p, int64_t stride) {
  asm volatile("tileloaddt1 (%0,%1,1), %%tmm%c2" ::"r"(p), "r"(stride), "i"(kTile) : "memory");
}
template <int kTile>
inline void store_tile(void* p, int64_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(p), "r"(stride), "i"(kTile) : "memory");
}

// The unit that multiplies dozes off some 600 ns after its last product and takes 300 ns to come round, 600 after a longer sleep (measured):
// who computes something else for so long between products does one now and then whose result nobody needs.
//
// Row m of c += row m of a times b: c has 16 sums a row, b one row per 4 bytes of a's rows (and is 64 bytes wide). The first row of b holds for each of the
// 16 outputs the first 4 bytes (2 bfloat16, 4 int8) of its inputs, the second row the next.
template <int kC, int kA, int kB>
inline void dot_tiles_bf16() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kC), "i"(kA), "i"(kB));
}
template <int kC, int kA, int kB>
inline void dot_tiles_s8s8() {
  asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kC), "i"(kA), "i"(kB));
}

#endif
