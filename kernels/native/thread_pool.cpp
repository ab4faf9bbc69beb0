#include "thread_pool.h"

#include <immintrin.h>
#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <chrono>
#include <stdexcept>
#include <system_error>

namespace foretoken {
namespace {

using Clock = std::chrono::steady_clock;

// Between two steps of a busy engine lies some tenths of a millisecond of other work: awake for that long, a thread joins the
// next step at once. Most of it is spent offering the core to others.
constexpr auto kAwake = std::chrono::microseconds(1000);
constexpr int kPauses = 1000;  // some 30 microseconds without a system call

// Waits a little longer each time it is called.
class Backoff {
 public:
  void operator()() {
    if (++count_ < kPauses) {
      _mm_pause();
    } else {
      sched_yield();
    }
  }
  bool is_patient() const { return count_ >= kPauses; }

 private:
  int count_ = 0;
};

// Rounding and the treatment of denormals are a thread's own setting, which the caller's libraries may have changed; what is computed
// must not depend on the thread that does it.
class DefaultFloatMode {
 public:
  DefaultFloatMode() : callers_(_mm_getcsr()) { _mm_setcsr(0x1f80); }  // to nearest, denormals are kept, nothing traps
  ~DefaultFloatMode() { _mm_setcsr(callers_); }
  DefaultFloatMode(const DefaultFloatMode&) = delete;

 private:
  unsigned callers_;
};

uint64_t pack(uint32_t epoch, uint32_t count) { return uint64_t(epoch) << 32 | count; }
uint32_t epoch_of(uint64_t value) { return uint32_t(value >> 32); }
uint32_t count_of(uint64_t value) { return uint32_t(value); }

}  // namespace

ThreadPool& ThreadPool::instance() {
  static ThreadPool* pool = nullptr;  // never destroyed: threads may still be asleep in it when the process ends
  static std::once_flag once;
  std::call_once(once, [] {
    pool = new ThreadPool(1);
    // A forked process has the caller of fork as its only thread, and the locks as the others happened to hold them.
    pthread_atfork(nullptr, nullptr, [] { pool = new ThreadPool(pool->size()); });
  });
  return *pool;
}

ThreadPool::ThreadPool(int threads) : phases_(new Phase[kMaxPhases]), num_threads_(threads) {}

ThreadPool::Turn ThreadPool::take_turn() {
  Turn turn(turn_mutex_);
  start_workers();  // none are missing but in a process that was forked
  return turn;
}

void ThreadPool::resize(int threads) {
  const Turn turn(turn_mutex_);
  threads = std::clamp(threads, 1, kMaxThreads);
  if (threads == num_threads_) return;
  stop_workers();
  num_threads_ = threads;
  start_workers();
}

void ThreadPool::start_workers() {
  try {
    while (int(workers_.size()) + 1 < num_threads_) workers_.emplace_back(&ThreadPool::work, this, int(workers_.size()) + 1);
  } catch (const std::system_error&) {  // a container's limit, for example: fewer are slower, not wrong
    num_threads_ = int(workers_.size()) + 1;
  }
}

void ThreadPool::stop_workers() {
  {
    std::lock_guard<std::mutex> lock(sleep_mutex_);
    stopping_ = true;
  }
  wake_.notify_all();
  for (std::thread& worker : workers_) worker.join();
  workers_.clear();
  stopping_ = false;
}

void ThreadPool::run(Job& job, const Turn&) {
  const uint32_t epoch = epoch_.load(std::memory_order_relaxed) + 1;
  const int phases = job.num_phases();
  if (phases > kMaxPhases) throw std::length_error("more phases in one pass than the thread pool has counters for");
  for (int i = 0; i < phases; ++i) {
    const uint64_t units = pack(epoch, job.num_units(i));
    phases_[i].unclaimed.value.store(units, std::memory_order_relaxed);
    phases_[i].undone.value.store(units, std::memory_order_relaxed);
  }
  job_.store(&job, std::memory_order_relaxed);
  num_phases_.store(phases, std::memory_order_relaxed);
  epoch_.store(epoch);  // sequentially consistent with sleepers_: a thread either sees the epoch or is seen asleep
  if (sleepers_.load()) {
    { std::lock_guard<std::mutex> wait_until_asleep(sleep_mutex_); }
    wake_.notify_all();
  }
  take_part(epoch, 0);
}

void ThreadPool::work(int thread) {
  for (uint32_t seen = epoch_.load(); await_job(seen);) {
    seen = epoch_.load();
    take_part(seen, thread);
  }
}

bool ThreadPool::await_job(uint32_t seen) {
  Backoff backoff;
  const auto start = Clock::now();
  while (epoch_.load(std::memory_order_acquire) == seen && !stopping_.load(std::memory_order_relaxed)) {
    backoff();
    if (backoff.is_patient() && Clock::now() - start > kAwake) {
      std::unique_lock<std::mutex> lock(sleep_mutex_);
      ++sleepers_;
      wake_.wait(lock, [&] { return epoch_.load() != seen || stopping_.load(); });
      --sleepers_;
    }
  }
  return !stopping_.load();
}

void ThreadPool::take_part(uint32_t epoch, int thread) {
  const DefaultFloatMode mode;
  const int phases = num_phases_.load(std::memory_order_acquire);
  for (int i = 0; i < phases; ++i) {
    if (!finish_phase(epoch, i, thread)) return;
  }
}

bool ThreadPool::finish_phase(uint32_t epoch, int phase, int thread) {
  std::atomic<uint64_t>& unclaimed = phases_[phase].unclaimed.value;
  std::atomic<uint64_t>& undone = phases_[phase].undone.value;
  const uint32_t shares = 2 * uint32_t(num_threads_.load(std::memory_order_relaxed));
  uint64_t value = unclaimed.load(std::memory_order_acquire);
  while (epoch_of(value) == epoch && count_of(value)) {
    const uint32_t left = count_of(value);
    const uint32_t count = left > shares ? left / shares : 1;  // large runs first, small ones to end together
    if (!unclaimed.compare_exchange_weak(value, pack(epoch, left - count), std::memory_order_acq_rel)) continue;
    // Holding a unit, this thread knows that the job is not over: only now may it look at the job.
    Job* job = job_.load(std::memory_order_relaxed);
    job->run(phase, job->num_units(phase) - left, count, thread);
    undone.fetch_sub(count, std::memory_order_acq_rel);
    value = unclaimed.load(std::memory_order_acquire);
  }
  Backoff backoff;
  for (;;) {
    value = undone.load(std::memory_order_acquire);
    if (epoch_of(value) != epoch) return false;
    if (!count_of(value)) return true;
    backoff();
  }
}

}  // namespace foretoken
