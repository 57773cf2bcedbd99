// The checksum of a block is put together from those of its pieces.
#include "block_checksums.h"

#include <algorithm>

#include "checksum.h"

namespace tidegate {

BlockChecksums::BlockChecksums(const char* memory, size_t nbytes, size_t block_bytes)
    : memory_(memory), nbytes_(nbytes), block_bytes_(block_bytes) {}

void BlockChecksums::add(const void* data, size_t nbytes) {
  const auto first = reinterpret_cast<uintptr_t>(memory_), from = reinterpret_cast<uintptr_t>(data);
  if (from < first || from - first >= nbytes_ || nbytes > nbytes_ - (from - first)) return;
  for (size_t at = from - first, end = at + nbytes; at < end;) {
    const size_t size = std::min(end, (at / block_bytes_ + 1) * block_bytes_) - at;
    const Piece piece{at, size, crc32c(memory_ + at, size, 0)};
    at += size;
    const std::lock_guard<std::mutex> lock(mutex_);
    pieces_.push_back(piece);
  }
}

std::vector<uint32_t> BlockChecksums::finish() {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::sort(pieces_.begin(), pieces_.end(), [](const Piece& a, const Piece& b) { return a.offset < b.offset; });
  std::vector<uint32_t> checksums;
  Crc32cShift shift(0);
  auto piece = pieces_.cbegin();
  for (size_t at = 0; at < nbytes_;) {
    const size_t end = std::min(nbytes_, at + block_bytes_);
    uint32_t checksum = 0;
    while (at < end) {
      const bool gap = piece == pieces_.cend() || piece->offset >= end;
      const size_t next = gap ? end : piece->offset;
      if (next < at) return {};
      checksum = crc32c(memory_ + at, next - at, checksum);
      at = next;
      if (gap) continue;
      if (shift.nbytes() != piece->nbytes) shift = Crc32cShift(piece->nbytes);
      checksum = shift(checksum) ^ piece->checksum;
      at += piece->nbytes;
      ++piece;
    }
    checksums.push_back(checksum);
  }
  return checksums;
}

}  // namespace tidegate
