// A linear layer: chooses how a weight of its precision is multiplied here. Included by isa_table.h.
#include "epilogue.h"
#include "panels.h"
#if FT_AVX2
#include "linear_codes.h"
#include "linear_avx2.h"
#else
#include "linear_dot.h"
#include "linear_codes.h"
#if FT_BF16 && !FT_AMX
#define FT_COMPACT 1
#include "linear_compact.h"
#endif
#endif
#include "unpack.h"
#if FT_AMX
#include "linear_as_tiles.h"
#include "linear_amx.h"
#endif

inline void linear(const PackedLinear& w, const PreparedRows& x, const Epilogue& e, int first_panel, int num_panels, const ReadBehind& behind,
                   void* scratch) {
  float* tile = static_cast<float*>(scratch);
#if FT_AMX
  if (w.precision != Precision::kFloat32) return linear_tiles(w, x, e, first_panel, num_panels, behind, scratch);
#endif
  (void)behind;  // the processor's own prefetchers see vectors' loads
  switch (w.precision) {
    case Precision::kFloat32:
      return linear_panels<DotFormat<Float32Dot>>(w, x, e, first_panel, num_panels, tile);
    case Precision::kBFloat16:
      return linear_panels<DotFormat<BFloat16Dot>>(w, x, e, first_panel, num_panels, tile);
    case Precision::kCompact:
#if FT_COMPACT
      return linear_panels<CompactFormat>(w, x, e, first_panel, num_panels, tile);
#else
      return;  // is not packed for this instruction set
#endif
    case Precision::kInt8:
      return linear_panels<DotFormat<Int8Dot>>(w, x, e, first_panel, num_panels, tile);
    case Precision::kInt4:
      return linear_panels<CodeFormat<Precision::kInt4>>(w, x, e, first_panel, num_panels, tile);
    case Precision::kInt2:
      return linear_panels<CodeFormat<Precision::kInt2>>(w, x, e, first_panel, num_panels, tile);
  }
}
