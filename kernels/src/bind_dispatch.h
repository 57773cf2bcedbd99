// Binds dispatcher and lanes to Python.
#pragma once

#include <nanobind/nanobind.h>

namespace tidegate {

void bind_dispatch(nanobind::module_& m);

}  // namespace tidegate
