// What Python sees of tasks: functions that make them, with checked arguments.
#include "bind_tasks.h"

#include <array>
#include <memory>
#include <tuple>
#include <utility>
#include <vector>

#include <nanobind/stl/array.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "arguments.h"
#include "tasks.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace tidegate {
namespace {

// dst, src, nbytes
using CopyTuple = std::tuple<uintptr_t, uintptr_t, size_t>;
// numel, weight, weight_format, aux, exp_avg, exp_avg_sq, grad, grad_dtype, arithmetic, scalars
using PartTuple = std::tuple<size_t, uintptr_t, int, uintptr_t, uintptr_t, uintptr_t, uintptr_t, int, int, std::array<float, 10>>;

std::shared_ptr<Task> copy_task(const std::vector<CopyTuple>& copies, double bytes_per_second) {
  std::vector<CopyTask::Copy> made;
  for (const auto& [dst, src, nbytes] : copies)
    if (nbytes != 0)
      made.push_back({static_cast<char*>(at(dst, 1, "dst")), static_cast<const char*>(at(src, 1, "src")), nbytes});
  return std::make_shared<CopyTask>(std::move(made), bytes_per_second);
}

// address, numel, dtype
using GradientTuple = std::tuple<uintptr_t, size_t, int>;

std::shared_ptr<SquaresTask> squares_task(ThreadPool& pool, const std::vector<GradientTuple>& gradients) {
  std::vector<SquaresTask::Part> made;
  for (const auto& [address, numel, dtype] : gradients) {
    checked(dtype, 3, "dtype");
    made.push_back({numel == 0 ? nullptr : at(address, kGradBytes[dtype], "address"), numel, GradDtype(dtype)});
  }
  return std::make_shared<SquaresTask>(pool, std::move(made));
}

std::vector<std::pair<double, int64_t>> sums_of(const SquaresTask& task) {
  std::vector<std::pair<double, int64_t>> found;
  for (const NormParts& parts : task.sums()) found.emplace_back(parts.sum, parts.nonfinite);
  return found;
}

std::shared_ptr<Task> update_task(ThreadPool& pool, const std::vector<PartTuple>& parts,
                                  std::shared_ptr<GradientFactor> factor, std::shared_ptr<TransferTask> flush) {
  std::vector<UpdateTask::Part> made;
  for (const auto& [numel, weight, format, aux, exp_avg, exp_avg_sq, grad, dtype, arithmetic, values] : parts) {
    const UpdateCall call = update_call(numel, weight, format, aux, exp_avg, exp_avg_sq, grad, dtype);
    const Scalars scalars{values[0], values[1], values[2], values[3], values[4],
                          values[5], values[6], values[7], values[8], values[9],
                          Arithmetic(checked(arithmetic, 3, "arithmetic"))};
    made.push_back({call.arrays, call.format, call.dtype, scalars});
  }
  return std::make_shared<UpdateTask>(pool, std::move(made), std::move(factor), std::move(flush));
}

}  // namespace

void bind_tasks(nb::module_& m) {
  nb::class_<Task>(m, "Task", "The work of one op, which a lane's thread runs without the interpreter.");
  nb::class_<GradientFactor>(m, "GradientFactor",
                             "The factor of a step for all gradients, which is known after the step's tasks were made.")
      .def(nb::new_([] { return std::make_shared<GradientFactor>(); }))
      .def("set", &GradientFactor::set);
  nb::class_<SquaresTask, Task>(m, "SquaresTask", "Sums of squares of gradients.").def_prop_ro("sums", &sums_of);
  m.def("copy_task", &copy_task, "copies"_a, "bytes_per_second"_a);
  m.def("squares_task", &squares_task, "pool"_a, "gradients"_a, nb::keep_alive<0, 1>());
  m.def("update_task", &update_task, "pool"_a, "parts"_a, "factor"_a, "flush"_a.none(), nb::keep_alive<0, 1>());
}

}  // namespace tidegate
