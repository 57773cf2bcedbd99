// Decides which op each lane of a plan begins next.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>
#include <vector>

namespace tidegate {

// What an op waits for, besides its dependencies: for nothing, for the gradient of its subgroup, or for the step.
enum class Gate : uint8_t { None, Gradient, Step };

// How an op ended: done (or enqueued on the device); the step must be skipped; with an error.
enum class Outcome : uint8_t { Issued, Skip, Failed };

struct PlannedOp {
  int lane;
  Gate gate;
  int subgroup;  // -1 for an op that belongs to no subgroup
  bool copies_gradient;  // may be repeated, as long as no step was taken
  bool uses_copy;  // waits for the repeated copy of its subgroup's gradient
  std::vector<int> deps;  // ops that must be issued first, by their place in the program
};

// An op that has begun. `run`: number of this execution, unique in the dispatcher. `waits`: the executions for whose
// end the lane must wait.
struct Beginning {
  int op;
  int64_t run;
  std::vector<int64_t> waits;
};

// The op that keeps its lane longest, and the time since which it does.
struct Oldest {
  int op;
  double since;
};

// The state of one execution of a plan. A pure state machine: events go in, and what each lane may begin comes out. It
// has no clock, no thread and no lock; times are given. So an execution can be replayed from its events.
//
// Ops of a lane begin in order and end in order. A lane that runs ahead may begin an op while its previous one runs, if
// all work of that one is queued. An op that is done early counts as running until all ops before it are done.
class Dispatcher {
 public:
  static constexpr size_t kMostAtOnce = 2;  // ops that a lane runs at the same time

  // `first_run`: number of the first execution of an op.
  Dispatcher(std::vector<PlannedOp> program, const std::vector<bool>& ahead, int64_t first_run = 0);

  // Begins the next op of the lane; nothing if it may not begin now.
  std::optional<Beginning> begin(int lane, double now);
  // All work of this execution is queued. Unknown executions are ignored, here and in `ended`.
  void queued(int64_t run);
  void ended(int64_t run, Outcome outcome, double now);
  // The gradients of these subgroups have arrived.
  void open_gradients(const std::vector<int>& subgroups);
  // Opens all gates. Of these ops, those that are issued run again, before the other ops of their lane.
  void step(const std::vector<int>& repeat);
  // Drops the ops that have not begun.
  void drop();

  bool may_begin(int lane) const;
  // The op that the lane may begin now; nothing if there is none.
  std::optional<int> next(int lane) const;
  bool is_idle() const;  // no op is running
  bool is_done() const;  // no op is running, and none will begin
  bool is_lane_running(int lane) const { return !lanes_[size_t(lane)].running.empty(); }
  bool is_running(int op) const { return states_[size_t(op)] == State::Running; }
  bool is_issued(int op) const { return states_[size_t(op)] == State::Issued; }
  bool is_stepping() const { return stepping_; }
  bool is_skipped() const { return skipped_; }
  bool has_pending() const;
  std::optional<int64_t> failed_run() const { return failed_run_; }
  int64_t next_run() const { return next_run_; }
  std::optional<Oldest> oldest() const;
  // The executions that were issued, in the order of their ends, and their ops.
  const std::vector<std::pair<int, int64_t>>& issued() const { return issued_; }

 private:
  enum class State : uint8_t { Pending, Running, Issued, Dropped };

  struct Running {
    int op;
    int64_t run;
    double since;
    bool queued = false;
    std::optional<Outcome> outcome;  // known when it has ended before those in front of it
  };

  struct Lane {
    bool ahead;
    std::deque<int> pending;
    std::deque<Running> running;
  };

  bool may_run(const PlannedOp& op) const;
  Running* find(int64_t run);
  void settle(const Running& ended);

  std::vector<PlannedOp> program_;
  std::vector<Lane> lanes_;
  std::vector<State> states_;
  std::vector<int64_t> last_run_;  // of each op: its last execution that was issued
  std::vector<bool> arrived_;  // by subgroup: its gradient has arrived
  std::vector<int> recopying_;  // by subgroup: the gradient copy that must be repeated first, or -1
  std::vector<int64_t> recopied_;  // by subgroup: the execution that repeated its copy, or -1
  std::vector<std::pair<int, int64_t>> issued_;
  std::optional<int64_t> failed_run_;
  int64_t next_run_;
  bool stepping_ = false;
  bool skipped_ = false;
};

}  // namespace tidegate
