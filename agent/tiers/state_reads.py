"""Reads of state files outside the lanes, with verified checksums: from files of checkpoints, and from files that a
checkpoint holds (`HeldFile`)."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
from tenacity import retry, retry_if_result, stop_after_attempt

from tidegate.agent.tiers.file_moves import TRANSIENT_ERRORS
from tidegate.agent.tiers.state_file import Header, num_blocks
from tidegate.agent.tiers.transfers import PathCounters, Transfer, run_transfer
from tidegate.errors import DataTruncated
from tidegate.kernels import IoPool, IoTicket, crc32c

ATTEMPTS: Final = 3
"""Maximum number of attempts to read, if a read fails with a transient error or a wrong checksum."""


@dataclass(slots=True)
class HeldFile:
    """File of one subgroup that a checkpoint holds, to copy the state in it later. `header`: header for the copy. `fd`:
    separate file descriptor, which stays valid after the file is unlinked."""

    name: str
    fd: int
    header: Header
    counters: PathCounters

    def load(self, pool: IoPool, first: int, nbytes: int, buffer: int) -> int:
        """Reads `nbytes` of the state, from offset `first` on, to the address `buffer`, and returns `buffer`. The read
        is included in the counters of the storage path."""
        with self.counters.in_progress("read"):
            ticket = read_blocks(pool, self.fd, self.name, self.header, first, nbytes, buffer)
        self.counters.count("read", Transfer(ticket.start, ticket.end, nbytes, 0.0, is_whole=False))
        return buffer

    def close(self) -> None:
        """Closes the file. Idempotent."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def read_blocks(
    pool: IoPool, fd: int, name: str | os.PathLike[str], header: Header, first: int, nbytes: int, buffer: int
) -> IoTicket:
    """Reads `nbytes` of the state in a file to the address `buffer`, from offset `first` in the state on, and verifies
    the blocks. BlockDamaged, DataTruncated or OSError when that fails. `name`: the file, for errors."""
    block_bytes, block = header.block_bytes, first // header.block_bytes
    expected = np.array(header.block_checksums[block : block + num_blocks(nbytes, block_bytes)], np.uint32)
    ticket = _retried(lambda: pool.read(fd, buffer, nbytes, header.header_bytes + first, block_bytes, expected))
    if ticket.checksum_mismatch:
        at = ticket.failed_block * block_bytes
        header.check_block(block + ticket.failed_block, crc32c(buffer + at, min(block_bytes, nbytes - at)), name)
    if ticket.end_of_file:
        raise DataTruncated(name, f"{os.fstat(fd).st_size:,} bytes", f"{header.file_bytes:,}")
    check_ticket(ticket, name)
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


def check_ticket(ticket: IoTicket, name: str | os.PathLike[str]) -> None:
    """Raises OSError when the transfer of `ticket` failed. `name`: the file, for the error."""
    if not ticket.ok:
        code = ticket.error or errno.EIO
        raise OSError(code, os.strerror(code), os.fspath(name))
