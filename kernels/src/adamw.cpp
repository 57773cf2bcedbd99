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

// Elements whose checksums are made as soon as they are written: few enough to be in the cache of a core.
constexpr size_t kElementsPerChecksum = 16384;

auto loop_of(WeightFormat format, GradDtype dtype) {
#define TIDEGATE_TABLE(ISA, TARGET) loops_by_format<ISA##Loops>(),
  static constexpr decltype(loops_by_format<BaselineLoops>()) tables[] = {TIDEGATE_EACH_ISA(TIDEGATE_TABLE)};
  return tables[index(current_isa().load())][index(format)][index(dtype)];
}

template <class T>
void add_elements(BlockChecksums& checksums, const T* array, size_t bytes_per_element, size_t begin, size_t end) {
  if (array != nullptr)
    checksums.add(reinterpret_cast<const char*>(array) + begin * bytes_per_element, (end - begin) * bytes_per_element);
}

}  // namespace

void adamw_update(ThreadPool& pool, const Arrays& arrays, WeightFormat format, GradDtype dtype,
                  const Scalars& scalars) {
  const auto loop = loop_of(format, dtype);
  pool.for_ranges(arrays.numel, kElementsPerTask,
                  [&](size_t begin, size_t end) { loop(arrays, scalars, begin, end); });
}

void adamw_update(ThreadPool& pool, const Arrays& arrays, WeightFormat format, GradDtype dtype, const Scalars& scalars,
                  BlockChecksums& checksums) {
  const auto loop = loop_of(format, dtype);
  pool.for_ranges(arrays.numel, kElementsPerTask, [&](size_t begin, size_t end) {
    for (size_t first = begin; first < end; first += kElementsPerChecksum) {
      const size_t last = std::min(first + kElementsPerChecksum, end);
      loop(arrays, scalars, first, last);
      add_elements(checksums, arrays.weight, kWeightBytes[index(format)], first, last);
      add_elements(checksums, arrays.aux, kAuxBytes[index(format)], first, last);
      add_elements(checksums, arrays.exp_avg, sizeof(float), first, last);
      add_elements(checksums, arrays.exp_avg_sq, sizeof(float), first, last);
    }
  });
}

}  // namespace tidegate
