// Positional reads and writes of one storage path by threads of its own; direct where the descriptor is.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <utility>

namespace tidegate {

// What O_DIRECT asks of addresses, sizes and offsets: enough for every common device and file system.
constexpr size_t kDirectAlignment = 4096;

enum class IoKind { Read, Write };

// A run of bytes of a file, moved in blocks. Memory and checksums must live until the transfer is done.
struct IoRequest {
  IoKind kind;
  int fd;
  char* memory;
  size_t nbytes;
  off_t offset;
  size_t block_bytes;
  uint32_t* checksums;  // one a block: what a read must find, where a write puts what it wrote; null for none
  bool checksums_known = false;  // of a write: they are those of the memory already
};

struct IoState {
  bool done = false;
  bool cancelled = false;          // blocks were dropped by `cancel`
  bool end_of_file = false;        // the file ended inside a block that was read
  bool checksum_mismatch = false;  // a block that was read is not what was written
  int error = 0;                   // errno
  int64_t failed_block = -1;       // the first of the blocks that failed, for whichever reason
  size_t nbytes = 0;               // moved, blocks that failed after it included
  double start = std::numeric_limits<double>::quiet_NaN();  // of the first block, seconds of CLOCK_MONOTONIC
  double end = std::numeric_limits<double>::quiet_NaN();    // of the last block; known when done
};

struct IoQueue;
struct IoTransfer;

// A transfer that was asked for. Dropping the ticket does not stop it. In a forked child everything but that throws.
class IoTicket {
 public:
  explicit IoTicket(std::shared_ptr<IoTransfer> transfer) : transfer_(std::move(transfer)) {}
  IoTicket(const IoTicket&) = default;
  IoTicket& operator=(const IoTicket&) = default;
  ~IoTicket();

  bool wait(double seconds) const;  // whether it is done; infinity for no limit
  void cancel() const;              // drops the blocks that nobody has begun
  IoState state() const;
  bool ok() const;  // done, and every byte was moved

 private:
  std::shared_ptr<IoTransfer> transfer_;
};

class IoPool {
 public:
  // `kept_free`: of the threads, how many a single direction leaves to the other.
  explicit IoPool(int num_threads, int kept_free = 0);
  ~IoPool();
  IoPool(const IoPool&) = delete;
  IoPool& operator=(const IoPool&) = delete;

  // Queues a transfer. Threads take its blocks in order, and those of the next transfer of its direction when no block of
  // this one is left. Where reads and writes wait, a free thread takes a block of that direction of which fewer are in
  // flight.
  // A block that fails drops those of its transfer that nobody has begun. Throws after close and in a forked child.
  IoTicket submit(const IoRequest& request);

  // Lets what is queued end, then ends the threads. May be called twice; does nothing in a forked child.
  void close();
  int num_threads() const { return num_threads_; }

 private:
  const int num_threads_;
  std::shared_ptr<IoQueue> queue_;
};

}  // namespace tidegate
