// Processes with several threads take turns in one lock; built with a sanitizer by test_path_lock.py.
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <new>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "path_lock.h"

using namespace tidegate;

namespace {

constexpr int kProcesses = 3;
constexpr int kThreads = 3;
constexpr int kSlots = 2;

void fail(const char* why) {
  std::fprintf(stderr, "%s\n", why);
  std::abort();
}

struct Interrupted : std::runtime_error {
  Interrupted() : std::runtime_error("interrupted") {}
};

// `processes`: of all that are inside, in memory that they share.
void take_turns(PathLock& lock, int turns, unsigned seed, std::mutex& mutex, int& inside,
                std::atomic<int>& processes) {
  std::mt19937 random(seed);
  for (int turn = 0; turn < turns; ++turn) {
    Entered entered;
    try {
      const int kind = int(random() % 4);
      // Some waits time out, some are interrupted, some may last.
      const double timeout = kind == 0 ? 0.0002 : 60.0;
      const auto between = [&] {
        if (random() % 2) throw Interrupted();
      };
      entered = kind == 1 ? lock.enter(timeout, between) : lock.enter(timeout);
      if (kind > 1 && !entered.acquired) fail("a wait ended without the lock");
    } catch (const Interrupted&) {
    }
    if (entered.acquired && lock.counts().inside == 0) fail("a thread inside is not counted");
    if (entered.failed_errno != 0) fail(entered.failure.c_str());
    if (!entered.acquired) continue;
    {
      const std::lock_guard<std::mutex> counting(mutex);
      if (inside++ == 0 && ++processes > kSlots) fail("too many processes are inside");
    }
    if (random() % 2) std::this_thread::sleep_for(std::chrono::microseconds(random() % 200));
    {
      const std::lock_guard<std::mutex> counting(mutex);
      if (--inside == 0) --processes;
    }
    lock.leave();
  }
}

int run(const char* path, int turns, int process, std::atomic<int>& processes) {
  // For ever, as in training.
  static const auto& lock = *new std::shared_ptr<PathLock>(std::make_shared<PathLock>(path));
  if (const std::string failure = lock->open(kSlots); !failure.empty()) fail(failure.c_str());
  std::mutex mutex;
  int inside = 0;
  std::vector<std::thread> threads;
  for (int thread = 0; thread < kThreads; ++thread)
    threads.emplace_back([&, seed = unsigned(process * kThreads + thread)] {
      take_turns(*lock, turns, seed, mutex, inside, processes);
    });
  for (std::thread& thread : threads) thread.join();
  while (lock->counts().queued) std::this_thread::yield();
  if (lock->counts().inside != 0 || lock->counts().waiting != 0) fail("threads are left");
  return 0;
}

}  // namespace

int main(int, char** arguments) {
  const int turns = std::atoi(arguments[2]);
  void* shared = mmap(nullptr, sizeof(std::atomic<int>), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  auto& processes = *new (shared) std::atomic<int>(0);
  std::vector<pid_t> children;
  for (int process = 0; process < kProcesses; ++process) {
    const pid_t child = fork();
    if (child == 0) return run(arguments[1], turns, process, processes);
    children.push_back(child);
  }
  for (const pid_t child : children) {
    int status = 0;
    waitpid(child, &status, 0);
    if (status != 0) fail("a process failed");
  }
  std::printf("turns %d\n", kProcesses * kThreads * turns);
}
