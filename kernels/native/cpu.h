// Which instruction set this machine runs. The one place that asks the processor and the operating system.
#pragma once

#include <cstdint>

namespace foretoken {

struct Kernels;

enum class Isa : int32_t { kNone = -1, kAvx2 = 0, kAvx512 = 1, kAvx512Vnni = 2, kAvx512Bf16 = 3, kAmx = 4 };

// The best Isa that processor and operating system allow, -1 without AVX2. Asks once; any thread may call it.
int detected_isa();
// The functions of an instruction set, null where this machine cannot run it (or isa is none of them).
const Kernels* kernels_of(int isa);
// kernels_of(detected_isa())
const Kernels* best_kernels();

}  // namespace foretoken
