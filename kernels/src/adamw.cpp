// The CPU update: gradient in, new weight and moments out, in one pass over memory.
#include <algorithm>

#include "adamw_step.h"
#include "prefetch.h"

namespace tidegate {
namespace {

template <class Weight, class Grad, class Step>
TIDEGATE_INLINE void adamw_block(const Arrays& arrays, const Step& step, size_t begin, size_t end) {
  auto* weight = static_cast<typename Weight::Stored*>(arrays.weight);
  auto* aux = static_cast<typename Weight::Aux*>(arrays.aux);
  auto* grad = static_cast<const typename Grad::Stored*>(arrays.grad);
  float* exp_avg = arrays.exp_avg;
  float* exp_avg_sq = arrays.exp_avg_sq;
  TIDEGATE_INDEPENDENT
  for (size_t i = begin; i < end; ++i) {
    const Element done = step({Weight::load(weight, aux, i), exp_avg[i], exp_avg_sq[i]}, Grad::load(grad, i));
    exp_avg[i] = done.exp_avg;
    exp_avg_sq[i] = done.exp_avg_sq;
    Weight::store(weight, aux, i, done.weight);
  }
}

template <class Weight, class Grad, class Step>
TIDEGATE_INLINE void adamw_loop(const Arrays& arrays, const Scalars& scalars, size_t begin, size_t end) {
  const Step step(scalars);  // a local copy of them cannot alias the arrays, so it stays in registers
  for (size_t i = begin; i < end; i += kPrefetchBlock) {
    prefetch<Weight, Grad>(arrays, i);
    adamw_block<Weight, Grad>(arrays, step, i, std::min(i + kPrefetchBlock, end));
  }
}

template <class Weight, class Grad, bool kTail>
TIDEGATE_INLINE void deepspeed_loop(const Arrays& arrays, const Scalars& s, size_t begin, size_t end) {
  if (s.l2 != 0.0f)
    adamw_loop<Weight, Grad, DeepSpeedStep<kTail, Decay::L2>>(arrays, s, begin, end);
  else if (s.decay != 0.0f)
    adamw_loop<Weight, Grad, DeepSpeedStep<kTail, Decay::DECOUPLED>>(arrays, s, begin, end);
  else
    adamw_loop<Weight, Grad, DeepSpeedStep<kTail, Decay::NONE>>(arrays, s, begin, end);
}

#define TIDEGATE_LOOPS(ISA, TARGET)                                                            \
  struct ISA##Loops {                                                                          \
    template <class Weight, class Grad>                                                        \
    TARGET static void run(const Arrays& arrays, const Scalars& s, size_t begin, size_t end) { \
      if (s.arithmetic == Arithmetic::DEEPSPEED)                                               \
        deepspeed_loop<Weight, Grad, false>(arrays, s, begin, end);                            \
      else if (s.arithmetic == Arithmetic::DEEPSPEED_TAIL)                                     \
        deepspeed_loop<Weight, Grad, true>(arrays, s, begin, end);                             \
      else if (s.l2 != 0.0f)                                                                   \
        adamw_loop<Weight, Grad, TorchStep<true>>(arrays, s, begin, end);                      \
      else                                                                                     \
        adamw_loop<Weight, Grad, TorchStep<false>>(arrays, s, begin, end);                     \
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
