"""State as it was at one moment, and how it is written to a file while whatever holds it goes on changing.

What lies on a path is held by a second descriptor of its file: the next flush goes to another file, and the one that is
held is there until it is let go, with a name or without. What lies in memory is held by a copy.
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

from tidegate.agent.interrupts import Uninterrupted
from tidegate.agent.tiers.file_moves import PASSING
from tidegate.agent.tiers.file_path import HeldFile, write_header
from tidegate.agent.tiers.scratch import reserve
from tidegate.agent.tiers.state_file import Header, StateKind, file_bytes, header_bytes, num_blocks, padded_bytes
from tidegate.errors import DataTruncated
from tidegate.kernels import IoPool, IoTicket, crc32c, open_direct

BLOCK_BYTES: Final = 1 << 20
CHUNK_BYTES: Final = 8 << 20
"""What is moved between two calls of `pace`: whole blocks, at least one."""
ATTEMPTS: Final = 3
POLL_SECONDS: Final = 1.0

Pace = Callable[[int], object]
"""Called before each chunk, with its bytes."""


class State(Protocol):
    """The state of one subgroup, block by block."""

    @property
    def kind(self) -> StateKind: ...

    @property
    def block_bytes(self) -> int: ...

    def load(self, pool: IoPool, first: int, nbytes: int, buffer: int) -> int:
        """The address of `nbytes` of it from `first` on; it may be `buffer`, the address of as much memory."""

    def header(self, checksums: tuple[int, ...]) -> Header:
        """`checksums`: of the blocks as they were written."""

    def close(self) -> None:
        """Lets it go. Idempotent."""


@dataclass(slots=True)
class StateInMemory:
    """State at `address`, in whole pages whose rest is zeros; `memory` is what keeps it there."""

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
    """State in a file of a path; each block is verified when it is read."""

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
        with held.counters.going_on("read"):
            ticket = _tried(
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


def write_state(pool: IoPool, state: State, target: Path, buffer: int = 0, pace: Pace | None = None) -> None:
    """Writes a state file around the page cache; durable after fsync. `buffer`: the address of `buffer_bytes`.

    OSError or PathFull when it cannot be written, OSError or `StateFileError` when the state cannot be read.
    """
    nbytes, block_bytes = padded_bytes(state.kind.data_bytes), state.block_bytes
    checksums = np.zeros(num_blocks(nbytes, block_bytes), np.uint32)
    data_at, chunk = header_bytes(len(checksums)), chunk_bytes(block_bytes)
    fd, _ = open_direct(target, write=True, create=True)
    try:
        reserve(fd, file_bytes(state.kind.data_bytes, block_bytes))
        for first in range(0, nbytes, chunk):
            size = min(chunk, nbytes - first)
            if pace is not None:
                pace(size)
            address = state.load(pool, first, size, buffer)
            some = checksums[first // block_bytes : num_blocks(first + size, block_bytes)]
            begin = partial(pool.write, fd, address, size, data_at + first, block_bytes, some)
            _check(finish(begin), target)
        write_header(fd, state.header(tuple(map(int, checksums))))
    finally:
        os.close(fd)


def chunk_bytes(block_bytes: int) -> int:
    return max(CHUNK_BYTES // block_bytes, 1) * block_bytes


def buffer_bytes(state: State) -> int:
    """What `write_state` needs of a buffer; 0 for state in memory."""
    if isinstance(state, StateInMemory):
        return 0
    return min(chunk_bytes(state.block_bytes), padded_bytes(state.kind.data_bytes))


def finish(begin: Callable[[], IoTicket]) -> IoTicket:
    """The ticket of a transfer that has ended. Whatever is raised meanwhile comes when its threads are done with file
    and memory, which the caller then lets go of."""
    with Uninterrupted():
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


def _tried(begin: Callable[[], IoTicket]) -> IoTicket:
    """Again where the error may pass."""
    for _ in range(ATTEMPTS - 1):
        ticket = finish(begin)
        if ticket.ok or (ticket.error not in PASSING and not ticket.checksum_mismatch):
            return ticket
    return finish(begin)


def _check(ticket: IoTicket, name: str | os.PathLike[str]) -> None:
    if not ticket.ok:
        code = ticket.error or errno.EIO
        raise OSError(code, os.strerror(code), os.fspath(name))
