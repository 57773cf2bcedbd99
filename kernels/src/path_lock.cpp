#include "path_lock.h"

#include <pthread.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <limits>
#include <mutex>
#include <optional>
#include <system_error>
#include <thread>
#include <utility>

#include "clock.h"
#include "lock_file.h"
#include "signals_blocked.h"

namespace tidegate {
namespace {

constexpr off_t kTurnstile = 0;
constexpr off_t kFirstSlot = 1;
constexpr double kShortestPauseSeconds = 50e-6;  // of the process that polls for a free slot
constexpr double kLongestPauseSeconds = 500e-6;
constexpr double kSliceSeconds = 0.05;  // of a wait whose caller wants to be called in between
constexpr double kLongestWaitSeconds = 1e6;  // at a time: much more would overflow the clock

// Releases the turnstile at its end.
struct AtTurnstile {
  const int fd;
  ~AtTurnstile() { unlock(fd, kTurnstile); }
};

using Lock = std::unique_lock<std::mutex>;
using Between = std::function<void()>;

}  // namespace

struct PathLock::Shared {
  Shared(const std::string& file, int num_slots) : path(file), slots(num_slots) {}

  const pid_t owner = getpid();
  const std::string path;
  std::mutex mutex;  // guards what follows; held for moments only
  std::condition_variable changed;
  int slots;
  int fd = -1;  // never changes while a thread is inside or the queue thread lives
  std::optional<off_t> slot;
  int inside = 0;
  int waiting = 0;
  double left = -std::numeric_limits<double>::infinity();  // when the last thread inside left
  int64_t turn = 0;  // how often this process got the lock for all its waiting threads at once
  bool queued = false;
  bool first = false;
  std::optional<LockFailure> failure;  // of the last queue thread

  // If the file was deleted, a new one is created. Only while no thread is inside and the queue thread does not live.
  void open_file() {
    struct stat found {};
    if (fd >= 0 && fstat(fd, &found) == 0 && found.st_nlink != 0) return;
    if (fd >= 0) close(std::exchange(fd, -1));
    fd = open_lock_file(path);
  }

  // Enters if that needs no wait: other threads of this process are inside and no other process waits, or fewer than
  // `slots` processes are inside and none waits.
  bool try_enter() {
    if (inside != 0) {
      if (waiting != 0 || is_locked_by_other(fd, kTurnstile)) return false;
    } else if (queued) {
      return false;  // the turnstile belongs to the process: it would be left for the queue thread, too
    } else {
      open_file();
      if (!try_lock(fd, kTurnstile)) return false;
      const AtTurnstile passing{fd};
      if (!try_slots()) return false;
    }
    ++inside;
    return true;
  }

  bool try_slots() {
    for (off_t byte = kFirstSlot; byte < kFirstSlot + slots && !slot; ++byte)
      if (try_lock(fd, byte)) slot = byte;
    return slot.has_value();
  }

  void leave() {
    if (inside == 0 || --inside != 0) return;
    unlock(fd, *slot);
    slot.reset();
    left = monotonic_seconds();
    changed.notify_all();
  }

  // Waits until this process has the lock for all its waiting threads; false after the timeout.
  bool wait(Lock& lock, double timeout_seconds, const Between& between) {
    start_queue();
    const auto came = [this, before = turn] { return turn != before; };
    ++waiting;
    try {
      // The timeout does not include the time while other threads of this process are inside.
      const auto ended = [&] { return came() || failure; };
      wait_until(lock, [&] { return ended() || inside == 0; }, std::numeric_limits<double>::infinity(), between);
      wait_until(lock, ended, monotonic_seconds() + timeout_seconds, between);
    } catch (...) {
      lock.lock();  // `between` threw, which is called without it
      came() ? leave() : void(--waiting);
      throw;
    }
    if (came()) return true;
    --waiting;
    if (failure) throw *failure;
    return false;
  }

  template <typename Met>
  void wait_until(Lock& lock, const Met& met, double deadline, const Between& between) {
    const double slice = between ? kSliceSeconds : kLongestWaitSeconds;
    while (!met()) {
      const double seconds = std::min(deadline - monotonic_seconds(), slice);
      if (seconds <= 0.0) return;
      changed.wait_for(lock, std::chrono::duration<double>(seconds));
      if (!between) continue;
      lock.unlock();
      between();
      lock.lock();
    }
  }

  // A blocked lock call cannot be cancelled, so a thread of its own is in it.
  void start_queue() {
    if (queued) return;
    failure.reset();
    const SignalsBlocked blocked;
    try {
      std::thread thread([this] { queue_for_process(); });
      pthread_setname_np(thread.native_handle(), "tidegate-locks");
      thread.detach();
    } catch (const std::system_error& error) {
      throw LockFailure(error.code().value(), error.what());
    }
    queued = true;
  }

  // Acquires the lock for this process: first the turnstile, then a slot. If no thread waits any longer when the
  // turnstile is acquired, it is released at once.
  void queue_for_process() {
    try {
      while (has_waiters()) {
        wait_lock(fd, kTurnstile);
        const AtTurnstile passing{fd};
        take_turn();
      }
    } catch (const LockFailure& error) {
      const Lock lock(mutex);
      failure.emplace(error);
      queued = first = false;
      changed.notify_all();
    }
  }

  // Waits until no thread is inside, or none waits. Without waiting threads the queue thread ends.
  bool has_waiters() {
    Lock lock(mutex);
    changed.wait(lock, [this] { return inside == 0 || waiting == 0; });
    return queued = waiting != 0;
  }

  // Polls until a slot is free. The caller holds the turnstile, so no other process polls.
  void take_turn() {
    Lock lock(mutex);
    for (double pause = kShortestPauseSeconds; waiting != 0; pause = std::min(2 * pause, kLongestPauseSeconds)) {
      first = true;
      if (try_slots()) {
        inside = std::exchange(waiting, 0);
        ++turn;
        changed.notify_all();
        break;
      }
      lock.unlock();
      std::this_thread::sleep_for(std::chrono::duration<double>(pause));
      lock.lock();
    }
    first = false;
  }
};

PathLock::PathLock(std::string path) : path_(std::move(path)), shared_(new Shared(path_, 1)) {}

PathLock::Shared& PathLock::its() {
  Shared* found = shared_.load();
  if (found->owner == getpid()) return *found;
  // A forked child has none of the locks and threads. What threads may have been using is neither used nor destroyed.
  auto fresh = std::make_unique<Shared>(path_, found->slots);
  if (!shared_.compare_exchange_strong(found, fresh.get())) return *found;  // by another thread of the child
  return *fresh.release();
}

std::string PathLock::open(int slots) {
  Shared& shared = its();
  const Lock lock(shared.mutex);
  shared.slots = slots;
  try {
    if (shared.fd < 0) shared.open_file();
  } catch (const LockFailure& failure) {
    return failure.what();
  }
  return {};
}

Entered PathLock::enter(double timeout_seconds, const Between& between) {
  Shared& shared = its();
  const double start = monotonic_seconds();
  Entered entered;
  Lock lock(shared.mutex);
  try {
    entered.acquired = shared.try_enter() || (timeout_seconds > 0.0 && shared.wait(lock, timeout_seconds, between));
  } catch (const LockFailure& failure) {
    entered.failed_errno = failure.error;
    entered.failure = failure.what();
  }
  // While another thread of this process was inside, no other process had the path: that is no waiting time.
  entered.waited_seconds = monotonic_seconds() - std::max(start, shared.left);
  return entered;
}

void PathLock::leave() {
  Shared& shared = its();
  const Lock lock(shared.mutex);
  shared.leave();
}

PathLockCounts PathLock::counts() {
  Shared& shared = its();
  const Lock lock(shared.mutex);
  return {shared.inside, shared.waiting, shared.queued, shared.first};
}

}  // namespace tidegate
