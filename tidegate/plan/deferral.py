"""Deferred flushes: which subgroups are flushed after `step()` has returned, and where their state waits.

Between the end of `step()` and the first gradient of the next backward, the disks are idle, and the memory for
gradients is free. So the state of the last subgroups is fetched into memory of used gradients (`GradientMemory`)
instead of a host slot, updated there, and flushed beside the next forward.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from tidegate.plan.gradient_memory import (
    DEFERRED_WEIGHT_SLOTS,
    GradientMemory,
    gradient_buffer_bytes,
    slots_over,
)
from tidegate.plan.ops import Subgroup, is_path
from tidegate.plan.plan import Placement
from tidegate.plan.slot_sizes import whole_pages
from tidegate.plan.tier_split import PathSpeeds

UPDATES_AHEAD: Final = 4
"""A deferred slot takes gradients that are used at least this many updates before its own subgroup is updated: so its
fetch can run ahead."""


def deferrable_bytes(speeds: Mapping[str, PathSpeeds], idle_seconds: float) -> dict[str, int]:
    """Bytes that each path can write in the time between `step()` and the next gradient.

    idle_seconds: this time.
    """
    return {path: int(idle_seconds * speed.write_bytes_per_second) for path, speed in speeds.items()}


def with_deferred_flushes(
    subgroups: Sequence[Subgroup],
    placements: Sequence[Placement],
    update_order: Sequence[int],
    most_bytes: Mapping[str, int],
) -> tuple[Placement, ...]:
    """The placements, with `deferred` set for the last subgroups in the order of updates that can be flushed after the
    step.

    update_order: all subgroup ids. most_bytes: bytes that each path can write between `step()` and the next gradient;
    0 where absent. There are fewer deferred subgroups if the memory of used gradients is too small for them.
    """
    left, deferred = dict(most_bytes), list[int]()
    for i in reversed(update_order):
        size = subgroups[i].nbytes("state")
        if _may_be_deferred(placements[i]) and left.get(placements[i].after, 0) >= size:
            left[placements[i].after] -= size
            deferred.insert(0, i)
    least, most = 0, len(deferred)
    while least < most:  # finds the largest number of deferred subgroups whose state has room
        count = (least + most + 1) // 2
        if _fits(_marked(placements, deferred[-count:]), subgroups, update_order):
            least = count
        else:
            most = count - 1
    return _marked(placements, deferred[-least:] if least else ())


def _may_be_deferred(placement: Placement) -> bool:
    on_paths = is_path(placement.before) and is_path(placement.after)
    return placement.processor == "cpu" and on_paths and not placement.grad_in_slot


def _marked(placements: Sequence[Placement], deferred: Sequence[int]) -> tuple[Placement, ...]:
    wanted = set(deferred)
    return tuple(replace(p, deferred=True) if i in wanted else p for i, p in enumerate(placements))


def gradient_memory(
    subgroups: Sequence[Subgroup], placements: Sequence[Placement], update_order: Sequence[int]
) -> GradientMemory:
    """The layout of the host memory for gradients in a step with these placements.

    Gradients of subgroups whose state comes through a host slot lie first, then those of deferred subgroups, both in
    the order of updates (`update_order`): deferred slots take them in this order. The gradients of all others follow.
    """
    first = [i for i in update_order if placements[i].uses_host_slot and is_path(placements[i].before)]
    deferred = [i for i in update_order if placements[i].deferred]
    turns = {i: turn for turn, i in enumerate([*first, *deferred])}
    with_buffer = [i for i in update_order if placements[i].has_gradient_buffer]
    lying = sorted(with_buffer, key=lambda i: turns.get(i, len(turns)))
    sizes = tuple((i, gradient_buffer_bytes(subgroups[i])) for i in lying)
    weight = max((whole_pages(subgroups[i].nbytes("weight")) for i in deferred), default=0)
    weights = [weight] * min(DEFERRED_WEIGHT_SLOTS, len(deferred))
    states = [whole_pages(subgroups[i].nbytes("state")) for i in deferred]
    slots = slots_over(sizes, [*weights, *states])
    return GradientMemory(sizes, tuple(slots[: len(weights)]), tuple(slots[len(weights) :]))


def _fits(placements: Sequence[Placement], subgroups: Sequence[Subgroup], update_order: Sequence[int]) -> bool:
    """Whether each deferred subgroup has a deferred slot over gradients that are used early enough before its own
    (`UPDATES_AHEAD`)."""
    memory = gradient_memory(subgroups, placements, update_order)
    deferred = [i for i in update_order if placements[i].deferred]
    place = {i: place for place, (i, _) in enumerate(memory.sizes)}
    if len(memory.slots) < len(deferred):
        return False
    ends = [place[memory.weight_slots[-1].covers[-1]], *(place[slot.covers[-1]] for slot in memory.slots)]
    return all(end + UPDATES_AHEAD <= place[i] for end, i in zip(ends, [deferred[0], *deferred], strict=True))
