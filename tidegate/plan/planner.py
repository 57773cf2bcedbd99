"""Makes plans: which ops a step needs, in which order, and what each of them waits for.

An op waits for another only where they meet in a place that one of them writes (`effects`), and only where the order of
the lanes and its other dependencies do not say so already: every dependency of a plan is needed.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, Protocol

from tidegate.errors import PlanError
from tidegate.plan.ops import CONTENT_OF, CPU, D2H, DEVICE, H2D, LANES, Norms, Op, OpKind, Place, Subgroup, effects
from tidegate.plan.plan import Placement, Plan, Policy

Key = tuple[OpKind, int]
_Queue = tuple[str, deque[Op]]
NORM_KEY: Final[Key] = (OpKind.NORM, -1)


class Clock(Protocol):
    """Estimates how long an op takes; a `RateCard` is one."""

    def seconds(self, op: Op, /) -> float:
        """Expected run time of `op` in seconds."""


class TypicalClock:
    """A PCIe 4 link, a server's share of CPU cores, a data centre GPU: used to order the h2d lane, nothing else."""

    LINK_BYTES_PER_SECOND: Final = 25e9
    PARAMS_PER_SECOND: Final = {CPU: 2e9, DEVICE: 25e9}

    def seconds(self, op: Op, /) -> float:
        if op.lane in self.PARAMS_PER_SECOND:
            return op.numel / self.PARAMS_PER_SECOND[op.lane]
        return op.nbytes / self.LINK_BYTES_PER_SECOND


@dataclass(frozen=True, slots=True)
class _DeviceTask:
    """One update on the device: its state comes (`fetch`), with its gradient if that was spilled, is updated, and goes
    back (`flush`)."""

    fetch: Op | None
    gradient: Op | None
    update: Op
    flush: Op | None

    @property
    def ops(self) -> tuple[Op, ...]:
        return tuple(op for op in (self.fetch, self.gradient, self.update, self.flush) if op is not None)

    @property
    def stays(self) -> bool:
        return self.fetch is None and self.flush is None


@dataclass(frozen=True, slots=True)
class _CpuTask:
    """One update on the CPU, and the way of the new weight to the device."""

    update: Op
    weight: Op

    @property
    def ops(self) -> tuple[Op, ...]:
        return (self.update, self.weight)


@dataclass(frozen=True, slots=True)
class _Work:
    """All ops of a step, not yet in one order. `early` and `squares` may run before the step's gate opens."""

    early: tuple[Op, ...]
    squares: tuple[Op, ...]
    norm: Op
    on_cpu: tuple[_CpuTask, ...]
    on_device: tuple[_DeviceTask, ...]


def make_plan(
    subgroups: Sequence[Subgroup],
    placements: Sequence[Placement],
    *,
    num_slots: int,
    policy: Policy = "interleaved",
    grad_on_host_order: Sequence[int] | None = None,
    rates: Clock | None = None,
    norms: Norms = "step",
) -> Plan:
    """The plan of one step. The same arguments always give the same plan.

    `placements[i]` belongs to `subgroups[i]`. `num_slots` staging slots take turns on the device. `grad_on_host_order`
    lists subgroup ids as their gradients are expected to be ready: by default the last first, as a backward pass
    yields them. `rates` estimates run times to order the h2d lane; the plan is correct whatever they are. `norms`:
    `gradient` sums squares as gradients arrive, so that they can be released before the step.

    Policies: `interleaved` runs whatever is not ordered by data concurrently (Deep Optimizer States); `sequential`
    has the same ops, one at a time; `twinflow` updates the residents first and then everything else on the CPU, one op
    at a time (DeepSpeed's TwinFlow). Raises PlanError for what cannot be planned.
    """
    _check(subgroups, placements, num_slots, policy)
    work = _work(subgroups, placements, num_slots, _gradient_order(placements, grad_on_host_order), norms)
    if policy == "interleaved":
        order = _interleaved(work, rates or TypicalClock())
    else:
        order = _sequential(work) if policy == "sequential" else _twinflow(work)
    ops = _link(order, len(subgroups), norms, chain=policy != "interleaved")
    return Plan(policy, tuple(subgroups), tuple(placements), num_slots, ops, norms)


def _check(subgroups: Sequence[Subgroup], placements: Sequence[Placement], num_slots: int, policy: Policy) -> None:
    if len(subgroups) != len(placements):
        raise PlanError(f"{len(subgroups)} subgroups have {len(placements)} placements: give one each.", "subgroups")
    if [s.id for s in subgroups] != list(range(len(subgroups))):
        raise PlanError("Subgroup ids must be 0, 1, 2, … in order.", "subgroups")
    staged = [i for i, p in enumerate(placements) if p.is_staged]
    if staged and num_slots < 1:
        raise PlanError(f"Subgroup {staged[0]} needs a staging slot, num_slots={num_slots}: give at least 1.", "slots")
    if staged and policy == "twinflow":
        raise PlanError(f"twinflow cannot stage subgroup {staged[0]}: use stride='off'.", "policy")
    for i, placement in enumerate(placements):
        if placement.processor == "cpu" and placement.after == "device":
            raise PlanError(f"Subgroup {i} is updated on the CPU, so its state must end on the host.", "placement")
        if placement.spilled and not placement.is_staged:
            raise PlanError(f"Subgroup {i} is not staged, so its gradient cannot be spilled.", "placement")


def _gradient_order(placements: Sequence[Placement], given: Sequence[int] | None) -> tuple[int, ...]:
    """All subgroups in the order in which their gradients are expected; those that nobody copies may be left out."""
    if given is None:
        return tuple(reversed(range(len(placements))))
    copied = [i for i, p in enumerate(placements) if p.processor == "cpu" or p.spilled]
    missing = set(copied) - set(given)
    if missing or len(set(given)) != len(given) or not all(0 <= i < len(placements) for i in given):
        raise PlanError("grad_on_host_order must name each subgroup updated on the CPU exactly once.", "gradient order")
    return (*given, *(i for i in reversed(range(len(placements))) if i not in set(given)))


def _op(kind: OpKind, subgroup: Subgroup, slot: int | None = None, spilled: bool = False) -> Op:
    content = CONTENT_OF.get(kind)
    nbytes, numel = (subgroup.nbytes(content), 0) if content else (0, subgroup.numel)
    return Op(id=-1, kind=kind, subgroup=subgroup.id, nbytes=nbytes, numel=numel, slot=slot, spilled=spilled)


def _work(
    subgroups: Sequence[Subgroup],
    placements: Sequence[Placement],
    num_slots: int,
    gradients: Sequence[int],
    norms: Norms,
) -> _Work:
    pairs = list(zip(subgroups, placements, strict=True))
    on_cpu = [(s, p) for s, p in pairs if p.processor == "cpu"]
    # Gradients come last in their lane: what is before them needs no gate, and runs while the backward has just begun.
    early = [_op(OpKind.WEIGHT_D2H, s) for s, p in on_cpu if not p.mirror_valid]
    early += [_op(OpKind.STATE_D2H, s) for s, p in on_cpu if p.before == "device"]
    copied = [i for i in gradients if placements[i].processor == "cpu" or placements[i].spilled]
    early += [_op(OpKind.GRAD_D2H, subgroups[i]) for i in copied]
    squares = [_op(OpKind.GRAD_NORM, subgroups[i]) for i in gradients] if norms == "gradient" else []
    numel = sum(s.numel for s in subgroups) if norms == "step" else 0
    return _Work(
        early=tuple(early),
        squares=tuple(squares),
        norm=Op(id=-1, kind=OpKind.NORM, subgroup=-1, nbytes=0, numel=numel),
        on_cpu=tuple(_CpuTask(_op(OpKind.CPU_UPDATE, s), _op(OpKind.WEIGHT_H2D, s)) for s, _ in on_cpu),
        on_device=tuple(_device_tasks(pairs, num_slots)),
    )


def _device_tasks(pairs: Iterable[tuple[Subgroup, Placement]], num_slots: int) -> Iterator[_DeviceTask]:
    """Ascending ids, those that stay on the device last: transfers still pending hide behind their updates."""
    on_device = [(s, p) for s, p in pairs if p.processor == "device"]
    on_device.sort(key=lambda pair: (pair[1].before == pair[1].after == "device", pair[0].id))
    turns = itertools.count()
    for subgroup, placement in on_device:
        slot = next(turns) % num_slots if placement.is_staged else None
        spilled = placement.spilled
        yield _DeviceTask(
            fetch=_op(OpKind.STATE_H2D, subgroup, slot) if placement.before == "host" else None,
            gradient=_op(OpKind.GRAD_H2D, subgroup, slot, spilled) if spilled else None,
            update=_op(OpKind.DEVICE_UPDATE, subgroup, slot, spilled),
            flush=_op(OpKind.STATE_D2H, subgroup, slot) if placement.after == "host" else None,
        )


def _sequential(work: _Work) -> list[Op]:
    moving: list[_CpuTask | _DeviceTask] = [*work.on_cpu, *(task for task in work.on_device if not task.stays)]
    moving.sort(key=lambda task: task.update.subgroup)
    staying = [task for task in work.on_device if task.stays]
    return [*work.early, *work.squares, work.norm, *(op for task in [*moving, *staying] for op in task.ops)]


def _twinflow(work: _Work) -> list[Op]:
    tasks: list[_CpuTask | _DeviceTask] = [*work.on_device, *work.on_cpu]
    return [*work.early, *work.squares, work.norm, *(op for task in tasks for op in task.ops)]


def _interleaved(work: _Work, clock: Clock) -> list[Op]:
    """List scheduling: whenever a lane is free it takes what is ready, state for the device before weights.

    All lanes but h2d have a fixed order. There, fetches and weights are merged by the time at which each is expected
    to be ready, so that a fetch whose slot frees late does not hold up weights, nor weights not yet updated a fetch.
    """
    fetches = [task.fetch for task in work.on_device if task.fetch is not None]
    gradients = [task.gradient for task in work.on_device if task.gradient is not None]
    flushes = [task.flush for task in work.on_device if task.flush is not None]
    queues: list[_Queue] = [
        (D2H, deque([*work.early, *flushes])),
        (H2D, deque([op for op in fetches if op.slot is not None])),
        (H2D, deque([op for op in fetches if op.slot is None])),
        (H2D, deque(gradients)),
        (CPU, deque([task.update for task in work.on_cpu])),
        (DEVICE, deque([*work.squares, *(task.update for task in work.on_device)])),
        (H2D, deque([task.weight for task in work.on_cpu])),
    ]
    return list(_list_schedule(queues, _needs(work), work.norm, clock))


def _needs(work: _Work) -> dict[Key, tuple[Key, ...]]:
    """What an op waits for besides its place in its queue. Only an estimate is made from it, never a dependency."""
    needs: dict[Key, tuple[Key, ...]] = {}
    last_flush: dict[int, Key] = {}
    for task in work.on_device:
        update = _key(task.update)
        needs[update] = (NORM_KEY, *(_key(op) for op in (task.fetch, task.gradient) if op is not None))
        if task.fetch is not None and task.fetch.slot in last_flush:
            needs[_key(task.fetch)] = (last_flush[task.fetch.slot],)
        if task.gradient is not None:
            slot_free = (last_flush[task.update.slot],) if task.update.slot in last_flush else ()
            needs[_key(task.gradient)] = ((OpKind.GRAD_D2H, task.update.subgroup), *slot_free)
        if task.flush is not None:
            needs[_key(task.flush)] = (update,)
            if task.flush.slot is not None:
                last_flush[task.flush.slot] = _key(task.flush)
    for cpu_task in work.on_cpu:
        needs[_key(cpu_task.update)] = (NORM_KEY,)
        needs[_key(cpu_task.weight)] = (_key(cpu_task.update),)
    return needs


def _key(op: Op) -> Key:
    return (op.kind, op.subgroup)


def _list_schedule(queues: list[_Queue], needs: dict[Key, tuple[Key, ...]], norm: Op, clock: Clock) -> Iterator[Op]:
    """The ops in the order of their estimated starts; ties go to the earlier queue.

    The backward is assumed to be long: NORM comes when nothing else can run before it.
    """
    free = dict.fromkeys(LANES, 0.0)
    done: dict[Key, float] = {}

    def start_of(queue: _Queue) -> float:
        """Earliest start of its next op; infinite when there is none, or it waits for one not scheduled yet."""
        lane, ops = queue
        return (
            max([free[lane], *(done.get(need, math.inf) for need in needs.get(_key(ops[0]), ()))]) if ops else math.inf
        )

    while True:
        starts = [start_of(queue) for queue in queues]
        start = min(starts)
        if start < math.inf:
            op = queues[starts.index(start)][1].popleft()
        elif NORM_KEY not in done:
            op, start = norm, max(free.values())
        else:
            return
        free[op.lane] = done[_key(op)] = start + clock.seconds(op)
        yield op


def _link(order: Sequence[Op], num_subgroups: int, norms: Norms, *, chain: bool) -> tuple[Op, ...]:
    """Numbers the ops and gives each the dependencies it needs, none of them redundant.

    `seen[i][lane]` is the last op of each lane that is sure to be done when op i is: lanes run in order, so that one
    number per lane says everything about the past of an op.
    """
    lane_of = [LANES.index(op.lane) for op in order]
    seen: list[list[int]] = []
    last_in_lane: dict[int, int] = {}
    linked: list[Op] = []
    for op_id, (op, hazards) in enumerate(zip(order, _hazards(order, num_subgroups, norms), strict=True)):
        if chain and op_id:
            hazards.add(op_id - 1)
        lane = lane_of[op_id]
        past = list(seen[last_in_lane[lane]]) if lane in last_in_lane else [-1] * len(LANES)
        deps: list[int] = []
        # Latest first: an op can only be implied by a later one.
        for dep in sorted(hazards, reverse=True):
            if dep > past[lane_of[dep]]:
                deps.append(dep)
                past = [max(pair) for pair in zip(past, seen[dep], strict=True)]
        past[lane] = last_in_lane[lane] = op_id
        seen.append(past)
        linked.append(replace(op, id=op_id, deps=tuple(reversed(deps))))
    return tuple(linked)


def _hazards(order: Sequence[Op], num_subgroups: int, norms: Norms) -> Iterator[set[int]]:
    """For each op, the earlier ops it must not overtake: read after write, write after write, write after read."""
    writer: dict[Place, int] = {}
    readers: dict[Place, list[int]] = {}
    for op_id, op in enumerate(order):
        reads, writes = effects(op, num_subgroups, norms)
        hazards = {writer[place] for place in reads | writes if place in writer}
        for place in writes:
            hazards.update(readers.pop(place, ()))
            writer[place] = op_id
        for place in reads - writes:
            readers.setdefault(place, []).append(op_id)
        yield hazards
