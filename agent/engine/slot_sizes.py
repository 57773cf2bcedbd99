"""Sizes of staging slots on the device and in host memory: each slot holds one subgroup, so it is as large as the
largest."""

from __future__ import annotations

from collections.abc import Sequence

from tidegate.agent.engine.state_block import whole_pages
from tidegate.agent.parameters.subgroups import Layout

ALIGNMENT = 256


def device_slot_bytes(layouts: Sequence[Layout], *, gradients: bool) -> tuple[int, int]:
    """Bytes of a slot on the device: for the state of a subgroup and, behind it, for its spilled gradient (0 unless
    `gradients`)."""
    state = max((s.numel * s.format.state_bytes for s in layouts), default=0)
    grad = max((s.numel * s.format.grad_bytes for s in layouts), default=0)
    return -(-state // ALIGNMENT) * ALIGNMENT, grad if gradients else 0


def host_slot_bytes(layouts: Sequence[Layout], *, gradients: bool) -> tuple[int, int, int]:
    """Bytes of a host slot for state, weight and gradient (0 unless `gradients`), in this order, each of whole pages.

    In gradient mode `release`, gradients cannot wait for a host slot: they have separate buffers.
    """
    return (
        whole_pages(max((s.numel * s.format.state_bytes for s in layouts), default=0)),
        whole_pages(max((s.numel * s.format.weight_bytes for s in layouts), default=0)),
        whole_pages(max((s.numel * s.format.grad_bytes for s in layouts), default=0)) if gradients else whole_pages(0),
    )
