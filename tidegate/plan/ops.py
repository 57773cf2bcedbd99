"""What a plan is made of: ops, the lanes they run on, and the places they read and write."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Literal

Processor = Literal["cpu", "device"]
Residence = str
"""Where state lives between updates: `device`, `host`, or the name of a path."""
Gate = Literal["none", "gradient", "step"]
Content = Literal["gradient", "weight", "state"]
Norms = Literal["step", "gradient"]
"""Whether squares are summed when `step()` is called, or of each gradient as it arrives."""
Place = tuple[str, int]

H2D: Final = "h2d"
D2H: Final = "d2h"
CPU: Final = "cpu"
DEVICE: Final = "device"
LANES: Final = (H2D, D2H, CPU, DEVICE)
"""The lanes of every plan. Each path adds two of its own (`path_lanes`)."""
COMPUTE_LANES: Final = frozenset({CPU, DEVICE})
LINK_LANES: Final = frozenset({H2D, D2H})

SCALE: Final[Place] = ("scale", 0)
PATH_NAME: Final = re.compile(r"(?!(?:host|device)$)[a-z0-9_-]{1,32}")


def is_path(residence: Residence) -> bool:
    return residence not in ("device", "host")


def path_lanes(path: str) -> tuple[str, str]:
    """The lanes that read from a path and write to it."""
    return f"{path}:read", f"{path}:write"


class OpKind(StrEnum):
    """The kinds of op. Everything before the gate `step` only copies, so it can be repeated or dropped."""

    GRAD_D2H = "grad_d2h"
    """Gradient of a subgroup to the host, as soon as it is there (gate: gradient)."""
    WEIGHT_D2H = "weight_d2h"
    """Weight of a subgroup to its host mirror, when the mirror is missing or stale."""
    STATE_H2D = "state_h2d"
    """State of a subgroup into a staging slot, or into the place of a resident."""
    STATE_D2H = "state_d2h"
    """State of a subgroup from a staging slot, or from the place of a resident, to the host."""
    WEIGHT_H2D = "weight_h2d"
    """Weight that the CPU has updated to the device."""
    GRAD_H2D = "grad_h2d"
    """Gradient that was spilled to the host back to the device, into the staging slot of its state."""
    GRAD_NORM = "grad_norm"
    """Sum of squares and non-finite count of a subgroup's gradients, as soon as they are there (gate: gradient).
    Only in plans that release gradients before the step."""
    NORM = "norm"
    """Norm and non-finite count of all gradients, and from them the clip factor (gate: step)."""
    CPU_UPDATE = "cpu_update"
    DEVICE_UPDATE = "device_update"
    FETCH = "fetch"
    """State of a subgroup from its path to host memory. No gate: it may run during the backward."""
    FLUSH = "flush"
    """State of a subgroup from host memory to a path."""


LANE_OF: Final[dict[OpKind, str]] = {
    OpKind.GRAD_D2H: D2H,
    OpKind.WEIGHT_D2H: D2H,
    OpKind.STATE_D2H: D2H,
    OpKind.STATE_H2D: H2D,
    OpKind.WEIGHT_H2D: H2D,
    OpKind.GRAD_H2D: H2D,
    OpKind.GRAD_NORM: DEVICE,
    OpKind.NORM: DEVICE,
    OpKind.CPU_UPDATE: CPU,
    OpKind.DEVICE_UPDATE: DEVICE,
}
"""The lane of each kind that always has the same one; FETCH and FLUSH run on the lanes of their path."""

CONTENT_OF: Final[dict[OpKind, Content]] = {
    OpKind.GRAD_D2H: "gradient",
    OpKind.GRAD_H2D: "gradient",
    OpKind.WEIGHT_D2H: "weight",
    OpKind.WEIGHT_H2D: "weight",
    OpKind.STATE_H2D: "state",
    OpKind.STATE_D2H: "state",
    OpKind.FETCH: "state",
    OpKind.FLUSH: "state",
}

GATE_OF: Final[dict[OpKind, Gate]] = {
    OpKind.GRAD_D2H: "gradient",
    OpKind.GRAD_NORM: "gradient",
    OpKind.NORM: "step",
}


@dataclass(frozen=True, slots=True)
class Subgroup:
    """What a plan needs to know of a subgroup: its size, and its bytes per parameter of each content."""

    id: int
    numel: int
    weight_bytes: int
    """Bytes per parameter of the weight on the device."""
    grad_bytes: int
    state_bytes: int
    """Bytes per parameter of what is stored between steps: moments, and remainder or fp32 master."""

    def nbytes(self, content: Content) -> int:
        per_param = {"gradient": self.grad_bytes, "weight": self.weight_bytes, "state": self.state_bytes}
        return self.numel * per_param[content]


@dataclass(frozen=True, slots=True)
class Op:
    """One unit of work on one lane.

    `deps` are ids of ops that must be done first, beyond the order of the lane. `slot` is the staging slot on the
    device that the op uses, `host_slot` the one in host memory; None for a resident, for what has its own place on the
    host, or for ops that use no slot. `nbytes` crosses the link, or to or from `path` (FETCH and FLUSH only); `numel`
    is updated (or read, for norms). `subgroup` is -1 for NORM. `spilled`: an update on the device whose gradient comes
    back from the host. `grad_in_slot`: its gradient on the host is in the host slot.
    """

    id: int
    kind: OpKind
    subgroup: int
    nbytes: int
    numel: int
    deps: tuple[int, ...] = ()
    slot: int | None = None
    spilled: bool = False
    path: str | None = None
    host_slot: int | None = None
    grad_in_slot: bool = False

    @property
    def lane(self) -> str:
        if self.kind in LANE_OF:
            return LANE_OF[self.kind]
        read, write = path_lanes(str(self.path))
        return read if self.kind is OpKind.FETCH else write

    @property
    def may_run_ahead(self) -> bool:
        """Its lane may begin it before the op before it has ended. Such lanes begin their ops in order and end them in
        order, but that one begins says nothing of the one before: what it needs of that, a dependency must say."""
        return self.path is not None

    @property
    def gate(self) -> Gate:
        return GATE_OF.get(self.kind, "none")

    @property
    def content(self) -> Content | None:
        return CONTENT_OF.get(self.kind)

    @property
    def buffer(self) -> Place:
        """Where on the device the state is while this op works on it."""
        return ("resident", self.subgroup) if self.slot is None else ("slot", self.slot)

    @property
    def gradient(self) -> Place:
        """Where on the device the gradient is that this op brings or uses."""
        return ("slot_grad", self.slot) if self.spilled and self.slot is not None else ("device_grad", self.subgroup)

    @property
    def host_state(self) -> Place:
        """Where in host memory the state is that this op brings, takes or updates."""
        return ("host_state", self.subgroup) if self.host_slot is None else ("host_slot", self.host_slot)

    @property
    def host_weight(self) -> Place:
        """Where in host memory the weight is that this op brings, takes or updates."""
        return ("host_weight", self.subgroup) if self.host_slot is None else ("host_slot_weight", self.host_slot)

    @property
    def host_grad(self) -> Place:
        """Where in host memory the gradient is that this op brings or uses."""
        if self.grad_in_slot and self.host_slot is not None:
            return ("host_slot_grad", self.host_slot)
        return ("host_grad", self.subgroup)

    @property
    def stored(self) -> Place:
        """Where on its path the state is that this op fetches or flushes."""
        return (f"path:{self.path}", self.subgroup)

    @property
    def name(self) -> str:
        if self.subgroup < 0:
            return self.kind.value
        path = "" if self.path is None else f" {self.path}"
        slot = "" if self.slot is None else f" slot {self.slot}"
        host_slot = "" if self.host_slot is None else f" host slot {self.host_slot}"
        return f"{self.kind.value} {self.subgroup}{path}{slot}{host_slot}"


def effects(op: Op, num_subgroups: int, norms: Norms = "step") -> tuple[frozenset[Place], frozenset[Place]]:
    """The places that `op` reads and writes. Two ops that meet in a place, one of them writing, must be ordered."""
    s = op.subgroup
    match op.kind:
        case OpKind.GRAD_D2H:
            reads, writes = {("device_grad", s)}, {op.host_grad}
        case OpKind.WEIGHT_D2H:
            reads, writes = {("device_weight", s)}, {op.host_weight}
        case OpKind.STATE_H2D:
            reads, writes = {op.host_state}, {op.buffer}
        case OpKind.STATE_D2H:
            reads, writes = {op.buffer}, {op.host_state}
        case OpKind.WEIGHT_H2D:
            reads, writes = {op.host_weight}, {("device_weight", s)}
        case OpKind.GRAD_H2D:
            reads, writes = {op.host_grad}, {op.gradient}
        case OpKind.GRAD_NORM:
            reads, writes = {("device_grad", s)}, {("squares", s)}
        case OpKind.NORM:
            source = "device_grad" if norms == "step" else "squares"
            reads, writes = {(source, i) for i in range(num_subgroups)}, {SCALE}
        case OpKind.CPU_UPDATE:
            writes = {op.host_state, op.host_weight}
            reads = {op.host_grad, SCALE} | writes
        case OpKind.DEVICE_UPDATE:
            writes = {op.buffer, ("device_weight", s)}
            reads = {op.gradient, SCALE} | writes
        case OpKind.FETCH:
            reads, writes = {op.stored}, {op.host_state}
        case OpKind.FLUSH:
            reads, writes = {op.host_state}, {op.stored}
    return frozenset(reads), frozenset(writes)
