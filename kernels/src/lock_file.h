// A private file whose bytes processes lock. The kernel releases these locks (POSIX record locks) when a process dies,
// or closes any descriptor of the file; a forked child inherits none.
#pragma once

#include <sys/types.h>

#include <stdexcept>
#include <string>

namespace tidegate {

// A file that cannot be locked, or that others may use.
struct LockFailure : std::runtime_error {
  LockFailure(int number, const std::string& why) : std::runtime_error(why), error(number) {}
  int error;  // errno
};

// Locks one byte for this process without waiting. False when another process has locked it.
bool try_lock(int fd, off_t byte);
// Blocks until this process has locked the byte.
void wait_lock(int fd, off_t byte);
void unlock(int fd, off_t byte) noexcept;
// Whether another process has locked the byte. Only asks, so that it is in nobody's way.
bool is_locked_by_other(int fd, off_t byte);

// Opens the file, and creates it and its directory where they are missing. Refuses what is a link, belongs to another
// user or is open to others, because they could replace the file, and what cannot be locked. Closed on exec.
int open_lock_file(const std::string& path);

}  // namespace tidegate
