"""Scratch directory of a run on a path, `<directory>/tidegate-<run>/rank<k>/`, and whether its run is alive.

Each rank's directory has an owner file, on which the rank holds a record lock while its process lives. A directory is
removed only by a process that can take that lock. Process ids are not trusted: they are reused, and mean nothing on
another node. Locks are trusted only on the node that holds them (same boot id, that is the same kernel). After a
reboot, scratch on a local disk of the node is dead. Scratch on any other file system may belong to another node with
the same name, so it is `unknown` and is removed only with `force`.
"""

from __future__ import annotations

import errno
import json
import os
import re
import resource
import shutil
import socket
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Final, Literal, Self

from tidegate.agent.tiers.path_locks import locked_by_other, try_lock
from tidegate.errors import PathFull, PathUnusable, ScratchTaken

RUN_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
PREFIX: Final = "tidegate-"
RANK_NAME: Final = re.compile(r"rank(0|[1-9][0-9]{0,5})")
OWNER: Final = "owner.json"

Alive = Literal["yes", "no", "unknown"]


@dataclass(frozen=True, slots=True)
class Owner:
    """Process that a scratch directory belongs to: the content of its owner file."""

    host: str
    boot_id: str
    pid: int
    process_start_ticks: int
    """Start time of the process in clock ticks after boot. Together with `pid` it identifies the process."""
    run: str
    rank: int
    created_at: float
    """Unix seconds."""
    locked: bool
    """False where the file system has no locks: then it is unknown whether the owner is alive."""


@dataclass(frozen=True, slots=True)
class Leftover:
    """Scratch directory of one rank, found on a path."""

    directory: Path
    run: str
    rank: int
    nbytes: int
    """Bytes that its removal frees: files that a checkpoint also links are not counted."""
    age_seconds: float
    owner: Owner | None
    """None when the owner file is missing or damaged."""
    alive: Alive


_held: dict[tuple[int, int], tuple[int, Owner]] = {}
"""Owner files that this process has locked, by device and inode, with the process id at that time. Opening and closing
such a file would release the lock. By the process id a forked child detects that the locks are its parent's."""


class Scratch:
    """Scratch directory of one rank on a path, locked while its process lives. `close` removes it."""

    def __init__(self, directory: Path, owner: Owner, owner_fd: int) -> None:
        """Internal: call `create`."""
        self.directory = directory
        self.owner = owner
        self._fd = owner_fd

    @classmethod
    def create(cls, directory: str | os.PathLike[str], run: str, rank: int, needed_bytes: int = 0) -> Self:
        """Creates this rank's directory, mode 0700, in `directory`, which must exist; a relative path is made absolute.

        PathUnusable, PathFull (less than `needed_bytes` are free), or ScratchTaken when this run and rank already has
        scratch there, alive or not.
        """
        if not RUN_NAME.fullmatch(run):
            raise ValueError(f"run is {run!r}: 1 to 64 letters, digits, '.', '_' and '-', a letter or digit first")
        if not RANK_NAME.fullmatch(f"rank{rank}"):
            raise ValueError(f"rank is {rank}, it must be from 0 to 999,999")
        base = _absolute(directory)
        scratch = base / f"{PREFIX}{run}" / f"rank{rank}"
        try:
            _check_usable(base)
            _check_space(base, needed_bytes)
            _make_directories(scratch)
        except FileExistsError as error:
            raise ScratchTaken(_why_taken(scratch)) from error
        except OSError as error:
            raise _unusable(base, error) from error
        try:
            return cls(scratch, *_lock_owner_file(scratch, run, rank))
        except OSError as error:
            _remove_tree(scratch)
            raise _unusable(scratch, error) from error

    def close(self) -> None:
        """Removes the directory with its content. Idempotent. Does nothing in a forked child: the directory is the
        parent's."""
        if self._fd < 0 or self.owner.pid != os.getpid():
            return
        _remove_tree(self.directory)
        _held.pop(_inode(os.fstat(self._fd)), None)
        os.close(self._fd)
        self._fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def find_leftovers(directory: str | os.PathLike[str]) -> list[Leftover]:
    """Lists all scratch on a path, sorted by run and rank. Scratch of live runs is included: see `alive`. Scratch of
    other users is left out.

    PathUnusable when `directory` cannot be read.
    """
    base = _absolute(directory)
    try:
        runs = [run for run in _directories(base) if run.name.startswith(PREFIX)]
    except OSError as error:
        raise _unusable(base, error) from error
    leftovers = []
    for run in runs:
        with suppress(FileNotFoundError, PermissionError):  # the run ended meanwhile, or is another user's
            leftovers += [_inspect(rank) for rank in _directories(run) if RANK_NAME.fullmatch(rank.name)]
    return sorted(leftovers, key=lambda leftover: (leftover.run, leftover.rank))


def remove(leftover: Leftover, force: bool = False) -> None:
    """Removes scratch of a dead rank. Does nothing when it is already gone.

    It is inspected again, under its lock. ScratchTaken when the owner is alive, with or without `force`; when the
    scratch has changed since it was listed; and, without `force`, when it is unknown whether the owner is alive.
    PathUnusable when it cannot be removed.
    """
    directory = leftover.directory
    try:
        with _inspected(directory) as (fd, owner, alive):
            if alive == "yes" or (alive == "no" and not (fd is not None and try_lock(fd, 0))):
                raise ScratchTaken(f"{directory} is in use by {_named(owner)}: end that run first.")
            if owner != leftover.owner or (fd is not None and not _is_at(fd, directory / OWNER)):
                raise ScratchTaken(f"{directory} has changed since it was listed: list it again.")
            if alive == "unknown" and not force:
                raise ScratchTaken(
                    f"{directory} may be in use by {_named(owner)}: that cannot be decided on this machine. Check on "
                    "that host, or remove it with force."
                )
            _remove_tree(directory)
    except FileNotFoundError:
        return
    except OSError as error:
        raise _unusable(directory, error) from error


def reserve(fd: int, nbytes: int) -> bool:
    """Makes the open file at least `nbytes` long, with its blocks allocated, so that later writes cannot run out of
    space. False where the file system cannot allocate: then only the free space was checked, and the file is sparse.

    PathFull, with the figures, when the space is not there; the size of the file is then unchanged.
    """
    if nbytes < 1:
        raise ValueError(f"nbytes is {nbytes}, the least is 1")
    before = os.fstat(fd).st_size
    try:
        os.posix_fallocate(fd, 0, nbytes)
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


def free_bytes(place: int | str | os.PathLike[str]) -> int:
    """Free bytes for ordinary users on the file system of a directory or an open file."""
    status = os.statvfs(place)
    return status.f_bavail * status.f_frsize


def _absolute(directory: str | os.PathLike[str]) -> Path:
    return Path(os.path.abspath(Path(directory).expanduser()))


def _check_usable(base: Path) -> None:
    """Raises an OSError with the reason when files cannot be created in `base`."""
    if not stat.S_ISDIR(base.stat().st_mode):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
    if os.statvfs(base).f_flag & os.ST_RDONLY:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))
    if not os.access(base, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


def _check_space(base: Path, needed_bytes: int) -> None:
    free = free_bytes(base)
    if needed_bytes > free:
        raise PathFull(_no_space_message(base, needed_bytes, free), needed_bytes, free)


def _full(fd: int, nbytes: int, code: int) -> PathFull:
    path, needed, free = os.readlink(f"/proc/self/fd/{fd}"), nbytes - os.fstat(fd).st_size, free_bytes(fd)
    if code == errno.EFBIG and needed <= free:
        return PathFull(f"{path} needs {nbytes:,} bytes. {too_large_message()}", needed, free)
    return PathFull(f"{_no_space_message(path, needed, free)} ({os.strerror(code)})", needed, free)


def too_large_message() -> str:
    """Why the system refused a file for its size (EFBIG), and the remedy."""
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


REMEDIES: Final = {
    errno.ENOENT: "does not exist: create it first, or mount its file system.",
    errno.ENOTDIR: "is not a directory: give the path of a directory.",
    errno.EROFS: "is on a read-only file system: mount it for writing, or give another directory.",
    errno.EACCES: "is not open to user {user}: change its owner or mode, or give another directory.",
    errno.EPERM: "is not open to user {user}: change its owner or mode, or give another directory.",
}


def _unusable(path: Path, error: OSError) -> PathUnusable:
    """Error for a directory that cannot be used, with a remedy."""
    if error.errno == errno.ENOENT and path.is_dir():  # /proc raises ENOENT for each new file
        return PathUnusable(f"{path} is on a file system where users cannot create files: give another directory.")
    why = REMEDIES.get(error.errno or 0, f"cannot be used: {error.strerror}. Give another directory.")
    return PathUnusable(f"{path} {why.format(user=os.geteuid())}")


def _make_directories(scratch: Path) -> None:
    """Creates the rank's directory inside the run's directory, which an earlier run of the same name may be removing
    now."""
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


def _lock_owner_file(scratch: Path, run: str, rank: int) -> tuple[Owner, int]:
    """Writes and locks the owner file, and returns the owner and the open descriptor. The file gets its final name only
    when it is locked, so that a starting rank is never taken for dead."""
    new = scratch / f".{OWNER}"
    fd = os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        owner = Owner(
            host=socket.gethostname(), boot_id=_boot_id(), pid=os.getpid(), process_start_ticks=_process_start_ticks(),
            run=run, rank=rank, created_at=time.time(), locked=_can_lock(fd),
        )  # fmt: skip
        os.write(fd, json.dumps(asdict(owner), indent=1).encode())
        os.fsync(fd)
        _held[_inode(os.fstat(fd))] = owner.pid, owner
        new.rename(scratch / OWNER)
    except OSError:
        _held.pop(_inode(os.fstat(fd)), None)
        os.close(fd)
        raise
    return owner, fd


def _can_lock(fd: int) -> bool:
    """Locks the owner file; False when the file system has no locks."""
    try:
        return try_lock(fd, 0)
    except OSError:  # some parallel file systems are mounted without locks
        return False


@contextmanager
def _inspected(directory: Path) -> Iterator[tuple[int | None, Owner | None, Alive]]:
    """Opens a rank's owner file and yields its descriptor, its content and whether the owner is alive. The descriptor
    is None when the file is missing, or locked by this process: then it must not be opened again.

    FileNotFoundError when the directory is gone.
    """
    if not stat.S_ISDIR(directory.lstat().st_mode):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
    path = directory / OWNER
    inode = _inode(path.lstat()) if path.exists() else None
    process, own = _held.get(inode, (0, None)) if inode else (0, None)
    if inode is None or process == os.getpid():
        yield None, own, "yes" if own else "unknown"
        return
    fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        owner = _parse(os.read(fd, 1 << 16))
        yield fd, owner, _liveness(fd, owner)
    finally:
        os.close(fd)


def _liveness(fd: int, owner: Owner | None) -> Alive:
    """Whether the owner is alive, by the rules of the module's docstring."""
    try:
        if locked_by_other(fd, 0):
            return "yes"
    except OSError:
        return "unknown"
    if owner is None or not owner.locked:
        return "unknown"
    if owner.boot_id == _boot_id():
        return "no"
    # Another boot of this node, or another node with the same name. A local disk is not shared between nodes. File
    # systems without a disk, network file systems among them, have the major number 0.
    on_disk = os.major(os.fstat(fd).st_dev) != 0
    return "no" if owner.host == socket.gethostname() and on_disk else "unknown"


def _parse(text: bytes) -> Owner | None:
    """Owner from the JSON of an owner file; None when it is damaged."""
    try:
        values = json.loads(text)
        owner = Owner(**values)
    except (ValueError, TypeError):
        return None
    numbers = (owner.pid, owner.process_start_ticks, owner.rank, owner.created_at)
    texts = (owner.host, owner.boot_id, owner.run)
    sound = all(isinstance(n, int | float) for n in numbers) and all(isinstance(text, str) for text in texts)
    return owner if sound else None


def _inspect(directory: Path) -> Leftover:
    """Reads owner, size, age and liveness of a rank's scratch."""
    with _inspected(directory) as (_, owner, alive):
        created_at = directory.lstat().st_mtime if owner is None else owner.created_at
        return Leftover(
            directory, directory.parent.name.removeprefix(PREFIX), int(directory.name.removeprefix("rank")),
            _allocated_bytes(directory), max(0.0, time.time() - created_at), owner, alive,
        )  # fmt: skip


def _why_taken(directory: Path) -> str:
    """Message for scratch of this name that exists already."""
    try:
        leftover = _inspect(directory)
    except OSError as error:  # already gone, or another user's
        return f"{directory} cannot be inspected: {error.strerror}. Give this run another name."
    if leftover.alive == "no":
        return (
            f"{directory} was left behind by {_named(leftover.owner)}, which is dead: `tidegate doctor` offers to "
            "remove it; or give this run another name."
        )
    verb = "is" if leftover.alive == "yes" else "may be"
    return f"{directory} {verb} in use by {_named(leftover.owner)}: end that run first, or give this run another name."


def _named(owner: Owner | None) -> str:
    return "an unknown process" if owner is None else f"process {owner.pid} on {owner.host}"


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
    """Removes a rank's directory. The owner file is deleted last, so that a directory that is left after a crash can
    still be identified. The run's directory is removed with its last rank."""
    with os.scandir(directory) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path)
            elif entry.name != OWNER:
                os.unlink(entry.path)
    (directory / OWNER).unlink(missing_ok=True)
    directory.rmdir()
    with suppress(OSError):
        directory.parent.rmdir()


def _is_at(fd: int, path: Path) -> bool:
    """Whether the open file is still the file at `path`."""
    return _inode(os.fstat(fd)) == _inode(path.lstat())


def _inode(status: os.stat_result) -> tuple[int, int]:
    """Device and inode number: they identify a file."""
    return status.st_dev, status.st_ino


def _boot_id() -> str:
    """Id of the present boot of this kernel."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _process_start_ticks() -> int:
    """Start time of this process in clock ticks after boot: field 22 of /proc/self/stat. The second field, the
    program's name, may contain any character but ends at the last ')'."""
    return int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
