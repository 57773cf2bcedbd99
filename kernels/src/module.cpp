// What Python sees of the kernels: addresses are checked here, the interpreter lock is let go.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <stdexcept>
#include <string>

#include "arguments.h"
#include "bind_dispatch.h"
#include "bind_io.h"
#include "bind_tasks.h"
#include "dispatch.h"
#include "gil.h"
#include "kernels.h"
#include "span_sums.h"
#include "span_table.h"
#include "waits.h"

namespace nb = nanobind;
using namespace tidegate;

namespace {

void py_adamw_update(ThreadPool& pool, size_t numel, uintptr_t weight, int weight_format, uintptr_t aux,
                     uintptr_t exp_avg, uintptr_t exp_avg_sq, uintptr_t grad, int grad_dtype, int arithmetic, float grad_scale,
                     float l2, float decay, float beta1, float one_minus_beta1, float beta2, float one_minus_beta2,
                     float step_size, float inverse_bias_correction2_sqrt, float eps) {
  checked(arithmetic, 3, "arithmetic");
  const UpdateCall call = update_call(numel, weight, weight_format, aux, exp_avg, exp_avg_sq, grad, grad_dtype);
  const Scalars scalars{grad_scale,
                        l2,
                        decay,
                        beta1,
                        one_minus_beta1,
                        beta2,
                        one_minus_beta2,
                        step_size,
                        inverse_bias_correction2_sqrt,
                        eps,
                        Arithmetic(arithmetic)};
  const GilReleased released;
  adamw_update(pool, call.arrays, call.format, call.dtype, scalars);
}

void py_stream_like(ThreadPool& pool, size_t numel, uintptr_t weight, int weight_format, uintptr_t aux,
                    uintptr_t exp_avg, uintptr_t exp_avg_sq, uintptr_t grad, int grad_dtype) {
  const UpdateCall call = update_call(numel, weight, weight_format, aux, exp_avg, exp_avg_sq, grad, grad_dtype);
  const GilReleased released;
  stream_like(pool, call.arrays, call.format, call.dtype);
}

std::pair<double, int64_t> py_sum_of_squares(ThreadPool& pool, uintptr_t address, size_t numel, int dtype) {
  checked(dtype, 3, "dtype");
  const void* elements = numel == 0 ? nullptr : at(address, kGradBytes[dtype], "address");
  const GilReleased released;
  const NormParts parts = sum_of_squares(pool, elements, numel, GradDtype(dtype));
  return {parts.sum, parts.nonfinite};
}

void py_accumulate(ThreadPool& pool, uintptr_t sums, int sum_dtype, uintptr_t address, int dtype, size_t numel) {
  checked(sum_dtype, 3, "sum_dtype");
  checked(dtype, 3, "dtype");
  if (numel == 0) return;
  void* into = at(sums, kGradBytes[sum_dtype], "sums");
  const void* elements = at(address, kGradBytes[dtype], "address");
  const GilReleased released;
  accumulate(pool, into, GradDtype(sum_dtype), elements, GradDtype(dtype), numel);
}

void py_copy(uintptr_t dst, uintptr_t src, size_t nbytes) {
  if (nbytes == 0) return;
  void* to = at(dst, 1, "dst");
  const void* from = at(src, 1, "src");
  const GilReleased released;
  copy_bytes(to, from, nbytes);
}

void py_fill(uintptr_t dst, int byte, size_t nbytes) {
  checked(byte, 256, "byte");
  if (nbytes == 0) return;
  void* to = at(dst, 1, "dst");
  const GilReleased released;
  std::memset(to, byte, nbytes);
}

}  // namespace

NB_MODULE(_native, m) {
  nb::set_leak_warnings(false);  // a pool that lives until the interpreter ends is no leak
  using nb::arg;
  nb::class_<ThreadPool>(m, "ThreadPool")
      .def(nb::init<int, const std::vector<int>&>(), arg("num_threads"), arg("cpus"))
      .def_prop_ro("num_threads", &ThreadPool::num_threads)
      .def("close", &ThreadPool::close, nb::call_guard<GilReleased>());
  m.attr("SOURCES") = TIDEGATE_SOURCES;
  m.def("adamw_update", &py_adamw_update);
  m.def("stream_like", &py_stream_like);
  m.def("sum_of_squares", &py_sum_of_squares);
  m.def("accumulate", &py_accumulate);
  m.def("copy", &py_copy);
  m.def("fill", &py_fill);
  m.def("instruction_sets", &instruction_sets);
  m.def("current_instruction_set", [] { return static_cast<int>(current_isa().load()); });
  m.def("use_instruction_set", [](int isa) {
    current_isa() = static_cast<Isa>(checked(isa, static_cast<int>(instruction_sets().size()), "instruction_set"));
  });
  bind_tasks(m);
  bind_io(m);
  bind_dispatch(m);
  bind_span_table(m);
  bind_span_sums(m);
  bind_waits(m);
}
