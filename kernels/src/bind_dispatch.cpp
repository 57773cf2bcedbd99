// What Python sees of the dispatcher, and of the lanes whose threads wait for it.
#include "bind_dispatch.h"

#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "dispatcher.h"
#include "gil.h"
#include "lanes.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace tidegate {
namespace {

// lane, gate, subgroup, copies_gradient, uses_copy, dependencies
using OpTuple = std::tuple<int, int, int, bool, bool, std::vector<int>>;
using BegunTuple = std::tuple<int, int64_t, std::vector<int64_t>>;
using TakenTuple = std::tuple<int, int64_t, std::vector<int64_t>, int>;

int checked(int value, int count, const char* name) {
  if (value < 0 || value >= count)
    throw std::invalid_argument(std::string(name) + " is " + std::to_string(value) + ", must be in 0.." +
                                std::to_string(count - 1));
  return value;
}

// What a plan needs to be started, made once for each plan.
struct Program {
  std::vector<PlannedOp> ops;
};

struct TaskList {
  Tasks tasks;
};

std::vector<PlannedOp> program_of(std::vector<OpTuple> ops) {
  std::vector<PlannedOp> program;
  program.reserve(ops.size());
  for (auto& [lane, gate, subgroup, copies, uses, deps] : ops)
    program.push_back({lane, Gate(checked(gate, 3, "gate")), subgroup, copies, uses, std::move(deps)});
  return program;
}

std::optional<BegunTuple> tuple_of(std::optional<Beginning> begun) {
  if (!begun) return std::nullopt;
  return BegunTuple{begun->op, begun->run, std::move(begun->waits)};
}

std::optional<std::pair<int, double>> pair_of(std::optional<Oldest> oldest) {
  if (!oldest) return std::nullopt;
  return std::pair{oldest->op, oldest->since};
}

Outcome outcome_of(int outcome) { return Outcome(checked(outcome, 3, "outcome")); }

std::optional<TakenTuple> tuple_of(std::optional<Taken> taken) {
  if (!taken) return std::nullopt;
  return TakenTuple{taken->op, taken->run, std::move(taken->waits), int(taken->duty)};
}

std::optional<TakenTuple> py_take(Lanes& lanes, int lane) {
  // Most ops may begin when their lane asks: then the interpreter lock need not change hands.
  if (std::optional<Taken> taken = lanes.try_take(lane)) return tuple_of(std::move(taken));
  const GilReleased released;
  return tuple_of(lanes.take(lane));
}

bool py_perform(Lanes& lanes, int op, int64_t run) {
  const GilReleased released;
  return lanes.perform(op, run);
}

bool py_wait(Lanes& lanes, int until, const std::vector<int>& numbers, double seconds) {
  const Until what = Until(checked(until, 5, "until"));
  const GilReleased released;
  return lanes.wait(what, numbers, seconds);
}

template <typename Answer, typename Question>
Answer ask(const Lanes& lanes, const Question& question, Answer otherwise) {
  return lanes.ask<Answer>(question, std::move(otherwise));
}

using Issued = std::vector<std::pair<int, int64_t>>;

}  // namespace

void bind_dispatch(nb::module_& m) {
  nb::class_<Program>(m, "Program", "A plan for the dispatcher.")
      .def("__init__", [](Program* self, std::vector<OpTuple> ops) { new (self) Program{program_of(std::move(ops))}; },
           "ops"_a);
  nb::class_<Dispatcher>(m, "Dispatcher",
                         "The state of one execution of a plan: events go in, and what each lane may begin comes out. It has\n"
                         "no clock, no thread and no lock. Lanes, ops and subgroups are numbers; `run` is the number of one\n"
                         "execution of an op.")
      .def("__init__",
           [](Dispatcher* self, const Program& program, const std::vector<bool>& ahead, int64_t first_run) {
             new (self) Dispatcher(program.ops, ahead, first_run);
           }, "program"_a, "ahead"_a, "first_run"_a = 0)
      .def("begin", [](Dispatcher& its, int lane, double now) { return tuple_of(its.begin(lane, now)); })
      .def("queued", &Dispatcher::queued)
      .def("ended", [](Dispatcher& its, int64_t run, int outcome, double now) {
             its.ended(run, outcome_of(outcome), now);
           })
      .def("open_gradients", &Dispatcher::open_gradients)
      .def("step", &Dispatcher::step)
      .def("drop", &Dispatcher::drop)
      .def("may_begin", &Dispatcher::may_begin)
      .def("is_running", &Dispatcher::is_running)
      .def("is_issued", &Dispatcher::is_issued)
      .def("oldest", [](const Dispatcher& its) { return pair_of(its.oldest()); })
      .def_prop_ro("is_done", &Dispatcher::is_done)
      .def_prop_ro("is_idle", &Dispatcher::is_idle)
      .def_prop_ro("is_skipped", &Dispatcher::is_skipped)
      .def_prop_ro("failed_run", &Dispatcher::failed_run)
      .def_prop_ro("issued", &Dispatcher::issued);
  nb::class_<TaskList>(m, "TaskList", "The tasks of ops, by place in the program.")
      .def("__init__", [](TaskList* self, Tasks tasks) { new (self) TaskList{std::move(tasks)}; }, "tasks"_a = Tasks());
  nb::class_<Lanes>(m, "Lanes",
                    "A dispatcher, and the threads that wait for it without the interpreter lock. Any thread may call any\n"
                    "method. In a forked child the methods do nothing.")
      .def(nb::init<std::vector<bool>>(), "ahead"_a)
      .def("start", [](Lanes& its, const Program& program, const TaskList& list) {
             const GilReleased released;
             its.start(program.ops, list.tasks);
           }, "program"_a, "tasks"_a = TaskList())
      .def("arm", [](Lanes& its, const TaskList& list) { its.arm(list.tasks); })
      .def("forget", &Lanes::forget)
      .def("take", &py_take)
      .def("perform", &py_perform)
      .def("queued", &Lanes::queued)
      .def("ended", [](Lanes& its, int64_t run, int outcome, bool done) { its.ended(run, outcome_of(outcome), done); },
           "run"_a, "outcome"_a, "done"_a = false)
      .def("open_gradients", &Lanes::open_gradients)
      .def("step", &Lanes::step)
      .def("drop", &Lanes::drop)
      .def("close", &Lanes::close)
      .def("wait_for_tasks", &Lanes::wait_for_tasks, nb::call_guard<GilReleased>())
      .def("wait", &py_wait)
      .def("is_begun", [](const Lanes& its, int op) {
             return ask(its, [op](const Dispatcher& d) { return d.is_running(op) || d.is_issued(op); }, false);
           })
      .def("oldest", [](const Lanes& its) {
             return pair_of(ask(its, [](const Dispatcher& d) { return d.oldest(); }, std::optional<Oldest>()));
           })
      .def_prop_ro("is_done", [](const Lanes& its) {
             return ask(its, [](const Dispatcher& d) { return d.is_done(); }, true);
           })
      .def_prop_ro("is_stepping", [](const Lanes& its) {
             return ask(its, [](const Dispatcher& d) { return d.is_stepping(); }, false);
           })
      .def_prop_ro("is_skipped", [](const Lanes& its) {
             return ask(its, [](const Dispatcher& d) { return d.is_skipped(); }, false);
           })
      .def_prop_ro("has_pending", [](const Lanes& its) {
             return ask(its, [](const Dispatcher& d) { return d.has_pending(); }, false);
           })
      .def_prop_ro("failed_run", [](const Lanes& its) {
             return ask(its, [](const Dispatcher& d) { return d.failed_run(); }, std::optional<int64_t>());
           })
      .def("issued_from", [](const Lanes& its, size_t first) {
             std::vector<std::tuple<int, int64_t, double, double>> found;
             for (const IssuedRun& one : its.issued_from(first)) found.emplace_back(one.op, one.run, one.start, one.end);
             return found;
           }, "first"_a = 0)
      .def("record", &Lanes::record)
      .def("recorded", [](const Lanes& its) {
             std::vector<std::tuple<std::string, int64_t, double, std::vector<int>, int64_t>> found;
             for (const Event& event : its.recorded())
               found.emplace_back(event.what, event.number, event.now, event.ops, event.answer);
             return found;
           });
}

}  // namespace tidegate
