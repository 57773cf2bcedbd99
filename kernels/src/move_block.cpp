// One block: short transfers are continued, interruptions retried, and checksums taken while the block is in the cache.
#include "move_block.h"

#include <fcntl.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "checksum.h"

namespace tidegate {
namespace {

constexpr timespec kRetryPause{0, 1'000'000};
constexpr int kMostPauses = 1000;  // in a block, for a device that is busy; then it is an error like any other

ssize_t move_some(const IoRequest& request, size_t begin, size_t nbytes) {
  char* memory = request.memory + begin;
  const off_t offset = request.offset + off_t(begin);
  return request.kind == IoKind::Read ? pread(request.fd, memory, nbytes, offset)
                                      : pwrite(request.fd, memory, nbytes, offset);
}

// A direct transfer that stopped at an odd place goes on at the aligned place below it. What brings nothing new after
// that is the end of the file, or a device that takes no more: never a reason to try for ever.
BlockOutcome move_all(const IoRequest& request, bool direct, size_t begin, size_t nbytes) {
  size_t moved = 0;
  int pauses = 0;
  while (moved < nbytes) {
    const size_t from = direct ? moved - moved % kDirectAlignment : moved;
    const ssize_t count = move_some(request, begin + from, nbytes - from);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0 && errno == EAGAIN && pauses++ < kMostPauses) {
      nanosleep(&kRetryPause, nullptr);
      continue;
    }
    if (count < 0) return {moved, errno};
    if (from + size_t(count) <= moved)
      return request.kind == IoKind::Read ? BlockOutcome{moved, 0, true} : BlockOutcome{moved, EIO};
    moved = from + size_t(count);
  }
  return {moved};
}

}  // namespace

bool is_direct(int fd) {
  const int flags = fcntl(fd, F_GETFL);
  return flags != -1 && (flags & O_DIRECT) != 0;
}

BlockOutcome move_block(const IoRequest& request, bool direct, size_t block) {
  const size_t begin = block * request.block_bytes;
  const size_t nbytes = std::min(request.block_bytes, request.nbytes - begin);
  uint32_t* const checksum = request.checksums == nullptr ? nullptr : request.checksums + block;
  if (checksum != nullptr && request.kind == IoKind::Write && !request.checksums_known)
    *checksum = crc32c(request.memory + begin, nbytes, 0);
  BlockOutcome outcome = move_all(request, direct, begin, nbytes);
  if (checksum != nullptr && request.kind == IoKind::Read && !outcome.failed())
    outcome.checksum_mismatch = crc32c(request.memory + begin, nbytes, 0) != *checksum;
  return outcome;
}

}  // namespace tidegate
