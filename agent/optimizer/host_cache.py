"""Size of the host cache when the knob `host_cache` is `auto`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch

from tidegate.agent.cgroups import host_available_bytes
from tidegate.agent.gradients.accumulation import host_bytes
from tidegate.agent.optimizer.offload import Offload
from tidegate.agent.parameters.subgroups import Layout
from tidegate.agent.ranks import ranks_that_share_host
from tidegate.plan.slot_sizes import WEIGHT_SLOTS, weight_slot_bytes

CACHE_SHARE: Final = 0.9
"""Share of the free host memory that the engine may use for the host cache and its other buffers."""


def automatic_cache_bytes(
    offload: Offload, shards: Sequence[torch.Tensor], layouts: Sequence[Layout], held_bytes: int = 0
) -> int:
    """Bytes for the host cache: 90 % of the host memory that is available now, minus the other host buffers of the
    engine; 0 without paths.

    The ranks of a host share the free memory equally. held_bytes: host memory that the engine has already; it counts as
    free.
    """
    if not offload.paths:
        return 0
    subgroups = [layout.subgroup() for layout in layouts]
    state = sum(s.nbytes("state") for s in subgroups)
    gradients = sum(s.nbytes("gradient") for s in subgroups)
    largest = max((s.nbytes("state") + s.nbytes("weight") + s.nbytes("gradient") for s in subgroups), default=0)
    slots = len(offload.paths) * offload.host_slots * largest + WEIGHT_SLOTS * weight_slot_bytes(subgroups)
    sums = host_bytes(shards, offload.accumulation)
    free = CACHE_SHARE * (host_available_bytes() / ranks_that_share_host() + held_bytes) - slots - sums
    # A cached subgroup that the CPU updates also has a gradient buffer in host memory.
    return max(0, int(free * state / max(1, state + gradients)))
