// One binary for several instruction sets: every loop is compiled for each, and the best the CPU has is called.
#pragma once

#include <atomic>
#include <string>
#include <vector>

// TIDEGATE_EACH_ISA(X) expands to X(name, attribute): from the plainest to the widest.
// CMake defines TIDEGATE_HAS_X86_LEVELS where the compiler and the C library know these levels of x86-64.
#if defined(TIDEGATE_HAS_X86_LEVELS)
#define TIDEGATE_EACH_ISA(X)                                \
  X(Baseline, )                                             \
  X(Avx2, __attribute__((target("arch=x86-64-v3"))))        \
  X(Avx512, __attribute__((target("arch=x86-64-v4"))))
#else
#define TIDEGATE_EACH_ISA(X) X(Baseline, )
#endif

// Loop bodies must melt into the function for one instruction set: a body compiled alone would be baseline code.
#define TIDEGATE_INLINE inline __attribute__((always_inline))

// Arrays of one update never overlap, so an iteration depends on no other.
#if defined(__clang__)
#define TIDEGATE_INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#else
#define TIDEGATE_INDEPENDENT _Pragma("GCC ivdep")
#endif

namespace tidegate {

enum class Isa : int { Baseline = 0, Avx2 = 1, Avx512 = 2 };

inline Isa widest_isa() {
#if defined(TIDEGATE_HAS_X86_LEVELS)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("x86-64-v4")) return Isa::Avx512;
  if (__builtin_cpu_supports("x86-64-v3")) return Isa::Avx2;
#endif
  return Isa::Baseline;
}

// Names of what this build and this CPU offer, in the order of Isa; the last is the widest.
inline std::vector<std::string> instruction_sets() {
  static const char* const names[] = {"baseline", "avx2", "avx512"};
  return {names, names + static_cast<int>(widest_isa()) + 1};
}

// What every loop of this process runs with: the widest, unless a test or a comparison chooses another.
inline std::atomic<Isa>& current_isa() {
  static std::atomic<Isa> isa{widest_isa()};
  return isa;
}

}  // namespace tidegate
