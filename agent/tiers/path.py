"""One storage path of a rank: a file for each subgroup, moved by native threads around the page cache."""

from __future__ import annotations

import errno
import logging
import os
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray
from tenacity import Retrying, retry_if_exception_type, stop_after_attempt, wait_exponential

from tidegate.agent.devices.base import DoneEvent
from tidegate.agent.tiers.format import Header, StateKind, file_bytes, header_bytes, num_blocks, padded_bytes
from tidegate.agent.tiers.locks import TierLocks, device_key, lock_directory
from tidegate.agent.tiers.scratch import Scratch, free_bytes, reserve
from tidegate.errors import BlockDamaged, ConfigError, DataTruncated, PathFailed, PathUnusable
from tidegate.kernels import IoPool, IoTicket, aligned_buffer, crc32c, fill, open_direct
from tidegate.plan.split import PathSpeeds

log = logging.getLogger("tidegate.tiers")

Operation = Literal["read", "write"]

ATTEMPTS: Final = 3
"""How often an op that the system refuses with EIO is tried."""
DUPLEX_SHARE: Final = 0.75
"""Reads and writes at once that take less than this share of one after the other do not share the device."""
POLL_SECONDS: Final = 1.0
"""How long a wait holds back Python's signal handlers."""


@dataclass(frozen=True, kw_only=True)
class PathSettings:
    """One storage path.

    directory: an existing directory; state lies in a folder of the run inside it.
    threads: blocks that are read at once, and as many that are written.
    block_bytes: the unit of one transfer and of one checksum; a multiple of 4096.
    lock_slots: processes of this node that may use the device at once; 0 for no exclusive access.
    capacity_bytes: what state may take here; 0 for all that is free.
    """

    directory: str | os.PathLike[str]
    threads: int = 4
    block_bytes: int = 1 << 20
    lock_slots: int = 1
    capacity_bytes: int = 0

    def __post_init__(self) -> None:
        for name, minimum in (("threads", 1), ("block_bytes", 4096), ("lock_slots", 0), ("capacity_bytes", 0)):
            if getattr(self, name) < minimum:
                raise ConfigError(f"{name}={getattr(self, name)} of a path is out of range: at least {minimum}.")
        if self.block_bytes % 4096:
            raise ConfigError(f"block_bytes={self.block_bytes} of a path must be a multiple of 4096.")


@dataclass(frozen=True, slots=True)
class Transfer(DoneEvent):
    """One file read or written. `nbytes` is 0 where nothing had to be moved; the wait for the lock is not in its
    span."""

    nbytes: int
    lock_wait_seconds: float


@dataclass
class _File:
    """The file of one subgroup. `step` is -1 while nothing was written: then its state is zeros."""

    name: str
    fd: int
    kind: StateKind
    checksums: NDArray[np.uint32]
    step: int = -1

    @property
    def data_bytes(self) -> int:
        """With the padding."""
        return padded_bytes(self.kind.data_bytes)


@dataclass
class PathCounters:
    """What happened on a path since the run began."""

    retries: dict[str, int] = field(default_factory=lambda: {"read": 0, "write": 0})


class StoragePath:
    """Holds the state of subgroups in files of its own, which go with it.

    One thread may read and another write at once. Memory is given by address: whole pages, `padded_bytes` of the state.
    """

    def __init__(self, name: str, settings: PathSettings, run: str, rank: int, run_id: bytes) -> None:
        """PathUnusable, PathFull, ScratchTaken or LocksUnusable when it cannot work."""
        self.name = name
        self.settings = settings
        self.counters = PathCounters()
        self._run_id = run_id
        self._files: dict[int, _File] = {}
        self._scratch = Scratch.create(settings.directory, run, rank)
        self._locks: TierLocks | None = None
        if settings.lock_slots:
            self._locks = TierLocks(lock_directory(), device_key(settings.directory), settings.lock_slots)
        self._pools = {"read": IoPool(settings.threads), "write": IoPool(settings.threads)}
        self._said_buffered = False

    @property
    def free_bytes(self) -> int:
        """What more state may take."""
        free = free_bytes(self._scratch.directory)
        if self.settings.capacity_bytes:
            used = sum(self._file_bytes(file.kind) for file in self._files.values())
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
        name = str(self._scratch.directory / f"{kind.subgroup:06d}.tide")
        fd = self._open(name)
        try:
            reserve(fd, self._file_bytes(kind))
        except BaseException:
            os.close(fd)
            os.unlink(name)
            raise
        blocks = num_blocks(padded_bytes(kind.data_bytes), self.settings.block_bytes)
        self._files[kind.subgroup] = _File(name, fd, kind, np.zeros(blocks, np.uint32))

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
        file = self._files.pop(subgroup)
        os.close(file.fd)
        os.unlink(file.name)

    def read(self, subgroup: int, address: int) -> Transfer:
        """Brings its state to `address`, verified. PathFailed, BlockDamaged or DataTruncated when it cannot be had."""
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

        return self._move("read", file, address, begin)

    def write(self, subgroup: int, address: int, step: int) -> Transfer:
        """Stores the state at `address`, as it is after the update number `step`. PathFailed when it cannot be."""
        file = self._files[subgroup]
        fill(address + file.kind.data_bytes, 0, file.data_bytes - file.kind.data_bytes)

        def begin() -> IoTicket:
            where = header_bytes(len(file.checksums))
            return self._pools["write"].write(
                file.fd, address, file.data_bytes, where, self.settings.block_bytes, file.checksums
            )

        moved = self._move("write", file, address, begin)
        file.step = step
        return moved

    def header(self, subgroup: int, weights_checksum: int) -> Header:
        """What its file should say of itself, for a checkpoint."""
        file = self._files[subgroup]
        return Header(
            kind=file.kind,
            run_id=self._run_id,
            step=max(file.step, 0),
            block_bytes=self.settings.block_bytes,
            block_checksums=tuple(map(int, file.checksums)),
            weights_checksum=weights_checksum,
        )

    def _move(self, operation: Operation, file: _File, address: int, begin: Callable[[], IoTicket]) -> Transfer:
        waited, first = 0.0, float("nan")
        attempts = Retrying(
            stop=stop_after_attempt(ATTEMPTS),
            wait=wait_exponential(multiplier=0.02),
            retry=retry_if_exception_type(_TransientError),
            reraise=True,
        )
        try:
            for attempt in attempts:
                with attempt, self._locks.hold() if self._locks is not None else nullcontext() as held:
                    waited += held.waited_seconds if held is not None else 0.0
                    ticket = begin()
                    while not ticket.wait(POLL_SECONDS):
                        pass  # lets Python handle signals
                    first = ticket.start if first != first else first
                    self._check(operation, file, address, ticket)
        except _TransientError as error:
            raise PathFailed(
                f"Path {self.name} failed to {operation} subgroup {file.kind.subgroup}, {ATTEMPTS} times: "
                f"{os.strerror(error.errno)}. The last state that it holds is that of step {file.step}.",
                self.name, file.kind.subgroup, error.errno,
            ) from None  # fmt: skip
        return Transfer(first, ticket.end, file.data_bytes, waited)

    def _check(self, operation: Operation, file: _File, address: int, ticket: IoTicket) -> None:
        if ticket.ok:
            return
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
        self.counters.retries[operation] += 1
        raise _TransientError(ticket.error or errno.EIO)

    def calibrate(self, nbytes: int) -> PathSpeeds:
        """How fast it writes and reads `nbytes` alone, a first estimate that live rates replace, and whether both ways
        run at full speed at once. Takes space."""
        size = max(padded_bytes(nbytes), self.settings.block_bytes)
        name = str(self._scratch.directory / "calibration")
        memory, fd = aligned_buffer(size), self._open(name)
        try:
            reserve(fd, size)
            seconds = {moves: self._timed(moves, fd, memory) for moves in (("write",), ("read",), ("write", "read"))}
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
        return max(end - start, 1e-9)

    def close(self) -> None:
        """Its files are gone afterwards. Idempotent; nothing in a fork."""
        if self._scratch.owner.pid != os.getpid():
            return
        for pool in self._pools.values():
            pool.close()
        for file in self._files.values():
            os.close(file.fd)
        self._files.clear()
        self._scratch.close()


class _TransientError(Exception):
    def __init__(self, errno: int) -> None:
        super().__init__(errno)
        self.errno = errno
