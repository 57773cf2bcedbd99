// The CPU update: gradient in, new weight and moments out, in one pass over memory.
#include <algorithm>

#include "prefetch.h"

namespace tidegate {
namespace {

// The order of operations is the contract with kernels/oracle.py: each of + − × ÷ √ rounds once, to fp32.
template <class Weight, class Grad, bool kL2>
TIDEGATE_INLINE void adamw_block(const Arrays& arrays, const Scalars& c, size_t begin, size_t end) {
  auto* weight = static_cast<typename Weight::Stored*>(arrays.weight);
  auto* aux = static_cast<typename Weight::Aux*>(arrays.aux);
  auto* grad = static_cast<const typename Grad::Stored*>(arrays.grad);
  float* exp_avg = arrays.exp_avg;
  float* exp_avg_sq = arrays.exp_avg_sq;
  TIDEGATE_INDEPENDENT
  for (size_t i = begin; i < end; ++i) {
    float p = Weight::load(weight, aux, i);
    float g = Grad::load(grad, i) * c.grad_scale;
    if (kL2) g = g + c.l2 * p;
    p = p * c.decay;
    float m = exp_avg[i];
    m = m + (g - m) * c.one_minus_beta1;
    const float v = exp_avg_sq[i] * c.beta2 + (g * g) * c.one_minus_beta2;
    p = p - c.step_size * (m / (__builtin_sqrtf(v) * c.inverse_bias_correction2_sqrt + c.eps));
    exp_avg[i] = m;
    exp_avg_sq[i] = v;
    Weight::store(weight, aux, i, p);
  }
}

template <class Weight, class Grad, bool kL2>
TIDEGATE_INLINE void adamw_loop(const Arrays& arrays, const Scalars& s, size_t begin, size_t end) {
  const Scalars c = s;  // a local copy cannot alias the arrays, so it stays in registers
  for (size_t i = begin; i < end; i += kPrefetchBlock) {
    prefetch<Weight, Grad>(arrays, i);
    adamw_block<Weight, Grad, kL2>(arrays, c, i, std::min(i + kPrefetchBlock, end));
  }
}

// The L2 term is a branch outside the loop.
#define TIDEGATE_LOOPS(ISA, TARGET)                                                            \
  struct ISA##Loops {                                                                          \
    template <class Weight, class Grad>                                                        \
    TARGET static void run(const Arrays& arrays, const Scalars& s, size_t begin, size_t end) { \
      if (s.l2 != 0.0f)                                                                        \
        adamw_loop<Weight, Grad, true>(arrays, s, begin, end);                                 \
      else                                                                                     \
        adamw_loop<Weight, Grad, false>(arrays, s, begin, end);                                \
    }                                                                                          \
  };
TIDEGATE_EACH_ISA(TIDEGATE_LOOPS)

}  // namespace

void adamw_update(ThreadPool& pool, const Arrays& arrays, WeightFormat format, GradDtype dtype,
                  const Scalars& scalars) {
#define TIDEGATE_TABLE(ISA, TARGET) loops_by_format<ISA##Loops>(),
  static constexpr decltype(loops_by_format<BaselineLoops>()) tables[] = {TIDEGATE_EACH_ISA(TIDEGATE_TABLE)};
  const auto loop = tables[index(current_isa().load())][index(format)][index(dtype)];
  pool.for_ranges(arrays.numel, kElementsPerTask,
                  [&](size_t begin, size_t end) { loop(arrays, scalars, begin, end); });
}

}  // namespace tidegate
