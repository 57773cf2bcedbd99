// The clock of all recorded times.
#pragma once

#include <time.h>

namespace tidegate {

// As Python's time.monotonic().
inline double monotonic_seconds() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return double(time.tv_sec) + 1e-9 * double(time.tv_nsec);
}

}  // namespace tidegate
