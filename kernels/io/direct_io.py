"""Direct I/O for one storage path, bypassing the page cache: native threads, aligned memory, checksums per block.

Memory is given by address, as in the other kernels, and must exist until its transfer is done. Pools and buffers cannot
be used in a forked child, and file descriptors are closed on exec.
"""

from __future__ import annotations

import errno
import mmap
import os
from types import TracebackType
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tidegate.kernels import _native

WIPE_ON_FORK: Final = 18
"""MADV_WIPEONFORK, which Python does not define. A forked child gets the memory filled with zeros, and a fork causes no
copy-on-write of pages that a device uses."""

ALIGNMENT = _native.DIRECT_ALIGNMENT
"""Required alignment of addresses, sizes and offsets of direct transfers, in bytes."""

IoTicket = _native.IoTicket
PathLock = _native.PathLock
TransferTask = _native.TransferTask
WriteStop = _native.WriteStop


def num_blocks(nbytes: int, block_bytes: int) -> int:
    """The number of blocks of a transfer of `nbytes`; the last block may be shorter."""
    return -(-nbytes // block_bytes)


def allocate_blocks(fd: int, nbytes: int) -> None:
    """Allocates the first `nbytes` bytes of an open file, with fallocate(2), and extends the file to them.

    OSError with EOPNOTSUPP where the file system cannot allocate. `os.posix_fallocate` would then write one byte in
    each 4 KiB: on NFS with direct I/O that can take minutes for each gigabyte.
    """
    while (code := _native.allocate_blocks(fd, nbytes)) == errno.EINTR:
        pass  # signal handlers run before the next call
    if code:
        raise OSError(code, os.strerror(code))


class IoPool:
    """A pool of native threads that read and write blocks of the files of one storage path.

    threads: number of blocks that are transferred at the same time, 1 or more.
    kept_free: number of threads that a single direction leaves to the other, less than `threads`.

    Transfers are queued and divided into blocks, which the threads process in order. A transfer begins as soon as all
    blocks of the previous one in its direction have started, so that the queue of the storage device stays full. Where
    reads and writes wait, a free thread takes a block of the direction with fewer blocks in flight. So each direction
    has half of the threads, and all but `kept_free` while the other has nothing to do. Several Python threads may use
    one pool. In a forked child `read` and `write` raise RuntimeError, and `close` does nothing.
    """

    def __init__(self, threads: int, kept_free: int = 0) -> None:
        self._native = _native.IoPool(threads, kept_free)

    def read(
        self,
        fd: int,
        address: int,
        nbytes: int,
        offset: int,
        block_bytes: int,
        expected: NDArray[np.uint32] | None = None,
    ) -> IoTicket:
        """Starts a read of `nbytes` bytes at `offset` of the file into memory at `address`. Returns the transfer's
        ticket, on which the caller waits, and which reports errors of the transfer itself.

        expected: the CRC-32C of each block, verified by the thread that reads it; None or empty: not verified.

        ValueError for invalid arguments (with a direct `fd` also for misaligned ones), RuntimeError after `close`.
        """
        checksums = _checked(expected, num_blocks(nbytes, max(block_bytes, 1)), "expected")
        return self._native.read(fd, address, nbytes, offset, block_bytes, _address(checksums), checksums)

    def write(
        self, fd: int, address: int, nbytes: int, offset: int, block_bytes: int, found: NDArray[np.uint32] | None = None
    ) -> IoTicket:
        """Starts a write of `nbytes` bytes from memory at `address` to `offset` of the file. Returns the transfer's
        ticket, which reports errors of the transfer itself. The bytes are durable only after fsync.

        found: array for the CRC-32C of each block, which the thread that writes the block computes; None or empty: no
        checksums.

        ValueError for invalid arguments (with a direct `fd` also for misaligned ones), RuntimeError after `close`.
        """
        checksums = _checked(found, num_blocks(nbytes, max(block_bytes, 1)), "found")
        if checksums is not None and not checksums.flags.writeable:
            raise ValueError("found is read-only: give a writable array, for the checksums of the blocks")
        return self._native.write(fd, address, nbytes, offset, block_bytes, _address(checksums), checksums)

    def task(
        self,
        writes: bool,
        fd: int,
        address: int,
        nbytes: int,
        offset: int,
        block_bytes: int,
        checksums: NDArray[np.uint32],
        padding: int,
        lock: PathLock | None,
        timeout_seconds: float,
        stop: WriteStop,
    ) -> TransferTask:
        """The same as `read` (or `write`, with `writes`) as a task, which a lane of a plan runs without the
        interpreter. The caller keeps pool, file and checksums until the task has ended.

        padding: number of bytes at the end of the memory that are set to zero before the write.
        lock: lock that is held for the transfer; None for none.
        timeout_seconds: longest wait for the lock, after which the transfer runs without it.
        stop: when it is set, a write fails before it begins.
        """
        checked = _checked(checksums, num_blocks(nbytes, max(block_bytes, 1)), "checksums")
        return self._native.task(
            writes, fd, address, nbytes, offset, block_bytes, _address(checked), padding, lock, timeout_seconds, stop
        )

    def close(self) -> None:
        """Waits for all queued transfers, then ends the threads. May be called twice. Cancel tickets first to end
        sooner."""
        self._native.close()

    def __enter__(self) -> IoPool:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def _checked(checksums: NDArray[np.uint32] | None, wanted: int, name: str) -> NDArray[np.uint32] | None:
    if checksums is None or checksums.size == 0:
        return None
    if checksums.dtype != np.uint32 or checksums.shape != (wanted,) or not checksums.flags.c_contiguous:
        raise ValueError(
            f"{name} is {checksums.dtype} of shape {checksums.shape}, must be contiguous uint32 of shape ({wanted},): "
            "one checksum a block"
        )
    return checksums


def _address(array: NDArray[np.uint32] | None) -> int:
    return 0 if array is None else array.ctypes.data


def open_direct(
    path: str | os.PathLike[str], *, write: bool = False, create: bool = False, direct: bool = True
) -> tuple[int, bool]:
    """Opens a file for positional transfers. Returns its descriptor (closed on exec), and whether it bypasses the page
    cache.

    write: open for reading and writing, else for reading only. create: create the file if it is missing (needs
    `write`).
    direct: use O_DIRECT. On a file system that refuses it (EINVAL when opening or at the first read), the file is
    opened for ordinary buffered I/O, and the second value is False.

    OSError as in `os.open`, ValueError for `create` without `write`.
    """
    if create and not write:
        raise ValueError("create is True and write is False: a new file can only be made for writing")
    flags = (os.O_RDWR if write else os.O_RDONLY) | (os.O_CREAT if create else 0) | os.O_CLOEXEC
    if direct:
        fd = _open_o_direct(path, flags | os.O_DIRECT)
        if fd is not None:
            return fd, True
    return os.open(path, flags, 0o666), False


def _open_o_direct(path: str | os.PathLike[str], flags: int) -> int | None:
    """A descriptor of the file with O_DIRECT; None if the file system refuses O_DIRECT."""
    fd = None
    try:
        fd = os.open(path, flags, 0o666)
        with mmap.mmap(-1, ALIGNMENT) as page:
            os.preadv(fd, [page], 0)
    except BaseException as error:  # also what a signal handler raises
        if fd is not None:
            os.close(fd)
        if isinstance(error, OSError) and error.errno == errno.EINVAL:
            return None
        raise
    return fd


def aligned_buffer(nbytes: int) -> NDArray[np.uint8]:
    """Returns `nbytes` bytes of zeroed memory for direct I/O, aligned to a page. Huge pages are requested.

    A forked child has zeros in its place. If a child shared the memory, writes of the parent would copy pages
    (copy-on-write) during a transfer. The memory is freed with the last array that uses it; `torch.from_numpy` makes a
    tensor of it without a copy.

    ValueError for less than one byte, OSError if memory cannot be allocated.
    """
    if nbytes < 1:
        raise ValueError(f"nbytes is {nbytes}, must be 1 or more")
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(WIPE_ON_FORK)
    _try_huge_pages(memory)
    buffer: NDArray[Any] = np.frombuffer(memory, np.uint8)
    return buffer


def _try_huge_pages(memory: mmap.mmap) -> None:
    try:
        memory.madvise(mmap.MADV_HUGEPAGE)
    except OSError as error:  # a kernel built without them
        if error.errno != errno.EINVAL:
            raise
