// The body of every isa_*.cpp: all ops compiled for one instruction set, and their table.
// gcc 12 takes the undefined vectors inside its own intrinsics for mistakes.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>
#pragma GCC diagnostic pop

#include <utility>

#include "kernels.h"
#include "sampling.h"

namespace foretoken {
namespace {

#include "simd.h"
#include "ops/elementwise.h"
#include "ops/prepare.h"
#if FT_AMX
#include "ops/tiles.h"
#endif
#include "ops/linear.h"
#include "ops/low_rank.h"
#include "ops/cache_lines.h"
#include "ops/rotate.h"
#include "ops/attention.h"
#include "ops/recurrence.h"
#include "ops/noise.h"
#include "ops/logit_edits.h"
#include "ops/selection.h"
#include "ops/sampling.h"

}  // namespace

const Kernels* FT_TABLE() {
  static constexpr Kernels table = {
      FT_AMX ? 16 : 1, prepare, linear, unpack_rows, low_rank_down, low_rank_up, rms_norm, activate, softcap, best_of_row, best_panels,
      rotate_and_write, attend, fold, causal_conv, to_length, memory_steps, gated_norm, sample,
  };
  return &table;
}

}  // namespace foretoken
