"""A plan: all ops of one step, as an immutable list."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from tidegate.plan.gradient_memory import GradientMemory
from tidegate.plan.ops import D2H, LANES, Norms, Op, OpKind, Processor, Residence, Subgroup, is_path, path_lanes

Policy = Literal["interleaved", "sequential", "twinflow"]


@dataclass(frozen=True, slots=True)
class Placement:
    """Where one subgroup is updated, and where its state lives before and after the step.

    `mirror_valid`: the copy of the weight in host memory (the mirror) equals the weight on the device when the step
    begins. `spilled`: the gradient waits on the host and returns to the device with the state, because the device lacks
    memory for it. `grad_in_slot`: the gradient is copied into the subgroup's host slot instead of a buffer of its own,
    and therefore not before the slot is free; possible only where gradients are kept until the step. `weight_in_slot`:
    the weight has no mirror; for an update on the CPU it is copied into a weight slot, a buffer in host memory that
    subgroups use in turns. `deferred`: the state passes through a deferred slot (memory of gradients that were used)
    instead of a host slot, and is flushed after `step()` has returned, beside the next forward.
    """

    processor: Processor
    before: Residence
    after: Residence
    mirror_valid: bool
    spilled: bool = False
    grad_in_slot: bool = False
    weight_in_slot: bool = False
    deferred: bool = False

    @property
    def is_staged(self) -> bool:
        """Whether the state is on the device only during the update, in a staging slot."""
        return self.processor == "device" and self.before != "device" and self.after != "device"

    @property
    def uses_host_slot(self) -> bool:
        """Whether the state, on its way from or to a path, passes through a host slot (a buffer in host memory that
        subgroups use in turns), because it has no host buffer of its own."""
        passes = "host" not in (self.before, self.after) and (is_path(self.before) or is_path(self.after))
        return passes and not self.deferred

    @property
    def needs_grad_on_host(self) -> bool:
        """Whether the gradient is copied to the host."""
        return self.processor == "cpu" or self.spilled

    @property
    def has_gradient_buffer(self) -> bool:
        """Whether the gradient has a buffer of its own in host memory."""
        return self.needs_grad_on_host and not self.grad_in_slot

    @property
    def leaves_mirror(self) -> bool:
        """Whether the copy of the weight in host memory (the mirror) equals the weight on the device after the step."""
        return self.processor == "cpu" and not (self.uses_host_slot or self.weight_in_slot or self.deferred)

    @property
    def pool(self) -> str:
        """The path from which the state comes, else the residence to which it goes. If the subgroup uses a host slot,
        this is the path to which the slot belongs."""
        return self.before if is_path(self.before) else self.after


@dataclass(frozen=True)
class Plan:
    """Ops in program order: on each lane they run in this order.

    `placements[i]` belongs to `subgroups[i]`, whose id is i. There are `num_slots` staging slots on the device and
    `num_host_slots` in host memory; a host slot holds the state, weight and gradient of one subgroup. There are also
    `num_weight_slots` in host memory for weights of subgroups whose state is in host memory.
    """

    policy: Policy
    subgroups: tuple[Subgroup, ...]
    placements: tuple[Placement, ...]
    num_slots: int
    ops: tuple[Op, ...]
    norms: Norms = "step"
    paths: tuple[str, ...] = ()
    num_host_slots: int = 0
    num_weight_slots: int = 0
    gradient_memory: GradientMemory | None = None
    """The layout of the host memory for gradients; None without deferred slots."""

    @cached_property
    def by_id(self) -> dict[int, Op]:
        return {op.id: op for op in self.ops}

    @cached_property
    def places(self) -> dict[int, int]:
        """The place of each op in `ops`, by its id."""
        return {op.id: place for place, op in enumerate(self.ops)}

    @cached_property
    def norm_places(self) -> list[int]:
        """The place in `ops` of the op NORM, as a list with one number."""
        return [place for place, op in enumerate(self.ops) if op.kind is OpKind.NORM]

    @cached_property
    def deferred_flushes(self) -> frozenset[int]:
        """Ids of the ops that may run after `step()` has returned."""
        return frozenset(op.id for op in self.ops if op.is_deferred)

    @cached_property
    def last_in_step(self) -> tuple[int, ...]:
        """Ids of the ops for which `step()` waits: the last one of each lane that is not a deferred flush. None of the
        lane to the host: the ops that use what it copies wait for it."""
        return tuple({op.lane: op.id for op in self.ops if op.lane != D2H and not op.is_deferred}.values())

    @cached_property
    def lanes_of_ops(self) -> tuple[str, ...]:
        """The lane of each op in `ops`."""
        return tuple(op.lane for op in self.ops)

    @cached_property
    def lane_names(self) -> tuple[str, ...]:
        """The lanes of this plan: h2d, d2h, cpu and device, then for each path one lane that reads and one that
        writes."""
        return (*LANES, *(lane for path in self.paths for lane in path_lanes(path)))

    @cached_property
    def lanes(self) -> dict[str, tuple[Op, ...]]:
        ops: dict[str, list[Op]] = {lane: [] for lane in self.lane_names}
        for op in self.ops:
            ops[op.lane].append(op)
        return {lane: tuple(of_lane) for lane, of_lane in ops.items()}

    def of_kind(self, *kinds: OpKind) -> Iterator[Op]:
        return (op for op in self.ops if op.kind in kinds)

    def link_bytes(self, lane: str) -> int:
        """Bytes that one lane copies, over the link or from or to a path, when each op of this plan runs once."""
        return sum(op.nbytes for op in self.lanes[lane])

    def updated_params(self, processor: Processor) -> int:
        kind = OpKind.CPU_UPDATE if processor == "cpu" else OpKind.DEVICE_UPDATE
        return sum(op.numel for op in self.of_kind(kind))
