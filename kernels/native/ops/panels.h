// How a weight is walked: up to eight rows at a time pass over one panel after the other, in the order of memory. The processor's own
// prefetch keeps up with one stream of weights and with hardly any other pattern, and eight rows are enough to make arithmetic the
// limit: all further passes over a panel find it in the cache. Included by linear.h.

constexpr int kPassRows = 8;
constexpr int kGroupPanels = 6;  // finished together; even, for pairs of gate and up
constexpr int kTileRows = int(kLinearScratch / (kGroupPanels * kPanel * sizeof(float))) / kPassRows * kPassRows;

// One pass: some rows times a panel.
struct Pass {
  const char* weights;          // the panel
  int steps;                    // of the format, along the inputs
  const char* rows;
  int64_t row_stride;           // bytes
  const int32_t* column_sums;   // int8: of the panel's outputs
  const int32_t* group_sums;    // int4: of the first row
  int64_t group_stride;
  float* sums;                  // result, [rows][sum_stride] of float32 or int32
  int sum_stride;
};

using Multiply = void (*)(const Pass&);

// Format: kStepInputs and kStepBytes of a step; multiply[rows - 1].
template <typename Format>
inline void linear_panels(const PackedLinear& w, const PreparedRows& x, const Epilogue& e, int first_panel, int num_panels, float* tile) {
  Pass pass = {};
  pass.steps = w.inputs / Format::kStepInputs;
  pass.row_stride = x.stride;
  pass.group_stride = w.inputs / kGroup;
  const int64_t panel_bytes = int64_t(pass.steps) * Format::kStepBytes;

  for (int first_row = 0; first_row < x.rows; first_row += kTileRows) {
    const int rows = min_of(kTileRows, x.rows - first_row), passes = (rows + kPassRows - 1) / kPassRows;
    for (int done = 0; done < num_panels; done += kGroupPanels) {
      const int group = first_panel + done, panels = min_of(kGroupPanels, num_panels - done);
      pass.sum_stride = panels * kPanel;
      for (int p = 0; p < panels; ++p) {
        pass.weights = static_cast<const char*>(w.weights) + (group + p) * panel_bytes;
        if (w.column_sums) pass.column_sums = w.column_sums + (group + p) * kPanel;
        for (int i = 0; i < passes; ++i) {  // of about equally many rows
          const int begin = rows * i / passes, end = rows * (i + 1) / passes;
          pass.rows = static_cast<const char*>(x.data) + (first_row + begin) * x.stride;
          if (x.group_sums) pass.group_sums = x.group_sums + (first_row + begin) * pass.group_stride;
          pass.sums = tile + begin * pass.sum_stride + p * kPanel;
          Format::multiply[end - begin - 1](pass);
        }
      }
      finish_rows(w, x, e, first_row, rows, group, panels, tile, pass.sum_stride);
    }
  }
}
