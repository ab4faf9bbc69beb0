// How a weight is walked: some rows at a time, as many as registers hold, pass over one panel after the other, in the order of memory.
// The processor's own prefetch keeps up with one stream of weights and with hardly any other pattern (two panels side by side are faster
// in the cache for one or two rows, by a fifth, and slower from memory by as much), and eight rows are enough to make arithmetic the
// limit: all further passes over a panel find it in the cache. Included by linear.h.

// Panels finished together, an even number for pairs of gate and up: as many as L1 holds sums of beside the rows, for between two groups
// the products stand still.
constexpr int kGroupPanels = 6, kMostPanels = 32;  // at least, at most, ...
constexpr int kGroupSums = 288;                    // ... and in between so many vectors of sums
constexpr int kTileRows = 448;                     // whose sums wait together
static_assert(kTileRows * (kGroupPanels * kPanel * sizeof(float) + sizeof(LaneBests)) <= kLinearScratch, "sums, then the best of each row");

constexpr int kFarAhead = 16384;  // bytes of weights
constexpr int kFewestRows = 4;    // of a pass behind the first

// One pass: some rows times a panel.
struct Pass {
  const char* weights;          // the panel
  int steps;                    // of the format, along the inputs
  const char* rows;
  int64_t row_stride;           // bytes
  int64_t ahead[2];             // the lines prefetched with every two that are read: so many bytes behind the first of these
  const int32_t* input_sums;    // int8 and int4: of the first row
  int64_t sums_stride;          // from row to row
  float* sums;                  // result, [rows][sum_stride] of float32 or int32
  int sum_stride;
};

using Multiply = void (*)(const Pass&);

// Format: kStepInputs and kStepBytes of a step, kPassRows; multiply[rows - 1].
template <typename Format>
inline void linear_panels(const PackedLinear& w, const PreparedRows& x, const Epilogue& e, int first_panel, int num_panels, float* tile) {
  Pass pass = {};
  pass.steps = w.inputs / Format::kStepInputs;
  pass.row_stride = x.stride;
  pass.sums_stride = w.precision == Precision::kInt4 ? w.inputs / kGroup : 1;
  const int64_t panel_bytes = int64_t(pass.steps) * Format::kStepBytes;
  auto* bests = reinterpret_cast<LaneBests*>(tile + kTileRows * kGroupPanels * kPanel);

  for (int first_row = 0; first_row < x.rows; first_row += kTileRows) {
    const int rows = min_of(kTileRows, x.rows - first_row), passes = (rows + Format::kPassRows - 1) / Format::kPassRows;
    // The first reads the panel from memory, which takes as long as many rows' arithmetic: it has as many as it may have, those behind
    // it what is left, of about equally many rows but not too few.
    const int first_pass = passes > 1 ? min_of(Format::kPassRows, rows - kFewestRows * (passes - 1)) : rows;
    const int most_panels = max_of(kGroupPanels, min_of(kMostPanels, kGroupSums / rows / 2 * 2));
    if (e.best) clear_bests(bests, rows);
    for (int done = 0, panels; done < num_panels; done += panels) {
      const int group = first_panel + done;
      panels = min_of(most_panels, num_panels - done);
      pass.sum_stride = panels * kPanel;
      for (int p = 0; p < panels; ++p) {
        pass.weights = static_cast<const char*>(w.weights) + (group + p) * panel_bytes;
        for (int i = 0, begin = 0, end; i < passes; ++i, begin = end) {
          end = i ? first_pass + (rows - first_pass) * i / (passes - 1) : first_pass;
          pass.rows = static_cast<const char*>(x.data) + (first_row + begin) * x.stride;
          // The others fetch some of the next panel, so that memory is busy during all of them.
          pass.ahead[0] = i ? panel_bytes : kFarAhead, pass.ahead[1] = i ? panel_bytes : kFarAhead + 64;
          if (x.input_sums) pass.input_sums = x.input_sums + (first_row + begin) * pass.sums_stride;
          pass.sums = tile + begin * pass.sum_stride + p * kPanel;
          Format::multiply[end - begin - 1](pass);
        }
      }
      finish_rows(w, x, e, first_row, rows, group, panels, tile, pass.sum_stride, bests);
    }
    if (e.best) take_bests(bests, rows, e.best + first_row);
  }
}
