// The CPU update: gradient in, new weight and moments out, in one pass over memory.
#include "kernels.h"

namespace tidegate {
namespace {

// The order of operations is the contract with kernels/oracle.py: each of + − × ÷ √ rounds once, to fp32.
template <class Weight, class Grad, bool kL2>
TIDEGATE_INLINE void adamw_loop(const Arrays& arrays, const Scalars& s, size_t begin, size_t end) {
  auto* weight = static_cast<typename Weight::Stored*>(arrays.weight);
  auto* aux = static_cast<typename Weight::Aux*>(arrays.aux);
  auto* grad = static_cast<const typename Grad::Stored*>(arrays.grad);
  float* exp_avg = arrays.exp_avg;
  float* exp_avg_sq = arrays.exp_avg_sq;
  const Scalars c = s;  // a local copy cannot alias the arrays, so it stays in registers
  TIDEGATE_INDEPENDENT
  for (size_t i = begin; i < end; ++i) {
    float p = Weight::load(weight, aux, i);
    float g = Grad::load(grad, i) * c.grad_scale;
    if (kL2) g = g + c.l2 * p;
    p = p * c.decay;
    float m = exp_avg[i];
    m = m + (g - m) * c.one_minus_beta1;
    const float v = exp_avg_sq[i] * c.beta2 + (g * g) * c.one_minus_beta2;
    p = p - c.step_size * (m / (__builtin_sqrtf(v) / c.bias_correction2_sqrt + c.eps));
    exp_avg[i] = m;
    exp_avg_sq[i] = v;
    Weight::store(weight, aux, i, p);
  }
}

using Kernel = void (*)(const Arrays&, const Scalars&, size_t, size_t);

// Clones need plain functions, not templates: one for each weight format and gradient dtype.
#define TIDEGATE_KERNEL(W, G)                                                                                  \
  TIDEGATE_CLONES void adamw_##W##_##G(const Arrays& arrays, const Scalars& s, size_t begin, size_t end) { \
    if (s.l2 != 0.0f)                                                                                          \
      adamw_loop<Weight##W, Grad##G, true>(arrays, s, begin, end);                                             \
    else                                                                                                       \
      adamw_loop<Weight##W, Grad##G, false>(arrays, s, begin, end);                                            \
  }
#define TIDEGATE_KERNELS(W) TIDEGATE_KERNEL(W, F32) TIDEGATE_KERNEL(W, BF16) TIDEGATE_KERNEL(W, F16)

}  // namespace

TIDEGATE_KERNELS(F32)
TIDEGATE_KERNELS(BF16Remainder)
TIDEGATE_KERNELS(F16Master)
TIDEGATE_KERNELS(BF16Master)

void adamw_update(ThreadPool& pool, const Arrays& arrays, WeightFormat format, GradDtype dtype,
                  const Scalars& scalars) {
  static const Kernel kernels[4][3] = {
      {adamw_F32_F32, adamw_F32_BF16, adamw_F32_F16},
      {adamw_BF16Remainder_F32, adamw_BF16Remainder_BF16, adamw_BF16Remainder_F16},
      {adamw_F16Master_F32, adamw_F16Master_BF16, adamw_F16Master_F16},
      {adamw_BF16Master_F32, adamw_BF16Master_BF16, adamw_BF16Master_F16},
  };
  const Kernel kernel = kernels[static_cast<int>(format)][static_cast<int>(dtype)];
  pool.for_ranges(arrays.numel, kElementsPerTask,
                  [&](size_t begin, size_t end) { kernel(arrays, scalars, begin, end); });
}

}  // namespace tidegate
