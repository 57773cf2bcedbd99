"""List scheduler: puts the ops of a step into program order, by policy (interleaved, or one op at a time)."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Protocol

from tidegate.plan.dependencies import hazards
from tidegate.plan.ops import CPU, DEVICE, LANES, Norms, Op, OpKind
from tidegate.plan.plan import Policy
from tidegate.plan.tasks import StateOrigin, Task, Work

OpKey = tuple[OpKind, int]
NORM_KEY: Final[OpKey] = (OpKind.NORM, -1)

# Priority of ops that are ready on a lane, lower first: ops that unblock other ops, then state, then weights.
_FLUSH, _FETCH, _INTO_HOST, _OUT_OF_DEVICE, _GRAD_INTO_HOST = range(5)
_INTO_SLOT, _INTO_DEVICE, _GRAD_INTO_DEVICE, _ON_CPU, _ON_DEVICE, _WEIGHT, _DEFERRED_FLUSH = range(5, 12)
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


class OpTimes(Protocol):
    """An estimate of op run times, for example a `RateCard`."""

    def seconds(self, op: Op, /) -> float:
        """Expected run time of `op` in seconds."""


class TypicalOpTimes:
    """Run times of typical hardware, used only to order ops: a PCIe 4 link, a share of a server's CPU cores, a data
    centre GPU and an NVMe drive."""

    LINK_BYTES_PER_SECOND: Final = 25e9
    PARAMS_PER_SECOND: Final = {CPU: 2e9, DEVICE: 25e9}
    PATH_BYTES_PER_SECOND: Final = {OpKind.FETCH: 3e9, OpKind.FLUSH: 2e9}

    def seconds(self, op: Op, /) -> float:
        if op.kind in self.PATH_BYTES_PER_SECOND:
            return op.nbytes / self.PATH_BYTES_PER_SECOND[op.kind]
        if op.lane in self.PARAMS_PER_SECOND:
            return op.numel / self.PARAMS_PER_SECOND[op.lane]
        return op.nbytes / self.LINK_BYTES_PER_SECOND


def in_program_order(
    work: Work, policy: Policy, num_slots: int, num_subgroups: int, norms: Norms, clock: OpTimes, step_at: float
) -> list[Op]:
    """All ops of `work` in program order, according to `policy`. Ops that use a staging slot on the device get the
    number of their slot."""
    if policy == "interleaved":
        needs = _needs(work, num_subgroups, norms)
        return _with_slots(_interleaved(work, needs, num_slots, clock, step_at), num_slots)
    tasks = work.tasks if policy == "sequential" else sorted(work.tasks, key=lambda task: task.on_cpu)
    return _with_slots([*work.early, *work.squares, work.norm, *_ops(tasks)], num_slots)


def _ops(tasks: Iterable[Task]) -> Iterator[Op]:
    return (op for task in tasks for op in task.ops)


def _with_slots(order: Iterable[Op], num_slots: int) -> list[Op]:
    """Assigns staging slots on the device: an op that copies state into a slot (STATE_H2D) takes the slot that has been
    free for longest, and the later ops of its subgroup use the same slot."""
    free = deque(range(num_slots))
    taken: dict[int, int] = {}
    placed: list[Op] = []
    for op in order:
        if op.slot is None:
            placed.append(op)
            continue
        if op.kind is OpKind.STATE_H2D:
            taken[op.subgroup] = free.popleft()
        placed.append(replace(op, slot=taken[op.subgroup]))
        if op.kind is OpKind.STATE_D2H:
            free.append(taken[op.subgroup])
    return placed


def _needs(work: Work, num_subgroups: int, norms: Norms) -> dict[OpKey, tuple[OpKey, ...]]:
    """For each op, the ops that it is expected to wait for, besides earlier ops of its queue and a free staging slot.

    These are the data hazards that exist if tasks run one after another, in the order in which they take host slots.
    They are used only to estimate start times, and do not become dependencies of the plan.
    """
    turns = sorted(work.tasks, key=lambda task: task.origin)
    order = [*work.early, *work.squares, work.norm, *_ops(turns)]
    keys = [_key(op) for op in order]
    in_step: defaultdict[str | None, list[OpKey]] = defaultdict(list)
    for op in order:
        if op.path is not None and not op.is_deferred:
            in_step[op.path].append(_key(op))
    needs: dict[OpKey, tuple[OpKey, ...]] = {}
    for op, key, found in zip(order, keys, hazards(order, num_subgroups, norms), strict=True):
        # A spilled gradient goes into the same staging slot as its state.
        slot = ((OpKind.STATE_H2D, key[1]),) if key[0] is OpKind.GRAD_H2D else ()
        before = reversed(in_step[op.path]) if op.is_deferred else ()  # those that are done last come first
        needs[key] = (*slot, *before, *(keys[i] for i in found))
    return needs


def waits_of_deferred(order: Sequence[Op]) -> dict[int, int]:
    """For each deferred flush, the last fetch from its path before it, by position in `order`. The flush waits for this
    fetch, although both use different memory: flushes that `step()` does not wait for would slow down fetches."""
    waits: dict[int, int] = {}
    last: dict[str | None, int] = {}
    for position, op in enumerate(order):
        if op.kind is OpKind.FETCH:
            last[op.path] = position
        elif op.is_deferred and op.path in last:
            waits[position] = last[op.path]
    return waits


def _key(op: Op) -> OpKey:
    return (op.kind, op.subgroup)


@dataclass(slots=True)
class _Queue:
    """Ops of one lane that keep their order. The lane takes ops of a queue with a lower `preference` first.

    `ready`: estimated time at which all dependencies of the first op are done; infinite while one of these dependencies
    is not scheduled yet.
    """

    lane: str
    preference: tuple[int, StateOrigin]
    ops: deque[Op] = field(default_factory=deque)
    ready: float = math.inf
    fills: bool = False
    """Whether the ops are fillers: updates on the CPU that involve no path, so that the time at which they run does not
    change the work of any path."""

    @property
    def takes_slot(self) -> bool:
        return self.preference[0] == _INTO_SLOT


def _queues(work: Work) -> list[_Queue]:
    """The queues of all lanes, in the order of their preference. Ops whose tasks have different origins or paths are in
    different queues, so that an op that waits for one path does not block ops that do not need this path."""
    queues: dict[tuple[int, StateOrigin, str, str, bool], _Queue] = {}

    def put(op: Op, role: int, origin: StateOrigin, pool: str, fills: bool = False) -> None:
        key = (role, origin, pool, op.lane, fills)
        if key not in queues:
            queues[key] = _Queue(op.lane, (role, origin), fills=fills)
        queues[key].ops.append(op)

    for op in work.early:
        put(op, _OUT_OF_DEVICE, StateOrigin.HOST, "")
    for op in work.squares:
        put(op, _ON_DEVICE, StateOrigin.HOST, "")
    for task in work.tasks:
        for op in task.ops:
            put(op, _role(op), task.origin, task.pool, op.kind is OpKind.CPU_UPDATE and _needs_no_path(task))
    return [queue for _, queue in sorted(queues.items(), key=lambda item: item[1].preference)]


def _needs_no_path(task: Task) -> bool:
    return task.origin is StateOrigin.HOST and all(op.path is None for op in task.ops)


def _role(op: Op) -> int:
    if op.is_deferred:
        return _DEFERRED_FLUSH
    if op.kind is OpKind.STATE_H2D and op.slot is not None:
        return _INTO_SLOT
    return _ROLE[op.kind]


def _interleaved(
    work: Work, needs: dict[OpKey, tuple[OpKey, ...]], num_slots: int, clock: OpTimes, step_at: float
) -> Iterator[Op]:
    """List scheduling: yields the ops in the order of their estimated starts. Of several ops that could start at the
    same time, a lane takes the op with the lowest preference number, then the op that was ready first.

    It is assumed that the norm of all gradients (NORM) is computed when the backward has ended (`step_at`) and all ops
    are done that can run before it without a path. If no fetch is done by then, the CPU updates subgroups that need no
    path (fillers) until the first fetches are done; otherwise it first updates fetched subgroups, so that the write
    lanes of their paths have work (`_Fillers`).
    """
    queues, fillers = _queues(work), _Fillers()
    free: defaultdict[str, float] = defaultdict(float)
    done: dict[OpKey, float] = {}
    slots = deque([0.0] * num_slots)
    """The time at which each staging slot becomes free, in the order in which the d2h lane frees them."""
    norm_at = step_at

    def start_of(queue: _Queue) -> float:
        if queue.ready == math.inf:
            queue.ready = _latest(needs[_key(queue.ops[0])], done)
        start = max(free[queue.lane], queue.ready, fillers.start_from if queue.fills else 0.0)
        return max(start, slots[0] if slots else math.inf) if queue.takes_slot else start

    while queues or NORM_KEY not in done:
        best, best_start, norm_waits = None, math.inf, NORM_KEY in done
        for queue in queues:
            start = start_of(queue)
            if start == math.inf:
                continue
            norm_waits = norm_waits or queue.preference[1] is StateOrigin.HOST
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
        if best is None or best.preference[1] is StateOrigin.HOST:
            norm_at = max(norm_at, end)
        if op.kind is OpKind.STATE_D2H and op.slot is not None:
            slots.append(end)
        if op.kind is OpKind.NORM:
            fillers = _Fillers.after_norm(work, clock, done)
        elif op.kind is OpKind.CPU_UPDATE and best is not None:
            fillers.record_update(op, best.fills)
        yield op


def _latest(needs: Sequence[OpKey], done: Mapping[OpKey, float]) -> float:
    """The time at which all of these ops are done; infinite while one of them is not scheduled."""
    latest = 0.0
    for need in needs:
        end = done.get(need, math.inf)
        if end == math.inf:
            return end
        latest = max(latest, end)
    return latest


@dataclass(slots=True)
class _Fillers:
    """The rule by which the CPU runs fillers (updates that need no path) after the norm of the step, if some subgroups
    are fetched before the norm (early) and others of the same paths are fetched after it (late).

    Early subgroups are updated first: fillers would delay the first flushes, and no host slot would become free for the
    next fetches. After that the CPU alternates: it updates a late subgroup, and then runs a few fillers. With many
    fillers in a row, the lanes that write to the paths would have no work.
    """

    until: float = 0.0
    """Estimated time in seconds from which fillers may start whenever the CPU is free. Before this time, only
    `each_turn` fillers may start after each update of a late subgroup. The CPU is then expected to end its work at the
    same time as the paths."""
    each_turn: int = 0
    """Number of fillers that may start after the update of a late subgroup (fetched after the norm of the step)."""
    early: frozenset[int] = frozenset()
    """Ids of the early subgroups: their fetch is expected to end before the norm of the step is computed."""
    left: int = 0
    """Number of fillers that may still start before the next update of a late subgroup."""

    @classmethod
    def after_norm(cls, work: Work, clock: OpTimes, done: Mapping[OpKey, float]) -> _Fillers:
        """The rule for fillers in the part of the step after the op NORM; without limits if no subgroup is late.
        `done`: estimated end times of the ops that are already scheduled."""
        step = done[NORM_KEY]
        fetches = [op for op in _ops(work.tasks) if op.kind is OpKind.FETCH]
        early = frozenset(op.subgroup for op in fetches if done.get(_key(op), math.inf) <= step)
        early_paths = {op.path for op in fetches if op.subgroup in early}
        late = sum(op.path in early_paths and op.subgroup not in early for op in fetches)
        if not late:
            return cls()
        seconds: defaultdict[str, float] = defaultdict(float)
        for op in _ops(work.tasks):
            seconds[op.lane] += 0.0 if op.is_deferred else clock.seconds(op)
        busiest = max(total for lane, total in seconds.items() if lane not in LANES)
        fillers = sum(task.on_cpu and _needs_no_path(task) for task in work.tasks)
        return cls(step + max(0.0, busiest - seconds[CPU]), -(-fillers // late), early)

    @property
    def start_from(self) -> float:
        """Earliest start of the next filler."""
        return 0.0 if self.left else self.until

    def record_update(self, op: Op, fills: bool) -> None:
        """Counts `op`, an update on the CPU that has been scheduled. fills: whether it is a filler."""
        if fills:
            self.left = max(0, self.left - 1)
        elif op.subgroup not in self.early:
            self.left = self.each_turn
