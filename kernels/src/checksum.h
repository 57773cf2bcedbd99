// CRC-32C (Castagnoli), the checksum of stored blocks.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tidegate {

// Continues from `seed`: crc32c(b, crc32c(a)) is the checksum of a followed by b. Uses the CPU's own instruction where
// it has one and `use_instruction_set` did not choose the baseline below it; results are the same.
uint32_t crc32c(const void* data, size_t nbytes, uint32_t seed);

// The same by tables, on any CPU.
uint32_t crc32c_by_tables(const void* data, size_t nbytes, uint32_t seed);

}  // namespace tidegate
