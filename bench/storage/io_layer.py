"""Throughput of a disk by Tidegate's native direct I/O alone: with checksums, as an update could have at most, or
without, so that no CPU core touches the data, as in fio."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import numpy as np

from storage.fio import Mix
from tidegate.kernels import IoPool, IoTicket, aligned_buffer, crc32c, num_blocks, open_direct

QUEUED = 6
"""Transfers in progress or queued: as many of each direction as a path has host slots, if there are as many reads as
writes."""


def rate_in_little_memory(file: Path, mix: Mix) -> float:
    """Bytes per second like `rate` without checksums, in the memory that fio has: one block for each block in flight.
    The same few buffers are used again and again, so that they stay in the caches of the machine."""
    return rate(file, mix, mix.block_bytes, with_checksums=False, queued=mix.depth, memory=mix.depth)


def rate(
    file: Path,
    mix: Mix,
    transfer_bytes: int,
    *,
    with_checksums: bool = True,
    queued: int = QUEUED,
    memory: int = 2 * QUEUED,
) -> float:
    """Bytes per second of reads and writes together, in the shares of `mix`. Creates the file if it is missing. As many
    blocks are in flight as on a storage path with half as many `threads`.

    transfer_bytes: size of one transfer, which the engine makes for one subgroup. with_checksums: whether the checksum
        of each block is made or verified. queued: number of transfers in progress or queued. memory: number of
        transfers for which there is memory, at least `queued`.
    """
    created = not file.exists()
    fd, direct = open_direct(file, write=True, create=True)
    if not direct:
        raise SystemExit(f"{file.parent} is on a file system without O_DIRECT: give another --directory")
    buffers = aligned_buffer(memory * transfer_bytes).reshape(memory, transfer_bytes)
    buffers[:] = 1
    checksums = np.array(
        [
            crc32c(buffers.ctypes.data, min(mix.block_bytes, transfer_bytes - at))
            for at in range(0, transfer_bytes, mix.block_bytes)
        ],
        np.uint32,
    )
    found = np.empty((memory, num_blocks(transfer_bytes, mix.block_bytes)), np.uint32)
    places = max(2 * queued, mix.file_bytes // transfer_bytes) // 2
    turn, numbers = count(), {True: count(), False: count()}
    with IoPool(mix.depth) as pool:

        def move(reads: bool, number: int) -> IoTicket:
            buffer, place = next(turn) % memory, number % places + (0 if reads else places)
            sums = (checksums if reads else found[buffer]) if with_checksums else None
            address, offset = buffers[buffer].ctypes.data, place * transfer_bytes
            return (pool.read if reads else pool.write)(fd, address, transfer_bytes, offset, mix.block_bytes, sums)

        if created:
            for number in range(places):
                done(pool.write(fd, buffers.ctypes.data, transfer_bytes, number * transfer_bytes, mix.block_bytes))
                done(move(False, number))
        tickets, in_flight = list[IoTicket](), deque[IoTicket]()
        stop = time.monotonic() + mix.seconds
        for reads in turns(mix.read_share):
            if time.monotonic() < stop:
                in_flight.append(move(reads, next(numbers[reads])))
            if len(in_flight) == queued or time.monotonic() >= stop:
                if not in_flight:
                    break
                tickets.append(done(in_flight.popleft()))
    os.close(fd)
    seconds = max(ticket.end for ticket in tickets) - min(ticket.start for ticket in tickets)
    return sum(ticket.nbytes for ticket in tickets) / seconds


def turns(read_share: float) -> Iterator[bool]:
    """Whether each transfer is a read: in even turns, with this share of reads."""
    owed = 0.0
    while True:
        owed += read_share
        yield owed >= 0.5
        owed -= owed >= 0.5


def done(ticket: IoTicket) -> IoTicket:
    ticket.wait()
    if not ticket.ok:
        raise SystemExit(f"a transfer failed: {os.strerror(ticket.error)}; wrong checksum: {ticket.checksum_mismatch}")
    return ticket
