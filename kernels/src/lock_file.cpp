#include "lock_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdio>
#include <system_error>
#include <thread>

namespace tidegate {
namespace {

constexpr char kRemedy[] = "XDG_RUNTIME_DIR to a directory of yours on this node.";
constexpr auto kDeadlockPause = std::chrono::microseconds(500);

std::string message_of(int error) { return std::generic_category().message(error); }

struct flock of_byte(short type, off_t byte) {
  struct flock lock {};
  lock.l_type = type;
  lock.l_whence = SEEK_SET;
  lock.l_start = byte;
  lock.l_len = 1;
  return lock;
}

// 0 or errno; the byte's lock is answered in `lock`.
int control(int fd, int command, struct flock& lock) {
  while (fcntl(fd, command, &lock) != 0)
    if (errno != EINTR) return errno;
  return 0;
}

void check_private(const std::string& path, const struct stat& found) {
  if (found.st_uid != geteuid())
    throw LockFailure(EPERM, path + " belongs to user " + std::to_string(found.st_uid) + ", not to " +
                                 std::to_string(geteuid()) + ", the user of this process. Remove it, or set " + kRemedy);
  char mode[16];
  std::snprintf(mode, sizeof mode, "%04o", unsigned(found.st_mode & 07777));
  if (S_ISLNK(found.st_mode)) throw LockFailure(ELOOP, path + " is a link. Remove it, or set " + kRemedy);
  if (found.st_mode & 077)
    throw LockFailure(EACCES, path + " has mode " + mode + ": others may use it. Remove it, or set " + kRemedy);
}

void make_private_directory(const std::string& path) {
  struct stat found {};
  int error = mkdir(path.c_str(), 0700) == 0 ? 0 : errno;
  if (error == EEXIST && stat(path.c_str(), &found) == 0 && S_ISDIR(found.st_mode)) error = 0;
  if (error == 0 && lstat(path.c_str(), &found) != 0) error = errno;
  if (error != 0)
    throw LockFailure(error, path + ", the directory for lock files, cannot be created: " + message_of(error) +
                                 ". Set " + kRemedy);
  check_private(path, found);
}

LockFailure cannot_lock(const std::string& path, int error) {
  struct stat found {};
  const std::string owner =
      lstat(path.c_str(), &found) == 0 ? ", it belongs to user " + std::to_string(found.st_uid) : "";
  return {error, path + " cannot be locked: " + message_of(error) + owner + ". Remove it, or set " + kRemedy};
}

}  // namespace

bool try_lock(int fd, off_t byte) {
  struct flock lock = of_byte(F_WRLCK, byte);
  const int error = control(fd, F_SETLK, lock);
  if (error != 0 && error != EAGAIN && error != EACCES) throw LockFailure(error, message_of(error));
  return error == 0;
}

void wait_lock(int fd, off_t byte) {
  for (;;) {
    struct flock lock = of_byte(F_WRLCK, byte);
    const int error = control(fd, F_SETLKW, lock);
    if (error == 0) return;
    // The kernel treats a process as one thread: two threads that wait for different files can look like a deadlock.
    if (error != EDEADLK) throw LockFailure(error, message_of(error));
    std::this_thread::sleep_for(kDeadlockPause);
  }
}

void unlock(int fd, off_t byte) noexcept {
  struct flock lock = of_byte(F_UNLCK, byte);
  control(fd, F_SETLK, lock);  // a lock of this process on a file that is open: nothing can fail
}

bool is_locked_by_other(int fd, off_t byte) {
  struct flock lock = of_byte(F_WRLCK, byte);
  if (const int error = control(fd, F_GETLK, lock); error != 0) throw LockFailure(error, message_of(error));
  return lock.l_type != F_UNLCK;
}

int open_lock_file(const std::string& path) {
  make_private_directory(path.substr(0, path.rfind('/')));
  const int fd = open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
  if (fd < 0) throw cannot_lock(path, errno);
  try {
    struct stat found {};
    if (fstat(fd, &found) != 0) throw cannot_lock(path, errno);
    check_private(path, found);
    struct flock lock = of_byte(F_WRLCK, 0);
    if (const int error = control(fd, F_GETLK, lock); error != 0) throw cannot_lock(path, error);
  } catch (...) {
    close(fd);
    throw;
  }
  return fd;
}

}  // namespace tidegate
