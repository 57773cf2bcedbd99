// The gradient norm's sum: a fixed tree over fixed blocks, so threads and subgroups cannot change a bit of it.
#include <cmath>
#include <type_traits>
#include <vector>

#include "kernels.h"

namespace tidegate {
namespace {

constexpr size_t kBlock = 65536;
constexpr size_t kAccumulators = 16;
constexpr size_t kStaged = 512;  // elements that become fp32 in a loop of their own

// Accumulator j adds elements j, j + 16, … in order. A square of fp32 is exact in fp64. `numel`: whole rows of 16.
TIDEGATE_INLINE void add_rows(const float* x, size_t numel, double* sums) {
  for (size_t i = 0; i < numel; i += kAccumulators)
    for (size_t j = 0; j < kAccumulators; ++j) {
      const double value = x[i + j];
      sums[j] += value * value;
    }
}

TIDEGATE_INLINE double folded(double* sums) {
  for (size_t half = kAccumulators / 2; half > 0; half /= 2)
    for (size_t j = 0; j < half; ++j) sums[j] += sums[j + half];
  return sums[0];
}

// Of a block whose elements are all finite; else it is not finite itself, as fp64 has room for any squares of fp32.
template <class Grad>
TIDEGATE_INLINE double finite_sum(const void* elements, size_t begin, size_t end) {
  auto* x = static_cast<const typename Grad::Stored*>(elements);
  double sums[kAccumulators] = {};
  float staged[kStaged];
  size_t i = begin;
  if constexpr (std::is_same_v<typename Grad::Stored, float>) {
    i += (end - begin) / kAccumulators * kAccumulators;
    add_rows(x + begin, i - begin, sums);
  } else {
    for (; i + kStaged <= end; i += kStaged) {
      TIDEGATE_INDEPENDENT
      for (size_t j = 0; j < kStaged; ++j) staged[j] = Grad::load(x, i + j);
      add_rows(staged, kStaged, sums);
    }
  }
  for (; i < end; i += kAccumulators) {
    for (size_t j = 0; j < kAccumulators; ++j) staged[j] = i + j < end ? Grad::load(x, i + j) : 0.0f;
    add_rows(staged, kAccumulators, sums);
  }
  return folded(sums);
}

// The same sum, in which an element that is not finite counts as 0. Its branches keep it from being vectorized.
template <class Grad>
TIDEGATE_INLINE NormParts checked_sum(const void* elements, size_t begin, size_t end) {
  auto* x = static_cast<const typename Grad::Stored*>(elements);
  double sums[kAccumulators] = {};
  int64_t nonfinite = 0;
  for (size_t i = begin; i < end; ++i) {
    const double value = Grad::load(x, i);
    if (std::isfinite(value))
      sums[(i - begin) % kAccumulators] += value * value;
    else
      ++nonfinite;
  }
  return {folded(sums), nonfinite};
}

template <class Grad>
TIDEGATE_INLINE NormParts block_sum(const void* elements, size_t begin, size_t end) {
  const double sum = finite_sum<Grad>(elements, begin, end);
  return std::isfinite(sum) ? NormParts{sum, 0} : checked_sum<Grad>(elements, begin, end);
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
