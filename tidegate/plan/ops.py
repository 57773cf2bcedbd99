"""The elements of a plan: ops, the lanes they run on, and the places (buffers) they read and write."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Literal

Processor = Literal["cpu", "device"]
Residence = str
"""Where state lives between updates: `device`, `host`, or the name of a path."""
Gate = Literal["none", "gradient", "step"]
"""The event that an op waits for besides its dependencies: its gradient's arrival, or the call of `step()`."""
Content = Literal["gradient", "weight", "state"]
Norms = Literal["step", "gradient"]
"""When squares of gradients are summed for the norm: in `step()`, or for each gradient as it arrives."""
BufferId = tuple[str, int]
"""A buffer that ops read and write: its kind, and the number of its subgroup or slot."""

H2D: Final = "h2d"
D2H: Final = "d2h"
CPU: Final = "cpu"
DEVICE: Final = "device"
LANES: Final = (H2D, D2H, CPU, DEVICE)
"""The lanes (in-order queues of ops) of every plan. Each storage path adds two lanes (`path_lanes`)."""
COMPUTE_LANES: Final = frozenset({CPU, DEVICE})
LINK_LANES: Final = frozenset({H2D, D2H})

SCALE: Final[BufferId] = ("scale", 0)
PATH_NAME: Final = re.compile(r"(?!(?:host|device)$)[a-z0-9_-]{1,32}")


def is_path(residence: Residence) -> bool:
    return residence not in ("device", "host")


def path_lanes(path: str) -> tuple[str, str]:
    """The names of a path's two lanes: the lane that reads from it and the lane that writes to it."""
    return f"{path}:read", f"{path}:write"


class OpKind(StrEnum):
    """The kinds of op. Ops that run before `step()` is called only copy or sum, and change no state or weight. So they
    may run again (when a gradient has changed since), or be cancelled with their plan."""

    GRAD_D2H = "grad_d2h"
    """Copies the gradient of a subgroup to the host, as soon as the gradient has arrived (gate: gradient)."""
    WEIGHT_D2H = "weight_d2h"
    """Copies the weight of a subgroup to host memory for an update on the CPU: to its mirror (a copy of the weight in
    host memory) when that is missing or stale, or to a slot."""
    STATE_H2D = "state_h2d"
    """Copies the state of a subgroup to the device: into a staging slot (a buffer that subgroups use in turns), or, if
    the subgroup becomes a resident (its state stays on the device), into memory of its own."""
    STATE_D2H = "state_d2h"
    """Copies the state of a subgroup from the device to the host: from a staging slot, or, if the subgroup was a
    resident until now, from its own memory on the device."""
    WEIGHT_H2D = "weight_h2d"
    """Copies the weight of a subgroup, which the CPU has updated, to the device."""
    GRAD_H2D = "grad_h2d"
    """Copies a gradient back to the device, into the staging slot of its subgroup. The gradient had been moved to the
    host (spilled), because the device lacks memory for it."""
    GRAD_NORM = "grad_norm"
    """Computes the sum of squares and the non-finite count of a subgroup's gradients, as soon as they have arrived
    (gate: gradient). Not in plans that sum all squares in `step()` (`Norms`)."""
    NORM = "norm"
    """Computes the norm and the non-finite count of all gradients, and from them the clip factor (gate: step)."""
    CPU_UPDATE = "cpu_update"
    """Updates a subgroup's state and weight on the CPU."""
    DEVICE_UPDATE = "device_update"
    """Updates a subgroup's state and weight on the device."""
    FETCH = "fetch"
    """Reads the state of a subgroup from its path into host memory. No gate: it may run during the backward."""
    FLUSH = "flush"
    """Writes the state of a subgroup from host memory to a path."""


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
"""The lane of each kind of op that has a fixed lane. FETCH and FLUSH run on the lanes of their path."""

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
    """The size of a subgroup (a group of parameters that are updated together): parameters, and bytes per parameter of
    gradient, weight and state."""

    id: int
    numel: int
    weight_bytes: int
    """Bytes per parameter of the weight on the device."""
    grad_bytes: int
    state_bytes: int
    """Bytes per parameter of the state that is stored between steps: the tensors of the update rule, and what completes
    a 16-bit weight to fp32 (its missing 16 bits, or an fp32 master weight)."""

    def nbytes(self, content: Content) -> int:
        per_param = {"gradient": self.grad_bytes, "weight": self.weight_bytes, "state": self.state_bytes}
        return self.numel * per_param[content]


@dataclass(frozen=True, slots=True)
class Op:
    """One unit of work on one lane.

    `deps` are ids of ops that must be done first, in addition to the order of the lane. `slot` and `host_slot` are
    numbers of the staging slots (buffers that subgroups use in turns) on the device and in host memory that the op
    uses; None for a resident, for data with a buffer of its own on the host, or for ops that use no slot. `nbytes`:
    bytes that are copied over the link, or from or to `path` (FETCH and FLUSH only). `numel`: parameters that are
    updated (or read, for norms). `subgroup` is -1 for NORM. `spilled`: the op belongs to an update on the device whose
    gradient comes back from the host. `grad_in_slot`: the gradient on the host is in the host slot. `weight_slot`:
    number of the weight slot that holds the weight in host memory; None if the weight is elsewhere. `deferred_slot`:
    number of the deferred slot (memory of used gradients, see `GradientMemory`) that holds the state; the weight is
    then in the deferred weight slot of number `weight_slot`. `covers`: ids of the subgroups whose gradients had the
    memory of these slots before.
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
    weight_slot: int | None = None
    deferred_slot: int | None = None
    covers: tuple[int, ...] = ()

    @property
    def lane(self) -> str:
        if self.kind in LANE_OF:
            return LANE_OF[self.kind]
        read, write = path_lanes(str(self.path))
        return read if self.kind is OpKind.FETCH else write

    @property
    def may_run_ahead(self) -> bool:
        """Whether the lane may begin this op before the lane's previous op has ended; true on path lanes.

        Such lanes begin their ops in order and end them in order. The start of an op does not imply the end of the
        previous op: if an op needs that end, a dependency must state it.
        """
        return self.path is not None

    @property
    def is_deferred(self) -> bool:
        """Whether `step()` does not wait for this op: a flush from a deferred slot runs beside the next forward."""
        return self.kind is OpKind.FLUSH and self.deferred_slot is not None

    @property
    def gate(self) -> Gate:
        return GATE_OF.get(self.kind, "none")

    @property
    def content(self) -> Content | None:
        return CONTENT_OF.get(self.kind)

    @property
    def buffer(self) -> BufferId:
        """The buffer on the device, as its kind and number, that holds the state which this op copies or updates: the
        staging slot, or the memory of the resident."""
        return ("resident", self.subgroup) if self.slot is None else ("slot", self.slot)

    @property
    def gradient(self) -> BufferId:
        """The buffer on the device, as its kind and number, that holds the gradient which this op copies or uses: the
        staging slot if the gradient was spilled to the host and comes back, else the memory of the gradient itself."""
        return ("slot_grad", self.slot) if self.spilled and self.slot is not None else ("device_grad", self.subgroup)

    @property
    def host_state(self) -> BufferId:
        """The buffer in host memory, as its kind and number, that holds the state which this op copies or updates: the
        deferred slot, the host slot, or the memory of the subgroup."""
        if self.deferred_slot is not None:
            return ("deferred_slot", self.deferred_slot)
        return ("host_state", self.subgroup) if self.host_slot is None else ("host_slot", self.host_slot)

    @property
    def host_weight(self) -> BufferId:
        """The buffer in host memory, as its kind and number, that holds the weight which this op copies or updates: the
        weight slot, the host slot, or the memory of the subgroup (the mirror)."""
        if self.weight_slot is not None:
            return ("weight_slot" if self.deferred_slot is None else "deferred_weight", self.weight_slot)
        return ("host_weight", self.subgroup) if self.host_slot is None else ("host_slot_weight", self.host_slot)

    @property
    def host_grad(self) -> BufferId:
        """The buffer in host memory, as its kind and number, that holds the gradient which this op copies or uses: the
        host slot, or the memory of the subgroup."""
        if self.grad_in_slot and self.host_slot is not None:
            return ("host_slot_grad", self.host_slot)
        return ("host_grad", self.subgroup)

    @property
    def stored(self) -> BufferId:
        """The place in storage, as its path and the number of the subgroup, of the state which this op reads (FETCH) or
        writes (FLUSH)."""
        return (f"path:{self.path}", self.subgroup)

    @property
    def name(self) -> str:
        if self.subgroup < 0:
            return self.kind.value
        path = "" if self.path is None else f" {self.path}"
        slot = "" if self.slot is None else f" slot {self.slot}"
        host_slot = "" if self.host_slot is None else f" host slot {self.host_slot}"
        deferred_slot = "" if self.deferred_slot is None else f" deferred slot {self.deferred_slot}"
        weight_slot = "" if self.weight_slot is None else f" weight slot {self.weight_slot}"
        return f"{self.kind.value} {self.subgroup}{path}{slot}{host_slot}{deferred_slot}{weight_slot}"


def effects(op: Op, num_subgroups: int, norms: Norms = "step") -> tuple[frozenset[BufferId], frozenset[BufferId]]:
    """The places that `op` reads, and the places that it writes.

    Two ops that access the same place must be ordered if one of them writes. A deferred slot takes the memory of
    gradients: what fills the slot overwrites them.
    """
    s = op.subgroup
    reads: set[BufferId]
    writes: set[BufferId]
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
    gradients = {("host_grad", i) for i in op.covers}
    if op.kind in (OpKind.FETCH, OpKind.WEIGHT_D2H):
        writes |= gradients
    else:
        reads |= gradients
    return frozenset(reads), frozenset(writes)
