// The gradient norm's sum: a fixed tree over fixed blocks, so threads and subgroups cannot change a bit of it.
#include <vector>

#include "kernels.h"

namespace tidegate {
namespace {

constexpr size_t kBlock = 65536;
constexpr size_t kAccumulators = 16;

// Accumulator j adds elements j, j + 16, … in order. A square of fp32 is exact in fp64; a non-finite one counts as 0.
template <class Grad>
TIDEGATE_INLINE NormParts block_sum(const void* elements, size_t begin, size_t end) {
  auto* x = static_cast<const typename Grad::Stored*>(elements);
  double sums[kAccumulators] = {};
  uint32_t bad[kAccumulators] = {};
  const auto add = [&](size_t i, size_t j) __attribute__((always_inline)) {
    const uint32_t bits = bits_of(Grad::load(x, i));
    const uint32_t nonfinite = (bits & 0x7F800000u) == 0x7F800000u ? 1u : 0u;
    const double value = static_cast<double>(float_of(nonfinite ? 0u : bits));
    sums[j] += value * value;
    bad[j] += nonfinite;
  };
  size_t i = begin;
  for (; i + kAccumulators <= end; i += kAccumulators)
    for (size_t j = 0; j < kAccumulators; ++j) add(i + j, j);
  for (size_t j = 0; i + j < end; ++j) add(i + j, j);
  for (size_t half = kAccumulators / 2; half > 0; half /= 2)
    for (size_t j = 0; j < half; ++j) {
      sums[j] += sums[j + half];
      bad[j] += bad[j + half];
    }
  return {sums[0], static_cast<int64_t>(bad[0])};
}

// Adjacent pairs, an odd one is carried up.
double pairwise(std::vector<NormParts>& sums) {
  for (size_t n = sums.size(); n > 1; n = (n + 1) / 2)
    for (size_t i = 0; i < (n + 1) / 2; ++i)
      sums[i].sum = 2 * i + 1 < n ? sums[2 * i].sum + sums[2 * i + 1].sum : sums[2 * i].sum;
  return sums[0].sum;
}

#define TIDEGATE_LOOPS(ISA, TARGET)                                                \
  struct ISA##Loops {                                                              \
    template <class Grad>                                                          \
    TARGET static NormParts run(const void* elements, size_t begin, size_t end) { \
      return block_sum<Grad>(elements, begin, end);                                \
    }                                                                              \
  };
TIDEGATE_EACH_ISA(TIDEGATE_LOOPS)

}  // namespace

NormParts sum_of_squares(ThreadPool& pool, const void* elements, size_t numel, GradDtype dtype) {
#define TIDEGATE_TABLE(ISA, TARGET) {&ISA##Loops::run<GradF32>, &ISA##Loops::run<GradBF16>, &ISA##Loops::run<GradF16>},
  using Loop = NormParts (*)(const void*, size_t, size_t);
  static constexpr Loop tables[][3] = {TIDEGATE_EACH_ISA(TIDEGATE_TABLE)};
  if (numel == 0) return {0.0, 0};
  const auto loop = tables[index(current_isa().load())][index(dtype)];
  std::vector<NormParts> parts((numel + kBlock - 1) / kBlock);
  pool.for_ranges(numel, kBlock,
                  [&](size_t begin, size_t end) { parts[begin / kBlock] = loop(elements, begin, end); });
  int64_t nonfinite = 0;
  for (const NormParts& part : parts) nonfinite += part.nonfinite;
  const DefaultFpMode mode;
  return {pairwise(parts), nonfinite};
}

}  // namespace tidegate
