// A device that answers EAGAIN a given number of times before it serves a read. Prints error, bytes and calls.
#include <errno.h>
#include <time.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "move_block.h"

namespace {
long calls = 0, busy = 0;
}

extern "C" ssize_t pread(int, void* memory, size_t nbytes, off_t) {
  if (calls++ < busy) {
    errno = EAGAIN;
    return -1;
  }
  std::memset(memory, 1, nbytes);
  return ssize_t(nbytes);
}

extern "C" ssize_t pread64(int fd, void* memory, size_t nbytes, off64_t offset) {
  return pread(fd, memory, nbytes, offset);
}

extern "C" int nanosleep(const timespec*, timespec*) { return 0; }

int main(int, char** arguments) {
  busy = std::atol(arguments[1]);
  std::vector<char> memory(8192);
  const tidegate::IoRequest request{tidegate::IoKind::Read, 0, memory.data(), memory.size(), 0, 4096, nullptr};
  const tidegate::BlockOutcome outcome = tidegate::move_block(request, false, 1);
  std::printf("%d %zu %ld\n", outcome.error, outcome.nbytes, calls);
}
