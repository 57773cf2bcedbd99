"""Scratch directory of a run on a path, `<directory>/tidegate-<run>/rank<k>/`: created, found and removed.

Each rank's directory has an owner file, on which the rank holds a record lock while its process lives. A directory is
removed only by a process that can take that lock. Where it cannot be known whether the owner is alive
(`scratch_owner`), the directory is removed only with `force`.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import stat
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from tidegate.agent.tiers.byte_locks import try_lock
from tidegate.agent.tiers.scratch_owner import (
    OWNER_FILE,
    Alive,
    Owner,
    lock_owner_file,
    opened_owner_file,
    process_name,
    unlock_owner_file,
)
from tidegate.errors import PathUnusable, ScratchTaken

RUN_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
SCRATCH_PREFIX: Final = "tidegate-"
RANK_NAME: Final = re.compile(r"rank(0|[1-9][0-9]{0,5})")


@dataclass(frozen=True, slots=True)
class Leftover:
    """Scratch directory of one rank that a search on a path has found. `alive`: whether the rank still runs."""

    directory: Path
    run: str
    rank: int
    nbytes: int
    """Bytes that become free when the directory is removed. Files that a checkpoint also links are not counted."""
    age_seconds: float
    owner: Owner | None
    """Process that the directory belongs to; None when the owner file is missing or damaged."""
    alive: Alive


class Scratch:
    """Scratch directory of one rank on a path, locked while its process lives. `close` removes it."""

    def __init__(self, directory: Path, owner: Owner, owner_fd: int) -> None:
        """Constructor for internal use. Call `create` instead."""
        self.directory = directory
        self.owner = owner
        self._fd = owner_fd

    @classmethod
    def create(cls, directory: str | os.PathLike[str], run: str, rank: int) -> Self:
        """Creates this rank's directory, mode 0700, in `directory`, which must exist; a relative path is made absolute.

        Raises PathUnusable if the directory cannot be created, and ScratchTaken if scratch of this run and rank already
        exists there, even if its process is dead.
        """
        if not RUN_NAME.fullmatch(run):
            raise ValueError(
                f"run is {run!r}, it must have 1 to 64 letters, digits, '.', '_' and '-', with a letter or digit first"
            )
        if not RANK_NAME.fullmatch(f"rank{rank}"):
            raise ValueError(f"rank is {rank}, it must be from 0 to 999,999")
        base = absolute_path(directory)
        scratch = base / f"{SCRATCH_PREFIX}{run}" / f"rank{rank}"
        try:
            check_usable(base)
            _make_directories(scratch)
        except FileExistsError as error:
            raise ScratchTaken(_why_taken(scratch)) from error
        except OSError as error:
            raise directory_unusable(base, error) from error
        try:
            return cls(scratch, *lock_owner_file(scratch, run, rank))
        except OSError as error:
            _remove_tree(scratch)
            raise directory_unusable(scratch, error) from error

    def close(self) -> None:
        """Removes the directory with its content. Idempotent. Does nothing in a forked child: the directory is the
        parent's. OSError when it cannot be removed: it is then unlocked, so that `tidegate doctor` can remove it."""
        if self._fd < 0 or self.owner.pid != os.getpid():
            return
        try:
            _remove_tree(self.directory)
        finally:
            unlock_owner_file(self._fd)
            self._fd = -1


def find_leftovers(directory: str | os.PathLike[str]) -> list[Leftover]:
    """Lists the scratch directories of all runs on a path, sorted by run and rank. Directories of live runs are
    included: the field `alive` of each entry says whether its rank is alive. Directories of other users are left out.

    PathUnusable when `directory` cannot be read.
    """
    base = absolute_path(directory)
    leftovers = []
    try:
        for run in [run for run in _directories(base) if run.name.startswith(SCRATCH_PREFIX)]:
            with suppress(FileNotFoundError, PermissionError):  # the run ended meanwhile, or is another user's
                leftovers += [_inspect(rank) for rank in _directories(run) if RANK_NAME.fullmatch(rank.name)]
    except OSError as error:
        raise directory_unusable(base, error) from error
    return sorted(leftovers, key=lambda leftover: (leftover.run, leftover.rank))


def remove(leftover: Leftover, force: bool = False) -> None:
    """Removes the scratch directory of a dead rank. Does nothing when the directory is already gone.

    The directory is inspected again first, under the lock of its owner file. ScratchTaken when the owner is alive, even
    with `force`; when the owner file has changed since the directory was listed; and, without `force`, when it is
    unknown whether the owner is alive. PathUnusable when the directory cannot be removed.
    """
    directory = leftover.directory
    try:
        with opened_owner_file(directory) as (fd, owner, alive):
            if alive == "yes" or (alive == "no" and not (fd is not None and try_lock(fd, 0))):
                raise ScratchTaken(f"{directory} is in use by {process_name(owner)}: end that run first.")
            if owner != leftover.owner or (
                fd is not None and not os.path.samestat(os.fstat(fd), (directory / OWNER_FILE).lstat())
            ):
                raise ScratchTaken(f"{directory} has changed since it was listed: list it again.")
            if alive == "unknown" and not force:
                raise ScratchTaken(
                    f"{directory} may be in use by {process_name(owner)}: this machine cannot tell whether that "
                    "process still runs. Check on its host; if it has ended, remove the directory with force."
                )
            _remove_tree(directory)
    except FileNotFoundError:
        return
    except OSError as error:
        raise directory_unusable(directory, error) from error


def absolute_path(directory: str | os.PathLike[str]) -> Path:
    """The absolute path of a directory; ~ is the home directory."""
    return Path(os.path.abspath(Path(directory).expanduser()))


def check_usable(base: Path) -> None:
    """Raises an OSError with the reason when files cannot be created in `base`."""
    if not stat.S_ISDIR(base.stat().st_mode):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
    if os.statvfs(base).f_flag & os.ST_RDONLY:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))
    if not os.access(base, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


_BROKEN: Final = (
    "cannot be read or written: {why}. Find the cause in the kernel's log (dmesg). Unmount the file system, repair it "
    "or replace its disk, and mount it again."
)
_CUT_OFF: Final = "is cut off from its file system: {why}. Unmount it (umount -l), and mount it again."
REMEDIES: Final = {
    **dict.fromkeys((errno.EIO, errno.EUCLEAN, errno.ENXIO, errno.ENODEV, errno.EREMOTEIO), _BROKEN),
    **dict.fromkeys(
        (errno.ENOTCONN, errno.ESTALE, errno.ESHUTDOWN, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ETIMEDOUT), _CUT_OFF
    ),
    errno.ENOENT: "does not exist: create it first, or mount its file system.",
    errno.ENOTDIR: "is not a directory: give the path of a directory.",
    errno.EROFS: "is on a read-only file system: mount it for writing, or give another directory.",
    errno.EACCES: "is not open to user {user}: change its owner or mode, or give another directory.",
    errno.EPERM: "is not open to user {user}: change its owner or mode, or give another directory.",
}


def directory_unusable(path: Path, error: OSError) -> PathUnusable:
    """Creates the error for a directory that cannot be used. The message names the cause and a remedy."""
    if error.errno == errno.ENOENT and path.is_dir():  # /proc raises ENOENT for each new file
        return PathUnusable(f"{path} is on a file system where users cannot create files: give another directory.")
    why = REMEDIES.get(error.errno or 0, "cannot be used: {why}. Give another directory.")
    return PathUnusable(f"{path} {why.format(user=os.geteuid(), why=error.strerror)}")


def _make_directories(scratch: Path) -> None:
    """Creates the rank's directory inside the run's directory, and repeats that if an earlier run of the same name
    removes the run's directory at the same time."""
    while True:
        with suppress(FileExistsError):
            scratch.parent.mkdir(mode=0o700)
        try:
            if stat.S_ISLNK(scratch.parent.lstat().st_mode):
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
            scratch.mkdir(mode=0o700)
        except FileNotFoundError:
            continue
        return


def _inspect(directory: Path) -> Leftover:
    """Reads owner, size, age and liveness of a rank's scratch."""
    with opened_owner_file(directory) as (_, owner, alive):
        created_at = directory.lstat().st_mtime if owner is None else owner.created_at
        return Leftover(
            directory, directory.parent.name.removeprefix(SCRATCH_PREFIX), int(directory.name.removeprefix("rank")),
            _allocated_bytes(directory), max(0.0, time.time() - created_at), owner, alive,
        )  # fmt: skip


def _why_taken(directory: Path) -> str:
    """Message for a new run whose scratch directory already exists: who uses or left it, and the remedy."""
    try:
        leftover = _inspect(directory)
    except OSError as error:  # already gone, or another user's
        return f"{directory} cannot be inspected: {error.strerror}. Give this run another name."
    if leftover.alive == "no":
        return (
            f"{directory} was left behind by {process_name(leftover.owner)}, which is dead: `tidegate doctor` offers "
            "to remove it; or give this run another name."
        )
    verb, owner = "is" if leftover.alive == "yes" else "may be", process_name(leftover.owner)
    return f"{directory} {verb} in use by {owner}: end that run first, or give this run another name."


def _directories(directory: Path) -> list[Path]:
    with os.scandir(directory) as entries:
        return [Path(entry.path) for entry in entries if entry.is_dir(follow_symlinks=False)]


def _allocated_bytes(directory: Path) -> int:
    """Bytes allocated by files that no checkpoint links. Files of a live run may vanish while they are counted."""
    total = 0
    for at, _, names in os.walk(directory):
        for name in names:
            with suppress(FileNotFoundError):
                status = os.lstat(os.path.join(at, name))
                total += status.st_blocks * 512 if status.st_nlink == 1 else 0
    return total


def _remove_tree(directory: Path) -> None:
    """Removes a rank's directory with its content. The owner file is deleted last, so that a directory that is left
    after a crash can still be identified. The run's directory is removed when it is empty."""
    with os.scandir(directory) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path)
            elif entry.name != OWNER_FILE:
                os.unlink(entry.path)
    (directory / OWNER_FILE).unlink(missing_ok=True)
    directory.rmdir()
    with suppress(OSError):
        directory.parent.rmdir()
