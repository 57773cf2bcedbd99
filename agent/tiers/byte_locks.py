"""Locks of one byte of a file, held by a process. They are POSIX record locks: the kernel releases them when the
process dies, and a forked child inherits none."""

from __future__ import annotations

import fcntl
import os
import struct
from typing import Final

_FLOCK: Final = struct.Struct("@hhqqi4x")
"""struct flock of 64-bit Linux: type, whence, start, length, pid."""


def try_lock(fd: int, byte: int) -> bool:
    """Locks one byte for this process without waiting. False when another process has locked it."""
    try:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, byte)
    except (BlockingIOError, PermissionError):
        return False
    return True


def locked_by_other(fd: int, byte: int) -> bool:
    """Whether another process has locked the byte. The call only queries the lock, so it blocks no other process."""
    answer = fcntl.fcntl(fd, fcntl.F_GETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0))
    return bool(_FLOCK.unpack(answer)[0] != fcntl.F_UNLCK)
