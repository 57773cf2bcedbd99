"""Carries out the ops of a plan: finds the addresses that an op uses, and makes the copy or the update there."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tidegate.agent.devices.base import Copy, Device, DoneEvent, Event, UpdateRun, Waitable
from tidegate.agent.engine.executor import StepSkipped
from tidegate.agent.engine.memory import StateMemory
from tidegate.agent.engine.plan_execution import IssuedOp
from tidegate.agent.engine.state_block import state_addresses
from tidegate.agent.gradients.gradient_record import GradientRecord
from tidegate.agent.gradients.gradients import Gradients, GradientsRead, grad_ref_of
from tidegate.agent.parameters.shards import GradientNorm
from tidegate.agent.parameters.subgroups import Layout, Segment, address_of
from tidegate.agent.tiers.prepared_transfer import PreparedTransfer
from tidegate.errors import NoPathLeft
from tidegate.kernels import ThreadPool
from tidegate.kernels.arithmetic.implementation import Implementation, Piece
from tidegate.kernels.dispatch import GradientFactor
from tidegate.plan.ops import D2H, DEVICE, H2D, Op, OpKind

DEVICE_LANES = frozenset({H2D, D2H, DEVICE})
"""Lanes that are device streams, which wait for each other on the device. The other lanes are host threads."""


@dataclass(frozen=True, slots=True)
class StepInputs:
    """Inputs of the updates of one step, in addition to state, weights and gradients.

    scalars: `scalars(group, step, grad_scale)` returns the scalars of an update, as the update rule makes them.
    steps: the number of this update for each parameter, counted from 1.
    clip: `clip(total_norm)` returns the factor for all gradients.
    skip: whether to skip the step even if all gradients are finite.
    unscale: inverse of the loss scale.
    """

    steps: list[int]
    scalars: Callable[[int, int, float], Any]
    clip: Callable[[float], float]
    skip: bool = False
    unscale: float = 1.0


@dataclass(slots=True)
class StepOutcome:
    """What a step with these inputs finds out about its gradients. The op NORM sets the fields with defaults; after it,
    they do not change.

    has_grad: whether each parameter has a gradient. grad_norm: norm of all gradients, after multiplication with
    `inputs.unscale`. grad_scale: the factor for all gradients. bad_params: if the step is skipped, parameters whose
    gradients are not finite on this rank. sums_outdated: whether most of the gradients whose squares were summed before
    `step()` have changed since. skipped: whether the step is skipped; known when `step()` has returned.
    """

    inputs: StepInputs
    has_grad: Sequence[bool]
    grad_norm: float | None = None
    grad_scale: float = 1.0
    bad_params: tuple[int, ...] = ()
    sums_outdated: bool = False
    skipped: bool = False


@dataclass(frozen=True, slots=True)
class SquareSums:
    """Sums of squares and numbers of non-finite elements of gradients. After `ready.wait()`, `sums` has one such pair
    for each parameter in `params`, in the same order. `read`: in gradient mode `keep`, the records of the gradients
    that were summed; else None, because a released gradient does not change."""

    params: Sequence[int]
    read: Sequence[GradientRecord | None]
    ready: Waitable
    sums: list[tuple[float, int]]


class MemoryRunner:
    """Runs ops on device and state memory. Lanes run at the same time; a lane runs one op at a time, except for the
    lanes of paths."""

    def __init__(
        self,
        device: Device,
        memory: StateMemory,
        gradients: Gradients,
        weights: Sequence[torch.Tensor],
        norm: GradientNorm,
        pool: ThreadPool,
        rule: Implementation,
    ) -> None:
        """`weights`: this rank's shards of all parameters, in the engine's own list, so that shards which the engine
        adds later are included."""
        self._device = device
        self._memory = memory
        self._gradients = gradients
        self._weights = weights
        self.norm_over_ranks = norm
        self._pool = pool
        self._rule = rule
        self.copied: dict[int, GradientsRead | None] = {}
        """In gradient mode `keep`: the records of the gradients that were copied to the host, by subgroup. None while a
        copy is about to read them."""
        self.squares: dict[int, SquareSums] = {}
        """Sums of squares that GRAD_NORM ops make before `step()`, by id of the op. If an op was prepared, but its lane
        did not get the task, the op is run here and replaces the sums of the task."""
        self.reading: dict[int, GradientsRead] = {}
        """The records of the gradients that tasks read, by id of the op. They keep the memory of these gradients until
        the task has ended."""
        self.factor = GradientFactor()
        """The factor for all gradients of the step in progress, for ops that were prepared before it was known."""
        self.outcome: StepOutcome | None = None
        """Inputs and outcome of the step in progress; None before `step()`."""

    def begin(self) -> None:
        """Prepares for a new plan: deletes what is recorded about the last plan. To be called when none of its ops
        runs."""
        if self._memory.store is not None:
            self._memory.store.begin_plan()
        self.copied.clear()
        self.squares.clear()
        self.reading.clear()

    def wait(self, lane: str, event: Event) -> None:
        """Makes a lane wait for an event. For a lane of the device, its stream waits; for another lane, the calling
        thread waits."""
        if lane in DEVICE_LANES:
            self._device.wait(lane, event)
        else:
            event.wait()

    def run(self, op: Op, begun: Callable[[], None]) -> IssuedOp:
        """Issues an op on its lane. Raises StepSkipped if the op is NORM and the step must be skipped."""
        match op.kind:
            case OpKind.NORM:
                return self._norm()
            case OpKind.GRAD_NORM:
                return self._grad_norm(op, self._memory.layouts[op.subgroup])
            case OpKind.CPU_UPDATE:
                return self._cpu_update(op)
            case OpKind.DEVICE_UPDATE:
                return self._device_update(op, self._memory.layouts[op.subgroup])
            case OpKind.GRAD_D2H:
                return self._grad_d2h(op, self._memory.layouts[op.subgroup])
            case OpKind.FETCH | OpKind.FLUSH:
                return self.transfer(op, begun)
        return self._copy(op.lane, self.copies(op))

    def _copy(self, lane: str, copies: Sequence[Copy]) -> IssuedOp:
        return IssuedOp(self._device.copy(lane, copies), sum(copy.nbytes for copy in copies), 0)

    def transfer(self, op: Op, begun: Callable[[], None], failed: PreparedTransfer | None = None) -> IssuedOp:
        """Reads state from a path or writes it to a path; the lane may begin its next op when this transfer is queued.

        failed: the same transfer if its task has failed: it counts as the first attempt.
        """
        store = self._memory.store
        assert store is not None, "only engines with paths plan these"
        assert op.path is not None, "the planner names the path"
        start, address = time.monotonic(), self._memory.on_host(op.host_state)
        try:
            move = store.fetch if op.kind is OpKind.FETCH else store.flush
            moved = move(op.path, op.subgroup, address, begun, None if failed is None else failed.task)
        except NoPathLeft:
            if not self._memory.keep_on_host(op.subgroup, op.host_state):
                raise
            return IssuedOp(DoneEvent(start, time.monotonic()), 0, 0)
        # Counts the op's bytes without the store's padding; a state that was never written is not moved.
        return IssuedOp(moved, op.nbytes if moved.nbytes else 0, 0)

    # ---- copies

    def copies(self, op: Op) -> list[Copy]:
        """The copies of an op that copies weights, state or a spilled gradient."""
        return list(self._copies(op, self._memory.layouts[op.subgroup]))

    def _copies(self, op: Op, layout: Layout) -> Iterator[Copy]:
        s, memory = layout.id, self._memory
        match op.kind:
            case OpKind.GRAD_H2D if op.slot is not None:
                yield Copy(memory.slot_gradient(op.slot), memory.on_host(op.host_grad), op.nbytes)
            case OpKind.WEIGHT_D2H | OpKind.WEIGHT_H2D:
                size, mirrors = layout.format.weight_bytes, memory.on_host(op.host_weight)
                for segment in layout.segments:
                    weight, mirror = self._weight_address(segment, size), mirrors + segment.start * size
                    ends = (mirror, weight) if op.kind is OpKind.WEIGHT_D2H else (weight, mirror)
                    yield Copy(*ends, segment.numel * size)
            case OpKind.STATE_H2D:
                yield Copy(memory.on_device(s, op.slot), memory.on_host(op.host_state), op.nbytes)
            case OpKind.STATE_D2H:
                yield Copy(memory.on_host(op.host_state), memory.on_device(s, op.slot), op.nbytes)

    def _grad_d2h(self, op: Op, layout: Layout) -> IssuedOp:
        if self._gradients.mode == "keep":
            # Before the records are read: a thread that changes records and then finds no entry knows that this copy
            # reads the changed ones.
            self.copied.setdefault(layout.id, None)
        taken = self._gradients.records_of(layout)
        if self._gradients.mode == "keep":
            # The copy that this op repeats may still be reading a gradient that has no other reference.
            for replaced in self.copied.get(layout.id) or ():
                if replaced is not None:
                    self._device.used_by(op.lane, replaced.dense)
            self.copied[layout.id] = taken
        for arrived in taken:
            if arrived is not None:
                self._device.wait(op.lane, arrived.ready)
        issued = self._copy(op.lane, self.gradient_copies(op, taken))
        self._gradients.was_read(layout, taken, op.lane, issued.event)
        return issued

    def gradient_copies(self, op: Op, taken: GradientsRead) -> list[Copy]:
        """The copies of an op that copies gradients to the host. taken: the records of these gradients."""
        layout, base = self._memory.layouts[op.subgroup], self._memory.on_host(op.host_grad)
        size = layout.format.grad_bytes
        return [
            Copy(base + s.start * size, address_of(arrived.dense) + s.offset * size, s.numel * size)
            for s, arrived in zip(layout.segments, taken, strict=True)
            if arrived is not None
        ]

    def _weight_address(self, segment: Segment, size: int) -> int:
        return address_of(self._weights[segment.param]) + segment.offset * size

    # ---- compute

    def _grad_norm(self, op: Op, layout: Layout) -> IssuedOp:
        """Computes the sums of squares of the gradients of all parameters that begin in this subgroup, each over the
        whole parameter. So each parameter is counted once."""
        taken = self._gradients.records_of(layout)
        begun_here = self.gradients_that_begin(op, taken)
        for _, arrived in begun_here:
            self._device.wait(op.lane, arrived.ready)
        references = [grad_ref_of(arrived) for _, arrived in begun_here]
        event, sums = self._device.norms(references)
        read = [arrived if self._gradients.mode == "keep" else None for _, arrived in begun_here]
        self.squares[op.id] = SquareSums([param for param, _ in begun_here], read, event, sums)
        self._gradients.was_read(layout, taken, op.lane, event)
        return IssuedOp(event, 0, sum(reference.numel for reference in references))

    def gradients_that_begin(self, op: Op, taken: GradientsRead) -> list[tuple[int, GradientRecord]]:
        """The parameters that begin in the subgroup of `op`, with the records of their gradients. taken: the records of
        all gradients of this subgroup."""
        segments = self._memory.layouts[op.subgroup].segments
        return [(s.param, a) for s, a in zip(segments, taken, strict=True) if a is not None and s.offset == 0]

    def _norm(self) -> IssuedOp:
        outcome = self._step_outcome()
        inputs = outcome.inputs
        early = {
            param
            for squares in self.squares.values()
            for param, read in zip(squares.params, squares.read, strict=True)
            if read is None or read is self._gradients.record(param)
        }
        outcome.sums_outdated = 2 * len(early) < sum(len(squares.params) for squares in self.squares.values())
        late = [i for i, has in enumerate(outcome.has_grad) if has and i not in early]
        present = [self._gradients.reference(i) for i in late]
        event, sums = self._device.norms(present)
        known: dict[int, tuple[float, int]] = {}
        for summed in (*self.squares.values(), SquareSums(late, (), event, sums)):
            summed.ready.wait()  # one read from the device for all parameters of this sum
            known.update(zip(summed.params, summed.sums, strict=True))
        all_known_at = time.monotonic()
        squares = {i: known[i] for i, has in enumerate(outcome.has_grad) if has}
        total, skip = self.norm_over_ranks.total(squares, inputs.skip)
        norm = total**0.5
        outcome.grad_norm = norm * inputs.unscale
        if skip:
            outcome.bad_params = tuple(i for i, (_, bad) in squares.items() if bad)
            raise StepSkipped
        outcome.grad_scale = inputs.clip(norm)
        self.factor.set(outcome.grad_scale)
        numel = sum(reference.numel for reference in present)
        return IssuedOp(event if present else DoneEvent(all_known_at, time.monotonic()), 0, numel)

    def _cpu_update(self, op: Op) -> IssuedOp:
        start, updated = time.monotonic(), 0
        for run in self.runs_on_cpu(op, self._step_outcome().grad_scale):
            run.apply(self._pool)
            updated += run.numel
        return IssuedOp(DoneEvent(start, time.monotonic()), 0, updated)

    def runs_on_cpu(self, op: Op, grad_scale: float) -> list[UpdateRun]:
        """The runs of an update on the CPU. grad_scale: the factor for all gradients."""
        layout = self._memory.layouts[op.subgroup]
        state, weight, grad = (self._memory.on_host(place) for place in (op.host_state, op.host_weight, op.host_grad))
        weight_bytes, grad_bytes = layout.format.weight_bytes, layout.format.grad_bytes
        return [
            self._run(layout, state, weight + first * weight_bytes, grad + first * grad_bytes, first, numel, values)
            for first, numel, values in self._contiguous_runs(layout, grad_scale)
        ]

    def _device_update(self, op: Op, layout: Layout) -> IssuedOp:
        fmt, block, runs = layout.format, self._memory.on_device(layout.id, op.slot), []
        taken = self._gradients.records_of(layout)
        for segment, arrived in zip(layout.segments, taken, strict=True):
            if not self._has_grad(segment):
                continue
            if op.spilled and op.slot is not None:
                grad = self._memory.slot_gradient(op.slot) + segment.start * fmt.grad_bytes
            else:
                assert arrived is not None, "gradients stay until their last reader is done"
                grad = address_of(arrived.dense) + segment.offset * fmt.grad_bytes
            weight = self._weight_address(segment, fmt.weight_bytes)
            for offset, numel, values in self._pieces(layout, segment, self._step_outcome().grad_scale):
                piece = weight + offset * fmt.weight_bytes, grad + offset * fmt.grad_bytes, segment.start + offset
                runs.append(self._run(layout, block, *piece, numel, values))
        issued = IssuedOp(self._device.update(runs), 0, sum(run.numel for run in runs))
        if not op.spilled:
            self._gradients.was_read(layout, taken, op.lane, issued.event)
        return issued

    def _run(
        self, layout: Layout, block: int, weight: int, grad: int, first: int, numel: int, values: Any
    ) -> UpdateRun:
        """Describes the update of `numel` elements of a subgroup, from element `first` on.

        block: address of the block with the subgroup's state.
        weight, grad: addresses of the weight and of the gradient of element `first`.
        values: learning rate, betas and other scalars of the update.
        """
        tensors, aux = state_addresses(layout, block, first)
        return UpdateRun(
            numel=numel,
            weight=weight,
            weight_format=layout.format.weight,
            aux=aux,
            tensors=tensors,
            grad=grad,
            grad_dtype=layout.format.grad,
            scalars=values,
            implementation=self._rule,
        )

    def _contiguous_runs(self, layout: Layout, grad_scale: float) -> Iterator[Piece]:
        """Divides the elements of a subgroup that have a gradient into contiguous runs with the same scalars, as tuples
        (first, numel, scalars)."""
        open_run: Piece | None = None
        for segment in layout.segments:
            if not self._has_grad(segment):
                continue
            for offset, numel, values in self._pieces(layout, segment, grad_scale):
                start = segment.start + offset
                if open_run and open_run[0] + open_run[1] == start and open_run[2] == values:
                    open_run = (open_run[0], open_run[1] + numel, values)
                    continue
                if open_run:
                    yield open_run
                open_run = (start, numel, values)
        if open_run:
            yield open_run

    def _pieces(self, layout: Layout, segment: Segment, grad_scale: float) -> Iterable[Piece]:
        """Divides a segment (part of a parameter in a subgroup) into parts with the same scalars, as the update rule
        does. First elements are counted in the segment."""
        inputs, weight = self._step_outcome().inputs, self._weights[segment.param]
        values = inputs.scalars(layout.group, inputs.steps[segment.param], grad_scale)
        return self._rule.pieces(weight, segment.offset, segment.numel, values)

    def _has_grad(self, segment: Segment) -> bool:
        return self._step_outcome().has_grad[segment.param]

    def _step_outcome(self) -> StepOutcome:
        assert self.outcome is not None, "updates begin after step()"
        return self.outcome
