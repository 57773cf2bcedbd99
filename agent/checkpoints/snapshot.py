"""Point-in-time snapshots of a subgroup's state, and writing them to a file while training continues.

State on a path is held by a second descriptor of its file: the next flush goes to another file, and the held file keeps
its data until the descriptor is closed, even after it is unlinked. State in memory is held as a copy.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
from tenacity import retry, retry_if_result, stop_after_attempt

from tidegate.agent.interrupts import DelayInterrupt
from tidegate.agent.tiers.disk_space import reserve
from tidegate.agent.tiers.file_moves import TRANSIENT_ERRORS
from tidegate.agent.tiers.file_path import HeldFile, write_header
from tidegate.agent.tiers.state_file import Header, StateKind, file_bytes, header_bytes, num_blocks, padded_bytes
from tidegate.errors import DataTruncated
from tidegate.kernels import IoPool, IoTicket, crc32c, open_direct

BLOCK_BYTES: Final = 1 << 20
"""Size of a checksummed block in files copied from memory."""
CHUNK_BYTES: Final = 8 << 20
"""Bytes transferred between two calls of `before_chunk`: rounded down to whole blocks, at least one block."""
ATTEMPTS: Final = 3
"""Maximum number of attempts to read, if a read fails with a transient error or a wrong checksum."""
POLL_SECONDS: Final = 1.0

BeforeChunk = Callable[[int], object]
"""Type of a callback that is called before each chunk, with the number of bytes of state in it (0 for a user's file).
It may wait; an error that it raises ends the work."""


class StateSource(Protocol):
    """Snapshot of one subgroup's state that can be read chunk by chunk."""

    @property
    def kind(self) -> StateKind: ...

    @property
    def block_bytes(self) -> int: ...

    def load(self, pool: IoPool, first: int, nbytes: int, buffer: int) -> int:
        """Makes `nbytes` of the state available in memory, from offset `first` on, and returns their address. `buffer`:
        address of free memory of that size, into which state in a file is read. State that is in memory already is not
        copied; then the result is its own address."""

    def header(self, checksums: tuple[int, ...]) -> Header:
        """The header of the state file to which this snapshot is written. `checksums`: checksums of the blocks that
        were written."""

    def close(self) -> None:
        """Releases the snapshot. Idempotent."""


@dataclass(slots=True)
class StateInMemory:
    """Snapshot of a subgroup's state in memory at `address`, zero-padded to whole pages. `memory`: object that owns
    this memory and keeps it allocated."""

    kind: StateKind
    run_id: bytes
    step: int
    weights_checksum: int
    address: int
    memory: Any
    block_bytes: int = BLOCK_BYTES

    def load(self, pool: IoPool, first: int, nbytes: int, buffer: int) -> int:
        return self.address + first

    def header(self, checksums: tuple[int, ...]) -> Header:
        return Header(self.kind, self.run_id, self.step, self.block_bytes, checksums, self.weights_checksum)

    def close(self) -> None:
        self.memory = None


@dataclass(slots=True)
class StateInFile:
    """Snapshot of a subgroup's state that lies in a file of a path. Each block is verified when it is read."""

    held: HeldFile

    @property
    def kind(self) -> StateKind:
        return self.held.header.kind

    @property
    def block_bytes(self) -> int:
        return self.held.header.block_bytes

    def load(self, pool: IoPool, first: int, nbytes: int, buffer: int) -> int:
        held, header, block = self.held, self.held.header, first // self.block_bytes
        expected = np.array(header.block_checksums[block : block + num_blocks(nbytes, self.block_bytes)], np.uint32)
        with held.counters.in_progress("read"):
            ticket = _retried(
                lambda: pool.read(held.fd, buffer, nbytes, header.header_bytes + first, self.block_bytes, expected)
            )
        if ticket.checksum_mismatch:
            at = ticket.failed_block * self.block_bytes
            found = crc32c(buffer + at, min(self.block_bytes, nbytes - at))
            header.check_block(block + ticket.failed_block, found, held.name)
        if ticket.end_of_file:
            raise DataTruncated(held.name, f"{os.fstat(held.fd).st_size:,} bytes", f"{header.file_bytes:,}")
        _check(ticket, held.name)
        held.count(ticket.start, ticket.end, nbytes)
        return buffer

    def header(self, checksums: tuple[int, ...]) -> Header:
        return self.held.header

    def close(self) -> None:
        self.held.close()


def write_state(
    pool: IoPool, state: StateSource, target: Path, buffer: int = 0, before_chunk: BeforeChunk | None = None
) -> None:
    """Writes a snapshot to a new state file with direct I/O; durable after fsync. `buffer`: address of `buffer_bytes`
    bytes of page-aligned memory. `before_chunk` is called before each chunk.

    OSError or PathFull when the file cannot be written, OSError or `StateFileError` when the state cannot be read.
    """
    nbytes, block_bytes = padded_bytes(state.kind.data_bytes), state.block_bytes
    checksums = np.zeros(num_blocks(nbytes, block_bytes), np.uint32)
    data_at, chunk = header_bytes(len(checksums)), chunk_bytes(block_bytes)
    fd, _ = open_direct(target, write=True, create=True)
    try:
        reserve(fd, file_bytes(state.kind.data_bytes, block_bytes))
        for first in range(0, nbytes, chunk):
            size = min(chunk, nbytes - first)
            if before_chunk is not None:
                before_chunk(size)
            address = state.load(pool, first, size, buffer)
            chunk_checksums = checksums[first // block_bytes : num_blocks(first + size, block_bytes)]
            begin = partial(pool.write, fd, address, size, data_at + first, block_bytes, chunk_checksums)
            _check(run_transfer(begin), target)
        write_header(fd, state.header(tuple(map(int, checksums))))
    finally:
        os.close(fd)


def chunk_bytes(block_bytes: int) -> int:
    """Size of a chunk in bytes: CHUNK_BYTES rounded down to whole blocks of `block_bytes`, but at least one block."""
    return max(CHUNK_BYTES // block_bytes, 1) * block_bytes


def buffer_bytes(state: StateSource) -> int:
    """Bytes of the buffer that `write_state` needs; 0 for state in memory."""
    if isinstance(state, StateInMemory):
        return 0
    return min(chunk_bytes(state.block_bytes), padded_bytes(state.kind.data_bytes))


def run_transfer(begin: Callable[[], IoTicket]) -> IoTicket:
    """Starts a transfer with `begin`, waits for its end and returns its ticket. If an exception interrupts the wait, it
    is raised only after the threads have stopped using the file and the memory, so that the caller can
    close and free them."""
    with DelayInterrupt():
        ticket = begin()
        try:
            while not ticket.wait(POLL_SECONDS):
                pass  # lets Python handle signals
        except BaseException:
            ticket.cancel()
            while not ticket.wait(POLL_SECONDS):
                pass
            raise
    return ticket


@retry(
    retry=retry_if_result(lambda ticket: ticket.error in TRANSIENT_ERRORS or ticket.checksum_mismatch),
    stop=stop_after_attempt(ATTEMPTS),
    retry_error_callback=lambda state: state.outcome.result(),  # type: ignore[union-attr]
)
def _retried(begin: Callable[[], IoTicket]) -> IoTicket:
    """Runs a transfer and returns its ticket. After a transient error or a checksum mismatch it is repeated, up to
    `ATTEMPTS` attempts in all; the last ticket is returned."""
    return run_transfer(begin)


def _check(ticket: IoTicket, name: str | os.PathLike[str]) -> None:
    """Raises OSError when the transfer of `ticket` failed. `name`: the file, for the error."""
    if not ticket.ok:
        code = ticket.error or errno.EIO
        raise OSError(code, os.strerror(code), os.fspath(name))
