// The floating-point mode that every kernel runs in, whatever the caller has set.
#pragma once

#include <cstdint>

#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
#endif

namespace tidegate {

// Round to nearest, denormals kept, no traps; puts the thread's own mode back at the end. Threads inherit the mode of
// the thread that starts them (torch.set_flush_denormal), so workers need it as much as callers do.
class DefaultFpMode {
 public:
  DefaultFpMode() : saved_(read()) { write(kDefault); }
  ~DefaultFpMode() { write(saved_); }
  DefaultFpMode(const DefaultFpMode&) = delete;
  DefaultFpMode& operator=(const DefaultFpMode&) = delete;

 private:
#if defined(__x86_64__) || defined(__i386__)
  static constexpr uint64_t kDefault = 0x1F80;  // MXCSR: all exceptions masked, nothing else
  static uint64_t read() { return _mm_getcsr(); }
  static void write(uint64_t mode) { _mm_setcsr(static_cast<unsigned>(mode)); }
#elif defined(__aarch64__)
  static constexpr uint64_t kDefault = 0;  // FPCR
  static uint64_t read() {
    uint64_t mode;
    asm volatile("mrs %0, fpcr" : "=r"(mode));
    return mode;
  }
  static void write(uint64_t mode) { asm volatile("msr fpcr, %0" : : "r"(mode) : "memory"); }
#else
#error "Tidegate's kernels know the floating-point mode of x86-64 and aarch64 only"
#endif
  uint64_t saved_;
};

}  // namespace tidegate
