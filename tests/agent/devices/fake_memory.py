"""Memory of the fake CUDA runtime: host pages that must stay mapped while they are registered, and device memory that
no host code may touch.

A registered range whose pages were unmapped is worse than a crash: what is mapped there next is copied from the old
pages. So each mapping tells when it goes, before the kernel takes it.
"""

from __future__ import annotations

import ctypes
import faulthandler
import mmap
import os
import weakref
from bisect import bisect_right, insort
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from tidegate.agent.devices import pinned_memory

_all: weakref.WeakSet[Registered] = weakref.WeakSet()

lost: list[str] = []
"""Mappings that went while they were registered, in any fake; `watched_mappings` expects none."""


class Registered(dict[int, int]):
    """Bytes of each registered range, by address."""

    def __init__(self) -> None:
        super().__init__()
        _all.add(self)

    __hash__ = object.__hash__  # type: ignore[assignment]

    def add(self, address: int, nbytes: int) -> None:
        other = next((start for start in self if start < address + nbytes and address < start + self[start]), None)
        assert other is None, f"{nbytes} bytes at {address:#x} overlap those at {other:#x}, which are registered"
        self[address] = nbytes

    def holds(self, address: int, nbytes: int) -> bool:
        return any(start <= address and address + nbytes <= start + size for start, size in self.items())


class WatchedPages(mmap.mmap):
    """Anonymous pages that tell when they are unmapped."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.address = np.frombuffer(self, np.uint8).ctypes.data
        self.nbytes = len(self)

    def __del__(self) -> None:
        for registered in tuple(_all):
            for start, size in tuple(registered.items()):
                if start < self.address + self.nbytes and self.address < start + size:
                    lost.append(f"{size} bytes at {start:#x} were unmapped while they were registered")


@contextmanager
def watched_mappings() -> Iterator[None]:
    """Host memory for devices is mapped with pages that are watched. Fails when registered ones were unmapped."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pinned_memory, "map_pages", partial(pinned_memory.map_pages, kind=WatchedPages))
        yield
    found, lost[:] = lost[:], []
    assert not found, "\n".join(found)


DEVICE = 1 << 62
"""Set in addresses of tensors that the framework has on the device: no process can have memory there."""


class OnDevice:
    """A tensor of the framework as the agent may see it: it has an address, at which nobody may read or write."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        self.dtype = tensor.dtype

    def numel(self) -> int:
        return self._tensor.numel()

    def data_ptr(self) -> int:
        return self._tensor.data_ptr() | DEVICE if self._tensor.numel() else 0


class DevicePages:
    """Memory with two addresses: one that is handed out, at which nobody may read or write, and one for the fake."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._blocks: dict[int, tuple[int, int]] = {}
        """Size and accessible address, by the address that was handed out."""
        self._mapped: list[mmap.mmap] = []
        """For ever: an address is not used twice, and work that comes too late spoils results, not the process."""

    def map(self, nbytes: int) -> int:
        size = -(-max(nbytes, 1) // mmap.PAGESIZE) * mmap.PAGESIZE
        descriptor = os.memfd_create("device")
        try:
            os.ftruncate(descriptor, size)
            outside = mmap.mmap(descriptor, size, flags=mmap.MAP_SHARED, prot=0)
            inside = mmap.mmap(descriptor, size, flags=mmap.MAP_SHARED)
        finally:
            os.close(descriptor)
        self._mapped += (outside, inside)
        address, reachable = (np.frombuffer(pages, np.uint8).ctypes.data for pages in (outside, inside))
        insort(self._starts, address)
        self._blocks[address] = size, reachable
        return address

    def hold(self, address: int) -> bool:
        """Whether `address` is on the device: memory of these pages, or of a tensor `OnDevice`."""
        return self.reachable(address) != address

    def reachable(self, address: int) -> int:
        """Where the fake finds what is at `address`; `address` itself where that is no memory of this device."""
        if address & DEVICE:
            return address ^ DEVICE
        index = bisect_right(self._starts, address) - 1
        if index < 0:
            return address
        start = self._starts[index]
        size, reachable = self._blocks[start]
        return reachable + address - start if address < start + size else address


FAILED, NO_BACKWARD = 1, 77
"""Exit codes of a process that ended with an error, or because torch refused its backward."""


def dies_of(what: Callable[[], object]) -> int:
    """The signal that kills a process that does this; 0 for none."""
    child = os.fork()
    if child == 0:
        faulthandler.disable()  # else pytest's prints the stack of what is expected
        status = FAILED
        try:
            what()
            status = 0
        except RuntimeError as error:
            if "autograd's threading" in str(error):
                status = NO_BACKWARD
            raise
        finally:
            os._exit(status)
    status = os.waitpid(child, 0)[1]
    if os.WIFEXITED(status) and os.WEXITSTATUS(status) == NO_BACKWARD:
        pytest.skip("where torch uses a GPU, it refuses a backward in a forked process")
    assert not (os.WIFEXITED(status) and os.WEXITSTATUS(status)), "the process ended with an error"
    return os.WTERMSIG(status)


def read_byte(address: int) -> int:
    return ctypes.c_uint8.from_address(address).value
