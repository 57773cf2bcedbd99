#pragma once

#include <nanobind/nanobind.h>

namespace tidegate {

void bind_span_sums(nanobind::module_& m);

}  // namespace tidegate
