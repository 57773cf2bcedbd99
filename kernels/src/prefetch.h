// Asks for memory before the arithmetic needs it: square roots and divisions keep a core from looking ahead by itself.
#pragma once

#include <type_traits>

#include "kernels.h"

namespace tidegate {

constexpr size_t kPrefetchBlock = 64;   // elements asked for at a time: whole cache lines of every array
constexpr size_t kPrefetchAhead = 192;  // elements between asking and using; 64 to 256 do equally well, 320 does not

template <class T>
TIDEGATE_INLINE void prefetch_block(const T* x, size_t i) {
  const auto from = reinterpret_cast<uintptr_t>(x) + (i + kPrefetchAhead) * sizeof(T);
  for (size_t line = 0; line < kPrefetchBlock * sizeof(T); line += 64)
    __builtin_prefetch(reinterpret_cast<const void*>(from + line), 1);  // beyond an array's end this does nothing
}

// What block `i` of the update will need soon.
template <class Weight, class Grad>
TIDEGATE_INLINE void prefetch(const Arrays& arrays, size_t i) {
  prefetch_block(arrays.exp_avg, i);
  prefetch_block(arrays.exp_avg_sq, i);
  prefetch_block(static_cast<const typename Weight::Stored*>(arrays.weight), i);
  prefetch_block(static_cast<const typename Grad::Stored*>(arrays.grad), i);
  if constexpr (!std::is_same_v<typename Weight::Aux, char>)
    prefetch_block(static_cast<const typename Weight::Aux*>(arrays.aux), i);
}

}  // namespace tidegate
