"""Steady state: the placements, plans, bytes and memory of a rank after a change of knobs has taken full effect."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from tidegate.errors import ConfigError
from tidegate.plan.deferral import deferrable_bytes, with_deferred_flushes
from tidegate.plan.effective_knobs import EffectiveKnobs
from tidegate.plan.gradient_memory import gradient_buffer_bytes
from tidegate.plan.interference import pair_factors
from tidegate.plan.ops import Norms, Op, Processor, Residence, Subgroup, path_lanes
from tidegate.plan.path_times import PathOpTimes, rounded_step_delay
from tidegate.plan.plan import Placement, Plan
from tidegate.plan.planner import make_plan
from tidegate.plan.residency import (
    GradientBudget,
    GradientMode,
    TierState,
    next_residences,
    norms_of,
    placement,
    spilled_gradients,
    step_order,
)
from tidegate.plan.slot_sizes import (
    WEIGHT_SLOTS,
    device_slot_bytes,
    host_slot_bytes,
    weight_slot_bytes,
    whole_pages,
)
from tidegate.plan.tasks import StepOrder, Work, in_order, step_work
from tidegate.plan.tier_split import PathSpeeds
from tidegate.speeds.rate_card import RateCard

MAX_SIMULATED_SUBGROUPS: Final = 400
"""Largest number of subgroups in a simulation without storage paths. If a rank has more, `sampled` chooses a sample."""
MAX_SIMULATED_TIERED: Final = 96
"""Largest number of subgroups in a simulation with storage paths. Such a simulation takes longer: a subgroup has about
twice as many ops, and lanes slow each other down."""


@dataclass(frozen=True)
class Rank:
    """The properties of a rank that knobs do not change: its subgroups, and its staging slots on the device and in host
    memory.

    host_slots: host slots of each path. capacity: most subgroups of each path; without limit where absent. retired:
    paths that have failed and are not used any more. gradient_order: ids of all subgroups in the order in which their
    gradients arrive; None for the reverse order of ids. step_at: seconds after the first gradient at which plans expect
    `step()`; None to derive it from the length of the backward. idle_seconds: time between `step()` and the next
    gradient in which deferred flushes run; 0 if none are deferred. path_speeds: speeds by which the engine orders ops;
    None for the speeds of the rate card. gradient_budget: limits of the device memory for released gradients; None for
    no limit. early_gradients: whether gradients are final when autograd has accumulated them.
    """

    subgroups: Sequence[Subgroup]
    num_slots: int
    host_slots: Mapping[str, int] = field(default_factory=dict)
    gradients: GradientMode = "keep"
    capacity: Mapping[str, int] = field(default_factory=dict)
    retired: Collection[str] = ()
    gradient_order: Sequence[int] | None = None
    step_at: float | None = None
    idle_seconds: float = 0.0
    path_speeds: Mapping[str, PathSpeeds] | None = None
    gradient_budget: GradientBudget | None = None
    early_gradients: bool = True

    def __post_init__(self) -> None:
        if not self.subgroups:
            raise ConfigError("A rank without subgroups has no update to predict: give at least one subgroup.")


@dataclass(frozen=True)
class SteadyStep:
    """One step of a rank in the steady state: the placements of its subgroups, and the order of their updates.

    If the order alternates, two such steps take turns; otherwise one step repeats.
    """

    rank: Rank
    placements: tuple[Placement, ...]
    order: StepOrder

    @property
    def norms(self) -> Norms:
        return norms_of(self.placements, self.rank.gradients, self.rank.early_gradients)

    def plan(self, rates: RateCard, step_at: float = 0.0) -> Plan:
        """The plan that the engine would make if `step()` is called `step_at` seconds after the first gradient."""
        rank = self.rank
        return make_plan(
            rank.subgroups, self.placements, num_slots=rank.num_slots, norms=self.norms, host_slots=rank.host_slots,
            grad_on_host_order=rank.gradient_order, order=self.order,
            step_at=rounded_step_delay(step_at) if rank.step_at is None else rank.step_at,
            rates=PathOpTimes(_path_speeds(rank, rates)) if rank.host_slots else None,
        )  # fmt: skip

    def work(self) -> Work:
        """The ops of the step, not yet in program order: sufficient to count bytes, and much faster than a plan."""
        gradients = range(len(self.placements))
        return step_work(self.rank.subgroups, self.placements, gradients, self.norms, self.rank.host_slots, self.order)

    @property
    def spills(self) -> bool:
        """Whether gradients are spilled in this step, because the device has no room for them."""
        return any(placement.spilled for placement in self.placements)

    def lane_bytes(self) -> dict[str, int]:
        """Bytes that each lane copies in the step: over the link, and from and to each path."""
        nbytes: Counter[str] = Counter()
        for op in ops_of(self.work()):
            nbytes[op.lane] += op.nbytes
        lanes = ["h2d", "d2h", *(lane for path in self.rank.host_slots for lane in path_lanes(path))]
        return {lane: nbytes[lane] for lane in lanes}

    def device_bytes(self) -> int:
        """Device memory for residents and staging slots, in bytes. A slot has the size of the largest subgroup; without
        staged subgroups there are no slots."""
        return _device_state_bytes(
            self.rank, [p.processor for p in self.placements], [p.after for p in self.placements]
        )

    def host_bytes(self) -> dict[str, int]:
        """Host memory in bytes, by kind: `state`, `mirror` (copies of weights, for updates on the CPU), `gradient` and,
        with paths, `slot` (buffers for state on its way from or to a path, and for weights in an update)."""
        nbytes: Counter[str] = Counter()
        for s, p in zip(self.rank.subgroups, self.placements, strict=True):
            if "host" in (p.before, p.after):
                nbytes["state"] += whole_pages(s.nbytes("state"))
            if p.leaves_mirror:
                nbytes["mirror"] += s.nbytes("weight")
            if p.has_gradient_buffer:
                one_buffer = self.rank.host_slots and self.rank.gradients == "release"
                nbytes["gradient"] += gradient_buffer_bytes(s) if one_buffer else s.nbytes("gradient")
        kinds, rank = ("state", "mirror", "gradient"), self.rank
        if any(p.uses_host_slot for p in self.placements):
            slot = host_slot_bytes(rank.subgroups, gradients=rank.gradients == "keep")
            nbytes["slot"] += sum(rank.host_slots.values()) * sum(slot)
        if any(p.weight_in_slot for p in self.placements):
            nbytes["slot"] += WEIGHT_SLOTS * weight_slot_bytes(rank.subgroups)
        return {kind: nbytes[kind] for kind in (*kinds, *(["slot"] if "slot" in nbytes else []))}


def ops_of(work: Work) -> Iterator[Op]:
    """All ops of `work`, not in program order."""
    yield from work.early
    yield from work.squares
    yield work.norm
    for task in work.tasks:
        yield from task.ops


def sampled(rank: Rank, effective: EffectiveKnobs) -> tuple[Rank, EffectiveKnobs, float]:
    """A sample of `rank` with fewer subgroups, knobs for the sample, and the scale factor (parameters of `rank` divided
    by parameters of the sample; 1.0 if all subgroups are used).

    The sample has evenly spaced subgroups; the host cache is reduced by the scale factor, as is the device memory
    beside the staging slots.
    """
    subgroups = rank.subgroups
    count = min(len(subgroups), MAX_SIMULATED_TIERED if rank.host_slots else MAX_SIMULATED_SUBGROUPS)
    if count == len(subgroups):
        if any(s.id != i for i, s in enumerate(subgroups)):
            numbered = [replace(s, id=i) for i, s in enumerate(subgroups)]
            rank = replace(rank, subgroups=numbered, gradient_order=None)
        return rank, effective, 1.0
    picked = [i * len(subgroups) // count for i in range(count)]
    few = [replace(subgroups[place], id=i) for i, place in enumerate(picked)]
    scale = sum(s.numel for s in subgroups) / sum(s.numel for s in few)
    smaller = replace(effective, host_cache_bytes=int(effective.host_cache_bytes / scale))
    # Rounded up, so that subgroups that fit still fit.
    capacity = {path: -(-most * count // len(subgroups)) for path, most in rank.capacity.items()}
    number = {subgroups[place].id: i for i, place in enumerate(picked)}
    order = rank.gradient_order and [number[s] for s in rank.gradient_order if s in number]
    step_at = None if rank.step_at is None else rounded_step_delay(rank.step_at / scale)
    slots = rank.num_slots * sum(device_slot_bytes(subgroups, gradients=rank.gradients == "release"))
    budget = rank.gradient_budget and rank.gradient_budget.sampled(scale, slots)
    smaller_rank = replace(
        rank, subgroups=few, capacity=capacity, gradient_order=order, step_at=step_at, gradient_budget=budget,
        idle_seconds=rank.idle_seconds / scale,
    )  # fmt: skip
    return smaller_rank, smaller, scale


def steady_steps(rank: Rank, effective: EffectiveKnobs, rates: RateCard) -> list[SteadyStep]:
    """The steps that repeat under these knobs in the steady state: two if `alternate`, otherwise one.

    They are the fixed point of the residency planner: each step begins with the residences with which the step before
    ends. Without storage paths, the storage knobs are ignored. If `tier_split` is None, the speeds of the paths decide
    the split. ConfigError when the speed of a path is not known.
    """
    tier, orders = None, [step_order(effective, 0)]
    if rank.host_slots:
        tier = TierState(speeds=speeds_of(rates, rank.host_slots), capacity=rank.capacity, retired=rank.retired)
        orders = [step_order(effective, turn) for turn in range(1 + effective.alternate)]
    decided = [next_residences(rank.subgroups, effective, tier, order) for order in orders]
    steps = [
        SteadyStep(rank, _placements(rank, step.processors, before.after, step.after), order)
        for order, before, step in zip(orders, [decided[-1], *decided], decided, strict=False)
    ]
    return [_deferring(step, rates) for step in steps] if rank.idle_seconds and rank.host_slots else steps


def _deferring(step: SteadyStep, rates: RateCard) -> SteadyStep:
    """The step with as many deferred flushes as its paths can do in the idle time after it."""
    rank, ids = step.rank, in_order(range(len(step.placements)), step.order)
    most = deferrable_bytes(_path_speeds(rank, rates), rank.idle_seconds)
    return replace(step, placements=with_deferred_flushes(rank.subgroups, step.placements, ids, most))


def _path_speeds(rank: Rank, rates: RateCard) -> Mapping[str, PathSpeeds]:
    """The speeds by which the engine orders ops on paths."""
    return speeds_of(rates, rank.host_slots) if rank.path_speeds is None else rank.path_speeds


def _placements(
    rank: Rank, processors: Sequence[Processor], before: Sequence[Residence], after: Sequence[Residence]
) -> tuple[Placement, ...]:
    """The placement of each subgroup in a step of the steady state: without paths, a weight whose subgroup the CPU
    updates has an up-to-date copy in host memory (mirror) from the step before."""
    spilled = spilled_gradients(rank.subgroups, processors, before, after, _gradient_room(rank, processors, after))
    return tuple(
        placement(
            processor,
            old,
            new,
            mirror_valid=processor == "cpu",
            spilled=waits_on_host,
            mode=rank.gradients,
            has_paths=bool(rank.host_slots),
        )
        for processor, old, new, waits_on_host in zip(processors, before, after, spilled, strict=True)
    )


def _gradient_room(rank: Rank, processors: Sequence[Processor], after: Sequence[Residence]) -> float:
    """Device memory for released gradients that are not used yet, in bytes; infinite without a limit."""
    if rank.gradients == "keep" or rank.gradient_budget is None:
        return math.inf
    weights = sum(s.nbytes("weight") for s in rank.subgroups)
    return rank.gradient_budget.room_bytes(weights + _device_state_bytes(rank, processors, after))


def _device_state_bytes(rank: Rank, processors: Sequence[Processor], after: Sequence[Residence]) -> int:
    """Device memory for residents and staging slots, in bytes. Without staged subgroups there are no slots."""
    residents = sum(s.nbytes("state") for s, lives in zip(rank.subgroups, after, strict=True) if lives == "device")
    if all(processor == "cpu" or lives == "device" for processor, lives in zip(processors, after, strict=True)):
        return residents
    return residents + rank.num_slots * sum(device_slot_bytes(rank.subgroups, gradients=rank.gradients == "release"))


def speeds_of(rates: RateCard, paths: Mapping[str, object]) -> dict[str, PathSpeeds]:
    """The speeds of these paths, in the form that tier splits need. ConfigError when the speed of a path is not
    known."""
    speeds: dict[str, PathSpeeds] = {}
    for path in paths:
        known = rates.paths.get(path)
        if known is None or known.read_bytes_per_second is None or known.write_bytes_per_second is None:
            raise ConfigError(
                f"The rate card lacks the speed of path {path}: it was not measured yet. Run `tidegate calibrate`, or "
                "wait until a step has used the path."
            )
        speeds[path] = PathSpeeds(
            read_bytes_per_second=known.read_bytes_per_second,
            write_bytes_per_second=known.write_bytes_per_second,
            factors=pair_factors(rates.keeps, *path_lanes(path)),
        )
    return speeds
