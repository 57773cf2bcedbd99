"""Space on a file system: measures free space, reserves space for a file, and makes the messages for too little
space."""

from __future__ import annotations

import errno
import os
import resource

from tidegate.errors import PathFull
from tidegate.kernels.io.direct_io import allocate_blocks


def reserve(fd: int, nbytes: int) -> bool:
    """Makes the open file at least `nbytes` long and allocates its blocks, so that later writes cannot run out of
    space. Returns False where the file system cannot allocate blocks: then only the free space was checked, and the
    file is sparse.

    Raises PathFull, with the byte counts, if there is not enough free space. The size of the file is then unchanged.
    """
    if nbytes < 1:
        raise ValueError(f"nbytes is {nbytes}, it must be at least 1")
    before = os.fstat(fd).st_size
    try:
        allocate_blocks(fd, nbytes)
    except OSError as error:
        os.ftruncate(fd, before)
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise _full(fd, nbytes, error.errno) from error
        if error.errno not in (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL):
            raise
    else:
        return True
    if nbytes - before > free_bytes(fd):
        raise _full(fd, nbytes, errno.ENOSPC)
    os.ftruncate(fd, max(before, nbytes))
    return False


def free_bytes(directory: int | str | os.PathLike[str]) -> int:
    """Free bytes for ordinary users on the file system of a directory or an open file."""
    status = os.statvfs(directory)
    return status.f_bavail * status.f_frsize


def _full(fd: int, nbytes: int, code: int) -> PathFull:
    path, needed, free = os.readlink(f"/proc/self/fd/{fd}"), nbytes - os.fstat(fd).st_size, free_bytes(fd)
    if code == errno.EFBIG and needed <= free:
        return PathFull(f"{path} needs {nbytes:,} bytes. {too_large_message()}", needed, free)
    return PathFull(f"{_no_space_message(path, needed, free)} ({os.strerror(code)})", needed, free)


def too_large_message() -> str:
    """Message for a file that the system refuses because it is too large (EFBIG): the limit, and the remedy."""
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if limit == resource.RLIM_INFINITY:
        return "The file system allows no file of that size: give another directory, or a smaller subgroup_numel."
    return (
        f"This process may write no file larger than {limit:,} bytes: raise this limit (`ulimit -f`, or LimitFSIZE= of "
        "a systemd service), or give a smaller subgroup_numel."
    )


def _no_space_message(path: str | os.PathLike[str], needed_bytes: int, free: int) -> str:
    return (
        f"{os.fspath(path)} needs {needed_bytes:,} bytes more, {free:,} are free. Remove scratch of dead runs "
        "(`tidegate doctor` lists it), give this path a smaller share, or use another directory."
    )
