"""Sizes of staging slots on the device and in host memory: each slot holds one subgroup, so it is as large as the
largest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from tidegate.plan.ops import Content, Subgroup

WEIGHT_SLOTS: Final = 2
"""Number of weight slots in runs with storage paths: while the CPU updates one weight, the next one is copied."""
DEVICE_ALIGNMENT: Final = 256
"""The room for a spilled gradient in a slot on the device begins at a multiple of this number of bytes."""
PAGE_BYTES: Final = 4096
"""The size of each host buffer that is copied to and from storage paths is a multiple of this number of bytes."""


def device_slot_bytes(subgroups: Sequence[Subgroup], *, gradients: bool) -> tuple[int, int]:
    """Bytes of a slot on the device: for the state of a subgroup and, behind it, for its spilled gradient (0 unless
    `gradients`)."""
    state = -(-_largest(subgroups, "state") // DEVICE_ALIGNMENT) * DEVICE_ALIGNMENT
    return state, _largest(subgroups, "gradient") if gradients else 0


def host_slot_bytes(subgroups: Sequence[Subgroup], *, gradients: bool) -> tuple[int, int, int]:
    """Bytes of a host slot for state, weight and gradient (0 unless `gradients`), in this order, each of whole pages.

    In gradient mode `release`, gradients cannot wait for a host slot: they have separate buffers.
    """
    gradient = _largest(subgroups, "gradient") if gradients else 0
    return whole_pages(_largest(subgroups, "state")), whole_pages(_largest(subgroups, "weight")), whole_pages(gradient)


def weight_slot_bytes(subgroups: Sequence[Subgroup]) -> int:
    """Bytes of a weight slot, of whole pages."""
    return whole_pages(_largest(subgroups, "weight"))


def whole_pages(nbytes: int) -> int:
    """`nbytes`, rounded up to whole pages."""
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES


def _largest(subgroups: Sequence[Subgroup], content: Content) -> int:
    return max((s.nbytes(content) for s in subgroups), default=0)
