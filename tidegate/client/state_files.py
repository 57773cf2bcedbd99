"""Where a daemon's state is, and how its files are read: for the daemon, the command line and agents alike."""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path
from typing import Final

OWN_FOLDER: Final = "private"
"""Below a state directory that others own or may enter: the daemon's own folder, mode 0700."""


def home_of(state_dir: Path) -> Path:
    """The folder that holds the state: the daemon's own one below `state_dir` where it made one, else `state_dir`."""
    own = state_dir / OWN_FOLDER
    with contextlib.suppress(OSError):
        found = own.lstat()
        if stat.S_ISDIR(found.st_mode) and os.geteuid() in (0, found.st_uid):
            return own
    return state_dir


def read_no_link(path: Path) -> tuple[str, os.stat_result]:
    """Text and status of a regular file; OSError where it is none, a symbolic link included."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, encoding="ascii", errors="replace") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(f"{path} is not a regular file")
        return file.read(), status
