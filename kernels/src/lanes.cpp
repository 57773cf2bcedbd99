#include "lanes.h"

#include <algorithm>
#include <chrono>
#include <utility>

namespace tidegate {
namespace {

// As Python's time.monotonic().
double monotonic_seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace

void Lanes::start(std::vector<PlannedOp> program) {
  if (!is_owner()) return;
  const std::lock_guard<std::mutex> lock(shared_->mutex);
  Shared& its = *shared_;
  its.dispatcher.emplace(std::move(program), its.ahead, its.next_run);
  its.events.clear();
  its.notify();
}

void Lanes::forget() {
  if (!is_owner()) return;
  const std::lock_guard<std::mutex> lock(shared_->mutex);
  if (shared_->dispatcher) shared_->next_run = shared_->dispatcher->next_run();
  shared_->dispatcher.reset();
  shared_->notify();
}

std::optional<Beginning> Lanes::Shared::begin(int lane) {
  if (closed || !dispatcher) return std::nullopt;
  const double now = monotonic_seconds();
  std::optional<Beginning> begun = dispatcher->begin(lane, now);
  if (begun) note({"begin", lane, now, {begun->op}, begun->run});
  return begun;
}

std::optional<Beginning> Lanes::try_take(int lane) {
  if (!is_owner()) return std::nullopt;
  const std::lock_guard<std::mutex> lock(shared_->mutex);
  return shared_->begin(lane);
}

std::optional<Beginning> Lanes::take(int lane) {
  if (!is_owner()) return std::nullopt;
  std::unique_lock<std::mutex> lock(shared_->mutex);
  Shared& its = *shared_;
  std::optional<Beginning> begun;
  its.wake.at(size_t(lane)).wait(lock, [&] { return its.closed || (begun = its.begin(lane)); });
  return begun;
}

void Lanes::queued(int64_t run) {
  if (!is_owner()) return;
  const std::lock_guard<std::mutex> lock(shared_->mutex);
  if (!shared_->dispatcher) return;
  shared_->dispatcher->queued(run);
  shared_->note({"queued", run, 0.0, {}, 0});
  shared_->notify();
}

void Lanes::ended(int64_t run, Outcome outcome) {
  if (!is_owner()) return;
  const std::lock_guard<std::mutex> lock(shared_->mutex);
  if (!shared_->dispatcher) return;
  const double now = monotonic_seconds();
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
