"""The residency planner: where each subgroup is updated in the next step, and where its state lives after the step.

It is pure. The engine calls it with what a run has measured, the model with its steady state, and the capacity planner,
through the model, with a machine.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Literal

from tidegate.knobs.knobs import EQ1
from tidegate.plan.effective_knobs import EffectiveKnobs, Split, divide, host_cached_ids
from tidegate.plan.ops import Norms, Processor, Residence, Subgroup
from tidegate.plan.placement import place_subgroups
from tidegate.plan.plan import Placement
from tidegate.plan.tasks import StepOrder
from tidegate.plan.tier_split import PathSpeeds, SubgroupCounts, assign_paths, rebalanced

GradientMode = Literal["keep", "release"]
EQ1_SLACK: Final = 0.05
"""Tolerance for the number of subgroups on a path with the tier split `eq1` (Eq. 1 of MLP-Offload: in proportion to
measured speeds), as a share of all subgroups in storage (but at least one subgroup). Speeds fluctuate: no subgroup is
moved while the number on each path differs from the result of Eq. 1 by no more than this."""
PROBE_SUBGROUPS: Final = 1
"""Fewest subgroups that a split by measured speeds gives to each usable path. So the speed of a slow path is still
measured, and it is noticed when the path becomes fast again."""


@dataclass(frozen=True, kw_only=True)
class TierState:
    """The storage paths of a rank and what they hold: the present state, from which the residency planner goes on.

    speeds: speeds of all paths, in their order. capacity: most subgroups of each path, with those that it holds;
    without limit where absent. retired: paths that have failed. assigned: the path of each subgroup that ever had one,
    also while its state is in host memory. counts, split: number of subgroups of each path, and the tier split with
    which these numbers were decided; empty and None before the first decision. in_memory: subgroups whose state is in
    host memory. host_free_bytes: host memory for more of them, if paths fail.
    """

    speeds: Mapping[str, PathSpeeds]
    capacity: Mapping[str, int] = field(default_factory=dict)
    retired: Collection[str] = ()
    assigned: Mapping[int, str] = field(default_factory=dict)
    counts: SubgroupCounts = field(default_factory=dict)
    split: Split = None
    in_memory: Collection[int] = ()
    host_free_bytes: float = math.inf


@dataclass(frozen=True, kw_only=True)
class NextResidences:
    """The residency planner's decision for one step.

    processors: where each subgroup is updated. after: where its state lives after the step. tier: the new state of the
    storage paths; None without paths.
    """

    processors: tuple[Processor, ...]
    after: tuple[Residence, ...]
    tier: TierState | None = None


def next_residences(
    subgroups: Sequence[Subgroup], effective: EffectiveKnobs, tier: TierState | None, order: StepOrder
) -> NextResidences:
    """Decides the processor of each subgroup in the next step, and its residence after the step.

    tier: None without storage paths. order: the order of updates in the next step (`step_order`). CapacityError when
    the subgroups fit neither on the paths nor, where a path is retired, in host memory.
    """
    placed = place_subgroups(len(subgroups), stride=effective.stride, static_ratio=effective.static_ratio)
    processors = tuple(processor for processor, _ in placed)
    if tier is None:
        return NextResidences(processors=processors, after=tuple(residence for _, residence in placed))
    movable = [i for i, (_, residence) in enumerate(placed) if residence == "host"]
    sizes = [s.nbytes("state") for s in subgroups]
    cached = host_cached_ids(sizes, movable, effective, order)
    # While orders alternate, each subgroup is in storage after every other step, and keeps its path.
    stored = movable if effective.alternate else [i for i in movable if i not in cached]
    homeless = _without_path(sizes, stored, tier)
    tier = _assign([i for i in stored if i not in homeless], effective.tier_split, tier)
    after = tuple(
        residence if residence == "device" else "host" if i in cached or i in homeless else tier.assigned[i]
        for i, (_, residence) in enumerate(placed)
    )
    return NextResidences(processors=processors, after=after, tier=tier)


def step_order(effective: EffectiveKnobs, steps: int) -> StepOrder:
    """The order of updates in the next step, after `steps` steps."""
    return "descending" if effective.alternate and steps % 2 else "ascending"


def usable_split(split: Split, retired: Collection[str]) -> Split:
    """Returns `split`; or None, with which measured speeds decide, if weights divide the subgroups only among retired
    paths."""
    named = [name for name, weight in explicit_weights(split) if weight]
    return None if named and all(name in retired for name in named) else split


def explicit_weights(split: Split) -> tuple[tuple[str, float], ...]:
    """The paths and their weights if `tier_split` is given by weights (as in "nvme:2,pfs:1"); otherwise empty."""
    return split if isinstance(split, tuple) else ()


def _without_path(sizes: Sequence[int], stored: Sequence[int], tier: TierState) -> set[int]:
    """Subgroups in `stored` that must stay in host memory, because a path was retired and the other paths are too
    small. Empty if they do not fit in host memory either: `divide` then raises CapacityError.

    sizes: bytes of state of each subgroup, by id.
    """
    if not tier.retired:
        return set()
    room = sum(tier.capacity.get(path, len(stored)) for path in tier.speeds if path not in tier.retired)
    first_homeless = sorted(stored, key=lambda i: tier.capacity.get(tier.assigned.get(i, ""), 0) > 0)
    homeless = first_homeless[: max(0, len(stored) - room)]
    fits = sum(sizes[i] for i in homeless if i not in tier.in_memory) <= tier.host_free_bytes
    return set(homeless) if fits else set()


def _assign(stored: Sequence[int], split: Split, tier: TierState) -> TierState:
    """The state of the paths after the subgroups `stored` were divided among them, with as few moves as possible."""
    counts, usable = tier.counts, usable_split(split, tier.retired)
    proposed = divide(len(stored), usable, tier.speeds, capacity=tier.capacity, minimum=PROBE_SUBGROUPS)
    if counts and sum(counts.values()) == len(stored) and tier.split == split:
        if usable is None:
            better = rebalanced(counts, tier.speeds, capacity=tier.capacity, minimum=PROBE_SUBGROUPS)
            proposed = better or dict(counts)
        elif usable == EQ1 and _is_close(counts, proposed, tier.capacity):
            proposed = dict(counts)
    if proposed == counts and all(i in tier.assigned for i in stored):
        return replace(tier, split=split)
    assigned = {**tier.assigned, **assign_paths(stored, proposed, tier.assigned)}
    return replace(tier, assigned=assigned, counts=proposed, split=split)


def _is_close(counts: Mapping[str, int], wanted: Mapping[str, int], capacity: Mapping[str, int]) -> bool:
    """Whether each path has about the number of subgroups that is wanted (see `EQ1_SLACK`), and no more than it can
    hold."""
    slack = max(1.0, EQ1_SLACK * sum(wanted.values()))
    return all(
        abs(counts[name] - n) <= slack and counts[name] <= capacity.get(name, counts[name])
        for name, n in wanted.items()
    )


# ---- from residences to placements


@dataclass(frozen=True, slots=True)
class GradientBudget:
    """Limits of the device memory for released gradients that wait to be used.

    device_bytes: memory for weights, state and such gradients. most_bytes: largest use by these gradients; 0 for no
    limit of its own.
    """

    device_bytes: int
    most_bytes: int = 0

    def sampled(self, scale: float, slot_bytes: int) -> GradientBudget:
        """The budget for a sample with 1/`scale` of the parameters and as many staging slots, of `slot_bytes` in
        all."""
        rest = (self.device_bytes - slot_bytes) / scale
        return GradientBudget(int(rest) + slot_bytes, math.ceil(self.most_bytes / scale))

    def room_bytes(self, weights_and_state_bytes: int) -> int:
        """Bytes for gradients beside so many bytes of weights and state; negative if these do not fit alone."""
        left = self.device_bytes - weights_and_state_bytes
        return min(left, self.most_bytes or left)


def spilled_gradients(
    subgroups: Sequence[Subgroup],
    processors: Sequence[Processor],
    before: Sequence[Residence],
    after: Sequence[Residence],
    room_bytes: float,
) -> list[bool]:
    """Whether the gradient of each subgroup is spilled: kept in host memory, because the device has no room for it.

    Only gradients of subgroups that are staged for an update on the device are spilled, those of the last subgroups
    first. Gradients of residents stay on the device and use a part of the room. room_bytes: device memory for gradients
    that are not used yet.
    """
    spilled = [False] * len(subgroups)
    staged: list[int] = []
    for i, (processor, old, new) in enumerate(zip(processors, before, after, strict=True)):
        if processor == "device" and "device" not in (old, new):
            staged.append(i)
        elif processor == "device":
            room_bytes -= subgroups[i].nbytes("gradient")
    for i in staged:
        room_bytes -= subgroups[i].nbytes("gradient")
        spilled[i] = room_bytes < 0
    return spilled


def placement(
    processor: Processor,
    before: Residence,
    after: Residence,
    *,
    mirror_valid: bool,
    spilled: bool,
    mode: GradientMode,
    has_paths: bool,
) -> Placement:
    """The placement of one subgroup in the next step.

    mirror_valid: whether the host has an up-to-date copy of its weight (mirror). If the state passes through a host
    slot, the weight has no mirror. The slot has room for the gradient, too, but in mode `release` a gradient cannot
    wait for a free slot. has_paths: whether the run has storage paths. Then no weight has a mirror: host memory for
    more state saves more than mirrors do.
    """
    placed = Placement(processor, before, after, mirror_valid, spilled)
    if not placed.uses_host_slot:
        in_slot = has_paths and processor == "cpu"
        return replace(placed, mirror_valid=False, weight_in_slot=True) if in_slot else placed
    return replace(placed, mirror_valid=False, grad_in_slot=processor == "cpu" and mode == "keep")


def norms_of(placements: Sequence[Placement], mode: GradientMode, early_gradients: bool) -> Norms:
    """When squares of gradients are summed. In mode `keep`, they are summed as gradients arrive if gradients are final
    then (`early_gradients`), and if none of them waits for a host slot."""
    early = early_gradients and not any(placement.grad_in_slot for placement in placements)
    return "gradient" if early or mode == "release" else "step"
