// Persistent threads under our own control: a stated number of cores, no spinning, safe across fork.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <functional>
#include <memory>
#include <vector>

#include "fp_mode.h"

namespace tidegate {

// About 1 MB of traffic: long enough to hide the hand-over, short enough that a slow core holds nobody up.
constexpr size_t kElementsPerTask = 65536;

class ThreadPool {
 public:
  using Range = std::function<void(size_t begin, size_t end)>;

  // `num_threads` counts the thread that calls. Workers may run on `cpus` only (empty: anywhere); the caller stays free.
  ThreadPool(int num_threads, const std::vector<int>& cpus);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  // Runs `task` over [0, size) in ranges of `step`, and returns when all are done. Ranges start at multiples of `step`.
  // After close, and in a forked child, the caller does it all.
  void for_ranges(size_t size, size_t step, const Range& task);

  void close();
  int num_threads() const { return num_threads_; }

 private:
  struct Shared;
  bool is_owner() const;

  const int num_threads_;
  const pid_t owner_;
  // In a forked child this is leaked on purpose: its threads are gone and its locks may be held by nobody.
  std::unique_ptr<Shared> shared_;
};

}  // namespace tidegate
