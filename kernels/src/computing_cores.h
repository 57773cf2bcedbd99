// The cores on which threads of this process compute, and how other threads leave these cores to the computation.
//
// Linux often wakes a thread on the core of the thread that wakes it, although other cores are idle (Lozi et al., The
// Linux Scheduler: a Decade of Wasted Cores, EuroSys 2016), and kernels of virtual machines may do so on purpose. A
// thread that the CPU lane wakes for a copy would then interrupt the CPU lane. No thread is bound to cores before that
// happens.
#pragma once

namespace tidegate {

// While it lives, the calling thread computes.
class Computing {
 public:
  Computing();
  ~Computing();
  Computing(const Computing&) = delete;
  Computing& operator=(const Computing&) = delete;

  // To be called from time to time: the system may have moved the thread to another core.
  void go_on();

 private:
  int core_;
};

// If another thread computes on the core of the calling thread, binds the calling thread to the cores on which none
// does; does nothing if there is no such core. A later call allows all cores again, when no thread has computed for some
// time. To be called before each piece of work, while the calling thread has no `Computing`.
void leave_computing_core();

// Allows again all cores that were allowed before, at once. To be called before code that may start threads, because
// they inherit the cores.
void allow_all_cores();

}  // namespace tidegate
