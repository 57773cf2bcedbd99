// Binds the work of ops that needs no interpreter to Python.
#pragma once

#include <nanobind/nanobind.h>

namespace tidegate {

void bind_tasks(nanobind::module_& m);

}  // namespace tidegate
