"""Transfers blocks of state between memory and an object store: several at once, each with a checksum."""

from __future__ import annotations

import ctypes
import errno
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from tidegate.agent.interrupts import DelayInterrupt, wait_for_end
from tidegate.agent.tiers.object_client import Client, RequestFailed
from tidegate.agent.tiers.object_settings import ObjectSettings
from tidegate.agent.tiers.transfers import POLL_SECONDS, Operation, PathCounters, no_op
from tidegate.errors import BlockDamaged, DataTruncated
from tidegate.kernels import copy, crc32c

Job = tuple[Operation, Callable[[], None]]
"""One request of a transfer: its direction, which selects the thread pool, and the function that reads or writes one
object."""


@dataclass(frozen=True)
class StoredBlocks:
    """Objects that hold one subgroup's state: `<folder>/00000`, `<folder>/00001`, … in the order of the blocks."""

    folder: str
    checksums: NDArray[np.uint32]

    @property
    def keys(self) -> list[str]:
        """Keys of the objects, one for each block."""
        return [f"{self.folder}/{block:05d}" for block in range(len(self.checksums))]


class BlockMover:
    """Thread pools that read and write objects. Several threads may call it at once if they use separate memory."""

    def __init__(self, name: str, settings: ObjectSettings, client: Client, counters: PathCounters) -> None:
        self._settings = settings
        self._client = client
        self._counters = counters
        self._pools: dict[Operation, ThreadPoolExecutor] = {
            "read": ThreadPoolExecutor(settings.threads, f"tidegate-{name}-read"),
            "write": ThreadPoolExecutor(settings.threads, f"tidegate-{name}-write"),
        }

    def read_jobs(self, stored: StoredBlocks, address: int, nbytes: int) -> list[Job]:
        """Jobs that read the objects into memory at `address` and verify them. RequestFailed, BlockDamaged or
        DataTruncated when an object cannot be read."""
        return [
            ("read", partial(self._read, key, block, address + at, size, int(stored.checksums[block])))
            for block, (key, (at, size)) in enumerate(zip(stored.keys, self._blocks(nbytes), strict=True))
        ]

    def write_jobs(self, stored: StoredBlocks, address: int, nbytes: int) -> list[Job]:
        """Jobs that write `nbytes` from `address` to the objects and put the checksums in `stored`. RequestFailed when
        an object cannot be written."""
        return [
            ("write", partial(self._write, stored, block, key, address + at, size))
            for block, (key, (at, size)) in enumerate(zip(stored.keys, self._blocks(nbytes), strict=True))
        ]

    def move(self, jobs: Sequence[Job], begun: Callable[[], None] = no_op) -> None:
        """Runs jobs and waits until all have ended. If jobs fail, the error of the first failed job in the list is
        raised. After a return or an exception, no thread uses the memory any more.

        begun: callback, called when all jobs are queued.
        """
        futures: list[Future[None]] = []
        with DelayInterrupt():  # outside a lane
            try:
                for operation, job in jobs:
                    futures.append(self._pools[operation].submit(job))
                begun()
                wait(futures, return_when=FIRST_EXCEPTION)
            finally:
                for future in futures:
                    future.cancel()
                wait_for_end(lambda: not wait(futures, POLL_SECONDS).not_done)
        for future in futures:
            if not future.cancelled():
                future.result()

    def seconds(self, jobs: Sequence[Job]) -> float:
        """Runs the jobs and returns the seconds until all have ended, always more than 0."""
        start = time.monotonic()
        self.move(jobs)
        return max(time.monotonic() - start, 1e-9)

    def run_in_background(self, work: Callable[[], None]) -> None:
        """Queues a function for a thread of the write pool and returns at once. The function must not use memory of the
        caller. It is not run after `close`."""
        self._pools["write"].submit(work)

    def count_failure(self, operation: Operation, again: bool) -> None:
        """Counts an attempt that failed, and a retry if `again`."""
        self._counters.count_error(operation)
        if again:
            self._counters.count_retry(operation)

    def url(self, key: str) -> str:
        """URL of an object, for messages."""
        return f"{self._settings.url.rstrip('/')}/{key}"

    def close(self) -> None:
        """Ends the threads: queued jobs are cancelled, running jobs are waited for."""
        for pool in self._pools.values():
            pool.shutdown(cancel_futures=True)

    def _blocks(self, nbytes: int) -> list[tuple[int, int]]:
        """Offset and length in bytes of each block."""
        size = self._settings.block_bytes
        return [(at, min(size, nbytes - at)) for at in range(0, nbytes, size)]

    def _read(self, key: str, block: int, address: int, nbytes: int, expected: int) -> None:
        """Reads a block and verifies it against the `expected` checksum. After a mismatch the block is read once more,
        because the transfer may have been bad and the stored object good. BlockDamaged after the second mismatch."""
        for attempt in (1, 2):
            self._fetch(key, address, nbytes)
            found = crc32c(address, nbytes)
            if found == expected:
                return
            self.count_failure("read", again=attempt == 1)
        raise BlockDamaged(self.url(key), block, 0, found, expected)

    def _fetch(self, key: str, address: int, nbytes: int) -> None:
        try:
            data = self._client.get(key, nbytes, lambda: self.count_failure("read", again=True))
        except RequestFailed as error:
            if error.errno != errno.ENOENT:
                raise
            self.count_failure("read", again=False)
            raise DataTruncated(self.url(key), f"no object ({error})", f"{nbytes:,} bytes") from None
        if len(data) != nbytes:
            self.count_failure("read", again=False)
            raise DataTruncated(self.url(key), f"{len(data):,} bytes", f"{nbytes:,}")
        copy(address, np.frombuffer(data, np.uint8).ctypes.data, nbytes)

    def _write(self, stored: StoredBlocks, block: int, key: str, address: int, nbytes: int) -> None:
        stored.checksums[block] = crc32c(address, nbytes)
        memory = (ctypes.c_uint8 * nbytes).from_address(address)
        self._client.put(key, memoryview(memory).cast("B"), lambda: self.count_failure("write", again=True))
