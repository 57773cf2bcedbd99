"""The part of the plan verifier for deferred flushes: checks the layout of the memory for gradients, and that ops use
the deferred slots of their subgroups. Independent of the planner."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Final, NoReturn

from tidegate.errors import PlanError
from tidegate.plan.gradient_memory import DeferredSlot, GradientMemory
from tidegate.plan.ops import Op, OpKind, is_path
from tidegate.plan.plan import Plan

STATE_KINDS: Final = frozenset({OpKind.FETCH, OpKind.CPU_UPDATE, OpKind.FLUSH})
WEIGHT_KINDS: Final = frozenset({OpKind.WEIGHT_D2H, OpKind.CPU_UPDATE, OpKind.WEIGHT_H2D})
"""Kinds of op that use the deferred slot for state, or for the weight, of a deferred subgroup."""


def _refuse(message: str) -> NoReturn:
    raise PlanError(message, "deferral")


def check_gradient_memory(plan: Plan) -> None:
    """Checks that only subgroups which stay on paths are deferred, and that gradients and deferred slots are where the
    plan says; PlanError with the rule `deferral` if not."""
    deferred = [i for i, placement in enumerate(plan.placements) if placement.deferred]
    for i in deferred:
        placement = plan.placements[i]
        stays = is_path(placement.before) and is_path(placement.after) and placement.processor == "cpu"
        others = placement.grad_in_slot or placement.weight_in_slot or placement.mirror_valid
        if not stays or others or plan.norms != "gradient":
            _refuse(f"Subgroup {i} cannot be flushed after the step: its placement is {placement}.")
    if deferred and plan.policy != "interleaved":
        _refuse(f"{plan.policy} does one op at a time, and defers no flush: subgroup {deferred[0]} is deferred.")
    memory = plan.gradient_memory
    if memory is None:
        if deferred:
            _refuse(f"Subgroup {deferred[0]} is deferred, but the plan has no deferred slots.")
        return
    buffers = {i for i, placement in enumerate(plan.placements) if placement.has_gradient_buffer}
    listed = [subgroup for subgroup, _ in memory.sizes]
    if set(listed) != buffers or len(listed) != len(buffers):
        _refuse(f"The memory for gradients has those of the subgroups {listed}, should have {sorted(buffers)}.")
    for subgroup, nbytes in memory.sizes:
        if nbytes < plan.subgroups[subgroup].nbytes("gradient"):
            _refuse(f"The gradient of subgroup {subgroup} does not fit into {nbytes} bytes.")
    slots = sorted((*memory.weight_slots, *memory.slots))
    for slot in slots:
        if slot.offset < 0 or slot.offset + slot.nbytes > memory.nbytes or slot.covers != _covered(memory, slot):
            _refuse(f"The deferred slot {slot} does not take the memory of these gradients.")
    for slot, following in pairwise(slots):
        if set(slot.covers) & set(following.covers):
            _refuse(f"Two deferred slots take the memory of the same gradient: {slot} and {following}.")


def _covered(memory: GradientMemory, slot: DeferredSlot) -> tuple[int, ...]:
    """The subgroups with a gradient that overlaps the slot."""
    end = slot.offset + slot.nbytes
    return tuple(i for i, size in memory.sizes if memory.offsets[i] < end and memory.offsets[i] + size > slot.offset)


def check_deferred_ops(plan: Plan) -> None:
    """Checks that ops of deferred subgroups use the deferred slots of their subgroup, and that no other op uses one;
    PlanError with the rule `deferral` if not."""
    slot_of = {op.subgroup: op.deferred_slot for op in plan.of_kind(OpKind.FETCH)}
    for op in plan.ops:
        if op.kind in STATE_KINDS | WEIGHT_KINDS and plan.placements[op.subgroup].deferred:
            _check_slots(plan, op, slot_of.get(op.subgroup))
        elif op.deferred_slot is not None or op.covers:
            _refuse(f"Op {op.id} ({op.name}) uses no deferred slot.")


def _check_slots(plan: Plan, op: Op, number: int | None) -> None:
    """Checks the slots of an op of a deferred subgroup. number: the slot into which the state is fetched."""
    memory, turn = plan.gradient_memory, op.weight_slot
    covers: tuple[int, ...] = ()
    assert memory is not None, "checked before"
    if number is None or op.deferred_slot != number or not 0 <= number < len(memory.slots):
        _refuse(
            f"Op {op.id} ({op.name}) has the deferred slot {op.deferred_slot}, but its state is fetched into {number}; "
            f"there are {len(memory.slots)} slots."
        )
    if op.kind in STATE_KINDS:
        covers += _covers_of(op, memory.slots[number], plan.subgroups[op.subgroup].nbytes("state"))
    if op.kind in WEIGHT_KINDS:
        if turn is None or not 0 <= turn < len(memory.weight_slots):
            _refuse(f"Op {op.id} ({op.name}) needs a deferred slot for its weight, has {turn}.")
        covers += _covers_of(op, memory.weight_slots[turn], plan.subgroups[op.subgroup].nbytes("weight"))
    elif turn is not None:
        _refuse(f"Op {op.id} ({op.name}) uses no slot for a weight, has {turn}.")
    if op.covers != covers:
        _refuse(f"Op {op.id} ({op.name}) takes the memory of the gradients {covers}, says {op.covers}.")


def _covers_of(op: Op, slot: DeferredSlot, nbytes: int) -> tuple[int, ...]:
    """The gradients below a slot, after the check that `nbytes` fit into the slot."""
    if slot.nbytes < nbytes:
        _refuse(f"Op {op.id} ({op.name}) needs {nbytes} bytes, a larger slot than {slot}.")
    return slot.covers


def check_deferred_order(plan: Plan, before: Callable[[int, int], bool]) -> None:
    """Checks that each deferred flush waits for all fetches from its path, which it would slow down; PlanError with the
    rule `deferral` if not. before: whether one op (its id) ends before another begins."""
    last = {op.path: op for op in plan.of_kind(OpKind.FETCH)}  # fetches from a path end in order
    for flush in plan.of_kind(OpKind.FLUSH):
        fetch = last.get(flush.path)
        if flush.is_deferred and fetch is not None and not before(fetch.id, flush.id):
            _refuse(f"Op {flush.id} ({flush.name}) is deferred, but does not wait for op {fetch.id} ({fetch.name}).")
