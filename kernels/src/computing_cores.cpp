#include "computing_cores.h"

#include <pthread.h>
#include <sched.h>
#include <sys/sysinfo.h>

#include <algorithm>
#include <array>
#include <atomic>

#include "clock.h"

namespace tidegate {
namespace {

// Longer than the time from one op of the CPU lane to the next.
constexpr double kBetweenOpsSeconds = 1e-3;
// Longer than the pauses of the CPU lane in an update, shorter than a pass forward or backward.
constexpr double kPauseSeconds = 0.01;

struct Core {
  std::atomic<int> computing{0};  // threads
  std::atomic<double> until{0.0};  // when a thread last stopped to compute here
};
std::array<Core, CPU_SETSIZE> cores;
const int num_cores = std::min(get_nprocs_conf(), CPU_SETSIZE);

struct Thread {
  bool has_computed = false;
  bool is_bound = false;
  cpu_set_t allowed;  // before it was bound
};
thread_local Thread this_thread;

// A forked child has none of the threads that compute.
void forget_threads() {
  for (Core& core : cores) core.computing = 0;
}
[[maybe_unused]] const int at_fork = pthread_atfork(nullptr, nullptr, &forget_threads);

int this_core() {
  const int core = sched_getcpu();
  return core < num_cores ? core : -1;
}

void begin_on(int core) {
  if (core >= 0) cores[size_t(core)].computing.fetch_add(1, std::memory_order_relaxed);
}

void end_on(int core) {
  if (core < 0) return;
  cores[size_t(core)].until.store(monotonic_seconds(), std::memory_order_relaxed);
  cores[size_t(core)].computing.fetch_sub(1, std::memory_order_relaxed);
}

// Whether a thread computes on this core, or did so after `since`.
bool computes(int core, double since) {
  const Core& it = cores[size_t(core)];
  return it.computing.load(std::memory_order_relaxed) > 0 || it.until.load(std::memory_order_relaxed) > since;
}

bool any_computes(double since) {
  for (int core = 0; core < num_cores; ++core)
    if (computes(core, since)) return true;
  return false;
}

// Binds the calling thread to those of its cores on which no thread computes, or did so after `since`. False if there is
// none, or the system refuses.
bool bind_to_others(double since) {
  cpu_set_t others = this_thread.allowed;
  for (int core = 0; core < num_cores; ++core)
    if (computes(core, since)) CPU_CLR(core, &others);
  if (CPU_COUNT(&others) == 0 || sched_setaffinity(0, sizeof others, &others) != 0) return false;
  this_thread.is_bound = true;
  return true;
}

}  // namespace

Computing::Computing() : core_(this_core()) {
  this_thread.has_computed = true;
  begin_on(core_);
}

Computing::~Computing() { end_on(core_); }

void Computing::go_on() {
  const int core = this_core();
  if (core == core_) return;
  end_on(core_);
  begin_on(core_ = core);
}

void leave_computing_core() {
  const int core = this_core();
  if (core < 0) return;
  const double now = monotonic_seconds();
  // A thread that computes has perhaps just done so on this core itself.
  const double since = this_thread.has_computed ? now : now - kBetweenOpsSeconds;
  if (!computes(core, since)) {
    if (this_thread.is_bound && !any_computes(now - kPauseSeconds)) allow_all_cores();
    return;
  }
  if (!this_thread.is_bound && sched_getaffinity(0, sizeof(cpu_set_t), &this_thread.allowed) != 0) return;
  if (!bind_to_others(since) && !bind_to_others(now)) allow_all_cores();
}

void allow_all_cores() {
  if (!this_thread.is_bound) return;
  sched_setaffinity(0, sizeof(cpu_set_t), &this_thread.allowed);
  this_thread.is_bound = false;
}

}  // namespace tidegate
