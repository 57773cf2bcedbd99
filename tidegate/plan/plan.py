"""A plan: everything one step will do, as an immutable list of ops."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from tidegate.plan.ops import LANES, Norms, Op, OpKind, Processor, Residence, Subgroup, is_path, path_lanes

Policy = Literal["interleaved", "sequential", "twinflow"]


@dataclass(frozen=True, slots=True)
class Placement:
    """Where one subgroup is updated, where its state lives before and after the step.

    `mirror_valid`: the host mirror of the weight equals the weight on the device when the step begins. `spilled`: its
    gradient waits on the host and returns with its state, because the device has no room for it. `grad_in_slot`: its
    gradient is copied into its host slot, not to a buffer of its own, and so not before the slot is free: only where
    gradients are kept until the step.
    """

    processor: Processor
    before: Residence
    after: Residence
    mirror_valid: bool
    spilled: bool = False
    grad_in_slot: bool = False

    @property
    def is_staged(self) -> bool:
        """Its state comes to the device for the update only, into a staging slot."""
        return self.processor == "device" and self.before != "device" and self.after != "device"

    @property
    def uses_host_slot(self) -> bool:
        """Its state passes through host memory on the way from or to a path, and has no place of its own there."""
        return "host" not in (self.before, self.after) and (is_path(self.before) or is_path(self.after))

    @property
    def pool(self) -> str:
        """The path whose host slots it takes turns in."""
        return self.before if is_path(self.before) else self.after


@dataclass(frozen=True)
class Plan:
    """Ops in program order: on each lane they run in this order.

    `placements[i]` belongs to `subgroups[i]`, whose id is i. `num_slots` staging slots exist on the device,
    `num_host_slots` in host memory: each of these holds state, weight and gradient of one subgroup.
    """

    policy: Policy
    subgroups: tuple[Subgroup, ...]
    placements: tuple[Placement, ...]
    num_slots: int
    ops: tuple[Op, ...]
    norms: Norms = "step"
    paths: tuple[str, ...] = ()
    num_host_slots: int = 0

    @cached_property
    def by_id(self) -> dict[int, Op]:
        return {op.id: op for op in self.ops}

    @cached_property
    def lane_names(self) -> tuple[str, ...]:
        """The lanes of this plan: those of every plan, then two for each path."""
        return (*LANES, *(lane for path in self.paths for lane in path_lanes(path)))

    @cached_property
    def lanes(self) -> dict[str, tuple[Op, ...]]:
        ops: dict[str, list[Op]] = {lane: [] for lane in self.lane_names}
        for op in self.ops:
            ops[op.lane].append(op)
        return {lane: tuple(found) for lane, found in ops.items()}

    def of_kind(self, *kinds: OpKind) -> Iterable[Op]:
        return (op for op in self.ops if op.kind in kinds)

    def link_bytes(self, lane: str) -> int:
        """Bytes that cross the link, or come from or go to a path, on one lane when each op of this plan runs once."""
        return sum(op.nbytes for op in self.lanes[lane])

    def updated_params(self, processor: Processor) -> int:
        kind = OpKind.CPU_UPDATE if processor == "cpu" else OpKind.DEVICE_UPDATE
        return sum(op.numel for op in self.of_kind(kind))
