"""A system that refuses: permissions that root has to keep to, too, and no descriptors left."""

from __future__ import annotations

import ctypes
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager

VERSION_3 = 0x20080522
OVERRIDES = 1 << 1 | 1 << 2 | 1 << 3
"""CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH and CAP_FOWNER."""
MOST_DESCRIPTORS = 1024


@contextmanager
def held_to_permissions() -> Iterator[None]:
    """This thread reads and writes only what modes let it, even as root."""
    libc = ctypes.CDLL(None, use_errno=True)
    header, before = (ctypes.c_uint32 * 2)(VERSION_3, 0), (ctypes.c_uint32 * 6)()
    assert libc.capget(header, before) == 0
    less = (ctypes.c_uint32 * 6)(*before)
    less[0] &= ~OVERRIDES
    assert libc.capset(header, less) == 0
    try:
        yield
    finally:
        assert libc.capset(header, before) == 0


@contextmanager
def descriptors_left(count: int) -> Iterator[None]:
    """This process can open so many files more, and no other one."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(MOST_DESCRIPTORS, before[1]), before[1]))
    taken: list[int] = []
    try:
        try:
            while True:
                taken.append(os.open(os.devnull, os.O_RDONLY))
        except OSError:
            for _ in range(count):
                os.close(taken.pop())
        yield
    finally:
        for fd in taken:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
