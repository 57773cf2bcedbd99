"""Tensors of the framework that count as device memory of the emulated device, for as long as their storage lives."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import compress
from operator import not_

import torch
from torch.multiprocessing.reductions import StorageWeakRef

_expired: Callable[[int], bool] = torch._C.StorageBase._expired  # type: ignore[attr-defined]
"""What StorageWeakRef.expired() calls, five times as fast: it is asked about every tensor at every phase boundary."""


class Adopted:
    """By address. Not to be shared between threads without a lock."""

    def __init__(self) -> None:
        self.most_bytes = 0
        """Of all adopted tensors, those that were freed since among them: never less than `in_use_bytes`."""
        # In step with each other: who lives and how large it is are asked for all at once.
        self._refs: dict[int, StorageWeakRef] = {}
        self._cdata: dict[int, int] = {}
        self._nbytes: dict[int, int] = {}
        self._prune_at = 64

    def add(self, tensor: torch.Tensor) -> None:
        address, nbytes = tensor.data_ptr(), tensor.numel() * tensor.element_size()
        ref = StorageWeakRef(tensor.untyped_storage())
        self.most_bytes += nbytes - self._nbytes.get(address, 0)
        self._refs[address], self._cdata[address], self._nbytes[address] = ref, ref.cdata, nbytes
        if len(self._refs) > self._prune_at:
            self._prune()

    def clear(self) -> None:
        self._refs.clear()
        self._cdata.clear()
        self._nbytes.clear()
        self.most_bytes = 0

    @property
    def in_use_bytes(self) -> int:
        """Of those that the framework has not freed."""
        return sum(compress(self._nbytes.values(), self._alive()))

    def holds(self, address: int, nbytes: int) -> bool:
        """Whether one of them has all of these bytes."""
        return any(start <= address and address + nbytes <= start + size for start, size in self._living())

    def meets(self, address: int, nbytes: int) -> bool:
        """Whether one of them has some of these bytes."""
        return any(start < address + nbytes and address < start + size for start, size in self._living())

    def _alive(self) -> Iterator[bool]:
        return map(not_, map(_expired, self._cdata.values()))

    def _living(self) -> Iterator[tuple[int, int]]:
        """Addresses and sizes."""
        return compress(self._nbytes.items(), self._alive())

    def _prune(self) -> None:
        for address in [address for address, cdata in self._cdata.items() if _expired(cdata)]:
            del self._refs[address], self._cdata[address]
            self.most_bytes -= self._nbytes.pop(address)
        self._prune_at = len(self._refs) + 64
