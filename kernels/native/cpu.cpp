#include "cpu.h"

#include <cpuid.h>

#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "kernels.h"

namespace foretoken {
namespace {

// Register state that the operating system saves on a switch of threads: without its bit, an instruction is illegal.
constexpr uint64_t kHalfState = 0x6;       // XMM, YMM
constexpr uint64_t kVectorState = 0xe6;    // with mask registers, upper halves of ZMM, ZMM16-31
constexpr uint64_t kTileState = 0x60000;   // tile configuration, tile data

struct Leaf {
  uint32_t eax = 0, ebx = 0, ecx = 0, edx = 0;
};

Leaf cpuid(uint32_t leaf, uint32_t subleaf) {
  Leaf l;
  __get_cpuid_count(leaf, subleaf, &l.eax, &l.ebx, &l.ecx, &l.edx);  // leaves zeros where there is no such leaf
  return l;
}

bool bit(uint32_t word, int n) { return (word >> n) & 1; }

uint64_t saved_state() {
  if (!bit(cpuid(1, 0).ecx, 27)) return 0;  // OSXSAVE: xgetbv is legal
  uint32_t low, high;
  asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return uint64_t(high) << 32 | low;
}

// Linux gives a process its 8 KB of tile state a thread only on request; the answer holds for all threads, and for good.
bool request_tiles() {
#if defined(__linux__) && defined(SYS_arch_prctl)
  constexpr int kRequestPermission = 0x1023;  // ARCH_REQ_XCOMP_PERM, younger than many headers
  constexpr int kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

Isa detect() {
  const Leaf one = cpuid(1, 0), seven = cpuid(7, 0), seven_one = seven.eax >= 1 ? cpuid(7, 1) : Leaf{};
  const uint64_t state = saved_state();
  const bool avx2 = bit(seven.ebx, 5) && bit(one.ecx, 12);  // and FMA
  const bool avx512 = bit(seven.ebx, 16) && bit(seven.ebx, 17) && bit(seven.ebx, 30) && bit(seven.ebx, 31);  // F, DQ, BW, VL
  if (!avx2 || (state & kHalfState) != kHalfState) return Isa::kNone;
  if (!avx512 || (state & kVectorState) != kVectorState) return Isa::kAvx2;
  const bool vnni = bit(seven.ecx, 11), bf16 = bit(seven_one.eax, 5);
  if (!vnni) return Isa::kAvx512;
  if (!bf16) return Isa::kAvx512Vnni;
  const bool tiles = bit(seven.edx, 24) && bit(seven.edx, 22) && bit(seven.edx, 25);  // AMX-TILE, -BF16, -INT8
  if (!tiles || (state & kTileState) != kTileState || !request_tiles()) return Isa::kAvx512Bf16;
  return Isa::kAmx;
}

}  // namespace

int detected_isa() {
  static const int isa = int(detect());
  return isa;
}

const Kernels* kernels_of(int isa) {
  if (isa < 0 || isa > detected_isa()) return nullptr;  // each set contains those before it
  switch (Isa(isa)) {
    case Isa::kAvx2: return avx2_kernels();
    case Isa::kAvx512: return avx512_kernels();
    case Isa::kAvx512Vnni: return avx512_vnni_kernels();
    case Isa::kAvx512Bf16: return avx512_bf16_kernels();
    case Isa::kAmx: return amx_kernels();
    case Isa::kNone: break;
  }
  return nullptr;
}

const Kernels* best_kernels() { return kernels_of(detected_isa()); }

}  // namespace foretoken
