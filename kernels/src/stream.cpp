// The memory traffic of an update without its arithmetic: what the memory of this machine allows.
#include "kernels.h"

namespace tidegate {
namespace {

// `mask` is 0 but the compiler does not know: every element is read and written back as it was.
template <class Weight, class Grad>
TIDEGATE_INLINE void stream_loop(const Arrays& arrays, uint32_t mask, size_t begin, size_t end) {
  auto* weight = static_cast<typename Weight::Stored*>(arrays.weight);
  auto* aux = static_cast<typename Weight::Aux*>(arrays.aux);
  auto* grad = static_cast<const typename Grad::Stored*>(arrays.grad);
  float* exp_avg = arrays.exp_avg;
  float* exp_avg_sq = arrays.exp_avg_sq;
  TIDEGATE_INDEPENDENT
  for (size_t i = begin; i < end; ++i) {
    const uint32_t flip = bits_of(Grad::load(grad, i)) & mask;
    exp_avg[i] = float_of(bits_of(exp_avg[i]) ^ flip);
    exp_avg_sq[i] = float_of(bits_of(exp_avg_sq[i]) ^ flip);
    Weight::store(weight, aux, i, float_of(bits_of(Weight::load(weight, aux, i)) ^ flip));
  }
}

using Kernel = void (*)(const Arrays&, uint32_t, size_t, size_t);

#define TIDEGATE_KERNEL(W, G)                                                                              \
  TIDEGATE_CLONES void stream_##W##_##G(const Arrays& arrays, uint32_t mask, size_t begin, size_t end) { \
    stream_loop<Weight##W, Grad##G>(arrays, mask, begin, end);                                             \
  }
#define TIDEGATE_KERNELS(W) TIDEGATE_KERNEL(W, F32) TIDEGATE_KERNEL(W, BF16) TIDEGATE_KERNEL(W, F16)

}  // namespace

TIDEGATE_KERNELS(F32)
TIDEGATE_KERNELS(BF16Remainder)
TIDEGATE_KERNELS(F16Master)
TIDEGATE_KERNELS(BF16Master)

void stream_like(ThreadPool& pool, const Arrays& arrays, WeightFormat format, GradDtype dtype) {
  static const Kernel kernels[4][3] = {
      {stream_F32_F32, stream_F32_BF16, stream_F32_F16},
      {stream_BF16Remainder_F32, stream_BF16Remainder_BF16, stream_BF16Remainder_F16},
      {stream_F16Master_F32, stream_F16Master_BF16, stream_F16Master_F16},
      {stream_BF16Master_F32, stream_BF16Master_BF16, stream_BF16Master_F16},
  };
  const Kernel kernel = kernels[static_cast<int>(format)][static_cast<int>(dtype)];
  static volatile uint32_t opaque_zero = 0;
  const uint32_t mask = opaque_zero;
  pool.for_ranges(arrays.numel, kElementsPerTask, [&](size_t begin, size_t end) { kernel(arrays, mask, begin, end); });
}

}  // namespace tidegate
