"""What a run leaves on a path while it lives: `<directory>/tidegate-<run>/rank<k>/`, and how to tell that it is dead.

Each rank's directory has an owner file, on which the rank holds a record lock for as long as its process lives. Nobody
who cannot take that lock removes the directory, and nobody believes a process id: those are used again, and mean
nothing on another node. Locks are believed on the node that holds them (same boot id, that is the same kernel). After a
reboot what lies on a disk of the node is dead; what lies anywhere else may belong to another node of the same name, so
it is `unknown` and stays unless someone insists.
"""

from __future__ import annotations

import errno
import json
import os
import re
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
    """Whose scratch it is, as its owner file says."""

    host: str
    boot_id: str
    pid: int
    process_start_ticks: int
    """Clock ticks after boot at which the process began: with `pid`, which process it is."""
    run: str
    rank: int
    created_at: float
    """Unix seconds."""
    locked: bool
    """False where the file system has no locks: then nobody can tell whether it is alive."""


@dataclass(frozen=True, slots=True)
class Leftover:
    """One rank's scratch that was found on a path."""

    directory: Path
    run: str
    rank: int
    nbytes: int
    """What its removal frees: files that a checkpoint links too are not counted."""
    age_seconds: float
    owner: Owner | None
    """None when the owner file is missing or damaged."""
    alive: Alive


_held: dict[tuple[int, int], tuple[int, Owner]] = {}
"""Owner files that this process has locked, by device and inode: opening and closing one of them would drop the lock.
The process id tells a forked child that they are its parent's."""


class Scratch:
    """One rank's directory on a path, for as long as its process lives. `close` removes it."""

    def __init__(self, directory: Path, owner: Owner, owner_fd: int) -> None:
        """Use `create`."""
        self.directory = directory
        self.owner = owner
        self._fd = owner_fd

    @classmethod
    def create(cls, directory: str | os.PathLike[str], run: str, rank: int, needed_bytes: int = 0) -> Self:
        """Makes the directory of this rank, mode 0700, in `directory`, which must exist; relative ones are made
        absolute.

        PathUnusable, PathFull (less than `needed_bytes` are free), or ScratchTaken when this run and rank has scratch
        there, alive or not.
        """
        if not RUN_NAME.fullmatch(run):
            raise ValueError(f"run is {run!r}: 1 to 64 letters, digits, '.', '_' and '-', a letter or digit first")
        if not RANK_NAME.fullmatch(f"rank{rank}"):
            raise ValueError(f"rank is {rank}, it must be from 0 to 999,999")
        base = _absolute(directory)
        mine = base / f"{PREFIX}{run}" / f"rank{rank}"
        try:
            _check_usable(base)
            _check_space(base, needed_bytes)
            _make(mine)
        except FileExistsError as error:
            raise ScratchTaken(_why_taken(mine)) from error
        except OSError as error:
            raise _unusable(base, error) from error
        try:
            return cls(mine, *_claim(mine, run, rank))
        except OSError as error:
            _remove_tree(mine)
            raise _unusable(mine, error) from error

    def close(self) -> None:
        """Removes the directory and all in it. In a forked child it does nothing: the directory is the parent's."""
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
    """All scratch on a path, by run and rank, that of live runs too: look at `alive`. That of other users is left out.

    PathUnusable when `directory` cannot be read.
    """
    base = _absolute(directory)
    try:
        runs = [run for run in _directories(base) if run.name.startswith(PREFIX)]
    except OSError as error:
        raise _unusable(base, error) from error
    found = []
    for run in runs:
        with suppress(FileNotFoundError, PermissionError):  # ended meanwhile, or another user's
            found += [_look_at(rank) for rank in _directories(run) if RANK_NAME.fullmatch(rank.name)]
    return sorted(found, key=lambda leftover: (leftover.run, leftover.rank))


def remove(leftover: Leftover, force: bool = False) -> None:
    """Removes scratch that nobody uses. Nothing happens when it is gone.

    It is looked at again, under its lock: ScratchTaken when it is alive, `force` or not; when it is no longer what was
    found; and, unless `force`, when nobody can tell. PathUnusable when it cannot be removed.
    """
    directory = leftover.directory
    try:
        with _inspected(directory) as (fd, owner, alive):
            if alive == "yes" or (alive == "no" and not (fd is not None and try_lock(fd, 0))):
                raise ScratchTaken(f"{directory} is in use by {_named(owner)}: end that run first.")
            if owner != leftover.owner or (fd is not None and not _is_at(fd, directory / OWNER)):
                raise ScratchTaken(f"{directory} is no longer what was found: look again.")
            if alive == "unknown" and not force:
                raise ScratchTaken(
                    f"{directory} may be in use by {_named(owner)}: nobody can tell from here. Look on that host, or "
                    "insist on removing it."
                )
            _remove_tree(directory)
    except FileNotFoundError:
        return
    except OSError as error:
        raise _unusable(directory, error) from error


def reserve(fd: int, nbytes: int) -> bool:
    """Makes the open file at least `nbytes` long, with its blocks allocated, so that later writes cannot run out of
    space. False where the file system cannot: then space was only looked at, and the file is sparse.

    PathFull with the figures when there is not so much; the file is then as it was.
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
    """What an ordinary user can still write to the file system of a directory or an open file."""
    found = os.statvfs(place)
    return found.f_bavail * found.f_frsize


def _absolute(directory: str | os.PathLike[str]) -> Path:
    return Path(os.path.abspath(Path(directory).expanduser()))


def _check_usable(base: Path) -> None:
    """OSError that says why one cannot write there."""
    if not stat.S_ISDIR(base.stat().st_mode):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
    if os.statvfs(base).f_flag & os.ST_RDONLY:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))
    if not os.access(base, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


def _check_space(base: Path, needed_bytes: int) -> None:
    free = free_bytes(base)
    if needed_bytes > free:
        raise PathFull(_no_room(base, needed_bytes, free), needed_bytes, free)


def _full(fd: int, nbytes: int, code: int) -> PathFull:
    path, needed, free = os.readlink(f"/proc/self/fd/{fd}"), nbytes - os.fstat(fd).st_size, free_bytes(fd)
    return PathFull(f"{_no_room(path, needed, free)} ({os.strerror(code)})", needed, free)


def _no_room(path: str | os.PathLike[str], needed_bytes: int, free: int) -> str:
    return (
        f"{os.fspath(path)} needs {needed_bytes:,} bytes more, {free:,} are free. Remove what dead runs left "
        "(`tidegate doctor` lists it), give this path a smaller share, or another directory."
    )


REMEDIES: Final = {
    errno.ENOENT: "does not exist: create it first, or mount what it should be on.",
    errno.ENOTDIR: "is not a directory: give one.",
    errno.EROFS: "is on a read-only file system: mount it for writing, or give another directory.",
    errno.EACCES: "is not open to user {user}: change its owner or mode, or give another directory.",
    errno.EPERM: "is not open to user {user}: change its owner or mode, or give another directory.",
}


def _unusable(path: Path, error: OSError) -> PathUnusable:
    if error.errno == errno.ENOENT and path.is_dir():  # /proc says so of each file that one would make
        return PathUnusable(f"{path} is on a file system that holds no files of users: give another directory.")
    why = REMEDIES.get(error.errno or 0, f"cannot be used: {error.strerror}. Give another directory.")
    return PathUnusable(f"{path} {why.format(user=os.geteuid())}")


def _make(mine: Path) -> None:
    """The rank's directory in the run's, which an earlier run of that name may be removing right now."""
    while True:
        with suppress(FileExistsError):
            mine.parent.mkdir(mode=0o700)
        try:
            if stat.S_ISLNK(mine.parent.lstat().st_mode):
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
            mine.mkdir(mode=0o700)
        except FileNotFoundError:
            continue
        return


def _claim(mine: Path, run: str, rank: int) -> tuple[Owner, int]:
    """Writes and locks the owner file. It appears under its name when it is locked, so that no rank ever looks dead."""
    new = mine / f".{OWNER}"
    fd = os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        owner = Owner(
            host=socket.gethostname(), boot_id=_boot_id(), pid=os.getpid(), process_start_ticks=_process_start_ticks(),
            run=run, rank=rank, created_at=time.time(), locked=_can_lock(fd),
        )  # fmt: skip
        os.write(fd, json.dumps(asdict(owner), indent=1).encode())
        os.fsync(fd)
        _held[_inode(os.fstat(fd))] = owner.pid, owner
        new.rename(mine / OWNER)
    except OSError:
        _held.pop(_inode(os.fstat(fd)), None)
        os.close(fd)
        raise
    return owner, fd


def _can_lock(fd: int) -> bool:
    try:
        return try_lock(fd, 0)
    except OSError:  # some parallel file systems are mounted without locks
        return False


@contextmanager
def _inspected(directory: Path) -> Iterator[tuple[int | None, Owner | None, Alive]]:
    """The open owner file (None: missing, or our own, which must not be opened), what it says, and whether it is alive.

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
        yield fd, owner, _judge(fd, owner)
    finally:
        os.close(fd)


def _judge(fd: int, owner: Owner | None) -> Alive:
    try:
        if locked_by_other(fd, 0):
            return "yes"
    except OSError:
        return "unknown"
    if owner is None or not owner.locked:
        return "unknown"
    if owner.boot_id == _boot_id():
        return "no"
    # Another boot of this node or another node of this name: a disk of its own is not shared between nodes. Network
    # file systems, among others, have no disk: their major number is 0.
    on_disk = os.major(os.fstat(fd).st_dev) != 0
    return "no" if owner.host == socket.gethostname() and on_disk else "unknown"


def _parse(text: bytes) -> Owner | None:
    """None when it is damaged."""
    try:
        values = json.loads(text)
        owner = Owner(**values)
    except (ValueError, TypeError):
        return None
    numbers = (owner.pid, owner.process_start_ticks, owner.rank, owner.created_at)
    texts = (owner.host, owner.boot_id, owner.run)
    sound = all(isinstance(n, int | float) for n in numbers) and all(isinstance(text, str) for text in texts)
    return owner if sound else None


def _look_at(directory: Path) -> Leftover:
    with _inspected(directory) as (_, owner, alive):
        created_at = directory.lstat().st_mtime if owner is None else owner.created_at
        return Leftover(
            directory, directory.parent.name.removeprefix(PREFIX), int(directory.name.removeprefix("rank")),
            _allocated_bytes(directory), max(0.0, time.time() - created_at), owner, alive,
        )  # fmt: skip


def _why_taken(directory: Path) -> str:
    try:
        found = _look_at(directory)
    except OSError as error:  # gone again, or another user's
        return f"{directory} cannot be looked at: {error.strerror}. Give this run another name."
    if found.alive == "no":
        return (
            f"{directory} was left behind by {_named(found.owner)}, which is dead: `tidegate doctor` offers to remove "
            "it; or give this run another name."
        )
    word = "is" if found.alive == "yes" else "may be"
    return f"{directory} {word} in use by {_named(found.owner)}: end that run first, or give this one another name."


def _named(owner: Owner | None) -> str:
    return "a process that left no name" if owner is None else f"process {owner.pid} on {owner.host}"


def _directories(directory: Path) -> list[Path]:
    with os.scandir(directory) as entries:
        return [Path(entry.path) for entry in entries if entry.is_dir(follow_symlinks=False)]


def _allocated_bytes(directory: Path) -> int:
    """Files of a live run may vanish meanwhile."""
    total = 0
    for at, _, names in os.walk(directory):
        for name in names:
            with suppress(FileNotFoundError):
                found = os.lstat(os.path.join(at, name))
                total += found.st_blocks * 512 if found.st_nlink == 1 else 0
    return total


def _remove_tree(directory: Path) -> None:
    """The owner file goes last: what is left after a crash can still be told apart. The run's directory goes with its
    last rank."""
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
    return _inode(os.fstat(fd)) == _inode(path.lstat())


def _inode(found: os.stat_result) -> tuple[int, int]:
    return found.st_dev, found.st_ino


def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _process_start_ticks() -> int:
    """Field 22 of /proc/self/stat; the second, the program's name, may contain anything but ends at the last ')'."""
    return int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
