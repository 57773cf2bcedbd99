// How numbers of 16 bits become fp32 and back: branch-free, so that loops around them vectorize.
#pragma once

#include <cstdint>
#include <cstring>

#include "dispatch.h"

namespace tidegate {

TIDEGATE_INLINE uint32_t bits_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}

TIDEGATE_INLINE float float_of(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

// A NaN becomes a quiet one without low bits: rounding cannot carry it to infinity, and it leaves no remainder.
TIDEGATE_INLINE uint32_t tamed_bits(float x) {
  const uint32_t bits = bits_of(x);
  return x != x ? (bits | 0x00400000u) & 0xFFFF0000u : bits;
}

// Of tamed bits. bf16 nearest to fp32, ties away from zero: the only rule whose remainder always fits 16 signed bits.
TIDEGATE_INLINE uint16_t bf16_of(uint32_t tamed) { return static_cast<uint16_t>((tamed + 0x8000u) >> 16); }

// IEEE round to nearest even, as torch makes bf16 of fp32: for numbers that have no remainder beside them.
TIDEGATE_INLINE uint16_t bf16_nearest_even(float x) {
  const uint32_t bits = tamed_bits(x);
  return static_cast<uint16_t>((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
}

// Of tamed bits: what bf16_of left out.
TIDEGATE_INLINE int16_t remainder_of(uint32_t tamed) { return static_cast<int16_t>(tamed & 0xFFFFu); }

TIDEGATE_INLINE float join_bf16(uint16_t hi, int16_t lo) {
  return float_of((static_cast<uint32_t>(hi) << 16) + static_cast<uint32_t>(static_cast<int32_t>(lo)));
}

TIDEGATE_INLINE float from_bf16(uint16_t hi) { return float_of(static_cast<uint32_t>(hi) << 16); }

TIDEGATE_INLINE float from_f16(uint16_t half) {
  const uint32_t shifted = static_cast<uint32_t>(half & 0x7FFFu) << 13;
  const uint32_t exponent = shifted & 0x0F800000u;
  const uint32_t normal = shifted + (112u << 23);
  // A denormal is mantissa × 2^-24: let a subtraction of normal numbers do the normalizing.
  const uint32_t denormal = bits_of(float_of(normal + (1u << 23)) - float_of(113u << 23));
  const uint32_t special = normal + (112u << 23);
  const uint32_t magnitude = exponent == 0x0F800000u ? special : exponent == 0 ? denormal : normal;
  return float_of(magnitude | (static_cast<uint32_t>(half & 0x8000u) << 16));
}

// IEEE round to nearest even, as F16C does in hardware.
TIDEGATE_INLINE uint16_t f16_of(uint32_t bits) {
  const uint32_t magnitude = bits & 0x7FFFFFFFu;
  const uint32_t special = magnitude > 0x7F800000u ? 0x7E00u | ((magnitude >> 13) & 0x3FFu) : 0x7C00u;
  // 0.5 has its last bit at 2^-24, the unit of an fp16 denormal: the addition rounds there, to even.
  const uint32_t denormal = bits_of(float_of(magnitude) + 0.5f) - (126u << 23);
  const uint32_t odd = (magnitude >> 13) & 1u;
  const uint32_t normal = (magnitude - (112u << 23) + 0xFFFu + odd) >> 13;
  const uint32_t half = magnitude >= (143u << 23) ? special : magnitude < (113u << 23) ? denormal : normal;
  return static_cast<uint16_t>(half | ((bits >> 16) & 0x8000u));
}

}  // namespace tidegate
