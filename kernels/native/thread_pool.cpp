#include "thread_pool.h"

#include <immintrin.h>
#include <sched.h>

#include <chrono>

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

uint64_t pack(uint32_t epoch, uint32_t count) { return uint64_t(epoch) << 32 | count; }
uint32_t epoch_of(uint64_t value) { return uint32_t(value >> 32); }
uint32_t count_of(uint64_t value) { return uint32_t(value); }

}  // namespace

ThreadPool& ThreadPool::instance() {
  static ThreadPool* pool = new ThreadPool;  // never destroyed: threads may still be asleep in it when the process ends
  return *pool;
}

ThreadPool::ThreadPool() : phases_(new Phase[kMaxPhases]) {}

ThreadPool::~ThreadPool() { stop_workers(); }

void ThreadPool::resize(int threads) {
  std::lock_guard<std::mutex> lock(run_mutex_);
  if (threads == num_threads_) return;
  stop_workers();
  num_threads_ = threads;
  for (int thread = 1; thread < threads; ++thread) workers_.emplace_back(&ThreadPool::work, this, thread);
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

void ThreadPool::run(Job& job) {
  std::lock_guard<std::mutex> lock(run_mutex_);
  const uint32_t epoch = epoch_.load(std::memory_order_relaxed) + 1;
  const int phases = job.num_phases();
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
  const int phases = num_phases_.load(std::memory_order_acquire);
  for (int i = 0; i < phases; ++i) {
    if (!finish_phase(epoch, i, thread)) return;
  }
}

bool ThreadPool::finish_phase(uint32_t epoch, int phase, int thread) {
  std::atomic<uint64_t>& unclaimed = phases_[phase].unclaimed.value;
  std::atomic<uint64_t>& undone = phases_[phase].undone.value;
  const uint32_t shares = 2 * uint32_t(num_threads_);
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
