// One update and one norm over arrays from standard input, for machines that have no Python: test_other_cpus.py.
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "kernels.h"

using namespace tidegate;

namespace {

std::vector<char> read(size_t nbytes) {
  std::vector<char> bytes(nbytes);
  if (std::fread(bytes.data(), 1, nbytes, stdin) != nbytes) std::abort();
  return bytes;
}

void write(const std::vector<char>& bytes) { std::fwrite(bytes.data(), 1, bytes.size(), stdout); }

}  // namespace

int main() {
  struct {
    int64_t numel, format, dtype, num_threads;
    Scalars scalars;
  } head;
  if (std::fread(&head, 1, 76, stdin) != 76) std::abort();
  const auto n = static_cast<size_t>(head.numel);
  auto weight = read(n * kWeightBytes[head.format]), aux = read(n * kAuxBytes[head.format]);
  auto exp_avg = read(n * 4), exp_avg_sq = read(n * 4), grad = read(n * kGradBytes[head.dtype]);
  const Arrays arrays{n,
                      weight.data(),
                      aux.data(),
                      reinterpret_cast<float*>(exp_avg.data()),
                      reinterpret_cast<float*>(exp_avg_sq.data()),
                      grad.data()};
  ThreadPool pool(static_cast<int>(head.num_threads), {});
  adamw_update(pool, arrays, WeightFormat(head.format), GradDtype(head.dtype), head.scalars);
  const NormParts norm = sum_of_squares(pool, grad.data(), n, GradDtype(head.dtype));
  for (const auto* bytes : {&weight, &aux, &exp_avg, &exp_avg_sq}) write(*bytes);
  std::fwrite(&norm, sizeof norm, 1, stdout);
}
