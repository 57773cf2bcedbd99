// What the module takes from bind_io.cpp.
#pragma once

#include <nanobind/nanobind.h>

namespace tidegate {

void bind_io(nanobind::module_& m);

}  // namespace tidegate
