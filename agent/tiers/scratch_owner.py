"""Owner file of a scratch directory: it names the process of one rank, which holds a lock on it while it lives.

Process ids are not trusted: they are reused, and mean nothing on another node. Locks are trusted only on the node that
holds them (same boot id, that is the same kernel). After a reboot, scratch on a local disk of the node is dead. Scratch
on any other file system may belong to another node with the same name, so it is `unknown`.
"""

from __future__ import annotations

import errno
import json
import os
import socket
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final, Literal, Self

from pydantic import ConfigDict, PositiveInt, TypeAdapter, ValidationError

from tidegate.agent.procfs import boot_id, pid_namespace, start_ticks
from tidegate.agent.tiers.byte_locks import locked_by_other, try_lock

OWNER_FILE: Final = "owner.json"

Alive = Literal["yes", "no", "unknown"]


@dataclass(frozen=True, slots=True)
class Owner:
    """Process that a scratch directory, or a scratch prefix in an object store, belongs to: the content of its owner
    file."""

    __pydantic_config__ = ConfigDict(strict=True, extra="forbid")

    host: str
    boot_id: str
    pid: PositiveInt
    process_start_ticks: int
    """Start time of the process in clock ticks after boot. Together with `pid` it identifies the process."""
    run: str
    rank: int
    created_at: float
    """Time at which the scratch was created, in Unix seconds."""
    locked: bool = False
    """Whether the owner file was locked. False if the file system has no locks, as no object store has: then a lock
    does not show whether the owner is alive."""
    pid_namespace: str = ""
    """Id of the namespace of process ids in which `pid` is valid; empty if an older version of Tidegate, which did not
    store it, wrote the owner file."""

    @classmethod
    def of_this_process(cls, run: str, rank: int, locked: bool = False) -> Self:
        """Creates the owner record of the calling process."""
        return cls(
            host=socket.gethostname(), boot_id=boot_id(), pid=os.getpid(), process_start_ticks=start_ticks(), run=run,
            rank=rank, created_at=time.time(), locked=locked, pid_namespace=pid_namespace(),
        )  # fmt: skip

    def to_json(self) -> bytes:
        """The content of the owner file."""
        return json.dumps(asdict(self), indent=1).encode()


_SCHEMA: Final = TypeAdapter(Owner)


_locked_files: dict[tuple[int, int], tuple[int, Owner]] = {}
"""Owner files that this process has locked, by device and inode, each with the id of the locking process and the owner.
Such a file must not be opened again, because closing it would release the lock. In a forked child the process id shows
that the lock is the parent's."""


def lock_owner_file(scratch: Path, run: str, rank: int) -> tuple[Owner, int]:
    """Writes and locks the owner file, and returns the owner and the open descriptor. The file gets its final name only
    after it is locked. Otherwise another process could see it unlocked and take the rank for dead."""
    new = scratch / f".{OWNER_FILE}"
    fd = os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        owner = Owner.of_this_process(run, rank, _can_lock(fd))
        os.write(fd, owner.to_json())
        os.fsync(fd)
        _locked_files[inode_of(os.fstat(fd))] = owner.pid, owner
        new.rename(scratch / OWNER_FILE)
    except OSError:
        unlock_owner_file(fd)
        raise
    return owner, fd


def unlock_owner_file(fd: int) -> None:
    """Closes the owner file of this process, which releases its lock."""
    _locked_files.pop(inode_of(os.fstat(fd)), None)
    os.close(fd)


def _can_lock(fd: int) -> bool:
    """Tries to lock the owner file, and keeps the lock. False when the file system has no locks."""
    try:
        return try_lock(fd, 0)
    except OSError:  # some parallel file systems are mounted without locks
        return False


@contextmanager
def opened_owner_file(directory: Path) -> Iterator[tuple[int | None, Owner | None, Alive]]:
    """Opens a rank's owner file and yields its descriptor, its content and whether the owner is alive. The descriptor
    is None when the owner file is missing, or when this process has locked it: closing another descriptor of the file
    would release that lock.

    FileNotFoundError when the directory is gone.
    """
    if not stat.S_ISDIR(directory.lstat().st_mode):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
    path = directory / OWNER_FILE
    inode = inode_of(path.lstat()) if path.exists() else None
    process, own = _locked_files.get(inode, (0, None)) if inode else (0, None)
    if inode is None or process == os.getpid():
        yield None, own, "yes" if own else "unknown"
        return
    fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        owner = read_owner(os.read(fd, 1 << 16))
        yield fd, owner, _liveness(fd, owner)
    finally:
        os.close(fd)


def _liveness(fd: int, owner: Owner | None) -> Alive:
    """Whether the owner is alive: "yes" if another process has locked the owner file. If no process has, "no" if the
    owner had locked it on this node since the node's last boot, or before that boot on a local disk of this node. Else
    "unknown"."""
    try:
        if locked_by_other(fd, 0):
            return "yes"
    except OSError:
        return "unknown"
    if owner is None or not owner.locked:
        return "unknown"
    if owner.boot_id == boot_id():
        return "no"
    # Another boot of this node, or another node with the same name. A local disk is not shared between nodes. File
    # systems without a disk, network file systems among them, have the major number 0.
    on_disk = os.major(os.fstat(fd).st_dev) != 0
    return "no" if owner.host == socket.gethostname() and on_disk else "unknown"


def read_owner(text: bytes) -> Owner | None:
    """Parses the content of an owner file; None if the content is not valid."""
    try:
        return _SCHEMA.validate_json(text)
    except ValidationError:
        return None


def process_name(owner: Owner | None) -> str:
    """The process of an owner, as text for messages."""
    return "an unknown process" if owner is None else f"process {owner.pid} on {owner.host}"


def inode_of(status: os.stat_result) -> tuple[int, int]:
    """Device and inode number: they identify a file."""
    return status.st_dev, status.st_ino
