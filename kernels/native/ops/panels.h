// How a weight is walked. A few rows pass over one panel after the other, in the order of memory: the processor's own
// prefetch keeps up with a single stream, and with no other pattern. More rows pass a few at a time over strips, a few panels x a
// run of inputs that stays in the cache meanwhile; behind each step of a strip the same step of the next one is prefetched.
//
// Every output has two accumulators, one for its even and one for its odd steps, each in ascending order; their sum is the result.
// (Two, because a chain of dependent additions would read a single stream of weights at half the speed of the cache.) So it is
// whatever rows, panels and strips it is computed with: between strips accumulators lie in tiles, which rounds nothing.

constexpr int kPassRows = 8, kStripPanels = 3;   // 24 accumulators: with the operands they fill the registers
constexpr int kGroupPanels = 2 * kStripPanels;   // finished together; even, for pairs of gate and up
constexpr int kTileRows = int(kLinearScratch / (2 * kGroupPanels * kPanel * sizeof(float))) / kPassRows * kPassRows;

// One pass: rows of activations times panels.
struct Strip {
  const char* weights;       // first panel; the others follow at panel_bytes
  int64_t panel_bytes;
  const char* rows;
  int64_t row_stride;        // bytes
  int steps;
  bool first, last;          // strip of its panels
  float* tile;               // [rows][tile_stride] of float32, or int32
  float* odd_tile;           // accumulators of odd steps, alike
  int tile_stride;
  const int32_t* column_sums;   // int8: of the first output
  const int32_t* group_sums;    // int4: of the first row
  int64_t group_stride;
  const char* next;          // the strip to prefetch, laid out alike
  int pass, passes;          // passes share the prefetch
};

// Where strip `index` of `strips` begins: at an even step, for the accumulators take turns.
inline int cut(int steps, int index, int strips) {
  return index == strips ? steps : int(int64_t(steps) * index / strips) & ~1;
}

using Multiply = void (*)(const Strip&);

// What all strips of a call have in common.
inline Strip whole_panels(const PackedLinear& w, const PreparedRows& x, int steps, int64_t panel_bytes) {
  Strip strip = {};
  strip.panel_bytes = panel_bytes;
  strip.row_stride = x.stride;
  strip.steps = steps;
  strip.first = strip.last = true;
  strip.group_stride = w.inputs / kGroup;
  return strip;
}

inline void place_rows(Strip& strip, const PreparedRows& x, int row) {
  strip.rows = static_cast<const char*>(x.data) + row * x.stride;
  if (x.group_sums) strip.group_sums = x.group_sums + row * strip.group_stride;
}

// Panel after panel. Format::one_panel[rows - 1] multiplies a whole panel by up to kPanelRows rows.
template <typename Format>
inline void walk_panels(const PackedLinear& w, const PreparedRows& x, const Epilogue& e, int first_panel, int num_panels, float* tile) {
  const int steps = w.inputs / Format::kStepInputs;
  Strip strip = whole_panels(w, x, steps, int64_t(steps) * Format::kStepBytes);
  const char* weights = static_cast<const char*>(w.weights) + first_panel * strip.panel_bytes;
  for (int first_row = 0; first_row < x.rows; first_row += kTileRows) {
    const int rows = min_of(kTileRows, x.rows - first_row), passes = (rows + Format::kPanelRows - 1) / Format::kPanelRows;
    for (int done = 0; done < num_panels; done += kGroupPanels) {
      const int panels = min_of(kGroupPanels, num_panels - done);
      strip.tile_stride = panels * kPanel;
      for (int p = 0; p < panels; ++p) {
        strip.weights = weights + (done + p) * strip.panel_bytes;
        if (w.column_sums) strip.column_sums = w.column_sums + (first_panel + done + p) * kPanel;
        for (int pass = 0; pass < passes; ++pass) {
          const int r = rows * pass / passes, pass_rows = rows * (pass + 1) / passes - r;
          place_rows(strip, x, first_row + r);
          strip.tile = tile + int64_t(r) * strip.tile_stride + p * kPanel;
          Format::one_panel[pass_rows - 1](strip);
        }
      }
      finish_rows(w, x, e, first_row, rows, first_panel + done, panels, tile, strip.tile_stride);
    }
  }
}

// Strip after strip. Format::strips[rows - 1][panels - 1]; strips are Format::kStripSteps long at most.
template <typename Format>
inline void walk_strips(const PackedLinear& w, const PreparedRows& x, const Epilogue& e, int first_panel, int num_panels, float* tile) {
  const int steps = w.inputs / Format::kStepInputs;
  Strip strip = whole_panels(w, x, steps, int64_t(steps) * Format::kStepBytes);
  const int64_t panel_bytes = strip.panel_bytes;
  const char* weights = static_cast<const char*>(w.weights) + first_panel * panel_bytes;
  const int strips = (steps + Format::kStripSteps - 1) / Format::kStripSteps;

  for (int first_row = 0; first_row < x.rows; first_row += kTileRows) {
    const int rows = min_of(kTileRows, x.rows - first_row), passes = (rows + kPassRows - 1) / kPassRows;
    strip.passes = passes;
    for (int done = 0; done < num_panels; done += kGroupPanels) {
      const int group = min_of(kGroupPanels, num_panels - done);
      strip.tile_stride = group * kPanel;
      for (int p = 0, panels; p < group; p += panels) {
        panels = group - p > kStripPanels ? (group - p + 1) / 2 : group - p;
        const char* panel = weights + (done + p) * panel_bytes;
        if (w.column_sums) strip.column_sums = w.column_sums + (first_panel + done + p) * kPanel;
        for (int s = 0; s < strips; ++s) {
          const int begin = cut(steps, s, strips), end = cut(steps, s + 1, strips);
          strip.weights = panel + int64_t(begin) * Format::kStepBytes;
          strip.next = s + 1 < strips ? panel + int64_t(end) * Format::kStepBytes : panel + panels * panel_bytes;
          strip.steps = end - begin;
          strip.first = s == 0;
          strip.last = s + 1 == strips;
          for (int pass = 0; pass < passes; ++pass) {
            const int r = rows * pass / passes, pass_rows = rows * (pass + 1) / passes - r;
            place_rows(strip, x, first_row + r);
            strip.rows += int64_t(begin) * Format::kStepRowBytes;
            strip.pass = pass;
            strip.tile = tile + int64_t(r) * strip.tile_stride + p * kPanel;
            strip.odd_tile = strip.tile + int64_t(rows) * strip.tile_stride;
            Format::strips[pass_rows - 1][panels - 1](strip);
          }
        }
      }
      finish_rows(w, x, e, first_row, rows, first_panel + done, group, tile, strip.tile_stride);
    }
  }
}

template <typename Format>
inline void linear_panels(const PackedLinear& w, const PreparedRows& x, const Epilogue& e, int first_panel, int num_panels, float* tile) {
  if constexpr (Format::kHasStrips) {
    if (x.rows > Format::kPanelRows) return walk_strips<Format>(w, x, e, first_panel, num_panels, tile);
  }
  walk_panels<Format>(w, x, e, first_panel, num_panels, tile);
}
