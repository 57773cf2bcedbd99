// The threads of lanes wait here for their next op, without the interpreter.
#pragma once

#include <unistd.h>

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "dispatcher.h"
#include "tasks.h"

namespace tidegate {

// What a thread that drives an execution waits for.
enum class Until : uint8_t {
  Done,  // no op is running, and none will begin
  Idle,  // no op is running
  Issued,  // these ops are issued, or the execution is done
  NotRunning,  // none of these ops is running, or an op has failed
  LanesWait,  // these lanes run nothing, and may begin nothing now
};

// An op that a lane's thread has taken, and what the caller of `take` must do with it.
struct Taken : Beginning {
  enum class Duty : uint8_t {
    Run,  // run it: it has no task
    Perform,  // wait for the executions in `waits`, then `perform` it
    Retry,  // run it: its task has failed
  };
  Duty duty = Duty::Run;
};

// An op and its execution. start, end: of its task; NaN if it had none.
struct IssuedRun {
  int op;
  int64_t run;
  double start;
  double end;
};

using Tasks = std::vector<std::pair<int, std::shared_ptr<Task>>>;  // by op

// One event of an execution, as it is recorded: `what` is the name of a method of the dispatcher.
struct Event {
  std::string what;
  int64_t number = 0;  // lane or run
  double now = 0.0;
  std::vector<int> ops;  // ops or subgroups; of `begin` the op that began
  int64_t answer = 0;  // of `begin`: the run that began; of `ended`: the outcome
};

// One dispatcher at a time, and the threads that wait for it. Any thread may call any method. In a forked child, which
// has none of the threads, every method does nothing.
//
// An op that has a task is run here, by the thread that took it, which then takes its lane's next op. So a lane whose
// ops all have tasks never returns from `take` before it is closed.
class Lanes {
 public:
  explicit Lanes(std::vector<bool> ahead) : shared_(new Shared(std::move(ahead))), owner_(getpid()) {}
  ~Lanes() {
    // Threads that the child does not have may hold the lock, or wait: what they use must not be destroyed there.
    if (getpid() != owner_) static_cast<void>(shared_.release());
  }
  Lanes(const Lanes&) = delete;
  Lanes& operator=(const Lanes&) = delete;

  void start(std::vector<PlannedOp> program, const Tasks& tasks = {});
  // Gives tasks to ops. Those that have begun are run by the callers of `take`.
  void arm(const Tasks& tasks);
  // Forgets the execution: its ops that are running end unnoticed.
  void forget();

  // The lane's next op that the caller must run, as soon as it may begin; nothing when the lanes are closed.
  std::optional<Taken> take(int lane);
  // The same if it may begin now and its caller must run it; nothing otherwise.
  std::optional<Taken> try_take(int lane);
  // Runs the task of an op that was taken with `Duty::Perform`. False if it fails; then the op has not ended.
  bool perform(int op, int64_t run);
  void queued(int64_t run);
  // `done`: nobody has to wait for the end of this execution.
  void ended(int64_t run, Outcome outcome, bool done = false);
  void open_gradients(const std::vector<int>& subgroups);
  void step(const std::vector<int>& repeat);
  void drop();
  // Lets threads in `take` return.
  void close();
  // Whether no task has run any more before `seconds` were over. To be called after `close`.
  bool wait_for_tasks(double seconds);

  // Whether it came true in `seconds`. True without an execution.
  bool wait(Until until, const std::vector<int>& numbers, double seconds);
  // Asks the dispatcher; `otherwise` without one.
  template <typename Answer>
  Answer ask(const std::function<Answer(const Dispatcher&)>& question, Answer otherwise) const {
    if (getpid() != owner_) return otherwise;
    const std::lock_guard<std::mutex> lock(shared_->mutex);
    return shared_->dispatcher ? question(*shared_->dispatcher) : otherwise;
  }

  // The executions that were issued, in the order of their ends, from this number of them on.
  std::vector<IssuedRun> issued_from(size_t first) const;

  void record(bool events);
  std::vector<Event> recorded() const;

 private:
  struct Waiter {
    std::function<bool()> met;
    std::condition_variable wake;
  };

  struct Shared {
    explicit Shared(std::vector<bool> runs_ahead) : ahead(std::move(runs_ahead)), wake(ahead.size()) {}

    const std::vector<bool> ahead;
    mutable std::mutex mutex;
    std::vector<std::condition_variable> wake;  // by lane
    std::vector<Waiter*> waiters;
    std::optional<Dispatcher> dispatcher;
    std::unordered_map<int, std::shared_ptr<Task>> tasks;  // by op
    std::unordered_map<int64_t, TaskResult> results;  // by execution
    std::unordered_set<int64_t> done;  // executions for whose end nobody has to wait
    int tasks_running = 0;
    std::condition_variable task_ended;
    int64_t next_run = 0;
    bool closed = false;
    bool recording = false;
    std::vector<Event> events;

    // To be called with the lock held, after each event: wakes those who can go on, and nobody else.
    void notify();
    std::optional<Taken> begin(int lane);
    bool met(Until until, const std::vector<int>& numbers) const;
    void note(Event event) {
      if (recording) events.push_back(std::move(event));
    }
  };

  bool is_owner() const { return getpid() == owner_; }
  bool perform(const std::shared_ptr<Task>& task, int64_t run);

  std::unique_ptr<Shared> shared_;
  const pid_t owner_;
};

}  // namespace tidegate
