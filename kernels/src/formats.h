// How weights and gradients are laid out in memory, and how one element is read and written.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "convert.h"

namespace tidegate {

// The numbers are those of kernels/arithmetic/formats.py.
enum class WeightFormat : int { F32 = 0, BF16_REMAINDER = 1, F16_MASTER = 2, BF16_MASTER = 3 };
enum class GradDtype : int { F32 = 0, BF16 = 1, F16 = 2 };

struct GradF32 {
  using Stored = float;
  static TIDEGATE_INLINE float load(const Stored* x, size_t i) { return x[i]; }
};

struct GradBF16 {
  using Stored = uint16_t;
  static TIDEGATE_INLINE float load(const Stored* x, size_t i) { return from_bf16(x[i]); }
};

struct GradF16 {
  using Stored = uint16_t;
  static TIDEGATE_INLINE float load(const Stored* x, size_t i) { return from_f16(x[i]); }
};

// `Aux` is what stands beside the weight: nothing (a byte pointer that is never followed), remainder or fp32 master.
struct WeightF32 {
  using Stored = float;
  using Aux = char;
  static TIDEGATE_INLINE float load(const Stored* w, const Aux*, size_t i) { return w[i]; }
  static TIDEGATE_INLINE void store(Stored* w, Aux*, size_t i, float p) { w[i] = p; }
};

struct WeightBF16Remainder {
  using Stored = uint16_t;
  using Aux = int16_t;
  static TIDEGATE_INLINE float load(const Stored* w, const Aux* aux, size_t i) { return join_bf16(w[i], aux[i]); }
  static TIDEGATE_INLINE void store(Stored* w, Aux* aux, size_t i, float p) {
    const uint32_t bits = tamed_bits(p);
    w[i] = bf16_of(bits);
    aux[i] = remainder_of(bits);
  }
};

struct WeightF16Master {
  using Stored = uint16_t;
  using Aux = float;
  static TIDEGATE_INLINE float load(const Stored*, const Aux* aux, size_t i) { return aux[i]; }
  static TIDEGATE_INLINE void store(Stored* w, Aux* aux, size_t i, float p) {
    w[i] = f16_of(bits_of(p));
    aux[i] = p;
  }
};

struct WeightBF16Master {
  using Stored = uint16_t;
  using Aux = float;
  static TIDEGATE_INLINE float load(const Stored*, const Aux* aux, size_t i) { return aux[i]; }
  static TIDEGATE_INLINE void store(Stored* w, Aux* aux, size_t i, float p) {
    w[i] = bf16_of(tamed_bits(p));
    aux[i] = p;
  }
};

template <class Enum>
constexpr size_t index(Enum value) {
  return static_cast<size_t>(value);
}

// `Loops::run<Weight, Grad>` for every gradient dtype and, below, for every weight format, in the order of their numbers.
template <class Loops, class Weight>
constexpr auto loops_by_dtype() {
  return std::array{&Loops::template run<Weight, GradF32>, &Loops::template run<Weight, GradBF16>,
                    &Loops::template run<Weight, GradF16>};
}

template <class Loops>
constexpr auto loops_by_format() {
  return std::array{loops_by_dtype<Loops, WeightF32>(), loops_by_dtype<Loops, WeightBF16Remainder>(),
                    loops_by_dtype<Loops, WeightF16Master>(), loops_by_dtype<Loops, WeightBF16Master>()};
}

}  // namespace tidegate
