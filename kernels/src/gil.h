// The interpreter lock, let go while native code works.
#pragma once

#include <Python.h>
#include <unistd.h>

#include <cxxabi.h>

namespace tidegate {

// A daemon thread that asks for the lock while the interpreter ends does not get it: before Python 3.14 it is unwound
// with pthread_exit instead, and frames that may not throw (ours, nanobind's) turn that into std::terminate. Such a
// thread stays here for ever, as it does from 3.14 on; the process ends without it.
class GilReleased {
 public:
  GilReleased() : state_(PyEval_SaveThread()) {}
  ~GilReleased() {
    try {
      PyEval_RestoreThread(state_);
    } catch (const abi::__forced_unwind&) {
      for (;;) pause();
    }
  }
  GilReleased(const GilReleased&) = delete;
  GilReleased& operator=(const GilReleased&) = delete;

 private:
  PyThreadState* state_;
};

}  // namespace tidegate
