"""How much host memory `auto` gives to the host cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch

from tidegate.agent.devices.pinned_memory import host_available_bytes
from tidegate.agent.gradients.accumulation import host_bytes
from tidegate.agent.optimizer.offload import Offload
from tidegate.agent.parameters.subgroups import Layout
from tidegate.agent.ranks import ranks_that_share_host

CACHE_SHARE: Final = 0.9


def ample_cache(
    offload: Offload, shards: Sequence[torch.Tensor], layouts: Sequence[Layout], held_bytes: int = 0
) -> int:
    """Bytes: 90 % of the host memory that is free now, less what else the engine needs of it; 0 without paths.

    Ranks of a node have equal parts of what is free. held_bytes: what the engine has already.
    """
    if not offload.paths:
        return 0
    subgroups = [layout.subgroup() for layout in layouts]
    state = sum(s.nbytes("state") for s in subgroups)
    beside = sum(s.nbytes("weight") + s.nbytes("gradient") for s in subgroups)
    largest = max((s.nbytes("state") + s.nbytes("weight") + s.nbytes("gradient") for s in subgroups), default=0)
    slots = len(offload.paths) * offload.host_slots * largest
    sums = host_bytes(shards, offload.accumulation)
    free = CACHE_SHARE * (host_available_bytes() / ranks_that_share_host() + held_bytes) - slots - sums
    # What is cached and updated on the CPU has a mirror of its weight and a gradient in host memory, too.
    return max(0, int(free * state / max(1, state + beside)))
