"""Tensors of the framework that count as device memory of the emulated device, for as long as their storage lives."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

import torch
from torch.multiprocessing.reductions import StorageWeakRef

_expired: Callable[[int], bool] = torch._C.StorageBase._expired  # type: ignore[attr-defined]
"""What StorageWeakRef.expired() calls, five times as fast."""

MANY: Final = 64
"""So many more are adopted before it is sorted out which of them are still there."""
OLD: Final = 2
"""What has been there so often is likely to stay: weights, not gradients."""


class Adopted:
    """By address. Not to be shared between threads without a lock.

    Nobody says when a storage is freed, and asking it is a look at memory that no cache has any more. So
    `recent_bytes`, which phase boundaries call, takes it that old tensors are there as long as nothing new comes.
    """

    def __init__(self) -> None:
        self.most_bytes = 0
        """Of all that is known of, with some that were freed since: never less than `in_use_bytes`."""
        self._young: dict[int, _Tensor] = {}
        self._old: dict[int, _Tensor] = {}
        self._old_bytes = 0
        self._sorts = 0
        self._sort_at = MANY

    def add(self, tensor: torch.Tensor) -> None:
        address = tensor.data_ptr()
        if (freed := self._young.pop(address, None)) is None and (freed := self._old.pop(address, None)) is not None:
            self._old_bytes -= freed.nbytes
        one = self._young[address] = _Tensor(tensor, self._sorts)
        self.most_bytes += one.nbytes - (freed.nbytes if freed is not None else 0)
        if len(self._young) > self._sort_at:
            self._sort()

    def clear(self) -> None:
        self._young.clear()
        self._old.clear()
        self.most_bytes = self._old_bytes = 0

    @property
    def in_use_bytes(self) -> int:
        """Of those that the framework has not freed."""
        return sum(one.nbytes for _, one in self._living())

    def recent_bytes(self) -> int:
        """The same, but what was adopted long ago may be counted after it was freed, until many others have come."""
        return self._old_bytes + sum([one.nbytes for one in self._young.values() if not _expired(one.cdata)])

    def holds(self, address: int, nbytes: int) -> bool:
        """Whether one of them has all of these bytes."""
        return any(start <= address and address + nbytes <= start + one.nbytes for start, one in self._living())

    def meets(self, address: int, nbytes: int) -> bool:
        """Whether one of them has some of these bytes."""
        return any(start < address + nbytes and address < start + one.nbytes for start, one in self._living())

    def _living(self) -> Iterator[tuple[int, _Tensor]]:
        for tensors in (self._young, self._old):
            yield from ((at, one) for at, one in tensors.items() if not _expired(one.cdata))

    def _sort(self) -> None:
        """Forgets what was freed, and finds out what is old by now."""
        living = dict(self._living())
        self._sorts += 1
        self._old = {at: one for at, one in living.items() if self._sorts - one.since > OLD}
        self._young = {at: one for at, one in living.items() if at not in self._old}
        self._old_bytes = sum(one.nbytes for one in self._old.values())
        self.most_bytes = sum(one.nbytes for one in living.values())
        self._sort_at = len(self._young) + MANY


class _Tensor:
    """`cdata` is the storage's, which tells whether it lives; `since`: how often was sorted out before."""

    __slots__ = ("_storage", "cdata", "nbytes", "since")

    def __init__(self, tensor: torch.Tensor, since: int) -> None:
        self._storage = StorageWeakRef(tensor.untyped_storage())
        self.cdata: int = self._storage.cdata
        self.nbytes = tensor.numel() * tensor.element_size()
        self.since = since
