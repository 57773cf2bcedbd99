// Threads that compute on given cores, and a thread that moves data: prints on which cores the latter may run.
#include <sched.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "computing_cores.h"

namespace {

cpu_set_t allowed() {
  cpu_set_t set;
  sched_getaffinity(0, sizeof set, &set);
  return set;
}

void bind(const cpu_set_t& set) {
  if (sched_setaffinity(0, sizeof set, &set) != 0) std::abort();
}

void bind_to(int core) {
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(core, &set);
  bind(set);
}

// A thread that computes on one core, as it says, and leaves the core idle.
class Computes {
 public:
  explicit Computes(int core) : thread_([this, core] {
      bind_to(core);
      tidegate::Computing here;
      std::unique_lock<std::mutex> lock(mutex_);
      began_ = true;
      changed_.notify_all();
      changed_.wait(lock, [&] { return ended_; });
    }) {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] { return began_; });
  }
  ~Computes() {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      ended_ = true;
      changed_.notify_all();
    }
    thread_.join();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool began_ = false, ended_ = false;
  std::thread thread_;
};

const cpu_set_t all = allowed();

// Calls `leave_computing_core` on this core; all cores that are allowed before stay allowed.
void leave(int core) {
  const cpu_set_t before = allowed();
  do {
    bind_to(core);
    bind(before);
  } while (sched_getcpu() != core);
  tidegate::leave_computing_core();
}

// The number of the allowed cores, or "all".
std::string cores() {
  const cpu_set_t now = allowed();
  return CPU_EQUAL(&now, &all) ? "all" : std::to_string(CPU_COUNT(&now)) + " of " + std::to_string(CPU_COUNT(&all));
}

void say(const char* when) { std::printf("%s: %s\n", when, cores().c_str()); }

}  // namespace

int main() {
  std::vector<int> numbers;
  for (int core = 0; core < CPU_SETSIZE; ++core)
    if (CPU_ISSET(core, &all)) numbers.push_back(core);
  if (numbers.size() < 2) return 77;
  const int first = numbers[0], last = numbers.back();

  leave(first);
  say("nothing computes");
  {
    const Computes one(first);
    leave(last);
    say("another core computes");
    leave(first);
    std::printf("the core computes: %s, left: %d\n", cores().c_str(), sched_getcpu() != first);
    if (const pid_t child = fork(); child == 0) {
      tidegate::allow_all_cores();
      leave(first);
      const cpu_set_t now = allowed();
      _exit(CPU_EQUAL(&now, &all) ? 0 : 1);
    } else {
      int status = 0;
      waitpid(child, &status, 0);
      std::printf("a forked child is bound: %d\n", WEXITSTATUS(status));
    }
  }
  const auto rest = [&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(30));
    leave(last);
  };
  for (;;) {  // until the machine was fast enough
    rest();
    auto one = std::make_unique<Computes>(first);
    leave(first);
    const auto ended = std::chrono::steady_clock::now();
    one.reset();
    leave(last);
    if (std::chrono::steady_clock::now() - ended < std::chrono::milliseconds(8)) break;
  }
  say("just after the computation");
  rest();
  say("some time after the computation");
  {
    const Computes one(first);
    leave(first);
    tidegate::allow_all_cores();
    say("all cores are allowed again");
    leave(first);
    std::vector<std::unique_ptr<Computes>> others;
    for (size_t i = 1; i < numbers.size(); ++i) others.push_back(std::make_unique<Computes>(numbers[i]));
    leave(last);
    say("all cores compute");
  }
}
