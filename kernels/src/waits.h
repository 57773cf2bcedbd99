// What the module takes from waits.cpp.
#pragma once

#include <nanobind/nanobind.h>

namespace tidegate {

void bind_waits(nanobind::module_& m);

}  // namespace tidegate
