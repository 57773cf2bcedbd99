"""Lock of a directory of checkpoints: only one optimizer of one run may write to it at a time.

Two writers would each remove the other's checkpoints. The first writer takes an exclusive `flock` on a file in the
directory and holds it until `close`. The kernel releases the lock when the process dies; on NFS the server does. Rank 0
holds the lock for all ranks of its run. Two optimizers of one process exclude each other, too. If the lock file belongs
to another user, the lock is taken on that file, provided that it is readable. Where a file system has no locks, only
optimizers of one process exclude each other, and a warning is logged.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import socket
import stat
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from tidegate.agent.interrupts import DelayInterrupt
from tidegate.agent.tiers.plain_files import kind_of_entry
from tidegate.agent.tiers.scratch_owner import inode_of
from tidegate.errors import CheckpointFailed, CheckpointTaken

log = logging.getLogger("tidegate.tiers")

LOCK_FILE: Final = ".tidegate-writer"
"""Name of the lock file in the directory of checkpoints."""
NO_LOCKS_ERRORS: Final = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.EBADF)
NO_ACCESS_ERRORS: Final = (errno.EACCES, errno.EPERM)
MAX_LOCK_FILE_BYTES: Final = 4096
"""Maximum number of bytes that are read from a lock file."""

_held: dict[tuple[int, int], int] = {}
"""Directories that this process has locked, by device and inode, each with the descriptor of its lock file; -1 where
the lock file could not be locked."""


class WriterLock:
    """Locks that one optimizer holds on directories of checkpoints."""

    def __init__(self) -> None:
        self._mine: dict[tuple[int, int], Path] = {}
        self._pid = os.getpid()
        # Calling `close` is optional: the locks are released when the optimizer is garbage-collected or the process
        # ends.
        self._closed = weakref.finalize(self, _release, self._mine, self._pid)

    def take(self, directory: Path) -> None:
        """Locks an existing directory. Does nothing if this object has already locked it. CheckpointTaken when another
        process or optimizer has locked it. CheckpointFailed when this object has locked it on another file system: that
        one is no longer mounted, and a checkpoint would be written to the directory below it."""
        key = inode_of(os.stat(directory))
        if key in self._mine:
            return
        if any(directory == locked and device != key[0] for (device, _), locked in self._mine.items()):
            raise CheckpointFailed(_moved_message(directory))
        if key in _held:
            raise CheckpointTaken(_taken_message(directory, "another optimizer of this process"))
        with DelayInterrupt():  # so that the holder of the lock is recorded before KeyboardInterrupt is raised
            try:
                _held[key] = _lock(directory)
                self._mine[key] = directory
            except BaseException:
                if key not in self._mine and (fd := _held.pop(key, -1)) >= 0:
                    os.close(fd)
                raise

    def close(self) -> None:
        """Releases the locks. Idempotent; does nothing in a forked child."""
        _release(self._mine, self._pid)


def _release(mine: dict[tuple[int, int], Path], pid: int) -> None:
    """Deletes the lock files in the directories `mine` and closes their descriptors, which releases the locks. Does
    nothing unless this process has the id `pid`: a forked child does not own the locks."""
    if os.getpid() != pid:
        return
    for key, directory in mine.items():
        fd = _held.pop(key)
        if fd >= 0:
            with suppress(OSError):  # the directory may be gone; closing the descriptor releases the lock
                if _is_at(fd, directory / LOCK_FILE):
                    os.unlink(directory / LOCK_FILE)
            os.close(fd)
    mine.clear()


def _lock(directory: Path) -> int:
    """Locks the lock file and returns its descriptor. Returns -1, with a warning, where the file system has no locks or
    another user's lock file is not readable. CheckpointTaken when the file is locked already."""
    path = directory / LOCK_FILE
    while True:
        try:
            fd = _open(path)
        except OSError as error:
            if error.errno not in NO_ACCESS_ERRORS or not os.access(directory, os.W_OK):
                raise
            owner = f"it belongs to user {path.lstat().st_uid}" if os.path.lexists(path) else os.strerror(error.errno)
            _warn_unlocked(path, f"{owner}. Remove it when that user's run has ended")
            return -1
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = _holder(fd)
            os.close(fd)
            raise CheckpointTaken(_taken_message(directory, holder)) from None
        except OSError as error:
            os.close(fd)
            if error.errno not in NO_LOCKS_ERRORS:
                raise
            _warn_unlocked(path, f"{error.strerror}. Give each run and each optimizer a directory of its own")
            return -1
        except BaseException:  # raised by a signal handler: otherwise the lock would never be released
            os.close(fd)
            raise
        try:
            if _is_at(fd, path) and not _replaced(fd, path):
                _write_holder(fd)
                return fd
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)  # the file was removed meanwhile, by its last holder or by _replaced: try again


def _write_holder(fd: int) -> None:
    """Writes process id and host into the lock file, so that people can see which process holds the lock."""
    about = {"pid": os.getpid(), "host": socket.gethostname()}
    with suppress(OSError):  # a full disk, or another user's file: the content is only informative
        os.fchmod(fd, 0o644)  # other users can see that it is locked, whatever the umask
        os.ftruncate(fd, 0)
        os.pwrite(fd, json.dumps(about).encode(), 0)


def _replaced(fd: int, path: Path) -> bool:
    """Removes the lock file, which this process has just locked, if it belongs to another user. The lock was free,
    so the run of that user has ended. The caller then creates a new file that names this process. Returns whether
    the file was removed."""
    if os.fstat(fd).st_uid == os.geteuid():
        return False
    try:
        os.unlink(path)
    except OSError:  # in a directory with the sticky bit only owners may remove files: the other user's file is used
        return False
    return True


def _open(path: Path) -> int:
    """Opens the lock file, and creates it if it is missing. Another user's file is opened for reading only.
    CheckpointFailed when the entry is not a plain file."""
    flags = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | flags, 0o666)
        except OSError as error:
            if error.errno not in NO_ACCESS_ERRORS or not os.path.lexists(path):
                raise
            fd = os.open(path, os.O_RDONLY | flags)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
            raise CheckpointFailed(_wrong_kind_message(path, path.lstat().st_mode)) from error
        raise
    mode = os.fstat(fd).st_mode
    if not stat.S_ISREG(mode):
        os.close(fd)
        raise CheckpointFailed(_wrong_kind_message(path, mode))
    return fd


def _wrong_kind_message(path: Path, mode: int) -> str:
    """Message for a lock file that is not a plain file."""
    return (
        f"{path.parent} cannot be written: {path.name}, which should be the lock file, is "
        f"{kind_of_entry(mode)}. Find out who created it, and remove it."
    )


def _moved_message(directory: Path) -> str:
    """Message for a directory that is on another file system than at the last checkpoint."""
    return (
        f"{directory} is on another file system than at the last checkpoint: the one that it was on is probably no "
        "longer mounted. Nothing was written. Mount it again, or give another directory."
    )


def _taken_message(directory: Path, holder: str) -> str:
    """Message for a directory that cannot be locked, because the process or optimizer `holder` saves checkpoints
    there."""
    return (
        f"{directory} cannot be written: {holder} saves its checkpoints there, and each would remove the other's. Give "
        "each run and each optimizer a directory of its own, or close the other one first."
    )


def _warn_unlocked(path: Path, why: str) -> None:
    """Warns that the directory is used without a lock."""
    log.warning("%s cannot be locked: %s. Another run that writes there at the same time is not detected.", path, why)


def _holder(fd: int) -> str:
    """Describes the process that holds the lock, read from the lock file: "process 12 on host"."""
    try:
        about: Any = json.loads(os.pread(fd, MAX_LOCK_FILE_BYTES, 0))
        return f"process {int(about['pid'])} on {about['host']!s:.80}"
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return "another process"


def _is_at(fd: int, path: Path) -> bool:
    """Whether the open file is still the file at `path`."""
    try:
        return os.path.samestat(os.fstat(fd), path.lstat())
    except FileNotFoundError:
        return False


def _forget_in_child() -> None:
    """Closes a forked child's copies of the descriptors, so that the locks end with the parent. The child holds no
    locks."""
    for fd in _held.values():
        if fd >= 0:
            os.close(fd)
    _held.clear()


os.register_at_fork(after_in_child=_forget_in_child)
