// The functions of tiles.h on arrays, bit for bit as the instructions are specified (Intel SDM), faults included: a product of
// unconfigured or mismatched tiles traps. Lets the AMX translation unit run, sanitised too, on a machine without AMX.

struct EmulatedTiles {
  bool configured = false;
  TileShapes shapes;
  alignas(64) uint8_t data[8][16][64];

  int rows(int tile) const {
    if (!configured || shapes.rows[tile] == 0) __builtin_trap();
    return shapes.rows[tile];
  }
  int bytes(int tile) const { return shapes.row_bytes[tile]; }
  Int row(int tile, int r) const { return _mm512_load_si512(data[tile][r]); }
};
thread_local EmulatedTiles emulated;

inline void configure_tiles(const TileShapes& shapes) {
  for (int tile = 0; tile < 16; tile++)
    if (shapes.rows[tile] > 16 || shapes.row_bytes[tile] > 64 || (shapes.rows[tile] && (shapes.row_bytes[tile] % 4 || tile >= 8))) __builtin_trap();
  if (shapes.palette != 1 || shapes.start_row != 0) __builtin_trap();
  emulated.shapes = shapes;
  emulated.configured = true;
  __builtin_memset(emulated.data, 0, sizeof(emulated.data));
}
inline void release_tiles() { emulated.configured = false; }

template <int kTile>
inline void zero_tile() {
  emulated.rows(kTile);
  __builtin_memset(emulated.data[kTile], 0, kTileBytes);
}
template <int kTile>
inline void load_tile(const void* p, int64_t stride) {
  const int rows = emulated.rows(kTile), bytes = emulated.bytes(kTile);
  zero_tile<kTile>();
  for (int r = 0; r < rows; r++) __builtin_memcpy(emulated.data[kTile][r], static_cast<const char*>(p) + r * stride, bytes);
}
template <int kTile>
inline void load_tile_past_l1(const void* p, int64_t stride) {
  load_tile<kTile>(p, stride);
}
template <int kTile>
inline void store_tile(void* p, int64_t stride) {
  const int rows = emulated.rows(kTile), bytes = emulated.bytes(kTile);
  for (int r = 0; r < rows; r++) __builtin_memcpy(static_cast<char*>(p) + r * stride, emulated.data[kTile][r], bytes);
}

// Rows of the product, after the checks that the hardware makes.
template <int kC, int kA, int kB>
inline int dot_rows() {
  static_assert(kC != kA && kC != kB && kA != kB, "the three tiles of a product differ");
  if (emulated.rows(kC) != emulated.rows(kA) || emulated.rows(kB) * 4 != emulated.bytes(kA)) __builtin_trap();
  if (emulated.bytes(kC) != 64 || emulated.bytes(kB) != 64) __builtin_trap();
  return emulated.rows(kC);
}

inline Int quad_of_row(int tile, int row, int k) {  // bytes 4 k .. 4 k + 3 of a row, in all lanes
  int32_t bits;
  __builtin_memcpy(&bits, emulated.data[tile][row] + 4 * k, 4);
  return _mm512_set1_epi32(bits);
}

// Even and odd inputs are summed apart from zero on, with fused multiply-adds; then the two sums are added, then that to c. Denormals
// are zeros throughout and rounding is to nearest even, whatever MXCSR says.
template <int kC, int kA, int kB>
inline void dot_tiles_bf16() {
  const int rows = dot_rows<kC, kA, kB>();
  const unsigned saved = _mm_getcsr();
  _mm_setcsr(0x9fc0);  // flush to zero, denormals are zero, to nearest, no exceptions
  asm volatile("" ::: "memory");  // arithmetic between loads and stores of `emulated` stays between these two
  const Int high = _mm512_set1_epi32(int(0xffff0000));
  for (int m = 0; m < rows; m++) {
    Vec even = zero(), odd = zero();
    for (int k = 0; k < emulated.rows(kB); k++) {
      const Int a = quad_of_row(kA, m, k), b = emulated.row(kB, k);
      even = _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_slli_epi32(a, 16)), _mm512_castsi512_ps(_mm512_slli_epi32(b, 16)), even);
      odd = _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_and_si512(a, high)), _mm512_castsi512_ps(_mm512_and_si512(b, high)), odd);
    }
    const Vec c = _mm512_castsi512_ps(emulated.row(kC, m));
    _mm512_store_ps(emulated.data[kC][m], _mm512_add_ps(c, _mm512_add_ps(even, odd)));
  }
  asm volatile("" ::: "memory");
  _mm_setcsr(saved);
}

// Bytes widened to 16 bits, where a product of two is exact; sums wrap at 32 bits.
template <int kC, int kA, int kB>
inline void dot_tiles_s8s8() {
  const int rows = dot_rows<kC, kA, kB>();
  auto even = [](Int x) { return _mm512_srai_epi16(_mm512_slli_epi16(x, 8), 8); };
  auto odd = [](Int x) { return _mm512_srai_epi16(x, 8); };
  for (int m = 0; m < rows; m++) {
    Int c = emulated.row(kC, m);
    for (int k = 0; k < emulated.rows(kB); k++) {
      const Int a = quad_of_row(kA, m, k), b = emulated.row(kB, k);
      c = _mm512_add_epi32(c, _mm512_madd_epi16(even(a), even(b)));
      c = _mm512_add_epi32(c, _mm512_madd_epi16(odd(a), odd(b)));
    }
    _mm512_store_si512(emulated.data[kC][m], c);
  }
}
