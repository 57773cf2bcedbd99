// The memory traffic of an update and nothing else: what the memory of this machine allows.
#include <algorithm>
#include <type_traits>

#include "prefetch.h"

namespace tidegate {
namespace {

TIDEGATE_INLINE uint32_t raw(float x) { return bits_of(x); }
TIDEGATE_INLINE uint32_t raw(uint16_t x) { return x; }
TIDEGATE_INLINE float flipped(float x, uint32_t flip) { return float_of(bits_of(x) ^ flip); }
TIDEGATE_INLINE uint16_t flipped(uint16_t x, uint32_t flip) { return static_cast<uint16_t>(x ^ flip); }
TIDEGATE_INLINE int16_t flipped(int16_t x, uint32_t flip) { return static_cast<int16_t>(x ^ flip); }

// `mask` is 0 but the compiler does not know: every element is read and written back as it was. No conversions, and
// the update's prefetches: a slower yardstick would flatter it.
template <class Weight, class Grad>
TIDEGATE_INLINE void stream_block(const Arrays& arrays, uint32_t mask, size_t begin, size_t end) {
  auto* weight = static_cast<typename Weight::Stored*>(arrays.weight);
  auto* aux = static_cast<typename Weight::Aux*>(arrays.aux);
  auto* grad = static_cast<const typename Grad::Stored*>(arrays.grad);
  float* exp_avg = arrays.exp_avg;
  float* exp_avg_sq = arrays.exp_avg_sq;
  TIDEGATE_INDEPENDENT
  for (size_t i = begin; i < end; ++i) {
    const uint32_t flip = raw(grad[i]) & mask;
    exp_avg[i] = flipped(exp_avg[i], flip);
    exp_avg_sq[i] = flipped(exp_avg_sq[i], flip);
    weight[i] = flipped(weight[i], flip);
    if constexpr (!std::is_same_v<typename Weight::Aux, char>) aux[i] = flipped(aux[i], flip);
  }
}

template <class Weight, class Grad>
TIDEGATE_INLINE void stream_loop(const Arrays& arrays, uint32_t mask, size_t begin, size_t end) {
  for (size_t i = begin; i < end; i += kPrefetchBlock) {
    prefetch<Weight, Grad>(arrays, i);
    stream_block<Weight, Grad>(arrays, mask, i, std::min(i + kPrefetchBlock, end));
  }
}

#define TIDEGATE_LOOPS(ISA, TARGET)                                                           \
  struct ISA##Loops {                                                                         \
    template <class Weight, class Grad>                                                       \
    TARGET static void run(const Arrays& arrays, uint32_t mask, size_t begin, size_t end) { \
      stream_loop<Weight, Grad>(arrays, mask, begin, end);                                    \
    }                                                                                         \
  };
TIDEGATE_EACH_ISA(TIDEGATE_LOOPS)

}  // namespace

void stream_like(ThreadPool& pool, const Arrays& arrays, WeightFormat format, GradDtype dtype) {
#define TIDEGATE_TABLE(ISA, TARGET) loops_by_format<ISA##Loops>(),
  static constexpr decltype(loops_by_format<BaselineLoops>()) tables[] = {TIDEGATE_EACH_ISA(TIDEGATE_TABLE)};
  const auto loop = tables[index(current_isa().load())][index(format)][index(dtype)];
  static volatile uint32_t opaque_zero = 0;
  const uint32_t mask = opaque_zero;
  pool.for_ranges(arrays.numel, kElementsPerTask, [&](size_t begin, size_t end) { loop(arrays, mask, begin, end); });
}

}  // namespace tidegate
