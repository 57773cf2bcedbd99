#include "dispatcher.h"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>

namespace tidegate {
namespace {

[[noreturn]] void refuse(size_t op, const char* what, int value, size_t bound) {
  throw std::invalid_argument("op " + std::to_string(op) + ": its " + what + " is " + std::to_string(value) +
                              ", must be in 0.." + std::to_string(bound) + " (exclusive)");
}

}  // namespace

Dispatcher::Dispatcher(std::vector<PlannedOp> program, const std::vector<bool>& ahead, int64_t first_run)
    : program_(std::move(program)), next_run_(first_run) {
  for (const bool runs_ahead : ahead) lanes_.push_back({runs_ahead, {}, {}});
  int subgroups = 0;
  for (size_t i = 0; i < program_.size(); ++i) {
    const PlannedOp& op = program_[i];
    if (op.lane < 0 || size_t(op.lane) >= lanes_.size()) refuse(i, "lane", op.lane, lanes_.size());
    // Each op comes after those that it needs, so that no order of the lanes can end in a deadlock.
    for (const int dep : op.deps)
      if (dep < 0 || size_t(dep) >= i) refuse(i, "dependency", dep, i);
    if (op.subgroup < 0 && (op.gate == Gate::Gradient || op.copies_gradient || op.uses_copy))
      refuse(i, "subgroup", op.subgroup, size_t(subgroups) + 1);
    lanes_[size_t(op.lane)].pending.push_back(int(i));
    subgroups = std::max(subgroups, op.subgroup + 1);
  }
  states_.assign(program_.size(), State::Pending);
  last_run_.assign(program_.size(), -1);
  arrived_.assign(size_t(subgroups), false);
  recopying_.assign(size_t(subgroups), -1);
  recopied_.assign(size_t(subgroups), -1);
}

std::optional<Beginning> Dispatcher::begin(int lane, double now) {
  if (!may_begin(lane)) return std::nullopt;
  Lane& its = lanes_[size_t(lane)];
  const int op = its.pending.front();
  its.pending.pop_front();
  states_[size_t(op)] = State::Running;
  its.running.push_back({op, next_run_, now, false, std::nullopt});
  Beginning begun{op, next_run_++, {}};
  const PlannedOp& planned = program_[size_t(op)];
  for (const int dep : planned.deps) begun.waits.push_back(last_run_[size_t(dep)]);
  if (planned.uses_copy && recopied_[size_t(planned.subgroup)] >= 0)
    begun.waits.push_back(recopied_[size_t(planned.subgroup)]);
  return begun;
}

void Dispatcher::queued(int64_t run) {
  if (Running* found = find(run)) found->queued = true;
}

void Dispatcher::ended(int64_t run, Outcome outcome, double now) {
  Running* found = find(run);
  if (found == nullptr) return;
  found->outcome = outcome;
  std::deque<Running>& running = lanes_[size_t(program_[size_t(found->op)].lane)].running;
  while (!running.empty() && running.front().outcome) {
    const Running first = running.front();
    running.pop_front();
    if (!running.empty()) running.front().since = now;
    settle(first);
  }
}

void Dispatcher::settle(const Running& ended) {
  const PlannedOp& op = program_[size_t(ended.op)];
  switch (*ended.outcome) {
    case Outcome::Issued:
      states_[size_t(ended.op)] = State::Issued;
      last_run_[size_t(ended.op)] = ended.run;
      issued_.emplace_back(ended.op, ended.run);
      if (op.copies_gradient && recopying_[size_t(op.subgroup)] == ended.op) {
        recopying_[size_t(op.subgroup)] = -1;
        recopied_[size_t(op.subgroup)] = ended.run;
      }
      break;
    case Outcome::Skip:
      states_[size_t(ended.op)] = State::Dropped;
      skipped_ = true;
      drop();
      break;
    case Outcome::Failed:
      states_[size_t(ended.op)] = State::Dropped;
      if (!failed_run_) failed_run_ = ended.run;
      break;
  }
}

void Dispatcher::open_gradients(const std::vector<int>& subgroups) {
  for (const int subgroup : subgroups)
    if (subgroup >= 0 && size_t(subgroup) < arrived_.size()) arrived_[size_t(subgroup)] = true;
}

void Dispatcher::step(const std::vector<int>& repeat) {
  std::vector<int> again(repeat);
  std::sort(again.rbegin(), again.rend());
  for (const int op : again) {
    if (op < 0 || size_t(op) >= program_.size()) refuse(size_t(0), "repeated op", op, program_.size());
    const PlannedOp& planned = program_[size_t(op)];
    if (!planned.copies_gradient || !is_issued(op)) continue;
    states_[size_t(op)] = State::Pending;
    lanes_[size_t(planned.lane)].pending.push_front(op);
    recopying_[size_t(planned.subgroup)] = op;
  }
  stepping_ = true;
}

void Dispatcher::drop() {
  for (Lane& lane : lanes_) {
    for (const int op : lane.pending) states_[size_t(op)] = State::Dropped;
    lane.pending.clear();
  }
}

bool Dispatcher::may_begin(int lane) const {
  const Lane& its = lanes_.at(size_t(lane));
  if (failed_run_ || its.pending.empty()) return false;
  if (!its.running.empty()) {
    const bool room = its.ahead && its.running.size() < kMostAtOnce;
    if (!room || !its.running.back().queued) return false;
  }
  return may_run(program_[size_t(its.pending.front())]);
}

std::optional<int> Dispatcher::next(int lane) const {
  if (!may_begin(lane)) return std::nullopt;
  return lanes_[size_t(lane)].pending.front();
}

bool Dispatcher::may_run(const PlannedOp& op) const {
  // Plans leave out dependencies that follow from the order of a lane, and a repeated copy breaks this order.
  if (op.uses_copy && recopying_[size_t(op.subgroup)] >= 0) return false;
  if (op.gate == Gate::Step && !stepping_) return false;
  if (op.gate == Gate::Gradient && !stepping_ && !arrived_[size_t(op.subgroup)]) return false;
  return std::all_of(op.deps.begin(), op.deps.end(), [&](int dep) { return is_issued(dep); });
}

bool Dispatcher::is_idle() const {
  return std::all_of(lanes_.begin(), lanes_.end(), [](const Lane& lane) { return lane.running.empty(); });
}

bool Dispatcher::has_pending() const {
  return std::any_of(lanes_.begin(), lanes_.end(), [](const Lane& lane) { return !lane.pending.empty(); });
}

bool Dispatcher::is_done() const { return is_idle() && (failed_run_ || !has_pending()); }

std::optional<Oldest> Dispatcher::oldest() const {
  std::optional<Oldest> found;
  for (const Lane& lane : lanes_)
    // Only the first op counts: later ops of the lane may wait for it.
    if (!lane.running.empty() && (!found || lane.running.front().since < found->since))
      found = Oldest{lane.running.front().op, lane.running.front().since};
  return found;
}

Dispatcher::Running* Dispatcher::find(int64_t run) {
  for (Lane& lane : lanes_)
    for (Running& running : lane.running)
      if (running.run == run) return &running;
  return nullptr;
}

}  // namespace tidegate
