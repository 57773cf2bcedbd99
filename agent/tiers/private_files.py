"""Checks that lock files and their directory are private to the user: other users must not be able to replace them."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from tidegate.errors import LocksUnusable


def private_directory(directory: Path) -> Path:
    """Creates the directory for lock files if it is missing, and returns it. LocksUnusable when it cannot be created,
    belongs to another user, is a link, or gives other users any access."""
    try:
        directory.mkdir(mode=0o700, exist_ok=True)
        found = directory.lstat()
    except OSError as error:
        raise LocksUnusable(
            f"{directory}, the directory for lock files, cannot be created: {error.strerror}. Set XDG_RUNTIME_DIR to "
            "a directory of yours on this node."
        ) from error
    check_private(directory, found)
    return directory


def check_private(path: Path, found: os.stat_result) -> None:
    """Raises LocksUnusable if the entry belongs to another user, is a symbolic link, or gives other users any
    access."""
    remedy = "Remove it, or set XDG_RUNTIME_DIR to a directory of yours on this node."
    if found.st_uid != os.geteuid():
        raise LocksUnusable(
            f"{path} belongs to user {found.st_uid}, not to {os.geteuid()}, the user of this process. {remedy}"
        )
    if stat.S_ISLNK(found.st_mode) or (mode := stat.S_IMODE(found.st_mode)) & 0o077:
        fault = "is a link" if stat.S_ISLNK(found.st_mode) else f"has mode {mode:04o}: others may use it"
        raise LocksUnusable(f"{path} {fault}. {remedy}")
