"""One storage path of a rank: a file for each subgroup, moved by native threads around the page cache."""

from __future__ import annotations

import errno
import fcntl
import itertools
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray
from tenacity import RetryCallState, Retrying, stop_after_attempt, wait_exponential

from tidegate.agent.devices.base import DoneEvent
from tidegate.agent.tiers.format import Header, StateKind, file_bytes, header_bytes, num_blocks, padded_bytes
from tidegate.agent.tiers.locks import TierLocks, device_key, lock_directory
from tidegate.agent.tiers.scratch import Scratch, free_bytes, reserve
from tidegate.errors import BlockDamaged, ConfigError, DataTruncated, PathFailed, PathFull, PathUnusable
from tidegate.kernels import IoPool, IoTicket, aligned_buffer, crc32c, fill, open_direct
from tidegate.plan.split import PathSpeeds

log = logging.getLogger("tidegate.tiers")

Operation = Literal["read", "write"]

ATTEMPTS: Final = 3
"""How often an op is tried whose error may pass."""
PASSING: Final = frozenset({errno.EIO, errno.EAGAIN, errno.EINTR, errno.ETIMEDOUT, errno.ENOMEM})
"""Errors that may pass. Any other (no such device, read-only, …) is for good."""
NO_ROOM: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
MAX_MOVES: Final = 10_000
"""Moves that are kept for telemetry until it takes them: nobody may listen."""
DUPLEX_SHARE: Final = 0.75
"""Reads and writes at once that take less than this share of one after the other do not share the device."""
POLL_SECONDS: Final = 1.0
"""How long a wait holds back Python's signal handlers."""


def nothing() -> None:
    """What is called when nobody wants to be told."""


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


@dataclass(frozen=True, slots=True)
class Transfer(DoneEvent):
    """One file read or written. `nbytes` is 0 where nothing had to be moved; the wait for the lock is not in its
    span."""

    nbytes: int
    lock_wait_seconds: float
    is_whole: bool = True
    """False for a piece of one: a checkpoint is drained in pieces."""


@dataclass
class _File:
    """The file of one subgroup. `step` is -1 while nothing was written: then its state is zeros."""

    name: str
    fd: int
    kind: StateKind
    checksums: NDArray[np.uint32]
    step: int = -1
    linked: Header | None = None
    """What its header says, once a checkpoint may hold the file, too: it must never be written to again."""

    @property
    def data_bytes(self) -> int:
        """With the padding."""
        return padded_bytes(self.kind.data_bytes)


@dataclass
class PathCounters:
    """What happened on a path since the run began, by operation: `read`, `write`. Calibration does not count."""

    retries: dict[str, int] = field(default_factory=lambda: {"read": 0, "write": 0})
    errors: dict[str, int] = field(default_factory=lambda: {"read": 0, "write": 0})
    """Attempts that failed, those that were repeated included."""
    bytes: dict[str, int] = field(default_factory=lambda: {"read": 0, "write": 0})
    """As they were moved, padding included."""
    lock_wait_seconds: dict[str, float] = field(default_factory=lambda: {"read": 0.0, "write": 0.0})
    moves: deque[tuple[str, Transfer]] = field(default_factory=lambda: deque(maxlen=MAX_MOVES))
    """The newest, with their operation; who wants to know takes them out."""
    taken_over_bytes: int = 0
    """Written here because the path that the plan named had failed; in timelines these bytes and seconds are in the
    lane of that path."""
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)
    """Lanes may read and write in two threads each, and a checkpoint that is drained beside them."""
    under_way: dict[object, tuple[str, float]] = field(default_factory=dict)
    """Operation and begin, on the monotonic clock, of each transfer that has not ended."""

    @contextmanager
    def going_on(self, operation: str) -> Iterator[None]:
        """For the duration of one attempt, the wait for the lock excluded."""
        transfer = object()
        self.under_way[transfer] = (operation, time.monotonic())
        try:
            yield
        finally:
            del self.under_way[transfer]

    def count(self, operation: str, moved: Transfer) -> Transfer:
        with self._lock:
            self.bytes[operation] += moved.nbytes
            self.lock_wait_seconds[operation] += moved.lock_wait_seconds
            self.moves.append((operation, moved))
        return moved

    def count_retry(self, operation: str) -> None:
        with self._lock:
            self.retries[operation] += 1

    def count_error(self, operation: str) -> None:
        with self._lock:
            self.errors[operation] += 1

    def count_taken_over(self, nbytes: int) -> None:
        with self._lock:
            self.taken_over_bytes += nbytes


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
        """PathUnusable, PathFull, ScratchTaken or LocksUnusable when it cannot work."""
        self.name = name
        self.settings = settings
        self.counters = PathCounters()
        self._run_id = run_id
        self._files: dict[int, _File] = {}
        self._moving: set[IoTicket] = set()
        self._spares: dict[int, _File] = {}
        """Where state goes at its next flush, when a checkpoint holds the file that it is in."""
        self._scratch = Scratch.create(settings.directory, run, rank)
        try:
            self._locks: TierLocks | None = None
            if settings.lock_slots:
                self._locks = TierLocks(lock_directory(), device_key(settings.directory), settings.lock_slots)
            self._pools = {"read": IoPool(settings.threads), "write": IoPool(settings.threads)}
        except BaseException:
            self._scratch.close()
            raise
        self._said_buffered = False
        self._numbers = itertools.count(1)
        """Of files: no name is used twice."""

    @property
    def busy(self) -> bool:
        """A transfer is in progress: the kernel may still use its file, and the memory that it was given."""
        return bool(self._moving)

    @property
    def lock_timeouts(self) -> int:
        """Waits for exclusive access that took too long."""
        return self._locks.timeouts if self._locks is not None else 0

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

    def _new_file(self, kind: StateKind, given: str | os.PathLike[str] | None = None) -> _File:
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
        return _File(name, fd, kind, np.zeros(blocks, np.uint32))

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

    def _discard(self, file: _File) -> None:
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

        def begin() -> IoTicket:
            where = header_bytes(len(file.checksums))
            return self._pools["read"].read(
                file.fd, address, file.data_bytes, where, self.settings.block_bytes, file.checksums
            )

        return self._move("read", file, address, file.step, begin, begun)

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

        def begin() -> IoTicket:
            where = header_bytes(len(file.checksums))
            return self._pools["write"].write(
                file.fd, address, file.data_bytes, where, self.settings.block_bytes, file.checksums
            )

        moved = self._move("write", file, address, step, begin, begun)
        file.step = step
        if file is not before:
            self._files[subgroup] = self._spares.pop(subgroup)
            self._discard(before)
        return moved

    def _spare(self, file: _File) -> _File:
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

    def _freeze(self, file: _File, header: Header) -> None:
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

    def _header(self, file: _File, weights_checksum: int) -> Header:
        return Header(
            kind=file.kind,
            run_id=self._run_id,
            step=max(file.step, 0),
            block_bytes=self.settings.block_bytes,
            block_checksums=tuple(map(int, file.checksums)),
            weights_checksum=weights_checksum,
        )

    def _move(
        self,
        operation: Operation,
        file: _File,
        address: int,
        step: int,
        begin: Callable[[], IoTicket],
        begun: Callable[[], None],
    ) -> Transfer:
        """`step`: number of the update whose state it is."""
        waited, first = 0.0, float("nan")
        attempts = Retrying(
            stop=stop_after_attempt(ATTEMPTS),
            wait=wait_exponential(multiplier=0.02),
            retry=_may_pass,
            before_sleep=lambda _: self.counters.count_retry(operation),
            reraise=True,
        )
        try:
            for attempt in attempts:
                with attempt, self._locks.hold() if self._locks is not None else nullcontext() as held:
                    waited += held.waited_seconds if held is not None else 0.0
                    with self.counters.going_on(operation):
                        ticket = self._moved(begin, begun)
                        first = ticket.start if first != first else first
                        self._check(operation, file, address, ticket)
                        end = self._synchronised(file.fd) if operation == "write" else None
        except _RefusedError as error:
            what = f"{operation} the state of subgroup {file.kind.subgroup} after step {step}"
            tries = attempts.statistics["attempt_number"]
            why = f"Path {self.name} failed to {what} in {tries} attempt{'s'[: tries - 1]}: {os.strerror(error.errno)}."
            if operation == "write" and error.errno in NO_ROOM:
                raise PathFull(why, self._file_bytes(file.kind), _free_bytes_or_zero(file.fd)) from None
            raise PathFailed(why, self.name, file.kind.subgroup, error.errno) from None
        moved = Transfer(first, ticket.end if end is None else end, file.data_bytes, waited)
        return self.counters.count(operation, moved)

    def _moved(self, begin: Callable[[], IoTicket], begun: Callable[[], None]) -> IoTicket:
        """The ticket of a transfer that has ended. Whatever is raised meanwhile, the kernel is done with the memory."""
        ticket = begin()
        self._moving.add(ticket)
        try:
            try:
                begun()
                while not ticket.wait(POLL_SECONDS):
                    pass  # lets Python handle signals
            except BaseException:  # Ctrl-C, outside a lane
                ticket.cancel()
                while not ticket.wait(POLL_SECONDS):
                    pass
                raise
            return ticket
        finally:
            self._moving.discard(ticket)

    def _synchronised(self, fd: int) -> float | None:
        """When what was written is on the medium; None where it went around the page cache, and is there already."""
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            return None
        try:
            os.fdatasync(fd)
        except OSError as error:
            raise _RefusedError(error.errno or errno.EIO) from None
        return time.monotonic()

    def _check(self, operation: Operation, file: _File, address: int, ticket: IoTicket) -> None:
        if ticket.ok:
            return
        self.counters.count_error(operation)
        where = ticket.failed_block * self.settings.block_bytes
        if ticket.checksum_mismatch:
            nbytes = min(self.settings.block_bytes, file.data_bytes - where)
            raise BlockDamaged(
                file.name,
                ticket.failed_block,
                header_bytes(len(file.checksums)) + where,
                crc32c(address + where, nbytes),
                int(file.checksums[ticket.failed_block]),
            )
        if ticket.end_of_file:
            raise DataTruncated(file.name, f"{os.fstat(file.fd).st_size:,} bytes", f"{self._file_bytes(file.kind):,}")
        raise _RefusedError(ticket.error or errno.EIO)

    def calibrate(self, nbytes: int) -> PathSpeeds:
        """How fast it writes and reads `nbytes` alone, a first estimate that live rates replace, and whether both ways
        run at full speed at once. Takes space."""
        size = max(padded_bytes(nbytes), self.settings.block_bytes)
        name = str(self._scratch.directory / "calibration")
        memory, fd = aligned_buffer(size), self._open(name)
        try:
            reserve(fd, size)
            seconds = {moves: self._timed(moves, fd, memory) for moves in (("write",), ("read",), ("write", "read"))}
        except OSError as error:
            raise PathUnusable(
                f"Path {self.name} cannot reserve {size:,} bytes in {self.settings.directory}: {error.strerror}."
            ) from error
        finally:
            os.close(fd)
            os.unlink(name)
        write, read, both = seconds.values()
        return PathSpeeds(
            read_bytes_per_second=size / read,
            write_bytes_per_second=size / write,
            duplex=both < DUPLEX_SHARE * (read + write),
        )

    def _timed(self, moves: tuple[Operation, ...], fd: int, memory: NDArray[np.uint8]) -> float:
        """Seconds until all of `memory` has moved each of these ways at once, whatever the file then holds."""
        tickets: list[IoTicket] = [
            getattr(self._pools[move], move)(fd, memory.ctypes.data, len(memory), 0, self.settings.block_bytes)
            for move in moves
        ]
        for ticket in tickets:
            ticket.wait()
        for move, ticket in zip(moves, tickets, strict=True):
            if not ticket.ok:
                raise PathUnusable(
                    f"Path {self.name} cannot {move} {len(memory):,} bytes in {self.settings.directory}: "
                    f"{os.strerror(ticket.error or errno.EIO)}."
                )
        start, end = min(ticket.start for ticket in tickets), max(ticket.end for ticket in tickets)
        return max(float(end - start), 1e-9)

    def close(self) -> None:
        """Its files are gone afterwards. Idempotent; nothing in a fork."""
        if self._scratch.owner.pid != os.getpid():
            return
        for pool in self._pools.values():
            pool.close()
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


class _RefusedError(Exception):
    def __init__(self, errno: int) -> None:
        super().__init__(errno)
        self.errno = errno


def _may_pass(state: RetryCallState) -> bool:
    """Whether another try is worth it. One after a checksum that differs: the transfer may have been bad, not what is
    stored."""
    error = state.outcome.exception() if state.outcome is not None else None
    if isinstance(error, BlockDamaged):
        return state.attempt_number == 1
    return isinstance(error, _RefusedError) and error.errno in PASSING


def _free_bytes_or_zero(fd: int) -> int:
    """0 when the file system no longer says."""
    try:
        return free_bytes(fd)
    except OSError:
        return 0
