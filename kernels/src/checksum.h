// CRC-32C (Castagnoli), the checksum of stored blocks.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tidegate {

// Continues from `seed`: crc32c(b, crc32c(a)) is the checksum of a followed by b. Uses the CPU's own instruction where
// it has one and `use_instruction_set` did not choose the baseline below it; results are the same.
uint32_t crc32c(const void* data, size_t nbytes, uint32_t seed);

// What makes of the checksum of some bytes that of the same bytes before `nbytes` others, whose checksum is then added:
// crc32c(a followed by b) = shift(crc32c(a)) ^ crc32c(b), where `shift` is that of b's size.
class Crc32cShift {
 public:
  explicit Crc32cShift(size_t nbytes);
  size_t nbytes() const { return nbytes_; }
  uint32_t operator()(uint32_t checksum) const;

 private:
  size_t nbytes_;
  uint32_t factor_;
};

// The same by tables, on any CPU.
uint32_t crc32c_by_tables(const void* data, size_t nbytes, uint32_t seed);

}  // namespace tidegate
