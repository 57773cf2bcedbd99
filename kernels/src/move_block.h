// One block between memory and a file, whole or not at all, with its checksum.
#pragma once

#include "direct_io.h"

namespace tidegate {

struct BlockOutcome {
  size_t nbytes = 0;
  int error = 0;  // errno
  bool end_of_file = false;
  bool checksum_mismatch = false;

  bool failed() const { return error != 0 || end_of_file || checksum_mismatch; }
};

// Whether the file takes aligned transfers only. An fd that is not open is not direct: the transfer will say so.
bool is_direct(int fd);

BlockOutcome move_block(const IoRequest& request, bool direct, size_t block);

}  // namespace tidegate
