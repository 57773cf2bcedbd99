// One binary for several instruction sets: which loops are cloned, and what was picked on this machine.
#pragma once

#if defined(TIDEGATE_HAS_TARGET_CLONES)
#define TIDEGATE_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define TIDEGATE_CLONES
#endif

// Loop bodies must melt into the clone that calls them: a body compiled alone would be baseline code.
#define TIDEGATE_INLINE inline __attribute__((always_inline))

// Arrays of one update never overlap, so an iteration depends on no other.
#if defined(__clang__)
#define TIDEGATE_INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#else
#define TIDEGATE_INDEPENDENT _Pragma("GCC ivdep")
#endif

namespace tidegate {

inline const char* instruction_set() {
#if defined(TIDEGATE_HAS_TARGET_CLONES)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("x86-64-v4")) return "avx512";
  if (__builtin_cpu_supports("x86-64-v3")) return "avx2";
#endif
  return "baseline";
}

}  // namespace tidegate
