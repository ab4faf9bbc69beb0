#include "thread_pool.h"

#include <immintrin.h>
#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <stdexcept>
#include <system_error>

namespace foretoken {
namespace {

#include "ops/read_ahead.h"

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

// Between two looks at what others have done: about as long as a pause takes.
constexpr int kLinesBetween = 16;

// Some lines of what is read next; false if none are left.
bool fetch_some(ReadAhead& ahead) {
  const char* const lines = take(ahead, kLinesBetween * 64);
  for (int i = 0; lines && i < kLinesBetween; ++i) __builtin_prefetch(lines + i * 64, 0, 2);
  return lines;
}

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

// A thread's equal share is reserved for it but for an open part: claimed at once, it is claimed without waiting for another core, and stays
// the same part of the weights in pass after pass, which a small network then finds in the core's own cache. (Units claimed a few at a time
// from one counter took a tenth of a pass, a sixth of one token's.) The open part makes up for threads of unequal speed: an eighth of a
// phase that takes long. Of one that is over soon, to come to terms over an eighth costs more: sixteen tokens of M2 took 5 % longer.
constexpr uint32_t kOpenOfMost = 8, kOpenOfAll = 64;
// A core that shares its units with a neighbour's thread, or its time, may be slower than the next by half, for seconds: of one token's pass
// (M2 on two such cores) up to a sixth was waiting. So what is reserved follows what it took the last time: part of the way, and a
// little at a time, for most of what holds a thread up once is over. Where nothing differs much nothing moves, and each core keeps its weights.
constexpr double kFollows = 0.5, kMostMoved = 0.1, kIgnored = 0.03, kLeastPart = 0.25;  // of a thread's part; the last of an equal one
constexpr uint32_t kWhole = 1 << 16;
constexpr uint32_t kFineUnits = 8;  // a thread, for its part to be about what it should be: fewer are divided equally
constexpr int kPatience = 16;  // pauses after which somebody who has not come for his reservation is taken to be off his core

// What is shared is claimed in so many runs by and by: long ones first, to end together.
uint32_t runs_of(Deal deal, uint32_t threads) { return deal == Deal::kClaimed ? 2 * threads : threads; }

// An epoch and a count in one word. Epochs only grow: at ten thousand jobs a second for three years.
constexpr int kCountBits = 24;
constexpr int kDealBits = 22;  // from here on a phase's size says how its units are dealt
uint64_t pack(uint64_t epoch, uint32_t count) { return epoch << kCountBits | count; }
uint64_t epoch_of(uint64_t value) { return value >> kCountBits; }
uint32_t count_of(uint64_t value) { return uint32_t(value) & ((1u << kCountBits) - 1); }
// The count as of this epoch, in which it starts at 0.
uint32_t count_in(uint64_t epoch, uint64_t value) { return epoch_of(value) == epoch ? count_of(value) : 0; }

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

ThreadPool::ThreadPool(int threads)
    : sizes_(new std::atomic<uint64_t>[kMaxPhases]()), phases_(new Phase[kMaxPhases]), num_threads_(threads) {
  begin_anew();
}

void ThreadPool::begin_anew() {
  const auto threads = size_t(num_threads_);
  reservations_.reset(new std::atomic<uint64_t>[threads * kMaxPhases]());
  spent_.reset(new Spent[threads]);
  aheads_.reset(new Ahead[threads]());
  bounds_.reset(new std::atomic<uint32_t>[threads + 1]());
  share_equally();
}

void ThreadPool::share_equally() {
  const auto threads = size_t(num_threads_);
  parts_.assign(threads, 1.0 / double(threads));
  for (size_t t = 0; t <= threads; ++t) bounds_[t] = uint32_t(t * kWhole / threads);
}

// After a job: who took longer than others gets less.
void ThreadPool::adapt() {
  const auto threads = size_t(num_threads_);
  bool is_complete = !was_helped_.exchange(false, std::memory_order_relaxed);
  double sum = 0.0;
  wanted_.resize(threads);
  for (size_t t = 0; t < threads; ++t) {
    const auto ticks = double(spent_[t].ticks.exchange(0, std::memory_order_relaxed));
    is_complete = is_complete && ticks > 0.0;
    sum += wanted_[t] = parts_[t] / std::max(ticks, 1.0);
  }
  if (!is_complete) return;
  bool differs = false;
  for (size_t t = 0; t < threads; ++t) {
    wanted_[t] = std::max(wanted_[t] / sum, kLeastPart / double(threads));
    differs = differs || std::abs(wanted_[t] / parts_[t] - 1.0) > kIgnored;
  }
  if (!differs) return;
  sum = 0.0;
  for (size_t t = 0; t < threads; ++t) sum += parts_[t] *= 1.0 + std::clamp(kFollows * (wanted_[t] / parts_[t] - 1.0), -kMostMoved, kMostMoved);
  double end = 0.0;
  for (size_t t = 0; t < threads; ++t) {
    end += parts_[t] /= sum;
    bounds_[t + 1].store(uint32_t(end * kWhole + 0.5), std::memory_order_relaxed);
  }
}

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
  begin_anew();
  start_workers();
}

void ThreadPool::start_workers() {
  try {
    while (int(workers_.size()) + 1 < num_threads_) workers_.emplace_back(&ThreadPool::work, this, int(workers_.size()) + 1);
  } catch (const std::system_error&) {  // a container's limit, for example: fewer are slower, not wrong
    num_threads_ = int(workers_.size()) + 1;
    share_equally();
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
  const uint64_t epoch = epoch_.load(std::memory_order_relaxed) + 1;
  const int phases = job.num_phases();
  if (phases > kMaxPhases) throw std::length_error("more phases in one pass than the thread pool has counters for");
  for (int i = 0; i < phases; ++i) {
    const uint32_t units = job.num_units(i);
    if (units >> kDealBits) throw std::length_error("more units in one phase than the thread pool can count");
    sizes_[i].store(pack(epoch, units | uint32_t(job.deal(i)) << kDealBits), std::memory_order_relaxed);
  }
  job_.store(&job, std::memory_order_relaxed);
  num_phases_.store(phases, std::memory_order_relaxed);
  epoch_.store(epoch);  // sequentially consistent with sleepers_: a thread either sees the epoch or is seen asleep
  if (sleepers_.load()) {
    { std::lock_guard<std::mutex> wait_until_asleep(sleep_mutex_); }
    wake_.notify_all();
  }
  take_part(epoch, 0);
  if (num_threads_ > 1) adapt();
}

void ThreadPool::work(int thread) {
  for (uint64_t seen = epoch_.load(); await_job(seen);) {
    seen = epoch_.load();
    take_part(seen, thread);
  }
}

bool ThreadPool::await_job(uint64_t seen) {
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

void ThreadPool::take_part(uint64_t epoch, int thread) {
  const DefaultFloatMode mode;
  ahead(thread) = {};
  const int phases = num_phases_.load(std::memory_order_acquire);
  for (int i = 0; i < phases; ++i) {
    if (!finish_phase(epoch, i, thread)) return;
  }
}

bool ThreadPool::reserve(uint64_t epoch, int phase, int thread) {
  std::atomic<uint64_t>& last = reservations_[size_t(thread) * kMaxPhases + size_t(phase)];
  uint64_t value = last.load(std::memory_order_relaxed);
  return value < epoch && last.compare_exchange_strong(value, epoch, std::memory_order_acq_rel);
}

// Whoever holds a unit knows that the job is not over, and only then may look at the job.
void ThreadPool::run_units(int phase, uint32_t first, uint32_t count, int thread) {
  job_.load(std::memory_order_relaxed)->run(phase, first, count, thread);
}

void ThreadPool::report(uint64_t epoch, int phase, uint32_t count) {
  std::atomic<uint64_t>& done = phases_[phase].done;
  uint64_t value = done.load(std::memory_order_relaxed);
  while (!done.compare_exchange_weak(value, pack(epoch, count_in(epoch, value) + count), std::memory_order_acq_rel)) {
  }
}

uint32_t ThreadPool::num_reserved(uint32_t units, Deal deal) const {
  const auto threads = uint32_t(num_threads_.load(std::memory_order_relaxed));
  const uint32_t equal = units / threads, open = deal == Deal::kReserved ? kOpenOfAll : kOpenOfMost;
  return deal == Deal::kClaimed ? 0 : (equal - equal / open) * threads;
}

bool ThreadPool::are_fine(uint32_t units) const { return units >= kFineUnits * uint32_t(num_threads_.load(std::memory_order_relaxed)); }

ThreadPool::Run ThreadPool::reserved(uint32_t units, Deal deal, int thread) const {
  const uint64_t all = num_reserved(units, deal);
  if (!are_fine(units)) {
    const auto equal = uint32_t(all / uint32_t(num_threads_.load(std::memory_order_relaxed)));
    return {uint32_t(thread) * equal, equal};
  }
  const auto place = [&](int bound) { return uint32_t((all * bounds_[size_t(bound)].load(std::memory_order_relaxed) + kWhole / 2) / kWhole); };
  const uint32_t first = place(thread);
  return {first, place(thread + 1) - first};
}

ThreadPool::Run ThreadPool::claimed_next(uint32_t units, Deal deal, int thread) const {
  const uint32_t all = num_reserved(units, deal), runs = runs_of(deal, uint32_t(num_threads_.load(std::memory_order_relaxed)));
  const uint32_t run = (units - all + runs - 1) / runs, first = std::min(all + uint32_t(thread) * run, units);
  return {first, std::min(run, units - first)};
}

// Unless somebody has. Adds to *count how many those are.
bool ThreadPool::run_reserved(uint64_t epoch, int phase, uint32_t units, Deal deal, int thread, uint32_t* count) {
  if (!reserve(epoch, phase, thread)) return false;
  const Run run = reserved(units, deal, thread);  // of this job, as it is not over
  if (!run.count) return false;
  const bool counts = are_fine(units);
  const uint64_t start = counts ? __rdtsc() : 0;
  run_units(phase, run.first, run.count, thread);
  if (counts) {
    std::atomic<uint64_t>& ticks = spent_[size_t(thread)].ticks;
    ticks.store(ticks.load(std::memory_order_relaxed) + __rdtsc() - start, std::memory_order_relaxed);
  }
  *count += run.count;
  return true;
}

bool ThreadPool::finish_phase(uint64_t epoch, int phase, int thread) {
  const uint64_t size = sizes_[phase].load(std::memory_order_acquire);
  if (epoch_of(size) != epoch) return false;
  const uint32_t threads = uint32_t(num_threads_.load(std::memory_order_relaxed)), units = count_of(size) & ((1u << kDealBits) - 1);
  const Deal deal = Deal(count_of(size) >> kDealBits);
  const uint32_t all = num_reserved(units, deal), shared = units - all, runs = runs_of(deal, threads);

  // 1. what is reserved for this thread, then some of what is not
  uint32_t count = 0;
  if (all) run_reserved(epoch, phase, units, deal, thread, &count);
  std::atomic<uint64_t>& claimed = phases_[phase].claimed;
  for (uint64_t value = claimed.load(std::memory_order_acquire); epoch_of(value) <= epoch && count_in(epoch, value) < shared;) {
    const uint32_t before = count_in(epoch, value), run = (shared - before + runs - 1) / runs;
    if (!claimed.compare_exchange_weak(value, pack(epoch, before + run), std::memory_order_acq_rel)) continue;
    run_units(phase, units - shared + before, run, thread);
    count += run;
    value = claimed.load(std::memory_order_acquire);
  }
  if (count) report(epoch, phase, count);

  // 2. until others are done: what nobody has come for
  Backoff backoff;
  for (int left = kPatience;;) {
    const uint64_t value = phases_[phase].done.load(std::memory_order_acquire);
    if (epoch_of(value) > epoch) return false;
    if (count_in(epoch, value) == units) return true;
    if (!fetch_some(ahead(thread))) backoff();
    if (!left || --left || !all) continue;
    for (uint32_t other = 0; other < threads; ++other) {
      uint32_t helped = 0;
      if (!run_reserved(epoch, phase, units, deal, int(other), &helped)) continue;
      was_helped_.store(true, std::memory_order_relaxed);
      report(epoch, phase, helped);
    }
  }
}

}  // namespace foretoken
