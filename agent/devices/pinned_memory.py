"""Pool of pinned host memory, which a GPU copies from and to without the CPU. Its buffers are mapped, placed and pinned
once, then reused.

Pinning takes about as long as copying the pages. PyTorch's own cache of pinned memory rounds sizes up to powers of two,
which is too much for a state of 100 GB. So buffers are mapped here, rounded to pages, and returned buffers are reused
for the same size.
"""

from __future__ import annotations

import logging
import mmap
import os
import resource
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, Protocol

import numpy as np
import torch

from tidegate.agent.cgroups import host_available_bytes
from tidegate.agent.cleanup import close_all
from tidegate.errors import MemoryBudgetError
from tidegate.kernels import fill
from tidegate.kernels.io.direct_io import WIPE_ON_FORK

log = logging.getLogger("tidegate.devices")

TOUCH_BYTES: Final = 64 << 20
"""Size in bytes of the pieces of new memory that are zeroed by several threads. Each thread zeroes one piece after the
other."""

TOUCH_THREADS: Final = 8
"""Maximum number of threads that zero new memory at the same time."""


class Pinner(Protocol):
    """Interface for pinning pages, which `CudaRuntime` implements. `pin` returns the reason when it failed, "" on
    success."""

    def pin(self, address: int, nbytes: int) -> str: ...

    def unpin(self, address: int) -> None: ...

    def near_cpus(self) -> frozenset[int]: ...


class PinnedBlock:
    """Mapped pages. When the last reference is dropped, they are unpinned, if they are pinned, and then unmapped.

    The finalizer is attached to the block and holds `memory`, so that the pages are unpinned before they are unmapped.
    A finalizer of the mmap itself would be called too late: Python unmaps first.
    """

    __slots__ = ("__weakref__", "_finalizer", "_pinner", "address", "memory", "nbytes")

    def __init__(self, memory: mmap.mmap, address: int, nbytes: int) -> None:
        self.memory, self.address, self.nbytes = memory, address, nbytes
        self._pinner: Pinner | None = None
        self._finalizer: weakref.finalize[..., PinnedBlock] | None = None

    def pin(self, pinner: Pinner, wait_until_idle: Callable[[], None]) -> str:
        """Pins the pages. Returns the reason if this failed, "" on success.

        wait_until_idle: function that waits until the GPU has finished all its copies from and to host memory. It is
            called before pages are unpinned that a copy may still use.
        """
        reason = pinner.pin(self.address, self.nbytes)
        if not reason:
            self._pinner = pinner
            self._finalizer = weakref.finalize(
                self, _unpin_finalizer, pinner, wait_until_idle, self.memory, self.address, os.getpid()
            )
            self._finalizer.atexit = False
        return reason

    def unpin(self) -> None:
        """Unpins the pages. All work on them must be done."""
        if self._finalizer is not None and self._finalizer.detach() is not None and self._pinner is not None:
            self._pinner.unpin(self.address)


def _unpin_finalizer(
    pinner: Pinner, wait_until_idle: Callable[[], None], memory: mmap.mmap, address: int, pid: int
) -> None:
    """Finalizer of a pinned block that was not unpinned before: waits for copies that may still use the block, then
    unpins its pages. The argument `memory` keeps the pages mapped until then."""
    if os.getpid() != pid:
        return  # a forked child has the pages, but no access to the GPU
    try:
        close_all(wait_until_idle, lambda: pinner.unpin(address))
    except Exception as error:
        log.warning("Unused host memory could not be unpinned: %s: %s", type(error).__name__, error)


class ReturnedBlocks:
    """Queue of the blocks whose buffers (tensors in their memory) were dropped; the pool takes them out and reuses
    them. It exists as long as the pool or a buffer exists."""

    def __init__(self) -> None:
        self._returned: deque[PinnedBlock] = deque()
        self.closed = False
        """Whether the pool is closed: returned blocks are then freed at once."""

    def put(self, block: PinnedBlock) -> None:
        """Returns a block to the pool. Called when the block's buffer is dropped: in any thread and at any time, even
        while the same thread is inside `take`. A lock could therefore deadlock, so the deque is used without one."""
        self._returned.append(block)
        if self.closed:
            self._returned.clear()

    def take(self) -> Iterator[PinnedBlock]:
        """Removes and yields the returned blocks."""
        while self._returned:
            yield self._returned.popleft()


class PinnedPool:
    """Pool of pinned buffers by size. A buffer returns to the pool by itself when it and all its views are dropped.

    wait_until_idle: function that waits until no copy from or to a buffer is in progress. It is called before memory is
        unpinned that may still be in use.
    """

    def __init__(self, pinner: Pinner, wait_until_idle: Callable[[], None] = lambda: None) -> None:
        self._pinner, self._wait_until_idle = pinner, wait_until_idle
        self._cpus = pinner.near_cpus()
        self._free: dict[int, list[PinnedBlock]] = {}
        self._returned = ReturnedBlocks()
        self._mapped: weakref.WeakSet[PinnedBlock] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._warned = False

    @property
    def mapped_bytes(self) -> int:
        return sum(block.nbytes for block in self._mapped)

    def take(self, nbytes: int) -> torch.Tensor:
        """Returns a buffer of `nbytes` zeros. Raises MemoryBudgetError if host memory does not suffice."""
        size = -(-max(nbytes, 1) // mmap.PAGESIZE) * mmap.PAGESIZE
        with self._lock:
            self._returned.closed = False
            self._collect()
            kept = self._free.get(size)
            block = kept.pop() if kept else None
        if block is None:
            block = self._new(size)
        else:
            fill(block.address, 0, nbytes)
        return self._buffer_of(block, nbytes)

    def close(self) -> None:
        """Unpins the buffers that were returned to the pool; all work on them must be done. A buffer that is still in
        use is unpinned when it is dropped. All steps are run even if one fails; then the first error is raised."""
        with self._lock:
            self._returned.closed = True
            self._release_free()

    def _buffer_of(self, block: PinnedBlock, nbytes: int) -> torch.Tensor:
        """A tensor over the memory of a block. The block returns to the pool when the tensor and all its views are
        dropped."""
        array = np.frombuffer(block.memory, np.uint8, nbytes)
        # The storage of the tensor and of all its views holds the array.
        weakref.finalize(array, self._returned.put, block).atexit = False
        return torch.from_numpy(array)

    def _collect(self) -> None:
        """Moves returned blocks to the lists of free blocks, by size."""
        for block in self._returned.take():
            self._free.setdefault(block.nbytes, []).append(block)

    def _release_free(self) -> None:
        """Unpins and drops all free blocks."""
        self._collect()
        released = [block for blocks in self._free.values() for block in blocks]
        self._free.clear()
        close_all(*(block.unpin for block in released))

    def _new(self, size: int) -> PinnedBlock:
        """Maps and pins a new block. Raises MemoryBudgetError if host memory does not suffice. Free blocks of other
        sizes are released if they are more than the memory in use: the pool pins at most twice as much as is used."""
        with self._lock:
            self._collect()
            free = sum(nbytes * len(blocks) for nbytes, blocks in self._free.items())
            if size > host_available_bytes() or free > self.mapped_bytes - free + size:
                self._release_free()
        available = host_available_bytes()
        if size > available:
            raise MemoryBudgetError(
                f"{size:,} bytes do not fit in host memory: {available:,} are available, {self.mapped_bytes:,} are in "
                "use for offloaded state already. Free host memory, lower host_cache, or add storage paths.",
                size, available,
            )  # fmt: skip
        memory = map_pages(size)
        address = np.frombuffer(memory, np.uint8).ctypes.data
        _touch(address, size, self._cpus)
        block = PinnedBlock(memory, address, size)
        with self._lock:
            reason = block.pin(self._pinner, self._wait_until_idle)
            self._mapped.add(block)
        if reason:
            self._warn(size, reason)
        return block

    def _warn(self, size: int, reason: str) -> None:
        """Logs a warning, once, that memory could not be pinned."""
        if self._warned:
            return
        self._warned = True
        soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        limit = "unlimited" if soft == resource.RLIM_INFINITY else f"{soft:,} bytes"
        log.warning(
            "Host memory could not be pinned (%s; %s bytes in addition to %s bytes): copies from and to it are slower "
            "and do not overlap. The limit of locked memory (ulimit -l) is %s: raise it if it is too low.",
            reason, f"{size:,}", f"{self.mapped_bytes - size:,}", limit,
        )  # fmt: skip


def map_pages(size: int, kind: type[mmap.mmap] = mmap.mmap) -> mmap.mmap:
    """Maps private pages, huge ones if available."""
    memory = kind(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for advice in (WIPE_ON_FORK, mmap.MADV_HUGEPAGE):
        with suppress(OSError):  # an old kernel, or one without huge pages
            memory.madvise(advice)
    return memory


def near_cpus(pci_address: str, sys: Path = Path("/sys")) -> frozenset[int]:
    """CPUs of the NUMA node of a PCI device ("0000:3b:00.0"); an empty set if the host has one node only, or if the
    node is unknown."""
    try:
        node = int((sys / "bus/pci/devices" / pci_address / "numa_node").read_text())
        nodes = list((sys / "devices/system/node").glob("node[0-9]*"))
        if node < 0 or len(nodes) < 2:
            return frozenset()
        return frozenset(_cpu_list((sys / f"devices/system/node/node{node}/cpulist").read_text()))
    except (OSError, ValueError):
        return frozenset()


def _cpu_list(text: str) -> Iterator[int]:
    """Parses a list of CPUs in the kernel's format: "0-3,8" gives 0, 1, 2, 3, 8."""
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        yield from range(int(first), int(last or first) + 1)


def _touch(address: int, nbytes: int, cpus: frozenset[int]) -> None:
    """Writes zeros to new memory with threads that run on `cpus`: the kernel allocates a page on the NUMA node of the
    CPU that first writes to it."""
    allowed = cpus & os.sched_getaffinity(0)
    starts = range(0, nbytes, TOUCH_BYTES)
    if not allowed and len(starts) == 1:
        fill(address, 0, nbytes)
        return
    shares = [starts[i::TOUCH_THREADS] for i in range(min(TOUCH_THREADS, len(starts)))]
    threads = [threading.Thread(target=_touch_share, args=(address, nbytes, share, allowed)) for share in shares]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _touch_share(address: int, nbytes: int, starts: Sequence[int], cpus: frozenset[int]) -> None:
    """Main function of a thread: writes up to TOUCH_BYTES zeros at each of the offsets `starts`."""
    if cpus:
        os.sched_setaffinity(0, cpus)  # of this thread alone
    for start in starts:
        fill(address + start, 0, min(TOUCH_BYTES, nbytes - start))
