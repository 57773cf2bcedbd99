"""Opens files and looks at directories that others may have put something else in the place of.

Nothing here follows a symbolic link, waits for the other end of a FIFO, or wakes a device: what is not a plain file is
`StrangeEntry`.
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
    """What `st_mode` says an entry of a directory is, for people."""
    return next((name for is_kind, name in _KINDS if is_kind(mode)), "a device")


def open_plain(path: Path) -> BinaryIO:
    """A plain file, open for reading. StrangeEntry when it is something else; FileNotFoundError and other OSError."""
    try:
        # Without O_NONBLOCK a FIFO would be waited for; on a plain file it means nothing.
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
    """StrangeEntry when it is not a directory itself, FileNotFoundError when it is missing."""
    mode = path.lstat().st_mode
    if not stat.S_ISDIR(mode):
        raise StrangeEntry(path, kind_of_entry(mode), "a directory")


def is_directory(path: Path) -> bool:
    """Whether it is one itself: a link to one is none, nor is what is missing."""
    try:
        return stat.S_ISDIR(path.lstat().st_mode)
    except FileNotFoundError:
        return False
