// How a weight is walked: strips of a few panels x a run of inputs, small enough to stay in L1 while all rows pass over them
// a few at a time. The strip behind is prefetched meanwhile, a share in each pass, so that memory never waits for arithmetic.
//
// Sums lie in a tile [rows][panels of the group * 16] between strips. Storing and loading them rounds nothing: every output
// has one accumulator that takes its inputs in ascending order, however rows, panels and strips are cut.

constexpr int kGroupPanels = 6;    // finished together; 4 rows x 6 panels of sums fill the registers
constexpr int kPassRows = 4;
constexpr int kTileRows = int(kLinearScratch / (kGroupPanels * kPanel * sizeof(float))) / kPassRows * kPassRows;

// One pass: `rows` of activations times a strip.
struct Strip {
  const char* weights;       // first panel of the strip; the others follow at panel_bytes
  int64_t panel_bytes;
  const char* rows;
  int64_t row_stride;
  int steps;
  bool first;                // sums start here, else they go on from the tile
  float* tile;               // float32 or int32
  int tile_stride;
  const int32_t* column_sums;   // int8: of the strip's first output
  const int32_t* group_sums;    // int4: of the first row and the strip's first input
  int64_t group_stride;
  const char* next;          // the strip to prefetch, laid out alike
  int pass, passes;          // this pass prefetches one share of `passes`
};

using Multiply = void (*)(const Strip&);

// Format: kStepBytes of weights and kStepRowBytes of a row are one step; kStripSteps; kPanels at a time at most;
// multiply[rows - 1][panels - 1].
template <typename Format>
inline void linear_panels(const PackedLinear& w, const PreparedRows& x, const Epilogue& e, int first_panel, int num_panels,
                          float* tile) {
  const int steps = w.inputs / Format::kStepInputs;
  const int64_t panel_bytes = int64_t(steps) * Format::kStepBytes;
  const int64_t group_stride = w.inputs / kGroup;
  const char* weights = static_cast<const char*>(w.weights) + first_panel * panel_bytes;
  const int strips = (steps + Format::kStripSteps - 1) / Format::kStripSteps;
  const int even = e.gated ? 1 : 0;

  for (int first_row = 0; first_row < x.rows; first_row += kTileRows) {
    const int rows = min_of(kTileRows, x.rows - first_row);
    const char* group_weights = weights;
    for (int done = 0, panels; done < num_panels; done += panels, group_weights += panels * panel_bytes) {
      const int left = num_panels - done, groups = (left + kGroupPanels - 1) / kGroupPanels;
      panels = ((left + groups - 1) / groups + even) & ~even;  // equal groups, whole pairs of gate and up
      Strip strip = {};
      strip.panel_bytes = panel_bytes;
      strip.row_stride = x.stride;
      strip.tile_stride = panels * kPanel;
      strip.group_stride = group_stride;
      strip.passes = (rows + kPassRows - 1) / kPassRows;
      for (int s = 0; s < strips; ++s) {
        const int begin = int(int64_t(steps) * s / strips), end = int(int64_t(steps) * (s + 1) / strips);
        const char* here = group_weights + int64_t(begin) * Format::kStepBytes;
        const char* next = s + 1 < strips ? group_weights + int64_t(end) * Format::kStepBytes : group_weights + panels * panel_bytes;
        strip.steps = end - begin;
        strip.first = s == 0;
        for (int r = 0; r < rows; r += kPassRows) {
          const int pass_rows = min_of(kPassRows, rows - r);
          strip.pass = r / kPassRows;
          strip.rows = static_cast<const char*>(x.data) + (first_row + r) * x.stride + int64_t(begin) * Format::kStepRowBytes;
          if (x.group_sums) strip.group_sums = x.group_sums + (first_row + r) * group_stride + begin * (Format::kStepInputs / kGroup);
          for (int p = 0; p < panels; p += Format::kPanels) {
            strip.weights = here + p * panel_bytes;
            strip.next = next + p * panel_bytes;
            strip.tile = tile + int64_t(r) * strip.tile_stride + p * kPanel;
            if (w.column_sums) strip.column_sums = w.column_sums + (first_panel + done + p) * kPanel;
            Format::multiply[pass_rows - 1][min_of(Format::kPanels, panels - p) - 1](strip);
          }
        }
      }
      finish_rows(w, x, e, first_row, rows, first_panel + done, panels, tile, strip.tile_stride);
    }
  }
}
