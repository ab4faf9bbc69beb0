// Stands in for cpu.cpp where AMX is emulated: a machine that has it, and the AVX-512 set below it to compare with.
#include "cpu.h"

#include "kernels.h"

namespace foretoken {

int detected_isa() { return int(Isa::kAmx); }

const Kernels* kernels_of(int isa) {
  if (isa == int(Isa::kAmx)) return amx_kernels();
  return isa == int(Isa::kAvx512Bf16) ? avx512_bf16_kernels() : nullptr;
}

const Kernels* best_kernels() { return amx_kernels(); }

}  // namespace foretoken
