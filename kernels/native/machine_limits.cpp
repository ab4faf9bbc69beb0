// What the machine itself can do, as yardsticks for a benchmark: how fast it reads a buffer, how fast it multiplies.
//
// No part of a forward pass. Compiled for the baseline instruction set: the loops name theirs in an attribute, and are only
// reached where the processor has it.
#include <immintrin.h>
#include <sys/mman.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

#include "cpu.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

using foretoken::Isa;

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

// Threads that go on together: the last to arrive opens the gate. The time is its own, so that it is the same for all, and true
// for a thread that was not given a core just then.
class Gate {
 public:
  explicit Gate(int count) : count_(count) {}
  double wait() {
    int turn = turn_.load(std::memory_order_acquire);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == count_) {
      arrived_.store(0, std::memory_order_relaxed);
      const double opened = opened_[turn % 2] = now();
      turn_.store(turn + 1, std::memory_order_release);
      return opened;
    }
    for (int spins = 0; turn_.load(std::memory_order_acquire) == turn; ++spins) {
      if (spins < 2000) _mm_pause();
      else std::this_thread::yield();
    }
    return opened_[turn % 2];  // not written again before this thread has arrived once more
  }

 private:
  const int count_;
  std::atomic<int> arrived_{0}, turn_{0};
  double opened_[2] = {};
};

// work(thread) on `threads` threads, the caller's among them.
template <class Work>
void on_threads(int threads, const Work& work) {
  std::vector<std::thread> others;
  for (int i = 1; i < threads; ++i) others.emplace_back([&work, i] { work(i); });
  work(0);
  for (std::thread& other : others) other.join();
}

// ---- reading

constexpr size_t kChunk = 64 * 1024;  // claimed from a counter, so that a thread whose core was taken away holds up nobody

// Sum of a chunk as integers. Eight sums, because one would wait for its own result.
__attribute__((target("avx512f"))) uint64_t sum_avx512(const char* p, size_t bytes) {
  __m512i sum[8];
  for (__m512i& s : sum) s = _mm512_setzero_si512();
  for (const char* end = p + bytes; p < end; p += 512) {
    for (int i = 0; i < 8; ++i) sum[i] = _mm512_add_epi64(sum[i], _mm512_loadu_si512(p + 64 * i));
  }
  for (int i = 1; i < 8; ++i) sum[0] = _mm512_add_epi64(sum[0], sum[i]);
  uint64_t total = 0, lanes[8];
  _mm512_storeu_si512(lanes, sum[0]);
  for (uint64_t lane : lanes) total += lane;
  return total;
}

__attribute__((target("avx2"))) uint64_t sum_avx2(const char* p, size_t bytes) {
  __m256i sum[8];
  for (__m256i& s : sum) s = _mm256_setzero_si256();
  for (const char* end = p + bytes; p < end; p += 256) {
    for (int i = 0; i < 8; ++i) sum[i] = _mm256_add_epi64(sum[i], _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 32 * i)));
  }
  for (int i = 1; i < 8; ++i) sum[0] = _mm256_add_epi64(sum[0], sum[i]);
  uint64_t lanes[4];
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(lanes), sum[0]);
  return lanes[0] + lanes[1] + lanes[2] + lanes[3];
}

uint64_t sum_plain(const char* p, size_t bytes) {
  uint64_t sum = 0, word;
  for (size_t i = 0; i < bytes; i += 8) {
    std::memcpy(&word, p + i, 8);
    sum += word;
  }
  return sum;
}

using Sum = uint64_t (*)(const char*, size_t);
Sum best_sum() {
  if (__builtin_cpu_supports("avx512f")) return sum_avx512;
  return __builtin_cpu_supports("avx2") ? sum_avx2 : sum_plain;
}

// ---- multiplying: loops over registers alone

constexpr int kFloat32 = 0, kBFloat16 = 1, kInt8 = 2;
constexpr int kRepeats = 4096;      // products a register, between two looks at the clock
constexpr int kRegisters = 12;      // independent sums: two units, each some four to six cycles deep

// Keeps a register's loop from being computed once and for all.
#define OPAQUE(x) asm volatile("" : "+v"(x))

__attribute__((target("avx512f"))) void multiply_float32() {
  __m512 sum[kRegisters], x = _mm512_set1_ps(1.0f);
  for (__m512& s : sum) s = _mm512_setzero_ps();
  for (int n = 0; n < kRepeats; ++n) {
    for (__m512& s : sum) s = _mm512_fmadd_ps(x, x, s);
    OPAQUE(x);
  }
  for (__m512& s : sum) OPAQUE(s);
}

__attribute__((target("avx2,fma"))) void multiply_float32_avx2() {
  __m256 sum[kRegisters], x = _mm256_set1_ps(1.0f);
  for (__m256& s : sum) s = _mm256_setzero_ps();
  for (int n = 0; n < kRepeats; ++n) {
    for (__m256& s : sum) s = _mm256_fmadd_ps(x, x, s);
    asm volatile("" : "+x"(x));
  }
  for (__m256& s : sum) asm volatile("" : "+x"(s));
}

__attribute__((target("avx512f,avx512bf16"))) void multiply_bfloat16() {
  __m512 sum[kRegisters];
  __m512i x = _mm512_set1_epi32(0x3f803f80);  // ones
  for (__m512& s : sum) s = _mm512_setzero_ps();
  for (int n = 0; n < kRepeats; ++n) {
    for (__m512& s : sum) s = _mm512_dpbf16_ps(s, reinterpret_cast<__m512bh>(x), reinterpret_cast<__m512bh>(x));
    OPAQUE(x);
  }
  for (__m512& s : sum) OPAQUE(s);
}

__attribute__((target("avx512f,avx512vnni"))) void multiply_int8() {
  __m512i sum[kRegisters], x = _mm512_set1_epi32(0x01010101);
  for (__m512i& s : sum) s = _mm512_setzero_si512();
  for (int n = 0; n < kRepeats; ++n) {
    for (__m512i& s : sum) s = _mm512_dpbusd_epi32(s, x, x);
    OPAQUE(x);
  }
  for (__m512i& s : sum) OPAQUE(s);
}

// AMX: tiles 0-3 are sums, 4-5 and 6-7 the operands of a 2 x 2 block of products.
struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t column_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

__attribute__((target("amx-tile"))) void open_tiles() {
  TileConfig config;
  asm volatile("ldtilecfg %0" ::"m"(config));  // with the operand spelled out: gcc 12 drops the stores before its own intrinsic
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  _tile_zero(4);
  _tile_zero(5);
  _tile_zero(6);
  _tile_zero(7);
}
__attribute__((target("amx-tile"))) void close_tiles() { _tile_release(); }

__attribute__((target("amx-tile,amx-bf16"))) void multiply_tiles_bfloat16() {
  for (int n = 0; n < kRepeats; ++n) {
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
}
__attribute__((target("amx-tile,amx-int8"))) void multiply_tiles_int8() {
  for (int n = 0; n < kRepeats; ++n) {
    _tile_dpbssd(0, 4, 6);
    _tile_dpbssd(1, 4, 7);
    _tile_dpbssd(2, 5, 6);
    _tile_dpbssd(3, 5, 7);
  }
}

struct Multiplier {
  void (*run)();
  double operations;  // of one run, a product and a sum being two
  bool tiles;
};

constexpr double vector_operations(int products_a_lane) { return 2.0 * 16 * products_a_lane * kRegisters * kRepeats; }
constexpr double tile_operations(int inputs) { return 2.0 * 16 * 16 * inputs * 4 * kRepeats; }

Multiplier multiplier(int kind) {
  const Isa isa = Isa(foretoken::detected_isa());
  if (kind == kFloat32 && isa >= Isa::kAvx512) return {multiply_float32, vector_operations(1), false};
  if (kind == kFloat32 && isa == Isa::kAvx2) return {multiply_float32_avx2, vector_operations(1) / 2, false};
  if (kind == kBFloat16 && isa >= Isa::kAmx) return {multiply_tiles_bfloat16, tile_operations(32), true};
  if (kind == kBFloat16 && isa >= Isa::kAvx512Bf16) return {multiply_bfloat16, vector_operations(2), false};
  if (kind == kInt8 && isa >= Isa::kAmx) return {multiply_tiles_int8, tile_operations(64), true};
  if (kind == kInt8 && isa >= Isa::kAvx512Vnni) return {multiply_int8, vector_operations(4), false};
  return {nullptr, 0, false};
}

}  // namespace

// A buffer to read, its pages in memory and large where the system has such. Null if there is no memory for it.
EXPORT void* ft_read_buffer(size_t bytes) {
  constexpr size_t kLargePage = 2 << 20;
  bytes = (bytes + kLargePage - 1) / kLargePage * kLargePage;
  void* buffer = std::aligned_alloc(kLargePage, bytes);
  if (!buffer) return nullptr;
  madvise(buffer, bytes, MADV_HUGEPAGE);
  std::memset(buffer, 1, bytes);
  return buffer;
}

EXPORT void ft_free_read_buffer(void* buffer) { std::free(buffer); }

// Seconds of the fastest of `passes` reads of bytes (down to a whole number of chunks) of the buffer by `threads` threads.
// The first pass of a call is not counted: it finds the caches full of something else.
EXPORT double ft_read_seconds(const void* buffer, size_t bytes, int threads, int passes) {
  const char* data = static_cast<const char*>(buffer);
  const size_t chunks = bytes / kChunk;
  const Sum sum = best_sum();
  std::vector<std::atomic<size_t>> next(passes + 1);  // chunk to claim, of each pass
  std::atomic<uint64_t> total{0};
  Gate gate(threads);
  double best = 1e30;
  on_threads(threads, [&](int thread) {
    uint64_t mine = 0;
    for (int pass = 0; pass <= passes; ++pass) {
      double start = gate.wait();
      for (size_t chunk; (chunk = next[pass].fetch_add(1, std::memory_order_relaxed)) < chunks;) mine += sum(data + chunk * kChunk, kChunk);
      double seconds = gate.wait() - start;
      if (thread == 0 && pass > 0 && seconds < best) best = seconds;
    }
    total += mine;
  });
  return total.load() ? best : 0;  // the sum is used, so it is computed
}

// Operations a second in `kind` (0 float32, 1 bfloat16, 2 int8) with the widest instruction there is; 0 = no such instruction.
EXPORT double ft_operations_per_second(int kind, int threads, double seconds) {
  const Multiplier multiply = multiplier(kind);
  if (!multiply.run) return 0;
  std::atomic<int64_t> runs{0};
  Gate gate(threads);
  double elapsed = 0;
  on_threads(threads, [&](int thread) {
    if (multiply.tiles) open_tiles();
    double start = gate.wait();
    int64_t mine = 0;
    for (; now() - start < seconds; ++mine) multiply.run();
    runs += mine;
    double end = gate.wait();
    if (thread == 0) elapsed = end - start;
    if (multiply.tiles) close_tiles();
  });
  return double(runs) * multiply.operations / elapsed;
}
