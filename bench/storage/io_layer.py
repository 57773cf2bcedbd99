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


def rate(file: Path, mix: Mix, transfer_bytes: int, with_checksums: bool = True) -> float:
    """Bytes per second of reads and writes together, in the shares of `mix`. Creates the file if it is missing. As many
    blocks are in flight as on a storage path with half as many `threads`.

    transfer_bytes: size of one transfer, which the engine makes for one subgroup. with_checksums: whether the checksum
        of each block is made or verified.
    """
    created = not file.exists()
    fd, direct = open_direct(file, write=True, create=True)
    if not direct:
        raise SystemExit(f"{file.parent} is on a file system without O_DIRECT: give another --directory")
    # Each transfer in flight has memory of its own, even if all of them go in one direction.
    memory = aligned_buffer(2 * QUEUED * transfer_bytes).reshape(2, QUEUED, transfer_bytes)
    memory[:] = 1
    checksums = np.array(
        [
            crc32c(memory.ctypes.data, min(mix.block_bytes, transfer_bytes - at))
            for at in range(0, transfer_bytes, mix.block_bytes)
        ],
        np.uint32,
    )
    found = np.empty((QUEUED, num_blocks(transfer_bytes, mix.block_bytes)), np.uint32)
    places = max(2 * QUEUED, mix.file_bytes // transfer_bytes) // 2
    numbers = {True: count(), False: count()}
    with IoPool(mix.depth) as pool:

        def read(number: int) -> IoTicket:
            address, offset = memory[0, number % QUEUED].ctypes.data, number % places * transfer_bytes
            sums = checksums if with_checksums else None
            return pool.read(fd, address, transfer_bytes, offset, mix.block_bytes, sums)

        def write(number: int) -> IoTicket:
            address, offset = memory[1, number % QUEUED].ctypes.data, (places + number % places) * transfer_bytes
            sums = found[number % QUEUED] if with_checksums else None
            return pool.write(fd, address, transfer_bytes, offset, mix.block_bytes, sums)

        if created:
            for number in range(places):
                done(pool.write(fd, memory.ctypes.data, transfer_bytes, number * transfer_bytes, mix.block_bytes))
                done(write(number))
        tickets, in_flight = list[IoTicket](), deque[IoTicket]()
        stop = time.monotonic() + mix.seconds
        for reads in turns(mix.read_share):
            if time.monotonic() < stop:
                in_flight.append((read if reads else write)(next(numbers[reads])))
            if len(in_flight) == QUEUED or time.monotonic() >= stop:
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
