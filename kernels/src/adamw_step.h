// The update of one element, in the arithmetics that there are. The order of operations is the contract with the oracles
// in kernels/adamw/ and kernels/deepspeed_adamw/. A step has no branches, so that the loop around it vectorizes: what the
// scalars decide is its type.
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

// How weights decay: not at all, through their gradients (Adam) or apart from them (AdamW).
enum class Decay { NONE, L2, DECOUPLED };

// Arithmetic::DEEPSPEED and, with kTail, DEEPSPEED_TAIL: an fma rounds once. Without decay there is no term for it: a
// product with 0 would turn −0 into 0 and infinity into NaN.
template <bool kTail, Decay kDecay>
struct DeepSpeedStep {
  explicit DeepSpeedStep(const Scalars& scalars) : c(scalars) {}

  TIDEGATE_INLINE Element operator()(const Element& old, float grad) const {
    float p = old.weight;
    float g = grad * c.grad_scale;
    if (kDecay == Decay::L2) g = __builtin_fmaf(p, c.l2, g);
    const float m = sum(old.exp_avg, c.beta1, g, c.one_minus_beta1);
    const float v = sum(old.exp_avg_sq, c.beta2, g * g, c.one_minus_beta2);
    const float quotient = m / __builtin_fmaf(__builtin_sqrtf(v), c.inverse_bias_correction2_sqrt, c.eps);
    if (kDecay == Decay::DECOUPLED) p = __builtin_fmaf(p, -c.decay, p);
    p = __builtin_fmaf(quotient, -c.step_size, p);
    return {p, m, v};
  }

  // old × beta + fresh × rest: one product is rounded, then the other and the sum together.
  static TIDEGATE_INLINE float sum(float old, float beta, float fresh, float rest) {
    return kTail ? __builtin_fmaf(old, beta, fresh * rest) : __builtin_fmaf(fresh, rest, old * beta);
  }

  Scalars c;
};

}  // namespace tidegate
