"""A plan: everything one step will do, as an immutable list of ops."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from tidegate.plan.ops import LANES, Norms, Op, OpKind, Processor, Residence, Subgroup

Policy = Literal["interleaved", "sequential", "twinflow"]


@dataclass(frozen=True, slots=True)
class Placement:
    """Where one subgroup is updated, where its state lives before and after the step.

    `mirror_valid`: the host mirror of the weight equals the weight on the device when the step begins. `spilled`: its
    gradient waits on the host and returns with its state, because the device has no room for it.
    """

    processor: Processor
    before: Residence
    after: Residence
    mirror_valid: bool
    spilled: bool = False

    @property
    def is_staged(self) -> bool:
        return self.processor == "device" and self.before == self.after == "host"


@dataclass(frozen=True)
class Plan:
    """Ops in program order: on each lane they run in this order.

    `placements[i]` belongs to `subgroups[i]`, whose id is i. `num_slots` staging slots exist on the device.
    """

    policy: Policy
    subgroups: tuple[Subgroup, ...]
    placements: tuple[Placement, ...]
    num_slots: int
    ops: tuple[Op, ...]
    norms: Norms = "step"

    @cached_property
    def by_id(self) -> dict[int, Op]:
        return {op.id: op for op in self.ops}

    @cached_property
    def lanes(self) -> dict[str, tuple[Op, ...]]:
        return {lane: tuple(op for op in self.ops if op.lane == lane) for lane in LANES}

    def of_kind(self, *kinds: OpKind) -> Iterable[Op]:
        return (op for op in self.ops if op.kind in kinds)

    def link_bytes(self, lane: str) -> int:
        """Bytes that cross the link in one direction when each op of this plan runs once."""
        return sum(op.nbytes for op in self.lanes[lane])

    def updated_params(self, processor: Processor) -> int:
        kind = OpKind.CPU_UPDATE if processor == "cpu" else OpKind.DEVICE_UPDATE
        return sum(op.numel for op in self.of_kind(kind))
