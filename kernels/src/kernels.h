// What the kernels offer to the module: plain functions over raw memory.
#pragma once

#include <cstddef>
#include <cstdint>

#include "block_checksums.h"
#include "formats.h"
#include "thread_pool.h"

namespace tidegate {

// Whose roundings an update has. The numbers are those of kernels/adamw/scalars.py, which says what they are.
enum class Arithmetic : int { TORCH = 0, DEEPSPEED = 1, DEEPSPEED_TAIL = 2 };

// Each number is one fp32 value; kernels/adamw/scalars.py says what it stands for.
struct Scalars {
  float grad_scale;
  float l2;
  float decay;
  float beta1;
  float one_minus_beta1;
  float beta2;
  float one_minus_beta2;
  float step_size;
  float inverse_bias_correction2_sqrt;
  float eps;
  Arithmetic arithmetic;
};

// Bytes of an element, by format and dtype.
inline constexpr size_t kWeightBytes[] = {4, 2, 2, 2};
inline constexpr size_t kAuxBytes[] = {0, 2, 4, 4};
inline constexpr size_t kGradBytes[] = {4, 2, 2};

// The arrays of one update, `numel` elements each.
struct Arrays {
  size_t numel;
  void* weight;
  void* aux;
  float* exp_avg;
  float* exp_avg_sq;
  const void* grad;
};

struct NormParts {
  double sum;         // of the squares of all finite elements
  int64_t nonfinite;  // how many elements are NaN or infinite
};

void adamw_update(ThreadPool& pool, const Arrays& arrays, WeightFormat format, GradDtype dtype, const Scalars& scalars);

// The same, which also adds the elements that it writes to these checksums.
void adamw_update(ThreadPool& pool, const Arrays& arrays, WeightFormat format, GradDtype dtype, const Scalars& scalars,
                  BlockChecksums& checksums);

// The memory traffic of adamw_update with no arithmetic, the yardstick of the benchmark. Changes nothing.
void stream_like(ThreadPool& pool, const Arrays& arrays, WeightFormat format, GradDtype dtype);

// sums[i] += elements[i]; the two never overlap.
void accumulate(ThreadPool& pool, void* sums, GradDtype sum_dtype, const void* elements, GradDtype dtype, size_t numel);

// Copies memory that does not overlap. Large copies bypass the cache.
void copy_bytes(void* dst, const void* src, size_t nbytes);

NormParts sum_of_squares(ThreadPool& pool, const void* elements, size_t numel, GradDtype dtype);

}  // namespace tidegate
