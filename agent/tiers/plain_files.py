"""Safe opening of files and directories that another user or process may have replaced.

The functions do not follow symbolic links and do not block on a FIFO. `StrangeEntry` is raised for an entry of another
type, for example a device.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, Final

from tidegate.errors import StrangeEntry

_KINDS: Final[tuple[tuple[Callable[[int], bool], str], ...]] = (
    (stat.S_ISREG, "a plain file"),
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISLNK, "a symbolic link"),
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISSOCK, "a socket"),
)


def kind_of_entry(mode: int) -> str:
    """File type as text, from `st_mode`."""
    return next((name for is_kind, name in _KINDS if is_kind(mode)), "a device")


def open_plain(path: Path) -> BinaryIO:
    """Opens a plain file for reading. StrangeEntry when the entry is not a plain file; OSError, for example
    FileNotFoundError, when it cannot be opened."""
    try:
        # Without O_NONBLOCK, opening a FIFO waits for a writer. On a plain file the flag has no effect.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO, errno.ENODEV):  # a link; a socket, or a device that is not there
            raise StrangeEntry(path, kind_of_entry(path.lstat().st_mode), "a plain file") from error
        raise
    mode = os.fstat(fd).st_mode
    if not stat.S_ISREG(mode):
        os.close(fd)
        raise StrangeEntry(path, kind_of_entry(mode), "a plain file")
    return open(fd, "rb")


def require_directory(path: Path) -> None:
    """Raises StrangeEntry when `path` is not itself a directory (a link to one is not), FileNotFoundError when it is
    missing."""
    mode = path.lstat().st_mode
    if not stat.S_ISDIR(mode):
        raise StrangeEntry(path, kind_of_entry(mode), "a directory")


def is_directory(path: Path) -> bool:
    """Whether `path` is itself a directory: False for a link to a directory and for a missing entry."""
    try:
        return stat.S_ISDIR(path.lstat().st_mode)
    except FileNotFoundError:
        return False
