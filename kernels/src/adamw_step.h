// The update of one element, in the arithmetics that there are. The order of operations is the contract with
// kernels/oracle.py. Steps are branch-free, so that the loop around them vectorizes.
#pragma once

#include "convert.h"
#include "kernels.h"

namespace tidegate {

struct Element {
  float weight;  // fp32, whatever is stored
  float exp_avg;
  float exp_avg_sq;
};

// Arithmetic::TORCH: each of + − × ÷ √ rounds once, to fp32.
template <bool kL2>
struct TorchStep {
  explicit TorchStep(const Scalars& scalars) : c(scalars) {}

  TIDEGATE_INLINE Element operator()(const Element& old, float grad) const {
    float p = old.weight;
    float g = grad * c.grad_scale;
    if (kL2) g = g + c.l2 * p;
    p = p * c.decay;
    const float m = old.exp_avg + (g - old.exp_avg) * c.one_minus_beta1;
    const float v = old.exp_avg_sq * c.beta2 + (g * g) * c.one_minus_beta2;
    p = p - c.step_size * (m / (__builtin_sqrtf(v) * c.inverse_bias_correction2_sqrt + c.eps));
    return {p, m, v};
  }

  Scalars c;
};

// Arithmetic::DEEPSPEED and, with kTail, DEEPSPEED_TAIL: an fma rounds once. What cpu_adam leaves out where weights do
// not decay is left out here: a product with 0 would turn −0 into 0 and infinity into NaN.
template <bool kTail>
struct DeepSpeedStep {
  explicit DeepSpeedStep(const Scalars& scalars)
      : c(scalars), l2_bits(scalars.l2 != 0.0f ? ~0u : 0u), decay_bits(scalars.decay != 0.0f ? ~0u : 0u) {}

  TIDEGATE_INLINE Element operator()(const Element& old, float grad) const {
    float p = old.weight;
    float g = grad * c.grad_scale;
    g = chosen(l2_bits, __builtin_fmaf(p, c.l2, g), g);
    const float m = sum(old.exp_avg, c.beta1, g, c.one_minus_beta1);
    const float v = sum(old.exp_avg_sq, c.beta2, g * g, c.one_minus_beta2);
    const float quotient = m / __builtin_fmaf(__builtin_sqrtf(v), c.inverse_bias_correction2_sqrt, c.eps);
    p = chosen(decay_bits, __builtin_fmaf(p, -c.decay, p), p);
    p = __builtin_fmaf(quotient, -c.step_size, p);
    return {p, m, v};
  }

  // old × beta + fresh × rest: one product is rounded, then the other and the sum together.
  static TIDEGATE_INLINE float sum(float old, float beta, float fresh, float rest) {
    return kTail ? __builtin_fmaf(old, beta, fresh * rest) : __builtin_fmaf(fresh, rest, old * beta);
  }

  // Not a condition: the compiler would make a loop for each of its cases.
  static TIDEGATE_INLINE float chosen(uint32_t bits, float yes, float no) {
    return float_of((bits_of(yes) & bits) | (bits_of(no) & ~bits));
  }

  Scalars c;
  uint32_t l2_bits, decay_bits;
};

}  // namespace tidegate
