"""The settings of an engine, which stay the same during its life."""

from __future__ import annotations

from dataclasses import dataclass

from tidegate.agent.gradients.accumulation import Accumulation
from tidegate.agent.gradients.gradients import Mode
from tidegate.plan import Policy


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """Settings of one engine. Fields that `Offload` has, too, are described in the docstring of `Offload`."""

    num_slots: int
    """Number of staging slots on the device. A slot is a buffer for the state of one subgroup during its update
    there."""
    host_slots: int = 3
    """Number of staging slots in host memory for each path. A slot is a buffer for the state of one subgroup while it
    is fetched from the path, updated and written back."""
    cpu_threads: int
    policy: Policy = "interleaved"
    gradients: Mode = "keep"
    accumulation: Accumulation = "device"
    gradient_memory_bytes: int = 0
    headroom_bytes: int = 0
    early_gradients: bool = True
    """Whether gradients are final (reduced over the ranks) when autograd has accumulated them, so that they may be
    copied before `step()`."""
    watchdog_seconds: float = 120.0
