// Checksums of the blocks of a state in memory, made piece by piece by the update that writes it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <vector>

namespace tidegate {

// An update adds what it has just written, while that is in the cache of its core, so that the write to storage need not
// read the memory again. Threads may add pieces in any order.
class BlockChecksums {
 public:
  // Of `nbytes` of memory in blocks of `block_bytes`, the last of which may be shorter.
  BlockChecksums(const char* memory, size_t nbytes, size_t block_bytes);

  // Adds bytes that do not change any more. Ignores what lies outside of the memory.
  void add(const void* data, size_t nbytes);
  // The checksum of each block; bytes that were not added are read now. Empty if bytes were added twice.
  std::vector<uint32_t> finish();

 private:
  struct Piece {
    size_t offset;
    size_t nbytes;
    uint32_t checksum;
  };

  const char* const memory_;
  const size_t nbytes_;
  const size_t block_bytes_;
  std::mutex mutex_;
  std::vector<Piece> pieces_;
};

}  // namespace tidegate
