// The process's threads for native work: each takes its share of a job's phases, then helps with the rest. They spin briefly between
// jobs, then sleep.
//
// A phase is over when all its units are done, not when all threads have come by: a thread that the system has taken off its
// core stalls nobody unless it holds a unit: what was reserved for it goes to another. So the calling thread alone finishes every job,
// if slowly.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "kernels.h"

namespace foretoken {

constexpr int kMaxPhases = 4096;
constexpr int kMaxThreads = 256;

// How a phase's units come to the threads: claimed run by run, or neighbours reserved for each thread, as many as it has been fast, if units
// are about equally much work: all but some, or (nearly) all.
enum class Deal : uint32_t { kClaimed, kMostReserved, kReserved };

// Phases run one after the other; the units of a phase in any order, on any thread, in runs of neighbours.
class Job {
 public:
  virtual ~Job() = default;
  virtual int num_phases() const = 0;
  virtual uint32_t num_units(int phase) const = 0;
  virtual Deal deal(int phase) const = 0;
  virtual void run(int phase, uint32_t first, uint32_t count, int thread) = 0;
};

class ThreadPool {
 public:
  static ThreadPool& instance();

  // Held from before a job is laid out for so many threads until its results are read: there is one job at a time, a second
  // caller waits, and the number of threads stays as it is.
  using Turn = std::unique_lock<std::mutex>;
  Turn take_turn();

  // Threads that take part, the calling one included: as many of these as the system gives, 1 to kMaxThreads.
  void resize(int threads);
  int size() const { return num_threads_; }

  // Units of a phase [first, first + count): those reserved for a thread, and of the others, which are whoever's that comes, those that it will
  // claim if all threads keep in step. Until the next job has run.
  struct Run {
    uint32_t first, count;
  };
  Run reserved(uint32_t units, Deal deal, int thread) const;
  Run claimed_next(uint32_t units, Deal deal, int thread) const;

  // What a thread fetches while it waits for others: it says so itself while it runs units, job by job. (That the job may be over and its
  // memory gone by then is no matter to a prefetch.)
  ReadAhead& ahead(int thread) { return aheads_[size_t(thread)].lines; }

  // Runs a job to its end; the caller is thread 0.
  void run(Job& job, const Turn& turn);

 private:
  // Counts of a phase's units: those claimed of the shared ones, and those done. Each carries the epoch of its job: a thread that
  // comes late from an older job sees a foreign epoch and leaves without touching anything, and no job has to clear them.
  struct alignas(64) Phase {
    std::atomic<uint64_t> claimed{0}, done{0};
  };

  // What a thread's reserved units took, in ticks of the processor's clock; written by whoever runs them.
  struct alignas(64) Spent {
    std::atomic<uint64_t> ticks{0};
  };

  struct alignas(64) Ahead {
    ReadAhead lines;
  };

  explicit ThreadPool(int threads);
  void begin_anew();
  void share_equally();
  void adapt();
  uint32_t num_reserved(uint32_t units, Deal deal) const;
  bool are_fine(uint32_t units) const;
  bool run_reserved(uint64_t epoch, int phase, uint32_t units, Deal deal, int thread, uint32_t* count);
  void start_workers();
  void stop_workers();
  void work(int thread);
  void take_part(uint64_t epoch, int thread);
  bool finish_phase(uint64_t epoch, int phase, int thread);  // false: the job is over
  bool reserve(uint64_t epoch, int phase, int thread);       // false: somebody has run that thread's part
  void run_units(int phase, uint32_t first, uint32_t count, int thread);
  void report(uint64_t epoch, int phase, uint32_t count);
  bool await_job(uint64_t seen);                             // false: the pool is stopping

  std::unique_ptr<std::atomic<uint64_t>[]> sizes_;         // [phases] units, with the epoch of the job
  std::unique_ptr<std::atomic<uint64_t>[]> reservations_;  // [threads][phases] the last epoch in which it was run
  std::unique_ptr<Phase[]> phases_;
  std::unique_ptr<std::atomic<uint32_t>[]> bounds_;        // [threads + 1] where each thread's part of what is reserved begins, of kWhole
  std::unique_ptr<Spent[]> spent_;                         // [threads] in this job
  std::unique_ptr<Ahead[]> aheads_;                        // [threads]
  std::vector<double> parts_, wanted_;                     // [threads] of what is reserved, together 1
  std::atomic<bool> was_helped_{false};                    // whether a thread ran another's part
  std::atomic<Job*> job_{nullptr};
  std::atomic<int> num_phases_{0};
  std::atomic<uint64_t> epoch_{0};
  std::atomic<bool> stopping_{false};
  std::atomic<int> num_threads_;

  std::mutex turn_mutex_;
  std::mutex sleep_mutex_;
  std::condition_variable wake_;
  std::atomic<int> sleepers_{0};
  std::vector<std::thread> workers_;
};

}  // namespace foretoken
