// The lock of a storage path between processes, which threads of C++ and of Python hold alike. The module docstring of
// agent/tiers/path_locks.py says how processes take turns.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <functional>
#include <memory>
#include <string>

namespace tidegate {

// What came of an attempt to enter.
struct Entered {
  bool acquired = false;
  double waited_seconds = 0.0;  // for other processes, not for threads of this one
  int failed_errno = 0;  // why locking failed; 0 after a timeout
  std::string failure;  // the same in words
};

// How many threads hold the lock and wait for it, and whether this process waits in the line of processes.
struct PathLockCounts {
  int inside = 0;
  int waiting = 0;
  bool queued = false;  // the queue thread lives
  bool first = false;  // it holds the turnstile and polls for a slot
};

// One object for each lock file in a process: it counts the threads of the process. Any thread may call any method. A
// forked child may continue to use it, and holds nothing of its parent's.
class PathLock : public std::enable_shared_from_this<PathLock> {
 public:
  explicit PathLock(std::string path);
  // Closing the file would release locks that threads hold or wait for: it stays open until the process ends.
  ~PathLock() = default;
  PathLock(const PathLock&) = delete;
  PathLock& operator=(const PathLock&) = delete;

  // Sets how many processes may be inside at once, and opens the file if it is not open. Returns why that fails; an
  // empty string if the file can be locked.
  std::string open(int slots);

  // Acquires the lock for the calling thread. `timeout_seconds` limits the wait for other processes: it starts when no
  // other thread of this process holds the lock; 0 for no wait. `between` is called now and then while the thread
  // waits, for a caller that must handle signals. If it throws, the thread neither waits nor holds the lock.
  Entered enter(double timeout_seconds, const std::function<void()>& between = {});
  // Releases it for the calling thread. Only after an `enter` that acquired it; does nothing in a child forked since.
  void leave();

  PathLockCounts counts();

 private:
  struct Shared;
  Shared& its();

  const std::string path_;
  std::atomic<Shared*> shared_;  // never destroyed
};

}  // namespace tidegate
