// Updates that make the checksums of the write after them, on several threads; built with a sanitizer by
// test_update_checksums.py.
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <utility>
#include <vector>

#include "checksum.h"
#include "tasks.h"

using namespace tidegate;

namespace {

constexpr size_t kPage = 4096;

void fail(const char* why) {
  std::fprintf(stderr, "%s\n", why);
  std::abort();
}

}  // namespace

int main(int, char** arguments) {
  const int wanted = std::atoi(arguments[1]);
  const int fd = open(arguments[2], O_RDWR | O_CREAT, 0600);
  if (fd < 0) fail("the file cannot be opened");
  std::mt19937 random(1);
  ThreadPool pool(3, {});
  IoPool io(4);
  const auto factor = std::make_shared<GradientFactor>();
  const auto stop = std::make_shared<WriteStop>();
  for (int done = 0; done < wanted; ++done) {
    const size_t numel = 1 + random() % 200'000, nbytes = (8 * numel + kPage - 1) / kPage * kPage;
    const size_t block = kPage * (1 + random() % 64);
    std::unique_ptr<char, decltype(&std::free)> memory(static_cast<char*>(std::aligned_alloc(kPage, nbytes)), &std::free);
    std::fill_n(memory.get(), nbytes, char(7));
    std::vector<float> weight(numel, 1.0f), grad(numel, 0.5f);
    std::vector<uint32_t> checksums((nbytes + block - 1) / block);
    const auto flush = std::make_shared<TransferTask>(
        io, IoRequest{IoKind::Write, fd, memory.get(), nbytes, 0, block, checksums.data()}, nbytes - 8 * numel, nullptr,
        0.0, stop);
    float* const moments = reinterpret_cast<float*>(memory.get());
    const size_t cut = random() % numel, left_out = random() % 3;
    std::vector<UpdateTask::Part> parts;
    for (const auto& [first, count] : {std::pair<size_t, size_t>{0, cut}, {cut, numel - cut}}) {
      if (count <= left_out) continue;
      const Arrays arrays{count - left_out, &weight[first], nullptr, moments + first, moments + numel + first, &grad[first]};
      parts.push_back({arrays, WeightFormat(0), GradDtype(0), {1, 0, 1, 0.9f, 0.1f, 0.999f, 0.001f, 1e-3f, 1, 1e-8f, Arithmetic::TORCH}});
    }
    UpdateTask update(pool, parts, factor, flush);
    if (!update.run([] {}).ok || !flush->run([] {}).ok) fail("a task failed");
    for (size_t i = 0; i < checksums.size(); ++i)
      if (checksums[i] != crc32c_by_tables(memory.get() + i * block, std::min(block, nbytes - i * block), 0))
        fail("a checksum is not that of the memory");
  }
  close(fd);
  std::printf("updates %d\n", wanted);
}
