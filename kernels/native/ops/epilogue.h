// What becomes of a product: sums of a tile of rows x panels -> bias, residual, scale, softcap, activation, store, best.
// Whatever computed the sums, they pass through here, so that every instruction set rounds the same way. Included by isa_table.h.

// Exact int32 sums -> floats. The one formula for all integer products.
inline Vec dequantised(Int sums, Vec weight_scales, float row_scale) {
  return _mm512_mul_ps(_mm512_mul_ps(_mm512_cvtepi32_ps(sums), weight_scales), splat(row_scale));
}

// The finished values of one panel of one row. Columns that do not exist hold no meaning.
inline Vec finished(const PackedLinear& w, const PreparedRows& x, const Epilogue& e, int row, int panel, const float* sums) {
  const int column = panel * kPanel, exist = e.outputs - column;
  const bool integer = w.precision == Precision::kInt8 || w.precision == Precision::kInt4;
  Vec v = load(sums);
  if (integer) v = dequantised(_mm512_castps_si512(v), load(w.scales + column), x.scales[row]);
  if (w.bias) v = _mm512_add_ps(v, load(w.bias + column));
  if (e.residual) v = _mm512_add_ps(v, load_some(e.residual + row * e.residual_stride + column, max_of(exist, 0)));
  if (e.scale != 1.0f) v = _mm512_mul_ps(v, splat(e.scale));
  if (e.softcap != 0.0f) v = softcapped(v, splat(e.softcap));
  return v;
}

// Rows [first_row, + rows) and panels [first_panel, + num_panels). tile[r * tile_stride + 16 p] is the first sum of row
// first_row + r and panel first_panel + p: float32, or int32 for an integer weight (less the offset of unsigned operands).
// The tile is overwritten. With e.gated first_panel and num_panels are even and a residual is not allowed.
inline void finish_rows(const PackedLinear& w, const PreparedRows& x, const Epilogue& e, int first_row, int rows, int first_panel,
                        int num_panels, float* tile, int tile_stride) {
  const int outputs = e.gated ? e.outputs / 2 : e.outputs;
  const int first_column = (e.gated ? first_panel / 2 : first_panel) * kPanel;
  const int columns = min_of((e.gated ? num_panels / 2 : num_panels) * kPanel, outputs - first_column);
  if (columns <= 0) return;
  for (int r = 0; r < rows; ++r) {
    const int row = first_row + r;
    float* sums = tile + int64_t(r) * tile_stride;
    const int place = e.out_rows ? e.out_rows[row] : row;
    float* out = e.out && place >= 0 ? e.out + place * e.out_stride + first_column : nullptr;
    for (int c = 0; c < columns; c += kPanel) {  // a gate's column lies at or before both of its sums: nothing unread is overwritten
      Vec v;
      if (e.gated) {
        const int gate = first_panel + 2 * c / kPanel;
        v = function_of(e.function, finished(w, x, e, row, gate, sums + 2 * c));
        v = _mm512_mul_ps(v, finished(w, x, e, row, gate + 1, sums + 2 * c + kPanel));
      } else {
        v = function_of(e.function, finished(w, x, e, row, first_panel + c / kPanel, sums + c));
      }
      if (out) store_some(out + c, v, columns - c);
      if (e.best) store(sums + c, v);
    }
    if (e.best) take_best(sums, first_column, columns, e.best + row);
  }
}
