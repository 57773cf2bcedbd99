// A scheduling hint for threads that mostly wait, for a disk or a copy: they get a core as soon as the wait is over.
#pragma once

#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>

namespace tidegate {

constexpr uint64_t kShortSliceNanoseconds = 100'000;  // the least that Linux accepts

// Asks that the calling thread, when it wakes up, takes a core from a thread that computes. Its share of the cores stays
// the same. Otherwise it waits until the slice of that thread is over (3 ms), and the device has nothing to do meanwhile.
// Linux 6.12 and later do this; earlier ones ignore it. Later calls by the same thread do nothing.
inline void ask_for_short_slice() {
  thread_local bool asked = false;
  if (asked) return;
  asked = true;
#ifdef SYS_sched_setattr
  struct {
    uint32_t size;
    uint32_t policy;
    uint64_t flags;
    int32_t nice;
    uint32_t priority;
    uint64_t runtime;
    uint64_t deadline;
    uint64_t period;
  } attributes{};
  if (syscall(SYS_sched_getattr, 0, &attributes, sizeof attributes, 0) != 0 || attributes.policy != 0) return;
  attributes.size = sizeof attributes;
  attributes.runtime = kShortSliceNanoseconds;
  syscall(SYS_sched_setattr, 0, &attributes, 0);
#endif
}

}  // namespace tidegate
