"""Moves blocks between memory and objects, several at once, each with its checksum."""

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

from tidegate.agent.tiers.object_client import Client, Refused
from tidegate.agent.tiers.object_settings import ObjectSettings
from tidegate.agent.tiers.transfers import Operation, PathCounters, Transfer
from tidegate.errors import BlockDamaged, DataTruncated
from tidegate.kernels import copy, crc32c

Job = tuple[Operation, Callable[[], None]]
"""One object, and the threads that move it."""


def nothing() -> None:
    """What is called when nobody wants to be told."""


@dataclass(frozen=True)
class StoredBlocks:
    """Objects `<folder>/00000`, `<folder>/00001`, … in the order of the blocks."""

    folder: str
    checksums: NDArray[np.uint32]

    @property
    def keys(self) -> list[str]:
        return [f"{self.folder}/{block:05d}" for block in range(len(self.checksums))]


class BlockMover:
    """Threads for each direction. May be used by several threads, each with memory of its own."""

    def __init__(self, name: str, settings: ObjectSettings, client: Client, counters: PathCounters) -> None:
        self._settings = settings
        self._client = client
        self._counters = counters
        self._moving: set[object] = set()
        self._pools: dict[Operation, ThreadPoolExecutor] = {
            "read": ThreadPoolExecutor(settings.threads, f"tidegate-{name}-read"),
            "write": ThreadPoolExecutor(settings.threads, f"tidegate-{name}-write"),
        }

    @property
    def busy(self) -> bool:
        """Something is being moved: memory that was given may still be used."""
        return bool(self._moving)

    def reads(self, stored: StoredBlocks, address: int, nbytes: int) -> list[Job]:
        """To bring it to `address`, verified. Refused, BlockDamaged or DataTruncated when it cannot be had."""
        return [
            ("read", partial(self._read, key, block, address + at, size, int(stored.checksums[block])))
            for block, (key, (at, size)) in enumerate(zip(stored.keys, self._blocks(nbytes), strict=True))
        ]

    def writes(self, stored: StoredBlocks, address: int, nbytes: int) -> list[Job]:
        """To store what is at `address`, and its checksums in `stored`. Refused when it cannot be."""
        return [
            ("write", partial(self._write, stored, block, key, address + at, size))
            for block, (key, (at, size)) in enumerate(zip(stored.keys, self._blocks(nbytes), strict=True))
        ]

    def move(self, jobs: Sequence[Job], begun: Callable[[], None] = nothing) -> None:
        """Raises what the first one raised that failed. Whatever is raised, nothing uses the memory afterwards.

        begun: called when all are queued.
        """
        futures: list[Future[None]] = []
        move = object()
        self._moving.add(move)
        try:
            for operation, job in jobs:
                futures.append(self._pools[operation].submit(job))
            begun()
            wait(futures, return_when=FIRST_EXCEPTION)
        finally:
            for future in futures:
                future.cancel()
            wait(futures)
            self._moving.discard(move)
        for future in futures:
            if not future.cancelled():
                future.result()

    def seconds(self, jobs: Sequence[Job]) -> float:
        """How long they take, more than 0."""
        start = time.monotonic()
        self.move(jobs)
        return max(time.monotonic() - start, 1e-9)

    def later(self, work: Callable[[], None]) -> None:
        """Does something that needs no memory when a thread has time for it; not at all after `close`."""
        self._pools["write"].submit(work)

    def moved(self, operation: Operation, transfer: Transfer) -> Transfer:
        """Notes what has ended well."""
        return self._counters.count(operation, transfer)

    def count(self, operation: Operation, again: bool) -> None:
        """Notes an attempt that failed, and whether it is repeated."""
        self._counters.count_error(operation)
        if again:
            self._counters.count_retry(operation)

    def url(self, key: str) -> str:
        return f"{self._settings.url.rstrip('/')}/{key}"

    def close(self) -> None:
        """Ends the threads, and waits for what they are at."""
        for pool in self._pools.values():
            pool.shutdown(cancel_futures=True)

    def _blocks(self, nbytes: int) -> list[tuple[int, int]]:
        """Offset and bytes of each."""
        size = self._settings.block_bytes
        return [(at, min(size, nbytes - at)) for at in range(0, nbytes, size)]

    def _read(self, key: str, block: int, address: int, nbytes: int, expected: int) -> None:
        """Once more when it differs: the transfer may have been bad, not what is stored."""
        for attempt in (1, 2):
            self._fetch(key, address, nbytes)
            found = crc32c(address, nbytes)
            if found == expected:
                return
            self.count("read", again=attempt == 1)
        raise BlockDamaged(self.url(key), block, 0, found, expected)

    def _fetch(self, key: str, address: int, nbytes: int) -> None:
        try:
            data = self._client.get(key, nbytes, lambda: self.count("read", again=True))
        except Refused as error:
            if error.errno != errno.ENOENT:
                raise
            self.count("read", again=False)
            raise DataTruncated(self.url(key), f"no object ({error})", f"{nbytes:,} bytes") from None
        if len(data) != nbytes:
            self.count("read", again=False)
            raise DataTruncated(self.url(key), f"{len(data):,} bytes", f"{nbytes:,}")
        copy(address, np.frombuffer(data, np.uint8).ctypes.data, nbytes)

    def _write(self, stored: StoredBlocks, block: int, key: str, address: int, nbytes: int) -> None:
        stored.checksums[block] = crc32c(address, nbytes)
        memory = (ctypes.c_uint8 * nbytes).from_address(address)
        self._client.put(key, memoryview(memory).cast("B"), lambda: self.count("write", again=True))
