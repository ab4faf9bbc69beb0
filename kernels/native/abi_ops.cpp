// The C ABI of packing and of single ops. Structs are passed as kernels.h lays them out; functions on an instruction set that this
// machine cannot run do nothing and return 0.
#include <new>

#include "compact.h"
#include "cpu.h"
#include "kernels.h"
#include "pack.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

using namespace foretoken;

namespace {

// Working memory of one call.
struct Memory {
  explicit Memory(size_t bytes) : data(::operator new(bytes, std::align_val_t(64))) {}
  ~Memory() { ::operator delete(data, std::align_val_t(64)); }
  Memory(const Memory&) = delete;
  void* data;
};

template <typename F>
int with_kernels(int isa, F&& act) {
  const Kernels* kernels = kernels_of(isa);
  if (kernels) act(*kernels);
  return kernels != nullptr;
}

}  // namespace

EXPORT int32_t ft_input_multiple(int32_t precision) { return input_multiple(Precision(precision)); }

EXPORT int64_t ft_packed_bytes(int32_t precision, int32_t inputs, int32_t outputs) {
  return packed_bytes(Precision(precision), inputs, outputs);
}

// See pack.h. Threads may pack different panels at once.
EXPORT void ft_pack(const PackedLinear* w, const void* source, int32_t source_precision, int32_t rows, int32_t width, int64_t stride,
                    int32_t first_panel, int32_t panel_step) {
  pack(*w, SourceRows{source, Precision(source_precision), rows, width, stride}, first_panel, panel_step);
}

// See compact.h. Whoever begins a compaction ends it. Null: no memory.
EXPORT Compaction* ft_compaction_begin(const void* packed, int32_t inputs, int32_t count) {
  try {
    return new Compaction(static_cast<const uint16_t*>(packed), inputs, count);
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}
EXPORT int64_t ft_compaction_raw_bytes(const Compaction* compaction) { return compaction->raw_bytes(); }
EXPORT void ft_compaction_make(const Compaction* compaction, void* weights, int32_t first_panel, int32_t panel_step, void* raw) {
  compaction->make(static_cast<char*>(weights), first_panel, panel_step, static_cast<char*>(raw));
}
EXPORT void ft_compaction_end(Compaction* compaction) { delete compaction; }

EXPORT int ft_op_prepare(int isa, const Prepare* prepare, int first, int count) {
  return with_kernels(isa, [&](const Kernels& kernels) { kernels.prepare(*prepare, first, count); });
}

EXPORT int ft_op_linear(int isa, const PackedLinear* w, const PreparedRows* x, const Epilogue* epilogue, int first_panel, int num_panels) {
  return with_kernels(isa, [&](const Kernels& kernels) {
    const Memory scratch(linear_scratch(*w));
    kernels.linear(*w, *x, *epilogue, first_panel, num_panels, {}, scratch.data);
  });
}

EXPORT int ft_op_unpack_rows(int isa, const PackedLinear* w, const int64_t* ids, int count, int width, float scale, float* out,
                             int64_t out_stride) {
  return with_kernels(isa, [&](const Kernels& kernels) { kernels.unpack_rows(*w, ids, count, width, scale, out, out_stride); });
}

EXPORT int ft_op_low_rank_down(int isa, const LowRank* w, int slot, const float* x, int rows, int first, int end, float* inner) {
  return with_kernels(isa, [&](const Kernels& kernels) { kernels.low_rank_down(*w, slot, x, rows, first, end, inner); });
}

EXPORT int ft_op_low_rank_up(int isa, const LowRank* w, int slot, const float* inner, int rows, const float* residual, int first, int end,
                             float* out) {
  return with_kernels(isa, [&](const Kernels& kernels) { kernels.low_rank_up(*w, slot, inner, rows, residual, first, end, out); });
}

EXPORT int ft_op_rms_norm(int isa, const float* x, int64_t x_stride, int width, bool centred, const float* weight,
                          const float* bias, float eps, float* out, int64_t out_stride, int rows) {
  return with_kernels(
      isa, [&](const Kernels& kernels) { kernels.rms_norm(x, x_stride, width, centred, weight, bias, eps, out, out_stride, rows); });
}

EXPORT int ft_op_activate(int isa, int32_t function, const float* gate, const float* up, float* out, int count) {
  return with_kernels(isa, [&](const Kernels& kernels) { kernels.activate(Function(function), gate, up, out, count); });
}

EXPORT int ft_op_softcap(int isa, float cap, const float* x, float* out, int count) {
  return with_kernels(isa, [&](const Kernels& kernels) { kernels.softcap(cap, x, out, count); });
}

EXPORT int ft_op_best_panels(int isa, const float* x, int count, int most, int32_t* panels) {
  int taken = 0;
  with_kernels(isa, [&](const Kernels& kernels) { taken = kernels.best_panels(x, count, most, panels); });
  return taken;
}

EXPORT int ft_op_best_of_row(int isa, const float* x, int count, Best* best, float* probability) {
  return with_kernels(isa, [&](const Kernels& kernels) { kernels.best_of_row(x, count, best, probability); });
}
