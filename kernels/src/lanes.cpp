#include "lanes.h"

#include <algorithm>
#include <chrono>
#include <limits>
#include <utility>

#include "clock.h"
#include "computing_cores.h"

namespace tidegate {

void Lanes::start(std::vector<PlannedOp> program, const Tasks& tasks) {
  if (!is_owner()) return;
  const std::lock_guard<std::mutex> lock(shared_->mutex);
  Shared& its = *shared_;
  its.dispatcher.emplace(std::move(program), its.ahead, its.next_run);
  its.events.clear();
  its.results.clear();
  its.done.clear();
  its.tasks.insert(tasks.begin(), tasks.end());
  its.notify();
}

void Lanes::arm(const Tasks& tasks) {
  if (!is_owner()) return;
  const std::lock_guard<std::mutex> lock(shared_->mutex);
  if (shared_->dispatcher) shared_->tasks.insert(tasks.begin(), tasks.end());
}

void Lanes::forget() {
  if (!is_owner()) return;
  const std::lock_guard<std::mutex> lock(shared_->mutex);
  if (shared_->dispatcher) shared_->next_run = shared_->dispatcher->next_run();
  shared_->dispatcher.reset();
  shared_->tasks.clear();
  shared_->notify();
}

std::optional<Taken> Lanes::Shared::begin(int lane) {
  if (closed || !dispatcher) return std::nullopt;
  const double now = monotonic_seconds();
  std::optional<Beginning> begun = dispatcher->begin(lane, now);
  if (!begun) return std::nullopt;
  note({"begin", lane, now, {begun->op}, begun->run});
  std::vector<int64_t>& waits = begun->waits;
  waits.erase(std::remove_if(waits.begin(), waits.end(), [&](int64_t run) { return done.count(run) != 0; }), waits.end());
  return Taken{std::move(*begun), tasks.count(begun->op) ? Taken::Duty::Perform : Taken::Duty::Run};
}

std::optional<Taken> Lanes::try_take(int lane) {
  if (!is_owner()) return std::nullopt;
  const std::lock_guard<std::mutex> lock(shared_->mutex);
  Shared& its = *shared_;
  if (its.closed || !its.dispatcher) return std::nullopt;
  const std::optional<int> next = its.dispatcher->next(lane);
  if (!next || its.tasks.count(*next)) return std::nullopt;
  return its.begin(lane);
}

std::optional<Taken> Lanes::take(int lane) {
  if (!is_owner()) return std::nullopt;
  std::optional<Taken> taken;
  for (;;) {
    taken.reset();
    std::shared_ptr<Task> task;
    {
      std::unique_lock<std::mutex> lock(shared_->mutex);
      Shared& its = *shared_;
      its.wake.at(size_t(lane)).wait(lock, [&] { return its.closed || (taken = its.begin(lane)); });
      if (!taken || taken->duty == Taken::Duty::Run || !taken->waits.empty()) break;
      task = its.tasks.at(taken->op);
      ++its.tasks_running;
    }
    leave_computing_core();
    if (!perform(task, taken->run)) {
      taken->duty = Taken::Duty::Retry;
      break;
    }
  }
  allow_all_cores();
  return taken;
}

bool Lanes::perform(int op, int64_t run) {
  if (!is_owner()) return false;
  std::shared_ptr<Task> task;
  {
    const std::lock_guard<std::mutex> lock(shared_->mutex);
    const auto found = shared_->tasks.find(op);
    if (found == shared_->tasks.end()) return false;
    task = found->second;
    ++shared_->tasks_running;
  }
  return perform(task, run);
}

bool Lanes::perform(const std::shared_ptr<Task>& task, int64_t run) {
  const TaskResult result = task->run([&] { queued(run); });
  {
    const std::lock_guard<std::mutex> lock(shared_->mutex);
    if (--shared_->tasks_running == 0) shared_->task_ended.notify_all();
    if (!result.ok) return false;
    shared_->results.emplace(run, result);
  }
  ended(run, Outcome::Issued, true);
  return true;
}

void Lanes::queued(int64_t run) {
  if (!is_owner()) return;
  const std::lock_guard<std::mutex> lock(shared_->mutex);
  if (!shared_->dispatcher) return;
  shared_->dispatcher->queued(run);
  shared_->note({"queued", run, 0.0, {}, 0});
  shared_->notify();
}

void Lanes::ended(int64_t run, Outcome outcome, bool done) {
  if (!is_owner()) return;
  const std::lock_guard<std::mutex> lock(shared_->mutex);
  if (!shared_->dispatcher) return;
  const double now = monotonic_seconds();
  if (done) shared_->done.insert(run);
  shared_->dispatcher->ended(run, outcome, now);
  shared_->note({"ended", run, now, {}, int64_t(outcome)});
  shared_->notify();
}

void Lanes::open_gradients(const std::vector<int>& subgroups) {
  if (!is_owner()) return;
  const std::lock_guard<std::mutex> lock(shared_->mutex);
  if (!shared_->dispatcher) return;
  shared_->dispatcher->open_gradients(subgroups);
  shared_->note({"open_gradients", 0, 0.0, subgroups, 0});
  shared_->notify();
}

void Lanes::step(const std::vector<int>& repeat) {
  if (!is_owner()) return;
  const std::lock_guard<std::mutex> lock(shared_->mutex);
  if (!shared_->dispatcher) return;
  shared_->dispatcher->step(repeat);
  shared_->note({"step", 0, 0.0, repeat, 0});
  shared_->notify();
}

void Lanes::drop() {
  if (!is_owner()) return;
  const std::lock_guard<std::mutex> lock(shared_->mutex);
  if (!shared_->dispatcher) return;
  shared_->dispatcher->drop();
  shared_->note({"drop", 0, 0.0, {}, 0});
  shared_->notify();
}

void Lanes::close() {
  if (!is_owner()) return;
  const std::lock_guard<std::mutex> lock(shared_->mutex);
  shared_->closed = true;
  for (std::condition_variable& lane : shared_->wake) lane.notify_all();
}

bool Lanes::wait_for_tasks(double seconds) {
  if (!is_owner()) return true;
  std::unique_lock<std::mutex> lock(shared_->mutex);
  return shared_->task_ended.wait_for(lock, std::chrono::duration<double>(seconds),
                                      [&] { return shared_->tasks_running == 0; });
}

bool Lanes::wait(Until until, const std::vector<int>& numbers, double seconds) {
  if (!is_owner()) return true;
  std::unique_lock<std::mutex> lock(shared_->mutex);
  Shared& its = *shared_;
  Waiter mine{[&] { return its.met(until, numbers); }, {}};
  if (mine.met()) return true;
  its.waiters.push_back(&mine);
  const bool came = mine.wake.wait_for(lock, std::chrono::duration<double>(seconds), mine.met);
  its.waiters.erase(std::find(its.waiters.begin(), its.waiters.end(), &mine));
  return came;
}

bool Lanes::Shared::met(Until until, const std::vector<int>& numbers) const {
  if (!dispatcher) return true;
  const Dispatcher& its = *dispatcher;
  switch (until) {
    case Until::Done:
      return its.is_done();
    case Until::Idle:
      return its.is_idle();
    case Until::Issued:
      return its.is_done() ||
             std::all_of(numbers.begin(), numbers.end(), [&](int op) { return its.is_issued(op); });
    case Until::NotRunning:
      return its.failed_run() || std::none_of(numbers.begin(), numbers.end(), [&](int op) { return its.is_running(op); });
    case Until::LanesWait:
      return std::none_of(numbers.begin(), numbers.end(),
                          [&](int lane) { return its.is_lane_running(lane) || its.may_begin(lane); });
  }
  return true;
}

void Lanes::Shared::notify() {
  if (dispatcher)
    for (size_t lane = 0; lane < wake.size(); ++lane)
      if (dispatcher->may_begin(int(lane))) wake[lane].notify_one();
  for (Waiter* waiter : waiters)
    if (waiter->met()) waiter->wake.notify_one();
}

std::vector<IssuedRun> Lanes::issued_from(size_t first) const {
  if (!is_owner()) return {};
  const std::lock_guard<std::mutex> lock(shared_->mutex);
  if (!shared_->dispatcher) return {};
  constexpr double none = std::numeric_limits<double>::quiet_NaN();
  const auto& issued = shared_->dispatcher->issued();
  std::vector<IssuedRun> found;
  for (size_t i = first; i < issued.size(); ++i) {
    const auto [op, run] = issued[i];
    const auto result = shared_->results.find(run);
    const bool has_task = result != shared_->results.end();
    found.push_back({op, run, has_task ? result->second.start : none, has_task ? result->second.end : none});
  }
  return found;
}

void Lanes::record(bool events) {
  if (!is_owner()) return;
  const std::lock_guard<std::mutex> lock(shared_->mutex);
  shared_->recording = events;
}

std::vector<Event> Lanes::recorded() const {
  if (!is_owner()) return {};
  const std::lock_guard<std::mutex> lock(shared_->mutex);
  return shared_->events;
}

}  // namespace tidegate
