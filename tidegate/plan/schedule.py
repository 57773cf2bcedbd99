"""Puts the ops of a step into one order, by policy: as much at once as can be, or one at a time."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Final, Protocol

from tidegate.plan.dependencies import hazards
from tidegate.plan.ops import CPU, DEVICE, LANES, Norms, Op, OpKind
from tidegate.plan.plan import Policy
from tidegate.plan.tasks import Origin, Task, Work

Key = tuple[OpKind, int]
NORM_KEY: Final[Key] = (OpKind.NORM, -1)

# What a lane prefers among ops that are ready. Lower first: what lets others begin, state before weights.
_FLUSH, _FETCH, _INTO_HOST, _OUT_OF_DEVICE, _GRAD_INTO_HOST = range(5)
_INTO_SLOT, _INTO_DEVICE, _GRAD_INTO_DEVICE, _ON_CPU, _ON_DEVICE, _WEIGHT = range(5, 11)
_ROLE: Final[dict[OpKind, int]] = {
    OpKind.FLUSH: _FLUSH,
    OpKind.FETCH: _FETCH,
    OpKind.WEIGHT_D2H: _INTO_HOST,
    OpKind.STATE_D2H: _OUT_OF_DEVICE,
    OpKind.GRAD_D2H: _GRAD_INTO_HOST,
    OpKind.STATE_H2D: _INTO_DEVICE,
    OpKind.GRAD_H2D: _GRAD_INTO_DEVICE,
    OpKind.CPU_UPDATE: _ON_CPU,
    OpKind.DEVICE_UPDATE: _ON_DEVICE,
    OpKind.WEIGHT_H2D: _WEIGHT,
}


class Clock(Protocol):
    """Estimates how long an op takes; a `RateCard` is one."""

    def seconds(self, op: Op, /) -> float:
        """Expected run time of `op` in seconds."""


class TypicalClock:
    """A PCIe 4 link, a server's share of CPU cores, a data centre GPU, an NVMe drive: to order ops, nothing else."""

    LINK_BYTES_PER_SECOND: Final = 25e9
    PARAMS_PER_SECOND: Final = {CPU: 2e9, DEVICE: 25e9}
    PATH_BYTES_PER_SECOND: Final = {OpKind.FETCH: 3e9, OpKind.FLUSH: 2e9}

    def seconds(self, op: Op, /) -> float:
        if op.kind in self.PATH_BYTES_PER_SECOND:
            return op.nbytes / self.PATH_BYTES_PER_SECOND[op.kind]
        if op.lane in self.PARAMS_PER_SECOND:
            return op.numel / self.PARAMS_PER_SECOND[op.lane]
        return op.nbytes / self.LINK_BYTES_PER_SECOND


def ordered(
    work: Work, policy: Policy, num_slots: int, num_subgroups: int, norms: Norms, clock: Clock, step_at: float
) -> list[Op]:
    """All ops of `work` in the order that `policy` gives them, each with its staging slot."""
    if policy == "interleaved":
        needs = _needs(work, num_subgroups, norms)
        return _with_slots(_interleaved(work, needs, num_slots, clock, step_at), num_slots)
    tasks = work.tasks if policy == "sequential" else sorted(work.tasks, key=lambda task: task.on_cpu)
    return _with_slots([*work.early, *work.squares, work.norm, *_ops(tasks)], num_slots)


def _ops(tasks: Iterable[Task]) -> Iterator[Op]:
    return (op for task in tasks for op in task.ops)


def _with_slots(order: Iterable[Op], num_slots: int) -> list[Op]:
    """Staging slots on the device: each fetch takes the one that has been free for longest."""
    free = deque(range(num_slots))
    taken: dict[int, int] = {}
    found: list[Op] = []
    for op in order:
        if op.slot is None:
            found.append(op)
            continue
        if op.kind is OpKind.STATE_H2D:
            taken[op.subgroup] = free.popleft()
        found.append(replace(op, slot=taken[op.subgroup]))
        if op.kind is OpKind.STATE_D2H:
            free.append(taken[op.subgroup])
    return found


def _needs(work: Work, num_subgroups: int, norms: Norms) -> dict[Key, tuple[Key, ...]]:
    """What an op waits for besides its place in its queue, and for a staging slot.

    It is what it would wait for if tasks ran one after another, which is the order in which they take host slots. Only
    an estimate is made from it, never a dependency.
    """
    turns = sorted(work.tasks, key=lambda task: task.origin)
    order = [*work.early, *work.squares, work.norm, *_ops(turns)]
    keys = [_key(op) for op in order]
    needs: dict[Key, tuple[Key, ...]] = {}
    for key, found in zip(keys, hazards(order, num_subgroups, norms), strict=True):
        # A gradient that was spilled goes to the slot that its state takes.
        slot = ((OpKind.STATE_H2D, key[1]),) if key[0] is OpKind.GRAD_H2D else ()
        needs[key] = (*slot, *(keys[i] for i in found))
    return needs


def _key(op: Op) -> Key:
    return (op.kind, op.subgroup)


@dataclass(slots=True)
class _Queue:
    """Ops of one lane that keep their order. `preference` is lower for what its lane takes first.

    `ready`: when all that its first op needs is done; infinite while one of them is not scheduled yet.
    """

    lane: str
    preference: tuple[int, Origin]
    ops: deque[Op] = field(default_factory=deque)
    ready: float = math.inf
    fills: bool = False
    """Updates on the CPU that have nothing to do with a path: whenever they run, all paths have as much to do."""

    @property
    def takes_slot(self) -> bool:
        return self.preference[0] == _INTO_SLOT


def _queues(work: Work) -> list[_Queue]:
    """Tasks that wait for different things stand in different queues, so that none holds up another."""
    found: dict[tuple[int, Origin, str, str, bool], _Queue] = {}

    def put(op: Op, role: int, origin: Origin, pool: str, fills: bool = False) -> None:
        key = (role, origin, pool, op.lane, fills)
        if key not in found:
            found[key] = _Queue(op.lane, (role, origin), fills=fills)
        found[key].ops.append(op)

    for op in work.early:
        put(op, _OUT_OF_DEVICE, Origin.HOST, "")
    for op in work.squares:
        put(op, _ON_DEVICE, Origin.HOST, "")
    for task in work.tasks:
        for op in task.ops:
            put(op, _role(op), task.origin, task.pool, op.kind is OpKind.CPU_UPDATE and _needs_no_path(task))
    return [queue for _, queue in sorted(found.items(), key=lambda item: item[1].preference)]


def _needs_no_path(task: Task) -> bool:
    return task.origin is Origin.HOST and all(op.path is None for op in task.ops)


def _role(op: Op) -> int:
    if op.kind is OpKind.STATE_H2D and op.slot is not None:
        return _INTO_SLOT
    return _ROLE[op.kind]


def _interleaved(
    work: Work, needs: dict[Key, tuple[Key, ...]], num_slots: int, clock: Clock, step_at: float
) -> Iterator[Op]:
    """List scheduling: the ops in the order of their estimated starts. Of ops that could start at once, a lane takes
    what it prefers, then what was ready first.

    The backward is assumed to be long enough for what can be done before it ends without any path, and to last until
    `step_at`: NORM comes then. Updates of what is on the host fill the time until the first fetches are done, if they
    are not done by then; otherwise what was fetched is updated first, and its path has something to write (`_Turns`).
    """
    queues, turns = _queues(work), _Turns()
    free: defaultdict[str, float] = defaultdict(float)
    done: dict[Key, float] = {}
    slots = deque([0.0] * num_slots)
    """When each staging slot is free. In the order in which they are given back, which is that of the d2h lane."""
    norm_at = step_at

    def start_of(queue: _Queue) -> float:
        if queue.ready == math.inf:
            queue.ready = max([0.0, *(done.get(need, math.inf) for need in needs[_key(queue.ops[0])])])
        start = max(free[queue.lane], queue.ready, turns.fillers_from if queue.fills else 0.0)
        return max(start, slots[0] if slots else math.inf) if queue.takes_slot else start

    while queues or NORM_KEY not in done:
        best, best_start, norm_waits = None, math.inf, NORM_KEY in done
        for queue in queues:
            start = start_of(queue)
            if start == math.inf:
                continue
            norm_waits = norm_waits or queue.preference[1] is Origin.HOST
            better = start < best_start
            if not better and best is not None and start == best_start:
                better = queue.preference == best.preference and queue.ready < best.ready
            if better:
                best, best_start = queue, start
        if not norm_waits and norm_at < best_start:
            op, best_start = work.norm, norm_at
        else:
            assert best is not None, "some op can always run"
            op = best.ops.popleft()
            best.ready = math.inf
            if best.takes_slot:
                slots.popleft()
            if not best.ops:
                queues.remove(best)
        end = free[op.lane] = done[_key(op)] = best_start + clock.seconds(op)
        if best is None or best.preference[1] is Origin.HOST:
            norm_at = max(norm_at, end)
        if op.kind is OpKind.STATE_D2H and op.slot is not None:
            slots.append(end)
        if op.kind is OpKind.NORM:
            turns = _Turns.after_norm(work, clock, done)
        elif op.kind is OpKind.CPU_UPDATE and best is not None:
            turns.updated(op, best.fills)
        yield op


@dataclass(slots=True)
class _Turns:
    """When the CPU updates what needs no path, if some of the others are fetched before the step, and it has the time.

    After those, it takes turns: some that need no path behind each that was fetched in the step. Until then it would be
    in the way of the first flushes, and nothing can be fetched; many in a row would make flushes wait for the next one.
    """

    until: float = 0.0
    """From then on they need not wait: the CPU is just done when the paths are."""
    each_turn: int = 0
    early: frozenset[int] = frozenset()
    """Subgroups that were fetched before the step."""
    left: int = 0
    """So many may still begin in this turn."""

    @classmethod
    def after_norm(cls, work: Work, clock: Clock, done: Mapping[Key, float]) -> _Turns:
        """`done`: when ops end."""
        step = done[NORM_KEY]
        fetches = [op for op in _ops(work.tasks) if op.kind is OpKind.FETCH]
        early = frozenset(op.subgroup for op in fetches if done.get(_key(op), math.inf) <= step)
        going_on = {op.path for op in fetches if op.subgroup in early}
        late = sum(op.path in going_on and op.subgroup not in early for op in fetches)
        if not late:
            return cls()
        seconds: defaultdict[str, float] = defaultdict(float)
        for op in _ops(work.tasks):
            seconds[op.lane] += clock.seconds(op)
        busiest = max(taken for lane, taken in seconds.items() if lane not in LANES)
        fillers = sum(task.on_cpu and _needs_no_path(task) for task in work.tasks)
        return cls(step + max(0.0, busiest - seconds[CPU]), -(-fillers // late), early)

    @property
    def fillers_from(self) -> float:
        return 0.0 if self.left else self.until

    def updated(self, op: Op, fills: bool) -> None:
        """`op`, an update on the CPU, has its place."""
        if fills:
            self.left = max(0, self.left - 1)
        elif op.subgroup not in self.early:
            self.left = self.each_turn
