"""Point-in-time snapshots of a subgroup's state, and writing them to a file while training continues.

State on a path is held by a second descriptor of its file: the next flush goes to another file, and the held file keeps
its data until the descriptor is closed, even after it is unlinked. State in memory is held as a copy.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np

from tidegate.agent.tiers.disk_space import reserve
from tidegate.agent.tiers.file_moves import write_header
from tidegate.agent.tiers.state_file import Header, header_bytes, num_blocks, padded_bytes
from tidegate.agent.tiers.state_reads import check_ticket
from tidegate.agent.tiers.transfers import run_transfer
from tidegate.kernels import IoPool, open_direct

BLOCK_BYTES: Final = 1 << 20
"""Size of a checksummed block in files copied from memory."""
CHUNK_BYTES: Final = 8 << 20
"""Bytes transferred between two calls of `before_chunk`: rounded down to whole blocks, at least one block."""

BeforeChunk = Callable[[int], object]
"""Type of a callback that is called before each chunk, with the number of bytes of state in it (0 for a user's file).
It may wait; an error that it raises ends the work."""


class StateSource(Protocol):
    """Snapshot of one subgroup's state that can be read chunk by chunk."""

    @property
    def header(self) -> Header:
        """The header of the state file to which this snapshot is written, except the checksums of the blocks."""

    def load(self, pool: IoPool, first: int, nbytes: int, buffer: int) -> int:
        """Makes `nbytes` of the state available in memory, from offset `first` on, and returns their address. `buffer`:
        address of free memory of that size, into which state in a file is read. State that is in memory already is not
        copied; then the result is its own address."""

    def close(self) -> None:
        """Releases the snapshot. Idempotent."""


@dataclass(slots=True)
class StateInMemory:
    """Snapshot of a subgroup's state in memory at `address`, zero-padded to whole pages. `memory`: object that owns
    this memory and keeps it allocated."""

    header: Header
    address: int
    memory: Any

    def load(self, pool: IoPool, first: int, nbytes: int, buffer: int) -> int:
        return self.address + first

    def close(self) -> None:
        self.memory = None


def write_state(
    pool: IoPool, state: StateSource, target: Path, buffer: int = 0, before_chunk: BeforeChunk | None = None
) -> None:
    """Writes a snapshot to a new state file with direct I/O; durable after fsync. `buffer`: address of `buffer_bytes`
    bytes of page-aligned memory. `before_chunk` is called before each chunk.

    OSError or PathFull when the file cannot be written, OSError or `StateFileError` when the state cannot be read.
    """
    nbytes, block_bytes = padded_bytes(state.header.data_bytes), state.header.block_bytes
    checksums = np.zeros(num_blocks(nbytes, block_bytes), np.uint32)
    data_at, chunk = header_bytes(len(checksums)), chunk_bytes(block_bytes)
    fd, _ = open_direct(target, write=True, create=True)
    try:
        reserve(fd, state.header.file_bytes)
        for first in range(0, nbytes, chunk):
            size = min(chunk, nbytes - first)
            if before_chunk is not None:
                before_chunk(size)
            address = state.load(pool, first, size, buffer)
            chunk_checksums = checksums[first // block_bytes : num_blocks(first + size, block_bytes)]
            begin = partial(pool.write, fd, address, size, data_at + first, block_bytes, chunk_checksums)
            check_ticket(run_transfer(begin), target)
        write_header(fd, replace(state.header, block_checksums=tuple(map(int, checksums))))
    finally:
        os.close(fd)


def chunk_bytes(block_bytes: int) -> int:
    """Size of a chunk in bytes: CHUNK_BYTES rounded down to whole blocks of `block_bytes`, but at least one block."""
    return max(CHUNK_BYTES // block_bytes, 1) * block_bytes


def buffer_bytes(state: StateSource) -> int:
    """Bytes of the buffer that `write_state` needs; 0 for state in memory."""
    if isinstance(state, StateInMemory):
        return 0
    return min(chunk_bytes(state.header.block_bytes), padded_bytes(state.header.data_bytes))
