"""The layout of the host memory for gradients, and of the deferred slots in it.

An update uses one gradient after the other. The memory of used gradients is free until the next backward, so that
updated state can wait there for its flush: in deferred slots. Each slot takes the memory of whole gradients, and no two
slots take the same gradient.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final, NamedTuple

from tidegate.plan.ops import Subgroup
from tidegate.plan.slot_sizes import whole_pages

DEFERRED_WEIGHT_SLOTS: Final = 2
"""Number of deferred slots for weights: while the CPU updates one weight, the next one is copied."""


class DeferredSlot(NamedTuple):
    """A deferred slot: where it begins in the memory for gradients and how large it is, in bytes, and the subgroups
    whose gradients have this memory before."""

    offset: int
    nbytes: int
    covers: tuple[int, ...]


@dataclass(frozen=True)
class GradientMemory:
    """One buffer in host memory with the gradients of all subgroups that have one there.

    sizes: bytes of each gradient, in whole pages, by id of the subgroup, in the order in which the gradients lie.
    weight_slots: deferred slots for weights, which subgroups use in turns. slots: deferred slots for state, one for
    each deferred subgroup.
    """

    sizes: tuple[tuple[int, int], ...]
    weight_slots: tuple[DeferredSlot, ...] = ()
    slots: tuple[DeferredSlot, ...] = ()

    @cached_property
    def offsets(self) -> Mapping[int, int]:
        """Where each gradient begins, in bytes, by id of the subgroup."""
        found, offset = {}, 0
        for subgroup, nbytes in self.sizes:
            found[subgroup] = offset
            offset += nbytes
        return found

    @cached_property
    def nbytes(self) -> int:
        return sum(nbytes for _, nbytes in self.sizes)


def gradient_buffer_bytes(subgroup: Subgroup) -> int:
    """Bytes of the gradient of a subgroup in host memory, in whole pages."""
    return whole_pages(subgroup.nbytes("gradient"))


class DeferredSlotMaker:
    """Makes deferred slots, one after the other, over these gradients from the first one on.

    sizes: id of the subgroup and bytes of each gradient, in the order in which the gradients lie. offset: where the
    first one begins, in bytes.
    """

    def __init__(self, sizes: Sequence[tuple[int, int]], offset: int = 0) -> None:
        self._sizes = sizes
        self._offset, self._taken = offset, 0

    def take(self, nbytes: int, before: int | None = None) -> DeferredSlot | None:
        """The next slot, of `nbytes`; None, with nothing taken, if the gradients do not suffice.

        before: how many gradients from the first one on may be taken; None for all.
        """
        limit = len(self._sizes) if before is None else min(before, len(self._sizes))
        room, end = 0, self._taken
        while room < nbytes and end < limit:
            room += self._sizes[end][1]
            end += 1
        if room < nbytes:
            return None
        slot = DeferredSlot(self._offset, nbytes, tuple(subgroup for subgroup, _ in self._sizes[self._taken : end]))
        self._offset, self._taken = self._offset + room, end
        return slot
