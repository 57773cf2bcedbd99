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


def slots_over(sizes: Sequence[tuple[int, int]], wanted: Sequence[int]) -> list[DeferredSlot]:
    """Deferred slots of at least `wanted` bytes, one after the other over these gradients from the first one on. Fewer
    slots if the gradients do not suffice.

    sizes: id of the subgroup and bytes of each gradient.
    """
    slots: list[DeferredSlot] = []
    offset, place = 0, 0
    for nbytes in wanted:
        first, room, taken = offset, 0, place
        while room < nbytes and taken < len(sizes):
            room += sizes[taken][1]
            taken += 1
        if room < nbytes:
            break
        slots.append(DeferredSlot(first, nbytes, tuple(subgroup for subgroup, _ in sizes[place:taken])))
        offset, place = offset + room, taken
    return slots
