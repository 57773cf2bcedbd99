"""Location and reading of a daemon's state files, for the daemon, the command line and agents."""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path
from typing import Final

OWN_FOLDER: Final = "private"
"""Name of a private folder (mode 0700) for the daemon's state files. The daemon creates it in the state directory if
other users own that directory or may enter it."""


def home_of(state_dir: Path) -> Path:
    """The folder of the state files: the daemon's own folder below `state_dir` if it exists, else `state_dir`."""
    own = state_dir / OWN_FOLDER
    with contextlib.suppress(OSError):
        found = own.lstat()
        if stat.S_ISDIR(found.st_mode) and os.geteuid() in (0, found.st_uid):
            return own
    return state_dir


def read_no_link(path: Path) -> tuple[str, os.stat_result]:
    """Text and status of a regular file; OSError if `path` is not a regular file, for example a symbolic link."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, encoding="ascii", errors="replace") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(f"{path} is not a regular file")
        return file.read(), status
