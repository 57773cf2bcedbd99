"""Transfers of subgroup state to and from files by native threads, with a lock between processes and retries."""

from __future__ import annotations

import errno
import fcntl
import os
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from math import isnan
from typing import Final

import numpy as np
from numpy.typing import NDArray
from tenacity import RetryCallState, Retrying, stop_after_attempt, wait_exponential

from tidegate.agent.interrupts import DelayInterrupt, wait_for_end
from tidegate.agent.tiers.disk_space import free_bytes, too_large_message
from tidegate.agent.tiers.path_locks import TierLocks
from tidegate.agent.tiers.state_file import Header, StateKind, file_bytes, header_bytes, padded_bytes
from tidegate.agent.tiers.transfers import POLL_SECONDS, Operation, PathCounters, PreparedMove, Transfer, run_transfer
from tidegate.errors import BlockDamaged, DataTruncated, PathFailed, PathFull, PathUnusable
from tidegate.kernels import IoPool, IoTicket, aligned_buffer, crc32c
from tidegate.kernels.dispatch import TransferTask
from tidegate.kernels.io.direct_io import WriteStop

ATTEMPTS: Final = 3
"""Maximum number of attempts of a transfer that fails with a transient error."""
TRANSIENT_ERRORS: Final = frozenset({errno.EIO, errno.EAGAIN, errno.EINTR, errno.ETIMEDOUT, errno.ENOMEM})
"""Error numbers (errno) of transient errors, after which a transfer is retried. All other errors (no such device,
read-only, …) are permanent."""
MAX_PREPARED: Final = 32
"""Maximum number of prepared transfers that are kept for one file, each for another address in memory."""
NO_SPACE_ERRORS: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


@dataclass
class StateFile:
    """File of one subgroup's state. `step`: number of the update whose state the file holds; -1 before the first write,
    when the state is zeros."""

    name: str
    fd: int
    kind: StateKind
    checksums: NDArray[np.uint32]
    direct: bool
    """Whether reads and writes bypass the page cache."""
    step: int = -1
    linked_header: Header | None = None
    """Header of the file if a checkpoint uses the file, as a hard link or as an open descriptor. Such a file must not
    be written to again. None if no checkpoint uses it."""
    prepared: dict[tuple[Operation, int], PreparedMove] = field(default_factory=dict)
    """Transfers that were prepared for earlier plans, by operation and address in memory. Later plans run their tasks
    again, because most plans move the same state to and from the same host slots."""

    @cached_property
    def data_bytes(self) -> int:
        """Bytes of the state, padding included."""
        return padded_bytes(self.kind.data_bytes)


class FileMover:
    """Runs the transfers of one path's files in native threads, under the path's lock. Several threads may call it at
    once if each uses a different file."""

    def __init__(
        self, path: str, threads: int, block_bytes: int, locks: TierLocks | None, counters: PathCounters
    ) -> None:
        """`threads`: blocks read at once, and blocks written at once, while both directions have work. A direction that
        is alone has all of these threads but one, so that one which hangs does not stop the other. `locks`: lock for
        exclusive access between processes; None for no exclusive access."""
        self.locks = locks
        self.pool = IoPool(2 * threads, kept_free=1)
        self.path, self.counters, self._block_bytes = path, counters, block_bytes
        self._moving: set[object] = set()
        self._counting = threading.Lock()
        self.stop = WriteStop()
        """Set when the path takes no more state: writes that were prepared before then fail, and go elsewhere."""

    @property
    def busy(self) -> bool:
        """Whether a transfer is in progress. The kernel may use the transfer's file and memory until the transfer has
        ended."""
        return bool(self._moving) or any(not isnan(one.task.since) for one in tuple(self.counters.prepared))

    def read(
        self, file: StateFile, address: int, begun: Callable[[], None], failed: TransferTask | None = None
    ) -> Transfer:
        """Reads the state of `file` into memory at `address` and verifies it. PathFailed, BlockDamaged or DataTruncated
        when it cannot be read. `begun`: called when all blocks are queued, and again at each retry. `failed`: the task
        of the first attempt, if a lane has run it."""
        return self._move("read", file, address, file.step, begun, failed)

    def write(
        self, file: StateFile, address: int, step: int, begun: Callable[[], None], failed: TransferTask | None = None
    ) -> Transfer:
        """Writes the state at `address`, the state after update number `step`, to stable storage. PathFailed or
        PathFull when that fails; the previous content of the file is then lost. `begun`: called when all blocks are
        queued, and again at each retry. `failed`: the task of the first attempt, if a lane has run it."""
        return self._move("write", file, address, step, begun, failed)

    def prepare(self, operation: Operation, file: StateFile, address: int) -> PreparedMove | None:
        """The transfer as a task, which a lane runs without the interpreter; None for a file without direct I/O, which
        must be synchronised after a write. A task that fails is followed by `read` or `write`, one that succeeds by
        `count`."""
        if not file.direct:
            return None
        move = file.prepared.get((operation, address))
        if move is None:
            if len(file.prepared) >= MAX_PREPARED:
                file.prepared.clear()
            move = PreparedMove(operation, self._task(operation, file, address), file.data_bytes)
            file.prepared[operation, address] = move
        else:
            self._prepare_again(move)
        self.counters.prepared.append(move)
        return move

    def _prepare_again(self, move: PreparedMove) -> None:
        """Prepares the transfer of an earlier plan for the present one."""
        self.count(move)
        with self._counting:  # a thread that counts must not see the end of the earlier run and the state of the next
            move.counted = False
            move.task.reset()

    def _task(self, operation: Operation, file: StateFile, address: int) -> TransferTask:
        """A new task for a transfer of `file` to or from memory at `address`."""
        writes, padding = operation == "write", file.data_bytes - file.kind.data_bytes
        lock, timeout = (self.locks.native, self.locks.timeout_seconds) if self.locks is not None else (None, 0.0)
        return self.pool.task(
            writes, file.fd, address, file.data_bytes, header_bytes(len(file.checksums)), self._block_bytes,
            file.checksums, padding if writes else 0, lock, timeout, self.stop,
        )  # fmt: skip

    def count(self, move: PreparedMove) -> None:
        """Counts a transfer that a lane has run as a task, unless it was counted before."""
        with self._counting:
            if move.counted or not move.task.succeeded:
                return
            move.counted, ticket = True, move.task.ticket
            assert ticket is not None, "the task has run"
            moved = Transfer(ticket.start, ticket.end, move.nbytes, self._lock_wait(move.task))
            self.counters.count(move.operation, moved)

    def count_finished(self) -> None:
        """Counts all transfers that lanes have run as tasks."""
        for move in tuple(self.counters.prepared):
            if not move.counted:
                self.count(move)

    def _lock_wait(self, task: TransferTask) -> float:
        """Seconds that a task that has run waited for the lock. Counts a wait that timed out."""
        entered = task.entered
        if entered is None:
            return 0.0
        if not entered.acquired and self.locks is not None:
            self.locks.count_timeout(entered.failure)
        return entered.waited_seconds

    def _move(
        self,
        operation: Operation,
        file: StateFile,
        address: int,
        step: int,
        begun: Callable[[], None],
        failed: TransferTask | None,
    ) -> Transfer:
        earlier, waited = (failed.ticket, self._lock_wait(failed)) if failed is not None else (None, 0.0)
        first = float("nan")
        attempts = Retrying(
            stop=stop_after_attempt(ATTEMPTS),
            wait=wait_exponential(multiplier=0.02),
            retry=_is_worth_retrying,
            before_sleep=lambda _: self.counters.count_retry(operation),
            reraise=True,
        )
        try:
            for attempt in attempts:
                locks = self.locks if earlier is None else None
                with attempt, locks.hold() if locks is not None else nullcontext() as held:
                    waited += held.waited_seconds if held is not None else 0.0
                    with self.counters.in_progress(operation):
                        ticket, earlier = earlier or self._transfer(operation, file, address, begun), None
                        first = ticket.start if first != first else first
                        self._check(operation, file, address, ticket)
                        end = _synchronised(file.fd) if operation == "write" else None
        except _RefusedError as error:
            what = f"{operation} the state of subgroup {file.kind.subgroup} after step {step}"
            tries, why = attempts.statistics["attempt_number"], os.strerror(error.errno)
            why = f"Path {self.path} failed to {what} in {tries} attempt{'s'[: tries - 1]}: {why}."
            if operation == "write" and error.errno == errno.EFBIG:
                why = f"{why} {too_large_message()}"
            if operation == "write" and error.errno in NO_SPACE_ERRORS:
                raise PathFull(why, self._file_bytes(file), _free_bytes_or_zero(file.fd)) from None
            raise PathFailed(why, self.path, file.kind.subgroup, error.errno) from None
        moved = Transfer(first, ticket.end if end is None else end, file.data_bytes, waited)
        return self.counters.count(operation, moved)

    def _transfer(self, operation: Operation, file: StateFile, address: int, begun: Callable[[], None]) -> IoTicket:
        """Runs one transfer and returns when it has ended. The returned ticket has its times and says whether it
        succeeded. If an exception is raised, the transfer has ended too: the kernel no longer uses the memory."""
        where = header_bytes(len(file.checksums))
        begin = self.pool.read if operation == "read" else self.pool.write
        move = object()
        try:
            self._moving.add(move)
            return run_transfer(
                lambda: begin(file.fd, address, file.data_bytes, where, self._block_bytes, file.checksums), begun
            )
        finally:
            self._moving.discard(move)

    def _check(self, operation: Operation, file: StateFile, address: int, ticket: IoTicket) -> None:
        """Raises BlockDamaged, DataTruncated or _RefusedError when the transfer failed, and counts the error."""
        if ticket.ok:
            return
        self.counters.count_error(operation)
        where = ticket.failed_block * self._block_bytes
        if ticket.checksum_mismatch:
            nbytes = min(self._block_bytes, file.data_bytes - where)
            raise BlockDamaged(
                file.name,
                ticket.failed_block,
                header_bytes(len(file.checksums)) + where,
                crc32c(address + where, nbytes),
                int(file.checksums[ticket.failed_block]),
            )
        if ticket.end_of_file:
            raise DataTruncated(file.name, f"{os.fstat(file.fd).st_size:,} bytes", f"{self._file_bytes(file):,}")
        raise _RefusedError(ticket.error or errno.EIO)

    def _file_bytes(self, file: StateFile) -> int:
        return file_bytes(file.kind.data_bytes, self._block_bytes)

    def seconds(self, ways: tuple[Operation, ...], fd: int, memory: NDArray[np.uint8]) -> float:
        """Measures the seconds to transfer all of `memory` in each direction of `ways`, all directions at once. The
        content of the file does not matter. PathUnusable when a transfer fails."""
        tickets: list[IoTicket] = []
        with DelayInterrupt():
            try:
                for way in ways:
                    begin = getattr(self.pool, way)
                    tickets.append(begin(fd, memory.ctypes.data, len(memory), 0, self._block_bytes))
            finally:
                wait_for_end(lambda: all(ticket.wait(POLL_SECONDS) for ticket in tickets))
        for way, ticket in zip(ways, tickets, strict=True):
            if not ticket.ok:
                why = os.strerror(ticket.error or errno.EIO)
                raise PathUnusable(f"Path {self.path} cannot {way} {len(memory):,} bytes: {why}.")
        start, end = min(ticket.start for ticket in tickets), max(ticket.end for ticket in tickets)
        return max(float(end - start), 1e-9)

    def close(self) -> None:
        """Ends the threads. Writes that still wait for the lock will fail before they touch anything. Idempotent."""
        self.stop.set()
        self.pool.close()


def write_header(fd: int, header: Header) -> None:
    """Writes the header at the beginning of an open file, from page-aligned memory as direct I/O requires."""
    page = aligned_buffer(header.header_bytes)
    page[:] = np.frombuffer(header.pack(), np.uint8)
    written = os.pwrite(fd, page.data, 0)
    if written != header.header_bytes:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _synchronised(fd: int) -> float | None:
    """Synchronises a written file to stable storage and returns the time (monotonic clock, seconds) at which that was
    done. Returns None for a file with direct I/O, whose data are on stable storage already."""
    if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
        return None
    try:
        os.fdatasync(fd)
    except OSError as error:
        raise _RefusedError(error.errno or errno.EIO) from None
    return time.monotonic()


class _RefusedError(Exception):
    """Raised when the operating system reports an error for a transfer."""

    def __init__(self, errno: int) -> None:
        super().__init__(errno)
        self.errno = errno


def _is_worth_retrying(state: RetryCallState) -> bool:
    """Whether a failed attempt is worth a retry: after each transient error, and after the first checksum mismatch,
    because the transfer may have been bad and the stored data good."""
    error = state.outcome.exception() if state.outcome is not None else None
    if isinstance(error, BlockDamaged):
        return state.attempt_number == 1
    return isinstance(error, _RefusedError) and error.errno in TRANSIENT_ERRORS


def _free_bytes_or_zero(fd: int) -> int:
    """Free bytes of the file system of an open file; 0 when the system does not report them."""
    try:
        return free_bytes(fd)
    except OSError:
        return 0
