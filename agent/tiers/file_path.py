"""One storage path of a rank: a file for each subgroup, moved by native threads around the page cache."""

from __future__ import annotations

import errno
import itertools
import logging
import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

import numpy as np

from tidegate.agent.tiers.file_moves import FileMover, StateFile
from tidegate.agent.tiers.path_locks import device_key, locks_of_path
from tidegate.agent.tiers.scratch import Scratch, free_bytes, reserve
from tidegate.agent.tiers.state_file import Header, StateKind, file_bytes, num_blocks, padded_bytes
from tidegate.agent.tiers.transfers import PathCounters, Transfer, nothing
from tidegate.errors import ConfigError, PathUnusable
from tidegate.kernels import aligned_buffer, fill, open_direct
from tidegate.plan.tier_split import PathSpeeds

log = logging.getLogger("tidegate.tiers")

CALIBRATION_TRIES: Final = 2
DUPLEX_SHARE: Final = 0.75
"""Reads and writes at once that take less than this share of one after the other do not share the device."""


@dataclass(frozen=True, kw_only=True)
class PathSettings:
    """One storage path.

    directory: an existing directory; state lies in a folder of the run inside it.
    threads: blocks that are read at once, and as many that are written.
    block_bytes: the unit of one transfer and of one checksum; a multiple of 4096.
    lock_slots: processes of this node that may use the device at once; 0 for no exclusive access.
    capacity_bytes: what state may take here; 0 for all that is free.
    wear_bytes_per_day: bytes written a day beyond which a warning is logged, once, by runs that are attached; 0 for
        never. A drive of 4 TB that is rated for one write of all of it a day: 4_000_000_000_000.
    """

    directory: str | os.PathLike[str]
    threads: int = 4
    block_bytes: int = 1 << 20
    lock_slots: int = 1
    capacity_bytes: int = 0
    wear_bytes_per_day: int = 0

    def __post_init__(self) -> None:
        if not os.fspath(self.directory):
            raise ConfigError(
                "directory='' of a path names no directory: give one that exists, '.' for the present one."
            )
        bounds = {"threads": 1, "block_bytes": 4096, "lock_slots": 0, "capacity_bytes": 0, "wear_bytes_per_day": 0}
        for name, minimum in bounds.items():
            if getattr(self, name) < minimum:
                raise ConfigError(f"{name}={getattr(self, name)} of a path is out of range: at least {minimum}.")
        if self.block_bytes % 4096:
            raise ConfigError(f"block_bytes={self.block_bytes} of a path must be a multiple of 4096.")

    @property
    def place(self) -> str:
        """Where it is, for people."""
        return os.fspath(self.directory)


@dataclass(slots=True)
class HeldFile:
    """State as it was on a path when it was held, behind `header`: an open file of its own, with a name or without."""

    name: str
    fd: int
    header: Header
    counters: PathCounters

    def count(self, start: float, end: float, nbytes: int) -> None:
        """Notes that some of it was read."""
        self.counters.count("read", Transfer(start, end, nbytes, 0.0, is_whole=False))

    def close(self) -> None:
        """Lets it go. Idempotent."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class StoragePath:
    """Holds the state of subgroups in files of its own, which go with it.

    Threads may read and write at once, each the state of other subgroups. Memory is given by address: whole pages,
    `padded_bytes` of the state.
    """

    def __init__(self, name: str, settings: PathSettings, run: str, rank: int, run_id: bytes) -> None:
        """PathUnusable, PathFull or ScratchTaken when it cannot work."""
        self.name = name
        self.settings = settings
        self.counters = PathCounters()
        self._run_id = run_id
        self._files: dict[int, StateFile] = {}
        self._spares: dict[int, StateFile] = {}
        """Where state goes at its next flush, when a checkpoint holds the file that it is in."""
        self._scratch = Scratch.create(settings.directory, run, rank)
        try:
            locks = None
            if settings.lock_slots:
                locks = locks_of_path(name, device_key(settings.directory), settings.lock_slots)
            self._mover = FileMover(name, settings.threads, settings.block_bytes, locks, self.counters)
        except BaseException:
            self._scratch.close()
            raise
        self._said_buffered = False
        self._numbers = itertools.count(1)
        """Of files: no name is used twice."""

    @property
    def busy(self) -> bool:
        """A transfer is in progress: the kernel may still use its file, and the memory that it was given."""
        return self._mover.busy

    @property
    def lock_timeouts(self) -> int:
        """Waits for exclusive access that took too long."""
        return self._mover.locks.timeouts if self._mover.locks is not None else 0

    @property
    def capacity_bytes(self) -> int:
        """Size of its file system, or what the settings allow if that is less. OSError when the directory is gone."""
        found = os.statvfs(self._scratch.directory)
        size = found.f_blocks * found.f_frsize
        return min(size, self.settings.capacity_bytes) if self.settings.capacity_bytes else size

    @property
    def free_bytes(self) -> int:
        """What more state may take. OSError when the directory is gone."""
        free = free_bytes(self._scratch.directory)
        if self.settings.capacity_bytes:
            files = (*tuple(self._files.values()), *tuple(self._spares.values()))
            used = sum(self._file_bytes(file.kind) for file in files)
            free = min(free, self.settings.capacity_bytes - used)
        return max(free, 0)

    def _file_bytes(self, kind: StateKind) -> int:
        return file_bytes(kind.data_bytes, self.settings.block_bytes)

    def holds(self, subgroup: int) -> bool:
        """There is a file for it, with its space reserved."""
        return subgroup in self._files

    def is_new(self, subgroup: int) -> bool:
        """Nothing was written to its file."""
        return self._files[subgroup].step < 0

    def make(self, kind: StateKind) -> None:
        """A file for a subgroup, with zeros for state and its space reserved. PathFull when there is not so much."""
        self._files[kind.subgroup] = self._new_file(kind)

    def _new_file(self, kind: StateKind, given: str | os.PathLike[str] | None = None) -> StateFile:
        """One with its space reserved; out of the file `given`, which is no longer where it was."""
        name = str(self._scratch.directory / f"{kind.subgroup:06d}-{next(self._numbers)}.tide")
        if given is not None:
            os.rename(given, name)
        fd = self._open(name)
        try:
            reserve(fd, self._file_bytes(kind))
        except BaseException:
            os.close(fd)
            os.unlink(name)
            raise
        blocks = num_blocks(padded_bytes(kind.data_bytes), self.settings.block_bytes)
        return StateFile(name, fd, kind, np.zeros(blocks, np.uint32))

    def _open(self, name: str) -> int:
        try:
            fd, direct = open_direct(name, write=True, create=True)
        except OSError as error:
            raise PathUnusable(f"Path {self.name}: {name} cannot be made: {os.strerror(error.errno or 0)}.") from error
        if not direct and not self._said_buffered:
            self._said_buffered = True
            log.warning("path %s has no direct I/O: it goes through the page cache, which takes memory", self.name)
        return fd

    def remove(self, subgroup: int) -> None:
        """Its state lives elsewhere now."""
        for files in (self._files, self._spares):
            if subgroup in files:
                self._discard(files.pop(subgroup))

    def _discard(self, file: StateFile) -> None:
        try:
            os.close(file.fd)
            os.unlink(file.name)
        except OSError as error:  # a path that fails, or a directory that somebody removed
            log.warning("path %s: %s stays behind: %s", self.name, file.name, error.strerror)

    def forget(self, subgroup: int) -> None:
        """Its state is zeros again, whatever was written."""
        self._files[subgroup].step = -1

    def step_of(self, subgroup: int) -> int:
        """Number of the last update that was written; -1 before the first."""
        return self._files[subgroup].step

    def read(self, subgroup: int, address: int, begun: Callable[[], None] = nothing) -> Transfer:
        """Brings its state to `address`, verified. PathFailed, BlockDamaged or DataTruncated when it cannot be had.

        begun: called when all of it is queued, again when it is tried again: what another thread asks for from then on
            comes after it.
        """
        file = self._files[subgroup]
        if file.step < 0:
            start = time.monotonic()
            fill(address, 0, file.data_bytes)
            return Transfer(start, time.monotonic(), 0, 0.0)
        return self._mover.read(file, address, begun)

    def write(self, subgroup: int, address: int, step: int, begun: Callable[[], None] = nothing) -> Transfer:
        """Stores the state at `address`, as it is after the update number `step`. PathFailed or PathFull when it cannot
        be; what the file held is lost then. `begun`: see `read`.

        Through the page cache an error would come after the last moment at which the state is still in memory. So a
        file without direct I/O is synchronised after each write: what returns from here is on the medium, or the
        error names this update.
        """
        before = self._files[subgroup]
        file = before if before.linked is None else self._spare(before)
        fill(address + file.kind.data_bytes, 0, file.data_bytes - file.kind.data_bytes)
        moved = self._mover.write(file, address, step, begun)
        file.step = step
        if file is not before:
            self._files[subgroup] = self._spares.pop(subgroup)
            self._discard(before)
        return moved

    def _spare(self, file: StateFile) -> StateFile:
        """It is there since the checkpoint, unless it was to come from one that another rank has not let go."""
        subgroup = file.kind.subgroup
        if subgroup not in self._spares:
            self._spares[subgroup] = self._new_file(file.kind)
        return self._spares[subgroup]

    # ---- checkpoints

    def link_bytes(self, subgroup: int, weights_checksum: int, device: int) -> int | None:
        """The size of the file that `link` would link to the file system `device`; None when it cannot."""
        file = self._files[subgroup]
        if file.step < 0 or os.fstat(file.fd).st_dev != device:
            return None
        if file.linked not in (None, self._header(file, weights_checksum)):
            return None  # an earlier checkpoint holds it, with other weights
        return os.fstat(file.fd).st_size

    def link(self, subgroup: int, weights_checksum: int, target: str | os.PathLike[str]) -> bool:
        """Gives the state on the disk the name `target`, too, header and all; from now on it is flushed to its spare.
        Durable after fsync. False, and no `target`, where the file system will not have it. To be asked for when
        `link_bytes` says so."""
        file = self._files[subgroup]
        self._freeze(file, self._header(file, weights_checksum))
        try:
            os.link(file.name, target)
        except OSError as error:
            if error.errno in (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP):
                return False
            raise
        return True

    def hold(self, subgroup: int, weights_checksum: int) -> HeldFile:
        """The state on the disk, for others to read later: from now on it is flushed to its spare. Not for state that
        was never written."""
        file = self._files[subgroup]
        header = self._header(file, weights_checksum)
        if file.linked is None:
            self._freeze(file, header)
        return HeldFile(file.name, os.dup(file.fd), header, self.counters)

    def _freeze(self, file: StateFile, header: Header) -> None:
        """It is never written to again."""
        if file.linked is None:
            write_header(file.fd, header)
        file.linked = header

    def has_spare(self, subgroup: int) -> bool:
        return subgroup in self._spares

    def add_spare(self, subgroup: int, given: str | os.PathLike[str] | None = None) -> None:
        """Makes the file that is flushed to once a checkpoint holds the present one; or takes the file `given`, of this
        file system, for it. PathFull when there is not so much space."""
        self._spares[subgroup] = self._new_file(self._files[subgroup].kind, given)

    def _header(self, file: StateFile, weights_checksum: int) -> Header:
        return Header(
            kind=file.kind,
            run_id=self._run_id,
            step=max(file.step, 0),
            block_bytes=self.settings.block_bytes,
            block_checksums=tuple(map(int, file.checksums)),
            weights_checksum=weights_checksum,
        )

    def calibrate(self, nbytes: int) -> PathSpeeds:
        """How fast it writes and reads `nbytes` alone, a first estimate that live rates replace, and whether both ways
        run at full speed at once. Takes space.

        The better of two tries each: one in ten meets a stall, and live rates take a path to be faster than it was
        measured to be only after many steps, to be slower after two.
        """
        size = max(padded_bytes(nbytes), self.settings.block_bytes)
        name = str(self._scratch.directory / "calibration")
        memory, fd = aligned_buffer(size), self._open(name)
        try:
            reserve(fd, size)
            tries = [
                [self._mover.seconds(way, fd, memory) for way in (("write",), ("read",), ("write", "read"))]
                for _ in range(CALIBRATION_TRIES)
            ]
        except OSError as error:
            raise PathUnusable(
                f"Path {self.name} cannot reserve {size:,} bytes in {self.settings.directory}: {error.strerror}."
            ) from error
        finally:
            os.close(fd)
            os.unlink(name)
        write, read, both = map(min, zip(*tries, strict=True))
        return PathSpeeds(
            read_bytes_per_second=size / read,
            write_bytes_per_second=size / write,
            duplex=both < DUPLEX_SHARE * (read + write),
        )

    def close(self) -> None:
        """Its files are gone afterwards. Idempotent; nothing in a fork."""
        if self._scratch.owner.pid != os.getpid():
            return
        self._mover.close()
        for files in (self._files, self._spares):
            for file in files.values():
                with suppress(OSError):  # what a close can say of lost writes matters to nobody now
                    os.close(file.fd)
            files.clear()
        try:
            self._scratch.close()
        except OSError as error:
            log.warning("path %s: what lies in %s stays behind: %s", self.name, self._scratch.directory, error.strerror)


def write_header(fd: int, header: Header) -> None:
    """Puts it at the beginning of an open file, directly if the file is open so."""
    page = aligned_buffer(header.header_bytes)
    page[:] = np.frombuffer(header.pack(), np.uint8)
    written = os.pwrite(fd, page.data, 0)
    if written != header.header_bytes:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
