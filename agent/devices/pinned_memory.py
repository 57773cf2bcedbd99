"""Host memory that a GPU copies from and to on its own: mapped, placed and pinned once, then used again and again.

Pinning takes about as long as copying the pages, and PyTorch's own cache rounds up to powers of two, which a state of
100 GB cannot afford. So buffers are mapped here, to the page, and those that come back serve the next of their size.
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
import psutil
import torch

from tidegate.agent.cleanup import close_all
from tidegate.errors import MemoryBudgetError
from tidegate.kernels import fill

log = logging.getLogger("tidegate.devices")

WIPE_ON_FORK: Final = 18
"""MADV_WIPEONFORK, which Python does not name: a fork must not make the pages that the GPU knows anybody's copy."""

TOUCH_BYTES: Final = 64 << 20
"""What one thread touches at a time."""

TOUCH_THREADS: Final = 8
CGROUP: Final = Path("/sys/fs/cgroup")


class Pinner(Protocol):
    """What pins pages; a `CudaRuntime` does. `pin` gives the reason when it could not."""

    def pin(self, address: int, nbytes: int) -> str: ...

    def unpin(self, address: int) -> None: ...

    def near_cpus(self) -> frozenset[int]: ...


class Block:
    """Mapped pages. When the last reference goes they are unpinned, if they are pinned, and then unmapped.

    The finalizer is the block's and not that of its mmap: Python unmaps before it calls those. It holds `memory`.
    """

    __slots__ = ("__weakref__", "_finalizer", "_pinner", "address", "memory", "nbytes")

    def __init__(self, memory: mmap.mmap, address: int, nbytes: int) -> None:
        self.memory, self.address, self.nbytes = memory, address, nbytes
        self._pinner: Pinner | None = None
        self._finalizer: weakref.finalize[..., Block] | None = None

    def pin(self, pinner: Pinner, at_rest: Callable[[], None]) -> str:
        """The reason when it could not. `at_rest` waits until no work on such pages is left."""
        reason = pinner.pin(self.address, self.nbytes)
        if not reason:
            self._pinner = pinner
            self._finalizer = weakref.finalize(
                self, _unpin_late, pinner, at_rest, self.memory, self.address, os.getpid()
            )
            self._finalizer.atexit = False
        return reason

    def unpin(self) -> None:
        """All work on it must be done."""
        if self._finalizer is not None and self._finalizer.detach() is not None and self._pinner is not None:
            self._pinner.unpin(self.address)


def _unpin_late(pinner: Pinner, at_rest: Callable[[], None], memory: mmap.mmap, address: int, pid: int) -> None:
    """Of a block that is going: nobody may have waited for the work on it. `memory` keeps the pages until then."""
    if os.getpid() != pid:
        return  # a fork has the pages, not the GPU
    try:
        close_all(at_rest, lambda: pinner.unpin(address))
    except Exception as error:
        log.warning("Host memory that nobody uses could not be unpinned: %s: %s", type(error).__name__, error)


class Shelf:
    """Blocks that came back. Is there for as long as somebody holds a buffer, pool or no pool."""

    def __init__(self) -> None:
        self._returned: deque[Block] = deque()
        self.closed = False
        """Nobody takes blocks any longer: they go as they come."""

    def put(self, block: Block) -> None:
        """By whichever thread drops a buffer, at any moment, even inside `take`: no lock may be needed."""
        self._returned.append(block)
        if self.closed:
            self._returned.clear()

    def take(self) -> Iterator[Block]:
        while self._returned:
            yield self._returned.popleft()


class PinnedPool:
    """Buffers by size. One that nobody holds any more comes back by itself, with views of it counted as holding it.

    at_rest: waits until no work on buffers is left. Called before memory is unpinned of which nobody can say so.
    """

    def __init__(self, pinner: Pinner, at_rest: Callable[[], None] = lambda: None) -> None:
        self._pinner, self._at_rest = pinner, at_rest
        self._cpus = pinner.near_cpus()
        self._free: dict[int, list[Block]] = {}
        self._shelf = Shelf()
        self._mapped: weakref.WeakSet[Block] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._warned = False

    @property
    def mapped_bytes(self) -> int:
        return sum(block.nbytes for block in self._mapped)

    def take(self, nbytes: int) -> torch.Tensor:
        """`nbytes` zeros. MemoryBudgetError when the host has not so much."""
        size = -(-max(nbytes, 1) // mmap.PAGESIZE) * mmap.PAGESIZE
        with self._lock:
            self._shelf.closed = False
            self._collect()
            kept = self._free.get(size)
            block = kept.pop() if kept else None
        if block is None:
            block = self._new(size)
        else:
            fill(block.address, 0, nbytes)
        return self._lend(block, nbytes)

    def close(self) -> None:
        """Unpins what came back: work on it must be done. A buffer that is still held is unpinned when it is let go.
        All are tried; then the first error is raised."""
        with self._lock:
            self._shelf.closed = True
            self._release_free()

    def _lend(self, block: Block, nbytes: int) -> torch.Tensor:
        array = np.frombuffer(block.memory, np.uint8, nbytes)
        # The storage of the tensor and of all its views holds the array.
        weakref.finalize(array, self._shelf.put, block).atexit = False
        return torch.from_numpy(array)

    def _collect(self) -> None:
        for block in self._shelf.take():
            self._free.setdefault(block.nbytes, []).append(block)

    def _release_free(self) -> None:
        self._collect()
        released = [block for blocks in self._free.values() for block in blocks]
        self._free.clear()
        close_all(*(block.unpin for block in released))

    def _new(self, size: int) -> Block:
        available = host_available_bytes()
        if size > available:
            with self._lock:
                self._release_free()
            available = host_available_bytes()
        if size > available:
            raise MemoryBudgetError(
                f"{size:,} bytes do not fit in host memory: {available:,} are available, {self.mapped_bytes:,} are in "
                "use for offloaded state already.", size, available,
            )  # fmt: skip
        memory = map_pages(size)
        address = np.frombuffer(memory, np.uint8).ctypes.data
        _touch(address, size, self._cpus)
        block = Block(memory, address, size)
        with self._lock:
            reason = block.pin(self._pinner, self._at_rest)
            self._mapped.add(block)
        if reason:
            self._warn(size, reason)
        return block

    def _warn(self, size: int, reason: str) -> None:
        if self._warned:
            return
        self._warned = True
        soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        limit = "unlimited" if soft == resource.RLIM_INFINITY else f"{soft:,} bytes"
        log.warning(
            "Host memory could not be pinned (%s; %s bytes on top of %s): copies from and to it are slower and do not "
            "overlap. The limit of locked memory (ulimit -l) is %s.",
            reason, f"{size:,}", f"{self.mapped_bytes - size:,}", limit,
        )  # fmt: skip


def map_pages(size: int, kind: type[mmap.mmap] = mmap.mmap) -> mmap.mmap:
    memory = kind(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for advice in (WIPE_ON_FORK, mmap.MADV_HUGEPAGE):
        with suppress(OSError):  # an old kernel, or one without huge pages
            memory.madvise(advice)
    return memory


def host_available_bytes(cgroup: Path = CGROUP) -> int:
    """Memory that this process can have: what the machine has left, or what its container has left."""
    available = psutil.virtual_memory().available
    with suppress(OSError, ValueError):
        limit = int((cgroup / "memory.max").read_text())
        used = int((cgroup / "memory.current").read_text())
        rows = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
        available = min(available, limit - used + int(rows.get("inactive_file", 0)))
    return max(available, 0)


def near_cpus(pci_address: str, sys: Path = Path("/sys")) -> frozenset[int]:
    """CPUs of the memory node that a PCI device ("0000:3b:00.0") hangs on; empty with one node or an unknown one."""
    try:
        node = int((sys / "bus/pci/devices" / pci_address / "numa_node").read_text())
        nodes = list((sys / "devices/system/node").glob("node[0-9]*"))
        if node < 0 or len(nodes) < 2:
            return frozenset()
        return frozenset(_cpu_list((sys / f"devices/system/node/node{node}/cpulist").read_text()))
    except (OSError, ValueError):
        return frozenset()


def _cpu_list(text: str) -> Iterator[int]:
    """ "0-3,8" as 0, 1, 2, 3, 8."""
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        yield from range(int(first), int(last or first) + 1)


def _touch(address: int, nbytes: int, cpus: frozenset[int]) -> None:
    """Writes zeros from threads on `cpus`: a page lands in the memory next to the CPU that first writes to it."""
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
    if cpus:
        os.sched_setaffinity(0, cpus)  # of this thread alone
    for start in starts:
        fill(address + start, 0, min(TOUCH_BYTES, nbytes - start))
