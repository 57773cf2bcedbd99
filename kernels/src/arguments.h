// Checks of the arguments that Python gives: a wrong address would be a crash far away from its cause.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>

#include "kernels.h"

namespace tidegate {

// Refuses null and misaligned addresses.
inline void* at(uintptr_t address, size_t alignment, const char* name) {
  if (address == 0 || address % alignment != 0)
    throw std::invalid_argument(std::string(name) + " is at address " + std::to_string(address) +
                                ", must be a multiple of " + std::to_string(alignment) + " and not 0");
  return reinterpret_cast<void*>(address);
}

inline int checked(int value, int count, const char* name) {
  if (value < 0 || value >= count)
    throw std::invalid_argument(std::string(name) + " is " + std::to_string(value) + ", must be 0.." +
                                std::to_string(count - 1));
  return value;
}

// The arrays of one update, and their formats.
struct UpdateCall {
  Arrays arrays;
  WeightFormat format;
  GradDtype dtype;
};

inline UpdateCall update_call(size_t numel, uintptr_t weight, int format, uintptr_t aux, uintptr_t exp_avg,
                              uintptr_t exp_avg_sq, uintptr_t grad, int dtype) {
  checked(format, 4, "weight_format");
  checked(dtype, 3, "grad_dtype");
  if (kAuxBytes[format] == 0 && aux != 0) throw std::invalid_argument("aux must be 0 for fp32 weights");
  if (numel == 0) return {{}, WeightFormat(format), GradDtype(dtype)};
  const Arrays arrays{numel,
                      at(weight, kWeightBytes[format], "weight"),
                      kAuxBytes[format] == 0 ? nullptr : at(aux, kAuxBytes[format], "aux"),
                      static_cast<float*>(at(exp_avg, 4, "exp_avg")),
                      static_cast<float*>(at(exp_avg_sq, 4, "exp_avg_sq")),
                      at(grad, kGradBytes[dtype], "grad")};
  return {arrays, WeightFormat(format), GradDtype(dtype)};
}

}  // namespace tidegate
