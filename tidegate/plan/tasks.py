"""The ops that a step needs, and the host slot that each uses; not yet in program order, and without dependencies."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Literal

from tidegate.errors import PlanError
from tidegate.plan.deferral import gradient_memory
from tidegate.plan.gradient_memory import DeferredSlot, GradientMemory
from tidegate.plan.ops import CONTENT_OF, Norms, Op, OpKind, Subgroup, is_path
from tidegate.plan.plan import Placement
from tidegate.plan.slot_sizes import WEIGHT_SLOTS

StepOrder = Literal["ascending", "descending"]
"""Order of the updates, by subgroup id."""


class StateOrigin(IntEnum):
    """Where the state of a task comes from, and whether the task needs a host slot. Of ready ops with equal priority,
    those of the task with the lower number run first, so that host slots become free early."""

    PATH = 0
    """The state comes from a path, through a host slot or a deferred slot."""
    PATH_TO_HOST = 1
    """The state comes from a path and stays in host memory; the task needs no host slot."""
    DEVICE = 2
    """The state goes from the device to a path, through a host slot."""
    HOST = 3
    """All other tasks: the state is on the host or the device, and the task waits for no path and no host slot."""


@dataclass(frozen=True, slots=True)
class Task:
    """The ops of one subgroup: its update and the ops before and after it, in an order in which they can run one at a
    time.

    Ops that use a staging slot on the device have the subgroup's id in `slot`, as a placeholder: the scheduler assigns
    the slot. `pool` is the path whose host slots the task uses, or from which its state comes; empty for tasks whose
    origin is `HOST`.
    """

    origin: StateOrigin
    pool: str
    on_cpu: bool
    stays: bool
    """Whether the subgroup is a resident: its state is on the device before and after the step."""
    ops: tuple[Op, ...]


@dataclass(frozen=True, slots=True)
class Work:
    """All ops of a step. `early` (copies from the device to the host) and `squares` (sums of squares of each subgroup's
    gradients) may run before the call of `step()`; `tasks` are in update order, residents last."""

    early: tuple[Op, ...]
    squares: tuple[Op, ...]
    norm: Op
    tasks: tuple[Task, ...]
    gradient_memory: GradientMemory | None = None
    """The layout of the host memory for gradients; None without deferred slots."""


def step_work(
    subgroups: Sequence[Subgroup],
    placements: Sequence[Placement],
    gradients: Sequence[int],
    norms: Norms,
    host_slots: Mapping[str, int],
    order: StepOrder,
    weight_slots: int = WEIGHT_SLOTS,
) -> Work:
    """The ops that these placements need.

    gradients: all subgroup ids, in the order in which their gradients are expected. host_slots: slots of each path.
    weight_slots: number of weight slots.
    """
    slots = _host_slots(placements, host_slots, order)
    # Gradients come last in their lane: the ops before them have no gate, and can run when the backward has just begun.
    mirrored = [(s, p) for s, p in zip(subgroups, placements, strict=True) if not (p.weight_in_slot or p.deferred)]
    early = [op for s, p in mirrored for op in _to_mirror(s, p, None)]
    early += [op for s, p in zip(subgroups, placements, strict=True) for op in _to_host_memory(s, p, None)]
    copied = [i for i in gradients if placements[i].has_gradient_buffer]
    early += [_op(OpKind.GRAD_D2H, subgroups[i]) for i in copied]
    squares = [_op(OpKind.GRAD_NORM, subgroups[i]) for i in gradients] if norms == "gradient" else []
    numel = sum(s.numel for s in subgroups) if norms == "step" else 0
    ids = in_order(range(len(subgroups)), order)
    num_deferred = sum(p.deferred for p in placements)
    memory = gradient_memory(subgroups, placements, ids) if num_deferred else None
    if memory is not None and len(memory.slots) < num_deferred:
        raise PlanError(
            f"{num_deferred} subgroups are deferred, and the gradients used before them have room for "
            f"{len(memory.slots)}: set deferred=False for the others.",
            "placement",
        )
    deferred = iter(_deferred_slots(memory) if memory is not None else ())
    tasks = _with_weight_slots(
        [_task(subgroups[i], placements[i], slots.get(i), deferred) for i in ids], placements, weight_slots
    )
    return Work(
        early=tuple(early),
        squares=tuple(squares),
        norm=Op(id=-1, kind=OpKind.NORM, subgroup=-1, nbytes=0, numel=numel),
        # Residents come last: their updates overlap with transfers that are still pending.
        tasks=tuple(sorted(tasks, key=lambda task: task.stays)),
        gradient_memory=memory,
    )


def in_order(ids: Sequence[int], order: StepOrder) -> Sequence[int]:
    return ids if order == "ascending" else ids[::-1]


def _host_slots(placements: Sequence[Placement], host_slots: Mapping[str, int], order: StepOrder) -> dict[int, int]:
    """The number of the host slot of each subgroup that uses one, by subgroup id.

    Each path has slots of its own, so that a slow path never delays another path; their numbers follow those of the
    path before it. Subgroups use the slots in turns. Subgroups whose state comes from the path are first, because their
    fetches need not wait for the call of `step()`. host_slots: number of slots of each path.
    """
    slots: dict[int, int] = {}
    first = 0
    for path, count in host_slots.items():
        mine = [i for i, p in enumerate(placements) if p.uses_host_slot and p.pool == path]
        turns = sorted(in_order(mine, order), key=lambda i: placements[i].before == "device")
        slots |= {i: first + turn % count for turn, i in enumerate(turns)}
        first += count
    return slots


def _with_weight_slots(tasks: Sequence[Task], placements: Sequence[Placement], weight_slots: int) -> Sequence[Task]:
    """The tasks, in the same order, with the weight slot of each subgroup that uses one. Subgroups use the slots in
    turns: those whose state comes from a path first, as ready ops with equal priority run."""
    users = [task for task in tasks if placements[task.ops[0].subgroup].weight_in_slot]
    turns = sorted(users, key=lambda task: task.origin)
    slot_of = {task.ops[0].subgroup: turn % weight_slots for turn, task in enumerate(turns)}
    return [_with_weight_slot(task, slot_of.get(task.ops[0].subgroup)) for task in tasks]


def _with_weight_slot(task: Task, slot: int | None) -> Task:
    if slot is None:
        return task
    kinds = (OpKind.WEIGHT_D2H, OpKind.CPU_UPDATE, OpKind.WEIGHT_H2D)
    return replace(task, ops=tuple(replace(op, weight_slot=slot) if op.kind in kinds else op for op in task.ops))


@dataclass(frozen=True, slots=True)
class _DeferredSlots:
    """The deferred slots of one subgroup, for its state and for its weight, with their numbers."""

    number: int
    state: DeferredSlot
    weight_number: int
    weight: DeferredSlot


def _deferred_slots(memory: GradientMemory) -> Iterator[_DeferredSlots]:
    """The deferred slots of each deferred subgroup, in the order of updates."""
    for number, state in enumerate(memory.slots):
        turn = number % len(memory.weight_slots)
        yield _DeferredSlots(number, state, turn, memory.weight_slots[turn])


def _task(subgroup: Subgroup, placement: Placement, host_slot: int | None, deferred: Iterator[_DeferredSlots]) -> Task:
    """The task of a subgroup. deferred: gives the slots of the next deferred subgroup."""
    on_cpu = placement.processor == "cpu"
    comes_from_path = is_path(placement.before)
    if placement.deferred:
        ops = tuple(_deferred_ops(subgroup, placement, next(deferred)))
        return Task(StateOrigin.PATH, placement.pool, on_cpu=True, stays=False, ops=ops)
    if placement.uses_host_slot:
        origin = StateOrigin.PATH if comes_from_path else StateOrigin.DEVICE
    else:
        origin = StateOrigin.PATH_TO_HOST if comes_from_path else StateOrigin.HOST
    return Task(
        origin=origin,
        pool="" if origin is StateOrigin.HOST else placement.pool,
        on_cpu=on_cpu,
        stays=placement.before == placement.after == "device",
        ops=tuple((_cpu_ops if on_cpu else _device_ops)(subgroup, placement, host_slot)),
    )


def _cpu_ops(subgroup: Subgroup, placement: Placement, host_slot: int | None) -> Iterator[Op]:
    if host_slot is not None or placement.weight_in_slot:
        yield from _to_mirror(subgroup, placement, host_slot)
    if host_slot is not None:
        yield from _to_host_memory(subgroup, placement, host_slot)
    yield from _fetch(subgroup, placement, host_slot)
    yield from _grad_to_slot(subgroup, placement, host_slot)
    yield _op(OpKind.CPU_UPDATE, subgroup, host_slot=host_slot, grad_in_slot=placement.grad_in_slot)
    yield _op(OpKind.WEIGHT_H2D, subgroup, host_slot=host_slot)
    yield from _flush(subgroup, placement, host_slot)


def _deferred_ops(subgroup: Subgroup, placement: Placement, slots: _DeferredSlots) -> Iterator[Op]:
    def with_slots(op: Op, *, weight: bool = False, state: bool = True) -> Op:
        covers = (slots.state.covers if state else ()) + (slots.weight.covers if weight else ())
        return replace(
            op, deferred_slot=slots.number, weight_slot=slots.weight_number if weight else None, covers=covers
        )

    yield with_slots(_op(OpKind.WEIGHT_D2H, subgroup), weight=True, state=False)
    yield with_slots(_op(OpKind.FETCH, subgroup, path=placement.before))
    yield with_slots(_op(OpKind.CPU_UPDATE, subgroup), weight=True)
    yield with_slots(_op(OpKind.WEIGHT_H2D, subgroup), weight=True, state=False)
    yield with_slots(_op(OpKind.FLUSH, subgroup, path=placement.after))


def _device_ops(subgroup: Subgroup, placement: Placement, host_slot: int | None) -> Iterator[Op]:
    slot = subgroup.id if placement.is_staged else None
    spilled, in_slot = placement.spilled, placement.grad_in_slot
    yield from _fetch(subgroup, placement, host_slot)
    if placement.before != "device":
        yield _op(OpKind.STATE_H2D, subgroup, slot=slot, host_slot=host_slot)
    yield from _grad_to_slot(subgroup, placement, host_slot)
    if spilled:
        host_grad_slot = host_slot if in_slot else None
        yield _op(OpKind.GRAD_H2D, subgroup, slot=slot, spilled=True, host_slot=host_grad_slot, grad_in_slot=in_slot)
    yield _op(OpKind.DEVICE_UPDATE, subgroup, slot=slot, spilled=spilled)
    if placement.after != "device":
        yield _op(OpKind.STATE_D2H, subgroup, slot=slot, host_slot=host_slot)
    yield from _flush(subgroup, placement, host_slot)


def _to_mirror(subgroup: Subgroup, placement: Placement, host_slot: int | None) -> Iterator[Op]:
    """Yields the op that copies the weight to host memory for an update on the CPU: to the mirror of the subgroup, or
    to its host slot or weight slot if it uses one. Yields nothing if no copy is needed."""
    wanted = placement.processor == "cpu" and not placement.mirror_valid
    if wanted and placement.uses_host_slot == (host_slot is not None):
        yield _op(OpKind.WEIGHT_D2H, subgroup, host_slot=host_slot)


def _to_host_memory(subgroup: Subgroup, placement: Placement, host_slot: int | None) -> Iterator[Op]:
    """Yields the op that copies the state from the device to the host before an update on the CPU; nothing if no copy
    is needed."""
    wanted = placement.processor == "cpu" and placement.before == "device"
    if wanted and placement.uses_host_slot == (host_slot is not None):
        yield _op(OpKind.STATE_D2H, subgroup, host_slot=host_slot)


def _grad_to_slot(subgroup: Subgroup, placement: Placement, host_slot: int | None) -> Iterator[Op]:
    if placement.grad_in_slot:
        yield _op(OpKind.GRAD_D2H, subgroup, host_slot=host_slot, grad_in_slot=True)


def _fetch(subgroup: Subgroup, placement: Placement, host_slot: int | None) -> Iterator[Op]:
    if is_path(placement.before):
        yield _op(OpKind.FETCH, subgroup, path=placement.before, host_slot=host_slot)


def _flush(subgroup: Subgroup, placement: Placement, host_slot: int | None) -> Iterator[Op]:
    if is_path(placement.after):
        yield _op(OpKind.FLUSH, subgroup, path=placement.after, host_slot=host_slot)


def _op(
    kind: OpKind,
    subgroup: Subgroup,
    *,
    slot: int | None = None,
    spilled: bool = False,
    path: str | None = None,
    host_slot: int | None = None,
    grad_in_slot: bool = False,
) -> Op:
    content = CONTENT_OF.get(kind)
    nbytes, numel = (subgroup.nbytes(content), 0) if content else (0, subgroup.numel)
    return Op(
        id=-1, kind=kind, subgroup=subgroup.id, nbytes=nbytes, numel=numel, slot=slot, spilled=spilled, path=path,
        host_slot=host_slot, grad_in_slot=grad_in_slot,
    )  # fmt: skip
