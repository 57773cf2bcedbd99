"""Who may write to a directory of checkpoints: one optimizer of one run at a time.

Two of them would each remove what the other keeps. The first takes an exclusive `flock` on a file in the directory,
and has it until it is closed; the kernel frees it when the process dies, on NFS the server does. Rank 0 has it for all
ranks of its run. Two optimizers of one process exclude each other, too. The file of another user is locked as well, if
that user lets it be read. Where a file system has no locks, only those of one process do, and that is said.
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

from tidegate.agent.tiers.plain_files import kind_of_entry
from tidegate.errors import CheckpointFailed, CheckpointTaken

log = logging.getLogger("tidegate.tiers")

LOCK: Final = ".tidegate-writer"
"""The lock file, in the directory of checkpoints."""
NO_LOCKS: Final = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.EBADF)
NOT_OURS: Final = (errno.EACCES, errno.EPERM)
MOST_SHOWN: Final = 4096

_held: dict[tuple[int, int], int] = {}
"""Directories that this process writes to, by device and inode, with the descriptor of the lock file; -1 for none."""


class Writing:
    """The right of one optimizer to write to directories of checkpoints."""

    def __init__(self) -> None:
        self._mine: dict[tuple[int, int], Path] = {}
        self._pid = os.getpid()
        # Nobody has to call `close`: the right goes with the optimizer that nobody holds, and with the process.
        self._closed = weakref.finalize(self, _give_up, self._mine, self._pid)

    def take(self, directory: Path) -> None:
        """Takes it for a directory that exists, unless it has it already. CheckpointTaken when another one has it."""
        key = _key(os.stat(directory))
        if key in self._mine:
            return
        if key in _held:
            raise CheckpointTaken(_taken(directory, "another optimizer of this process"))
        _held[key] = _lock(directory)
        self._mine[key] = directory

    def close(self) -> None:
        """Others may write from now on. Idempotent; nothing in a fork."""
        _give_up(self._mine, self._pid)


def _give_up(mine: dict[tuple[int, int], Path], pid: int) -> None:
    if os.getpid() != pid:
        return
    for key, directory in mine.items():
        fd = _held.pop(key)
        if fd >= 0:
            with suppress(OSError):  # the directory may be gone; the lock goes with the descriptor
                if _is_at(fd, directory / LOCK):
                    os.unlink(directory / LOCK)
            os.close(fd)
    mine.clear()


def _lock(directory: Path) -> int:
    """The descriptor that holds the lock; -1 where there are none, or the lock file is one that another user lets
    nobody read."""
    path = directory / LOCK
    while True:
        try:
            fd = _open(path)
        except OSError as error:
            if error.errno not in NOT_OURS or not os.access(directory, os.W_OK):
                raise
            owner = f"it belongs to user {path.lstat().st_uid}" if os.path.lexists(path) else os.strerror(error.errno)
            _say_unlocked(path, f"{owner}. Remove it when that user's run has ended")
            return -1
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = _holder(fd)
            os.close(fd)
            raise CheckpointTaken(_taken(directory, holder)) from None
        except OSError as error:
            os.close(fd)
            if error.errno not in NO_LOCKS:
                raise
            _say_unlocked(path, f"{error.strerror}. Give each run and each optimizer a directory of its own")
            return -1
        if _is_at(fd, path) and not _replaced(fd, path):
            break
        os.close(fd)  # whoever had it has just removed it, or we have
    about = {"pid": os.getpid(), "host": socket.gethostname()}
    with suppress(OSError):  # a full disk, or a file of another user's: it is only for people
        os.fchmod(fd, 0o644)  # other users can see that it is locked, whatever the umask
        os.ftruncate(fd, 0)
        os.pwrite(fd, json.dumps(about).encode(), 0)
    return fd


def _replaced(fd: int, path: Path) -> bool:
    """Whether a lock file of another user, whose run has ended, was removed: the next one will say who we are."""
    if os.fstat(fd).st_uid == os.geteuid():
        return False
    try:
        os.unlink(path)
    except OSError:  # a directory in which one removes only one's own: theirs is locked as well
        return False
    return True


def _open(path: Path) -> int:
    """The lock file, made when it is missing; for reading where it is another user's. CheckpointFailed when something
    else is in its place."""
    how = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | how, 0o666)
        except OSError as error:
            if error.errno not in NOT_OURS or not os.path.lexists(path):
                raise
            fd = os.open(path, os.O_RDONLY | how)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
            raise CheckpointFailed(_strange(path, path.lstat().st_mode)) from error
        raise
    mode = os.fstat(fd).st_mode
    if not stat.S_ISREG(mode):
        os.close(fd)
        raise CheckpointFailed(_strange(path, mode))
    return fd


def _strange(path: Path, mode: int) -> str:
    return (
        f"{path.parent} cannot be written: {path.name}, the lock file of whoever writes there, is "
        f"{kind_of_entry(mode)}. Look who put it there, and remove it."
    )


def _taken(directory: Path, holder: str) -> str:
    return (
        f"{directory} cannot be written: {holder} saves its checkpoints there, and each would remove the other's. Give "
        "each run and each optimizer a directory of its own, or close the other one first."
    )


def _say_unlocked(path: Path, why: str) -> None:
    log.warning("%s cannot be locked: %s. Nobody is kept from writing there at the same time.", path, why)


def _holder(fd: int) -> str:
    """For people, as the lock file says."""
    try:
        about: Any = json.loads(os.pread(fd, MOST_SHOWN, 0))
        return f"process {int(about['pid'])} on {about['host']!s:.80}"
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return "another process"


def _is_at(fd: int, path: Path) -> bool:
    try:
        return _key(os.fstat(fd)) == _key(path.lstat())
    except FileNotFoundError:
        return False


def _key(found: os.stat_result) -> tuple[int, int]:
    return found.st_dev, found.st_ino


def _forget_in_child() -> None:
    """A forked child writes no checkpoints of its parent's: it closes its copies of the descriptors, so that the locks
    go with the parent."""
    for fd in _held.values():
        if fd >= 0:
            os.close(fd)
    _held.clear()


os.register_at_fork(after_in_child=_forget_in_child)
