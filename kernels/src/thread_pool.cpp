// Persistent threads: one job at a time, its ranges handed out by an atomic counter.
#include "thread_pool.h"

#include <pthread.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>

#include "computing_cores.h"
#include "signals_blocked.h"

namespace tidegate {

struct ThreadPool::Shared {
  std::mutex one_job;  // held for a whole job: callers from several threads take turns
  std::mutex mutex;    // guards what follows
  std::condition_variable wake;
  std::condition_variable done;
  const Range* task = nullptr;
  size_t size = 0;
  size_t step = 1;
  unsigned long job = 0;
  size_t busy = 0;
  bool stop = false;
  std::atomic<size_t> next{0};
  std::vector<std::thread> workers;

  void drain(const Range& run, size_t total, size_t by, Computing& here) {
    const DefaultFpMode mode;
    for (size_t begin = next.fetch_add(by); begin < total; begin = next.fetch_add(by)) {
      here.go_on();
      run(begin, std::min(begin + by, total));
    }
  }

  void work() {
    unsigned long seen = 0;
    std::unique_lock<std::mutex> lock(mutex);
    for (;;) {
      wake.wait(lock, [&] { return stop || job != seen; });
      if (stop) return;
      seen = job;
      const Range* run = task;
      const size_t total = size, by = step;
      lock.unlock();
      leave_computing_core();
      {
        Computing here;
        drain(*run, total, by, here);
      }
      lock.lock();
      if (--busy == 0) done.notify_one();
    }
  }

  void run_job(size_t total, size_t by, const Range& run) {
    {
      const std::lock_guard<std::mutex> lock(mutex);
      task = &run;
      size = total;
      step = by;
      next = 0;
      busy = workers.size();
      ++job;
    }
    Computing here;  // before the workers begin, which leave this core
    wake.notify_all();
    drain(run, total, by, here);
    std::unique_lock<std::mutex> lock(mutex);
    done.wait(lock, [&] { return busy == 0; });  // a worker may still use `run`
  }

  void join() {
    {
      const std::lock_guard<std::mutex> lock(mutex);
      stop = true;
    }
    wake.notify_all();
    for (std::thread& worker : workers) worker.join();
    workers.clear();
  }
};

namespace {

cpu_set_t cpu_set_of(const std::vector<int>& cpus) {
  cpu_set_t set;
  CPU_ZERO(&set);
  for (const int cpu : cpus) {
    if (cpu < 0 || cpu >= CPU_SETSIZE)
      throw std::invalid_argument("cpu " + std::to_string(cpu) + " is not in 0.." + std::to_string(CPU_SETSIZE - 1));
    CPU_SET(cpu, &set);
  }
  return set;
}

// The system silently leaves out cpus that it or the process's control group does not offer.
void pin(std::thread& worker, const std::vector<int>& cpus, const cpu_set_t& set) {
  cpu_set_t actual;
  CPU_ZERO(&actual);
  if (pthread_setaffinity_np(worker.native_handle(), sizeof set, &set) == 0)
    pthread_getaffinity_np(worker.native_handle(), sizeof actual, &actual);
  for (const int cpu : cpus)
    if (!CPU_ISSET(cpu, &actual))
      throw std::invalid_argument("cpu " + std::to_string(cpu) + " may not be used by this process");
}

}  // namespace

ThreadPool::ThreadPool(int num_threads, const std::vector<int>& cpus)
    : num_threads_(num_threads), owner_(getpid()), shared_(new Shared) {
  if (num_threads < 1) throw std::invalid_argument("num_threads is " + std::to_string(num_threads) + ", must be 1 or more");
  const cpu_set_t set = cpu_set_of(cpus);
  const SignalsBlocked blocked;
  try {
    for (int i = 1; i < num_threads; ++i) {
      std::thread& worker = shared_->workers.emplace_back([shared = shared_.get()] { shared->work(); });
      pthread_setname_np(worker.native_handle(), "tidegate-cpu");
      if (!cpus.empty()) pin(worker, cpus, set);
    }
  } catch (...) {
    shared_->join();  // a joinable std::thread must not be destroyed
    throw;
  }
}

ThreadPool::~ThreadPool() {
  if (is_owner())
    close();
  else
    static_cast<void>(shared_.release());
}

bool ThreadPool::is_owner() const { return getpid() == owner_; }

void ThreadPool::for_ranges(size_t size, size_t step, const Range& task) {
  if (is_owner() && size > step) {
    const std::lock_guard<std::mutex> turn(shared_->one_job);
    if (!shared_->workers.empty()) return shared_->run_job(size, step, task);
  }
  const DefaultFpMode mode;
  Computing here;
  for (size_t begin = 0; begin < size; begin += step) {
    here.go_on();
    task(begin, std::min(begin + step, size));
  }
}

void ThreadPool::close() {
  if (!is_owner()) return;
  const std::lock_guard<std::mutex> turn(shared_->one_job);
  shared_->join();
}

}  // namespace tidegate
