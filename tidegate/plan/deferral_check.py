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


def check_deferred_op(plan: Plan, op: Op) -> None:
    """Checks that `op` uses the deferred slots of its subgroup if that is deferred, and none otherwise; PlanError with
    the rule `deferral` if not."""
    uses = op.kind in STATE_KINDS | WEIGHT_KINDS and plan.placements[op.subgroup].deferred
    if not uses:
        if op.deferred_slot is not None or op.covers:
            _refuse(f"Op {op.id} ({op.name}) uses no deferred slot.")
        return
    memory, number, turn = plan.gradient_memory, op.deferred_slot, op.weight_slot
    assert memory is not None, "checked before"
    if number is None or not 0 <= number < len(memory.slots):
        _refuse(f"Op {op.id} ({op.name}) needs one of the deferred slots 0 to {len(memory.slots) - 1}, has {number}.")
    covers: tuple[int, ...] = ()
    if op.kind in STATE_KINDS:
        covers += memory.slots[number].covers
        if memory.slots[number].nbytes < plan.subgroups[op.subgroup].nbytes("state"):
            _refuse(f"Op {op.id} ({op.name}) needs a larger slot than {memory.slots[number]}.")
    if op.kind in WEIGHT_KINDS:
        if turn is None or not 0 <= turn < len(memory.weight_slots):
            _refuse(f"Op {op.id} ({op.name}) needs a deferred slot for its weight, has {turn}.")
        covers += memory.weight_slots[turn].covers
        if memory.weight_slots[turn].nbytes < plan.subgroups[op.subgroup].nbytes("weight"):
            _refuse(f"Op {op.id} ({op.name}) needs a larger slot than {memory.weight_slots[turn]}.")
    elif turn is not None:
        _refuse(f"Op {op.id} ({op.name}) uses no slot for a weight, has {turn}.")
    fetch = next((one for one in plan.of_kind(OpKind.FETCH) if one.subgroup == op.subgroup), op)
    if fetch.deferred_slot != number:
        _refuse(f"Op {op.id} ({op.name}) uses another deferred slot than op {fetch.id} ({fetch.name}).")
    if op.covers != covers:
        _refuse(f"Op {op.id} ({op.name}) takes the memory of the gradients {covers}, says {op.covers}.")


def check_deferred_order(plan: Plan, before: Callable[[int, int], bool]) -> None:
    """Checks that each deferred flush waits for all fetches from its path, which it would slow down; PlanError with the
    rule `deferral` if not. before: whether one op (its id) ends before another begins."""
    for flush in plan.ops:
        for fetch in plan.of_kind(OpKind.FETCH) if flush.is_deferred else ():
            if fetch.path == flush.path and not before(fetch.id, flush.id):
                _refuse(
                    f"Op {flush.id} ({flush.name}) is deferred, but does not wait for op {fetch.id} ({fetch.name})."
                )
