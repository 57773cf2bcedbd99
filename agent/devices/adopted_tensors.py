"""Tracks the framework's tensors that count as memory of the emulated device, until their storage is freed."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from typing import Final

import torch
from torch.multiprocessing.reductions import StorageWeakRef

_expired: Callable[[int], bool] = torch._C.StorageBase._expired  # type: ignore[attr-defined]
"""Returns whether the storage at a `cdata` address is freed. `StorageWeakRef.expired()` calls the same function; a
direct call is five times as fast."""

SWEEP_AFTER: Final = 64
"""Number of newly tracked tensors after which freed tensors are removed (a sweep)."""
OLD_SWEEPS: Final = 2
"""A tensor that has survived more sweeps than this counts as old: it is probably a weight and not a gradient, and will
probably stay."""


class AdoptedTensors:
    """Registry of the framework's tensors that count as memory of the emulated device, by address. Not thread-safe:
    callers need a lock.

    There is no notification when a storage is freed, and checking a storage costs a cache miss. So `recent_bytes`,
    which is called at phase boundaries, does not check old tensors: it counts them until the next sweep, which removes
    freed tensors.
    """

    def __init__(self) -> None:
        self.most_bytes = 0
        """Bytes of all tracked tensors, possibly with some that were freed since: never less than `in_use_bytes`."""
        self._young: dict[int, _Tensor] = {}
        self._old: dict[int, _Tensor] = {}
        self._starts: dict[int, list[int]] = {}
        """Start addresses in ascending order, in one list for each size class (see `_size_class`), so that a search
        looks at few of them."""
        self._old_bytes = 0
        self._sweeps = 0
        self._sweep_at = SWEEP_AFTER

    def add(self, tensor: torch.Tensor) -> None:
        """Begins to track a tensor. If a freed tensor with the same address is still tracked, the new tensor replaces
        it.

        A KeyboardInterrupt after any line of this method leaves all other tensors tracked; only the sums of bytes may
        then be too high until the next sweep.
        """
        address, one = tensor.data_ptr(), _Tensor(tensor, self._sweeps)
        self.most_bytes += one.nbytes
        starts = self._starts.setdefault(_size_class(one.nbytes), [])
        place = bisect_left(starts, address)
        if place == len(starts) or starts[place] != address:
            starts.insert(place, address)
        freed = self._young.get(address)
        self._young[address] = one
        if freed is None and (freed := self._old.pop(address, None)) is not None:
            self._old_bytes -= freed.nbytes
        if freed is not None:
            self.most_bytes -= freed.nbytes
            if _size_class(freed.nbytes) != _size_class(one.nbytes):
                self._remove_start(address, freed)
        if len(self._young) > self._sweep_at:
            self._sweep()

    def _remove_start(self, address: int, freed: _Tensor) -> None:
        """Removes the start address of a freed tensor from the list of its size class, if it is there."""
        starts = self._starts.get(_size_class(freed.nbytes), [])
        place = bisect_left(starts, address)
        if place < len(starts) and starts[place] == address:
            del starts[place]

    def clear(self) -> None:
        self._young.clear()
        self._old.clear()
        self._starts.clear()
        self.most_bytes = self._old_bytes = 0

    @property
    def in_use_bytes(self) -> int:
        """Bytes of all tracked tensors whose storage is not freed."""
        return sum(one.nbytes for _, one in self._living())

    def recent_bytes(self) -> int:
        """Bytes of the tracked tensors, found faster than by `in_use_bytes`: only young tensors are checked. Old
        tensors that were freed still count until the next sweep."""
        return self._old_bytes + sum([one.nbytes for one in self._young.values() if not _expired(one.cdata)])

    def holds(self, address: int, nbytes: int) -> bool:
        """Whether one of the tracked tensors contains all of the `nbytes` bytes that begin at `address`."""
        end = address + nbytes
        return any(start <= address and end <= stop for start, stop in self._near(address, nbytes))

    def overlaps(self, address: int, nbytes: int) -> bool:
        """Whether a tracked tensor contains at least one of the `nbytes` bytes that begin at `address`."""
        end = address + nbytes
        return any(start < end and address < stop for start, stop in self._near(address, nbytes))

    def _near(self, address: int, nbytes: int) -> list[tuple[int, int]]:
        """Start and end address of each tracked tensor that may overlap or touch the `nbytes` bytes that begin at
        `address`. The caller must compare the addresses: a tensor that is only near may be included."""
        found = []
        for most_bytes, starts in self._starts.items():
            first, last = bisect_left(starts, address - most_bytes), bisect_right(starts, address + nbytes)
            for start in starts[first:last]:
                one = self._young.get(start) or self._old.get(start)
                if one is not None and not _expired(one.cdata):
                    found.append((start, start + one.nbytes))
        return found

    def _living(self) -> Iterator[tuple[int, _Tensor]]:
        """Tensors whose storage is not freed, with their addresses."""
        for tensors in (self._young, self._old):
            yield from ((at, one) for at, one in tensors.items() if not _expired(one.cdata))

    def _sweep(self) -> None:
        """Stops tracking the freed tensors. Of the others, a tensor counts as old if it has survived more than
        OLD_SWEEPS sweeps, else as young."""
        living = dict(self._living())
        self._sweeps += 1
        self._old = {at: one for at, one in living.items() if self._sweeps - one.since > OLD_SWEEPS}
        self._young = {at: one for at, one in living.items() if at not in self._old}
        self._starts = {}
        for at in sorted(living):
            self._starts.setdefault(_size_class(living[at].nbytes), []).append(at)
        self._old_bytes = sum(one.nbytes for one in self._old.values())
        self.most_bytes = sum(one.nbytes for one in living.values())
        self._sweep_at = len(self._young) + SWEEP_AFTER


def _size_class(nbytes: int) -> int:
    """The size class of a tensor: the least power of two above its number of bytes."""
    return 1 << nbytes.bit_length()


class _Tensor:
    """Tracked tensor. `cdata`: address of its storage object, with which `_expired` finds out whether the storage is
    freed. `since`: number of sweeps before the tensor was added."""

    __slots__ = ("_storage", "cdata", "nbytes", "since")

    def __init__(self, tensor: torch.Tensor, since: int) -> None:
        self._storage = StorageWeakRef(tensor.untyped_storage())
        self.cdata: int = self._storage.cdata
        self.nbytes = tensor.numel() * tensor.element_size()
        self.since = since
