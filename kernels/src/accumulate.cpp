// Gradients of several micro-batches, summed where they wait for the update.
#include "kernels.h"

namespace tidegate {
namespace {

struct SumF32 {
  using Stored = float;
  static TIDEGATE_INLINE float load(const Stored* x, size_t i) { return x[i]; }
  static TIDEGATE_INLINE Stored rounded(float x) { return x; }
};

struct SumBF16 {
  using Stored = uint16_t;
  static TIDEGATE_INLINE float load(const Stored* x, size_t i) { return from_bf16(x[i]); }
  static TIDEGATE_INLINE Stored rounded(float x) { return bf16_nearest_even(x); }
};

struct SumF16 {
  using Stored = uint16_t;
  static TIDEGATE_INLINE float load(const Stored* x, size_t i) { return from_f16(x[i]); }
  static TIDEGATE_INLINE Stored rounded(float x) { return f16_of(bits_of(x)); }
};

// One addition in fp32, rounded once more to what the sum is stored in: as torch adds into `.grad`.
template <class Sum, class Grad>
TIDEGATE_INLINE void accumulate_block(void* sums, const void* elements, size_t begin, size_t end) {
  auto* sum = static_cast<typename Sum::Stored*>(sums);
  auto* grad = static_cast<const typename Grad::Stored*>(elements);
  TIDEGATE_INDEPENDENT
  for (size_t i = begin; i < end; ++i) sum[i] = Sum::rounded(Sum::load(sum, i) + Grad::load(grad, i));
}

#define TIDEGATE_LOOPS(ISA, TARGET)                                                            \
  struct ISA##Loops {                                                                          \
    template <class Sum, class Grad>                                                           \
    TARGET static void run(void* sums, const void* elements, size_t begin, size_t end) {       \
      accumulate_block<Sum, Grad>(sums, elements, begin, end);                                 \
    }                                                                                          \
  };
TIDEGATE_EACH_ISA(TIDEGATE_LOOPS)

}  // namespace

void accumulate(ThreadPool& pool, void* sums, GradDtype sum_dtype, const void* elements, GradDtype dtype,
                size_t numel) {
#define TIDEGATE_TABLE(ISA, TARGET)                                                                              \
  {loops_by_dtype<ISA##Loops, SumF32>(), loops_by_dtype<ISA##Loops, SumBF16>(), loops_by_dtype<ISA##Loops, SumF16>()},
  static constexpr decltype(loops_by_dtype<BaselineLoops, SumF32>()) tables[][3] = {TIDEGATE_EACH_ISA(TIDEGATE_TABLE)};
  const auto loop = tables[index(current_isa().load())][index(sum_dtype)][index(dtype)];
  pool.for_ranges(numel, kElementsPerTask,
                  [&](size_t begin, size_t end) { loop(sums, elements, begin, end); });
}

}  // namespace tidegate
