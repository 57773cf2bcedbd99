// Preloaded into a process: direct writes hang, or one of them fails, while the file that FLAG names exists.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static ssize_t disturbed(const char* name, int fd, const void* memory, size_t nbytes, off_t offset) {
  ssize_t (*real)(int, const void*, size_t, off_t) = dlsym(RTLD_NEXT, name);
  const char* flag = getenv("FLAG");
  if (flag != NULL && access(flag, F_OK) == 0 && (fcntl(fd, F_GETFL) & O_DIRECT)) {
    if (strcmp(getenv("WRITES"), "hang") == 0)
      for (;;) pause();
    if (unlink(flag) == 0) {  // of the writes that come at once, one
      errno = ENODEV;
      return -1;
    }
  }
  return real(fd, memory, nbytes, offset);
}

ssize_t pwrite(int fd, const void* memory, size_t nbytes, off_t offset) {
  return disturbed("pwrite", fd, memory, nbytes, offset);
}

ssize_t pwrite64(int fd, const void* memory, size_t nbytes, off_t offset) {
  return disturbed("pwrite64", fd, memory, nbytes, offset);
}
