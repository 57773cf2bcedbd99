"""Reads and writes of one storage path around the page cache: native threads, aligned memory, checksums per block.

Memory is given by address, as in the other kernels, and must live until its transfer is done. Nothing here is inherited
by a forked child: no thread, no buffer, no descriptor beyond exec.
"""

from __future__ import annotations

import errno
import mmap
import os
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tidegate.kernels import _native

ALIGNMENT = _native.DIRECT_ALIGNMENT
"""What addresses, sizes and offsets of direct transfers must be multiples of, in bytes."""

IoTicket = _native.IoTicket


def num_blocks(nbytes: int, block_bytes: int) -> int:
    """How many blocks a transfer has; the last one may be shorter."""
    return -(-nbytes // block_bytes)


class IoPool:
    """Native threads that move blocks between memory and the files of one storage path.

    threads: how many blocks move at once, 1 or more.

    Transfers are queued and cut into blocks, which the threads take in order: those of the next transfer as soon as
    each block of the one before has a thread, so that the queue of the device stays full. Several Python threads may
    use one pool. In a forked child `read` and `write` raise RuntimeError, `close` does nothing.
    """

    def __init__(self, threads: int) -> None:
        self._native = _native.IoPool(threads)

    @property
    def num_threads(self) -> int:
        return self._native.num_threads

    def read(
        self,
        fd: int,
        address: int,
        nbytes: int,
        offset: int,
        block_bytes: int,
        expected: NDArray[np.uint32] | None = None,
    ) -> IoTicket:
        """Begins to read `nbytes` at `offset` of the file into `address`.

        expected: the CRC-32C of each block, verified by the thread that read it; None or empty: not verified.

        Raises ValueError for arguments that cannot work (with a direct `fd`: not aligned), RuntimeError after `close`.
        What goes wrong later is in the ticket.
        """
        checksums = _checked(expected, num_blocks(nbytes, max(block_bytes, 1)), "expected")
        return self._native.read(fd, address, nbytes, offset, block_bytes, _address(checksums), checksums)

    def write(
        self, fd: int, address: int, nbytes: int, offset: int, block_bytes: int, found: NDArray[np.uint32] | None = None
    ) -> IoTicket:
        """Begins to write `nbytes` from `address` at `offset` of the file. Durable only after fsync.

        found: takes the CRC-32C of each block, computed by the thread that is about to write it; None or empty: none.

        Raises as `read` does.
        """
        checksums = _checked(found, num_blocks(nbytes, max(block_bytes, 1)), "found")
        if checksums is not None and not checksums.flags.writeable:
            raise ValueError("found is read-only, must take the checksum of each block")
        return self._native.write(fd, address, nbytes, offset, block_bytes, _address(checksums), checksums)

    def close(self) -> None:
        """Lets all that is queued end, then ends the threads. May be called twice. Cancel tickets to be quicker."""
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
    """Opens a file for positional transfers: its descriptor, closed on exec, and whether it goes around the page cache.

    write: for reading and writing, else for reading only. create: make the file if it is not there (needs `write`).
    direct: ask for O_DIRECT. A file system that refuses it (EINVAL, when opening or when first read) gets ordinary,
    buffered I/O, and the second value is False.

    Raises OSError as `os.open` does, ValueError for `create` without `write`.
    """
    if create and not write:
        raise ValueError("create is True and write is False: a new file can only be made for writing")
    flags = (os.O_RDWR if write else os.O_RDONLY) | (os.O_CREAT if create else 0) | os.O_CLOEXEC
    if direct:
        fd = _opened_or_refused(path, flags | os.O_DIRECT)
        if fd is not None:
            return fd, True
    return os.open(path, flags, 0o666), False


def _opened_or_refused(path: str | os.PathLike[str], flags: int) -> int | None:
    fd = None
    try:
        fd = os.open(path, flags, 0o666)
        with mmap.mmap(-1, ALIGNMENT) as page:
            os.preadv(fd, [page], 0)
    except OSError as error:
        if fd is not None:
            os.close(fd)
        if error.errno == errno.EINVAL:
            return None
        raise
    return fd


def aligned_buffer(nbytes: int) -> NDArray[np.uint8]:
    """Zeroed memory that begins at a page and that a forked child does not have: touching it there is a crash.

    A child that shared it would make writes of the parent copy pages under a transfer. Huge pages are asked for. The
    memory is freed with the last array on it; `torch.from_numpy` makes a tensor of it without a copy.

    Raises ValueError for less than one byte, OSError where there is no memory.
    """
    if nbytes < 1:
        raise ValueError(f"nbytes is {nbytes}, must be 1 or more")
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_DONTFORK)
    _try_huge_pages(memory)
    buffer: NDArray[Any] = np.frombuffer(memory, np.uint8)
    return buffer


def _try_huge_pages(memory: mmap.mmap) -> None:
    try:
        memory.madvise(mmap.MADV_HUGEPAGE)
    except OSError as error:  # a kernel built without them
        if error.errno != errno.EINVAL:
            raise
