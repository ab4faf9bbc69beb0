// How a weight is walked: some rows at a time, as many as registers hold. Included by linear.h.
//
// The first pass over a panel reads it from memory, which takes as long as many rows' arithmetic: it has as many rows as it may have, and
// one panel, for the processor's own prefetch keeps up with one stream and with hardly any other pattern. The passes behind it find the
// panel in the core's own cache. They have two panels side by side, so that a row's inputs are loaded once for both: with one, loads hold
// up the products, by a tenth with fourteen rows and by a third with four.

// Panels finished together, an even number for pairs of gate and up: as many as L1 holds sums of beside the rows, for between two groups
// the products stand still.
constexpr int kGroupPanels = 6, kMostPanels = 32;  // at least, at most, ...
constexpr int kGroupSums = 288;                    // ... and in between so many vectors of sums
constexpr int kTileRows = 448;                     // whose sums wait together
constexpr size_t kTileBytesOfRows = kTileRows * (kGroupPanels * kPanel * sizeof(float) + sizeof(LaneBests));
static_assert(kTileBytesOfRows <= kLinearScratch, "sums, then the best of each row");

// One pass: some rows times a panel, or two.
struct Pass {
  const char* weights;          // the panel
  int64_t panel_bytes;          // from it to the next
  int steps;                    // of the format, along the inputs
  const char* rows;
  int64_t row_stride;           // bytes
  const int32_t* input_sums;    // integers: of the first row
  int64_t sums_stride;          // from row to row
  float* sums;                  // result, [rows][sum_stride] of float32 or int32
  int sum_stride;
  char* unpacked;               // where the panel goes as plain bfloat16 on the way, null = nowhere; compact weights only
};

using Multiply = void (*)(const Pass&);

// Panels that begin with their first step and are read anew in every pass.
struct PlainPanels {
  struct Mode {};  // in which the processor multiplies
  static constexpr bool kUnpacks = false;
  static constexpr int kHeadBytes = 0;
  static constexpr int64_t unpacked_bytes(int /*inputs*/) { return 0; }
};

// How a pass reads rows: from where they were prepared.
struct RowsAsPrepared : PlainPanels {
  static constexpr int most_rows(int /*inputs*/) { return kTileRows; }
  static void enter(const PreparedRows& x, int first_row, int /*rows*/, int /*inputs*/, char* /*memory*/, Pass* pass) {
    pass->rows = static_cast<const char*>(x.data) + first_row * x.stride;
    pass->row_stride = x.stride;
  }
};

// ... or as floats, made once for all panels, where nothing multiplies bfloat16: widened anew at every step they would cost as much as the
// products.
struct WidenedRows : PlainPanels {
  static constexpr size_t kWidenedBytes = 512 * 1024;
  static_assert(kMostInputs * sizeof(float) <= kWidenedBytes && kTileBytesOfRows + kWidenedBytes <= kLinearScratch, "a row fits");
  static constexpr int most_rows(int inputs) { return min_of(kTileRows, int(kWidenedBytes / (size_t(inputs) * sizeof(float)))); }
  static void enter(const PreparedRows& x, int first_row, int rows, int inputs, char* memory, Pass* pass) {
    auto* const wide = reinterpret_cast<float*>(memory);
    for (int r = 0; r < rows; ++r) {
      const auto* const from = reinterpret_cast<const uint16_t*>(static_cast<const char*>(x.data) + (first_row + r) * x.stride);
      for (int i = 0; i < inputs; i += 16) store(wide + int64_t(r) * inputs + i, load_bf16(from + i));
    }
    pass->rows = memory;
    pass->row_stride = int64_t(inputs) * int64_t(sizeof(float));
  }
};

// Format: kStepInputs and kStepBytes of a step; multiply[rows - 1] up to kPassRows: the passes over one panel; multiply_side[rows - 1] up to
// kSideRows: those over kSide panels, of kFewestRows at least; most_rows and enter: see RowsAsPrepared. kUnpacks: the first pass leaves the
// panels unpacked for those behind it, which are multiply_side, or multiply_alone for one panel.
template <typename Format>
inline void linear_panels(const PackedLinear& w, const PreparedRows& x, const Epilogue& e, int first_panel, int num_panels, float* tile) {
  Pass pass = {};
  pass.steps = w.inputs / Format::kStepInputs;
  const int64_t panel_bytes = int64_t(pass.steps) * Format::kStepBytes + Format::kHeadBytes;
  char* const unpacked = reinterpret_cast<char*>(tile) + kTileBytesOfRows;
  const int64_t unpacked_bytes = Format::unpacked_bytes(w.inputs);
  pass.sums_stride = has_codes(w.precision) ? w.inputs / kGroup : 1;
  auto* bests = reinterpret_cast<LaneBests*>(tile + kTileRows * kGroupPanels * kPanel);

  const int most_rows = Format::most_rows(w.inputs);
  for (int first_row = 0; first_row < x.rows; first_row += most_rows) {
    const int rows = min_of(most_rows, x.rows - first_row);
    Format::enter(x, first_row, rows, w.inputs, reinterpret_cast<char*>(tile) + kTileBytesOfRows, &pass);
    const char* const entered = pass.rows;
    const int first_rows = rows > Format::kPassRows ? min_of(Format::kPassRows, rows - Format::kFewestRows) : rows;
    const int others = rows - first_rows, passes = (others + Format::kSideRows - 1) / Format::kSideRows;
    const int most_panels = max_of(kGroupPanels, min_of(kMostPanels, kGroupSums / rows / 2 * 2));
    if (e.best) clear_bests(bests, rows);
    for (int done = 0, panels; done < num_panels; done += panels) {
      const int group = first_panel + done;
      panels = min_of(most_panels, num_panels - done);
      pass.sum_stride = panels * kPanel;
      const auto run = [&](Multiply multiply, const char* weights, int panel, int row) {
        pass.weights = weights;
        pass.rows = entered + row * pass.row_stride;
        if (x.input_sums) pass.input_sums = x.input_sums + (first_row + row) * pass.sums_stride;
        pass.sums = tile + row * pass.sum_stride + panel * kPanel;
        multiply(pass);
      };
      for (int p = 0, side; p < panels; p += side) {
        [[maybe_unused]] const typename Format::Mode mode;
        side = min_of(Format::kSide, panels - p);
        const char* weights = static_cast<const char*>(w.weights) + (group + p) * panel_bytes;
        pass.panel_bytes = panel_bytes;
        for (int i = 0; i < side; ++i) {
          pass.unpacked = passes ? unpacked + i * unpacked_bytes : nullptr;
          run(Format::multiply[first_rows - 1], weights + i * panel_bytes, p + i, 0);
        }
        if (Format::kUnpacks) weights = unpacked, pass.panel_bytes = unpacked_bytes;
        for (int i = 0, begin = first_rows, end; i < passes; ++i, begin = end) {
          end = first_rows + others * (i + 1) / passes;
          run((side == Format::kSide ? Format::multiply_side : Format::multiply_alone)[end - begin - 1], weights, p, begin);
        }
      }
      finish_of_group(w, x, e, first_row, group, panels, tile, pass.sum_stride, bests)(0, rows);
    }
    if (e.best) take_bests(bests, rows, e.best + first_row);
  }
}
