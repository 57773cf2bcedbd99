"""Deferred flushes: which subgroups are flushed after `step()` has returned, and where their state waits.

Between the end of `step()` and the first gradient of the next backward, the disks are idle, and the memory for
gradients is free. So the state of some subgroups is fetched into memory of used gradients (`GradientMemory`) instead of
a host slot, updated there, and flushed beside the next forward.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final

from tidegate.plan.gradient_memory import (
    DEFERRED_WEIGHT_SLOTS,
    DeferredSlot,
    DeferredSlotMaker,
    GradientMemory,
    gradient_buffer_bytes,
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
    """The placements, with `deferred` set for the subgroups that are flushed after the step.

    They are spread evenly over the update. Where a path writes more slowly than it reads, other fetches wait for host
    slots, and fetches into deferred slots go on meanwhile. The last subgroup is one of them, because `step()` would
    wait for its flush.

    update_order: all subgroup ids. most_bytes: bytes that each path can write between `step()` and the next gradient;
    0 where absent. There are fewer deferred subgroups if the memory of used gradients is too small for them.
    """
    candidates = [i for i in update_order if _may_be_deferred(placements[i])]
    states = [(i, placements[i].after, subgroups[i].nbytes("state")) for i in candidates]
    most = {path: float(nbytes) for path, nbytes in most_bytes.items()}
    while True:
        wanted = _evenly_spread(states, most)
        deferred = set(_with_room(candidates, wanted, subgroups, placements, update_order))
        if len(deferred) == len(wanted):
            return tuple(replace(p, deferred=i in deferred) for i, p in enumerate(placements))
        most = {path: nbytes * len(deferred) / len(wanted) for path, nbytes in most.items()}


def _may_be_deferred(placement: Placement) -> bool:
    on_paths = is_path(placement.before) and is_path(placement.after)
    return placement.processor == "cpu" and on_paths and not placement.grad_in_slot


def _evenly_spread(states: Sequence[tuple[int, str, int]], most_bytes: Mapping[str, float]) -> set[int]:
    """Chooses some of these states, evenly spread, and so that the last one is among them.

    states: the subgroup, the path to which it goes, and the bytes of each state, in the order of updates. most_bytes:
    of the chosen states, by path.
    """
    totals: Counter[str] = Counter()
    for _, path, nbytes in states:
        totals[path] += nbytes
    chosen, chosen_bytes, passed = set[int](), Counter[str](), Counter[str]()
    for i, path, nbytes in reversed(states):
        most = min(most_bytes.get(path, 0.0), totals[path])
        if chosen_bytes[path] + nbytes <= most and chosen_bytes[path] * totals[path] <= passed[path] * most:
            chosen.add(i)
            chosen_bytes[path] += nbytes
        passed[path] += nbytes
    return chosen


def _with_room(
    candidates: Sequence[int],
    wanted: Collection[int],
    subgroups: Sequence[Subgroup],
    placements: Sequence[Placement],
    update_order: Sequence[int],
) -> Iterator[int]:
    """The subgroups of `wanted`, as far as there is a deferred slot for each of them over gradients that are used early
    enough before its own (`UPDATES_AHEAD`). Where there is none yet, a later candidate of the path takes the turn."""
    layout = _Layout(subgroups, placements, update_order)
    weights_from = 0
    for slot in layout.weight_slots(candidates):
        weights_from = max(weights_from, *(layout.turns[i] + UPDATES_AHEAD for i in slot.covers))
    waiting: Counter[str] = Counter()
    for i in candidates:
        path = placements[i].before
        waiting[path] += i in wanted
        if waiting[path] and layout.turns[i] >= weights_from and layout.take(i, UPDATES_AHEAD):
            waiting[path] -= 1
            yield i


class _Layout:
    """The layout of the host memory for gradients, in which deferred slots are made one after the other.

    First come the gradients of subgroups whose state passes from a path to a path, those of each path together and in
    the order of updates; then the others. A subgroup gets a deferred slot over gradients of its own path, because the
    updates of another path may be far behind.
    """

    def __init__(
        self, subgroups: Sequence[Subgroup], placements: Sequence[Placement], update_order: Sequence[int]
    ) -> None:
        self._subgroups, self._placements = subgroups, placements
        with_buffer = [i for i in update_order if placements[i].has_gradient_buffer]
        passing = [i for i in with_buffer if is_path(placements[i].before) and placements[i].after != "host"]
        self.turns = {i: turn for turn, i in enumerate(passing)}
        """The place in the order of updates of each subgroup whose state passes from a path to a path."""
        of_path: dict[str, list[int]] = {}
        for i in passing:
            of_path.setdefault(placements[i].before, []).append(i)
        self._place = {i: place for ids in of_path.values() for place, i in enumerate(ids)}
        others = [i for i in with_buffer if i not in self.turns]
        lying = [i for ids in (*of_path.values(), others) for i in ids]
        self.gradients = tuple((i, gradient_buffer_bytes(subgroups[i])) for i in lying)
        """The subgroups with a gradient in host memory, and the bytes of it, in the order in which they lie."""
        self._makers: dict[str, DeferredSlotMaker] = {}
        offset = first = 0
        for path, ids in of_path.items():
            mine = self.gradients[first : first + len(ids)]
            self._makers[path] = DeferredSlotMaker(mine, offset)
            offset, first = offset + sum(nbytes for _, nbytes in mine), first + len(ids)

    def weight_slots(self, deferred: Sequence[int]) -> tuple[DeferredSlot, ...]:
        """Makes the deferred slots for the weights of these subgroups; fewer if the gradients do not suffice. To be
        called before `take`."""
        nbytes = max((whole_pages(self._subgroups[i].nbytes("weight")) for i in deferred), default=0)
        maker = next(iter(self._makers.values()), None)
        made = [maker.take(nbytes) for _ in deferred[:DEFERRED_WEIGHT_SLOTS]] if maker is not None else []
        return tuple(slot for slot in made if slot is not None)

    def take(self, subgroup: int, ahead: int = 1) -> DeferredSlot | None:
        """Makes the deferred slot for the state of this subgroup, over gradients that are used at least `ahead` updates
        of its path before its own; None if they do not suffice."""
        maker = self._makers[self._placements[subgroup].before]
        nbytes = whole_pages(self._subgroups[subgroup].nbytes("state"))
        return maker.take(nbytes, before=self._place[subgroup] + 1 - ahead)


def gradient_memory(
    subgroups: Sequence[Subgroup], placements: Sequence[Placement], update_order: Sequence[int]
) -> GradientMemory:
    """The layout of the host memory for gradients in a step with these placements, with the deferred slots of the
    deferred subgroups, in the order of updates (`update_order`)."""
    layout = _Layout(subgroups, placements, update_order)
    deferred = [i for i in update_order if placements[i].deferred]
    weights = layout.weight_slots(deferred)
    states = [layout.take(i) for i in deferred]
    return GradientMemory(layout.gradients, weights, tuple(slot for slot in states if slot is not None))
