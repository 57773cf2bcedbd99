"""Steady state: the placements, plans, bytes and memory of a rank after a change of knobs has taken full effect."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Literal

from tidegate.errors import ConfigError
from tidegate.plan.effective_knobs import EffectiveKnobs, Split, divide, host_cached_ids
from tidegate.plan.ops import Norms, Op, Residence, Subgroup, is_path, path_lanes
from tidegate.plan.path_times import PathOpTimes, rounded_step_delay
from tidegate.plan.placement import place_subgroups, steady_placements
from tidegate.plan.plan import Placement, Plan
from tidegate.plan.planner import make_plan
from tidegate.plan.tasks import StepOrder, Work, step_work
from tidegate.plan.tier_split import PathSpeeds, assign_paths
from tidegate.speeds.rate_card import RateCard

MAX_SIMULATED_SUBGROUPS: Final = 400
"""Largest number of subgroups in a simulation without storage paths. If a rank has more, `sampled` chooses a sample."""
MAX_SIMULATED_TIERED: Final = 96
"""Largest number of subgroups in a simulation with storage paths. Such a simulation takes longer: a subgroup has about
twice as many ops, and lanes slow each other down."""
_PAGE_BYTES: Final = 4096
"""Size of a memory page in bytes. The state of each subgroup in host memory occupies whole pages."""
_DUPLEX: Final = 0.9
"""Smallest interference factor of a duplex path: its reads keep at least this share of their speed while it also
writes."""


@dataclass(frozen=True)
class Rank:
    """The properties of a rank that knobs do not change: its subgroups, and its staging slots on the device and in host
    memory.

    host_slots: number of host slots of each path. capacity: largest number of subgroups that each path can hold; 0 for
    a retired path; a path that is absent has no limit. gradient_order: ids of all subgroups in the order in which their
    gradients arrive; None for the reverse order of ids. step_at: seconds after the first gradient at which plans expect
    `step()`; None to derive it from the length of the backward. path_speeds: speeds by which the engine orders ops;
    None for the speeds of the rate card.
    """

    subgroups: Sequence[Subgroup]
    num_slots: int
    host_slots: Mapping[str, int] = field(default_factory=dict)
    gradients: Literal["keep", "release"] = "keep"
    capacity: Mapping[str, int] = field(default_factory=dict)
    gradient_order: Sequence[int] | None = None
    step_at: float | None = None
    path_speeds: Mapping[str, PathSpeeds] | None = None

    def __post_init__(self) -> None:
        if not self.subgroups:
            raise ConfigError("A rank without subgroups has no update to predict: give at least one subgroup.")

    @property
    def norms(self) -> Norms:
        return "step" if self.gradients == "keep" else "gradient"


@dataclass(frozen=True)
class SteadyStep:
    """One step of a rank in the steady state: the placements of its subgroups, and the order of their updates.

    If the order alternates, two such steps take turns; otherwise one step repeats.
    """

    rank: Rank
    placements: tuple[Placement, ...]
    order: StepOrder

    def plan(self, rates: RateCard, step_at: float = 0.0) -> Plan:
        """The plan that the engine would make if `step()` is called `step_at` seconds after the first gradient."""
        rank = self.rank
        speeds = speeds_of(rates, rank.host_slots) if rank.path_speeds is None else rank.path_speeds
        return make_plan(
            rank.subgroups, self.placements, num_slots=rank.num_slots, norms=rank.norms, host_slots=rank.host_slots,
            grad_on_host_order=rank.gradient_order, order=self.order,
            step_at=rounded_step_delay(step_at) if rank.step_at is None else rank.step_at,
            rates=PathOpTimes(speeds) if rank.host_slots else None,
        )  # fmt: skip

    def work(self) -> Work:
        """The ops of the step, not yet in program order: sufficient to count bytes, and much faster than a plan."""
        gradients = range(len(self.placements))
        return step_work(
            self.rank.subgroups, self.placements, gradients, self.rank.norms, self.rank.host_slots, self.order
        )

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
        both = list(zip(self.rank.subgroups, self.placements, strict=True))
        residents = sum(s.nbytes("state") for s, p in both if p.after == "device")
        if not any(p.is_staged for p in self.placements):
            return residents
        return residents + self.rank.num_slots * max(s.nbytes("state") for s in self.rank.subgroups)

    def host_bytes(self) -> dict[str, int]:
        """Host memory in bytes, by kind: `state`, `mirror` (copies of weights, for updates on the CPU), `gradient` and,
        with paths, `slot` (buffers for subgroups on their way from or to a path)."""
        nbytes: Counter[str] = Counter()
        for s, p in zip(self.rank.subgroups, self.placements, strict=True):
            if "host" in (p.before, p.after):
                nbytes["state"] += _pages(s.nbytes("state"))
            if p.processor == "cpu" and not p.uses_host_slot:
                nbytes["mirror"] += s.nbytes("weight")
            if p.processor == "cpu" and not p.grad_in_slot:
                nbytes["gradient"] += s.nbytes("gradient")
        kinds = ("state", "mirror", "gradient")
        if any(p.uses_host_slot for p in self.placements):
            contents = ("state", "weight", *(("gradient",) if self.rank.gradients == "keep" else ()))
            slot = sum(_pages(max(s.nbytes(content) for s in self.rank.subgroups)) for content in contents)
            nbytes["slot"] = sum(self.rank.host_slots.values()) * slot
            return {kind: nbytes[kind] for kind in (*kinds, "slot")}
        return {kind: nbytes[kind] for kind in kinds}


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

    The sample has evenly spaced subgroups; the host cache is reduced by the scale factor.
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
    smaller_rank = replace(rank, subgroups=few, capacity=capacity, gradient_order=order, step_at=step_at)
    return smaller_rank, smaller, scale


def steady_steps(rank: Rank, effective: EffectiveKnobs, rates: RateCard) -> list[SteadyStep]:
    """The steps that repeat under these knobs in the steady state: two if `alternate`, otherwise one.

    Without storage paths, the storage knobs are ignored. If `tier_split` is None, the speeds of the paths decide the
    split. ConfigError when the speed of a path is not known.
    """
    placed = place_subgroups(len(rank.subgroups), stride=effective.stride, static_ratio=effective.static_ratio)
    if not rank.host_slots:
        return [SteadyStep(rank, steady_placements(placed), "ascending")]
    sizes = [s.nbytes("state") for s in rank.subgroups]
    movable = [i for i, (_, residence) in enumerate(placed) if residence == "host"]
    orders: tuple[StepOrder, ...] = ("ascending", "descending") if effective.alternate else ("ascending",)
    stay = {order: host_cached_ids(sizes, movable, effective, order) for order in orders}
    # If orders alternate, each movable subgroup is in storage after every other step.
    stored = movable if effective.alternate else [i for i in movable if i not in stay["ascending"]]
    without_path = _without_path(rank, stored)
    stored = stored[len(without_path) :]
    speeds, split = speeds_of(rates, rank.host_slots), _usable_split(rank, effective.tier_split)
    path_of = assign_paths(stored, divide(len(stored), split, speeds, capacity=rank.capacity, minimum=1))
    after: dict[StepOrder, list[Residence]] = {
        order: [
            residence if residence == "device" else "host" if i in stay[order] | without_path else path_of[i]
            for i, (_, residence) in enumerate(placed)
        ]
        for order in orders
    }
    return [
        SteadyStep(
            rank,
            tuple(
                _placement(rank, processor, before, last)
                for (processor, _), before, last in zip(placed, after[orders[turn - 1]], after[order], strict=True)
            ),
            order,
        )
        for turn, order in enumerate(orders)
    ]


def _without_path(rank: Rank, stored: Sequence[int]) -> set[int]:
    """Ids of the subgroups in `stored` (all that should be on paths) that stay in host memory, because a path was
    retired and the other paths lack capacity. The engine chooses the same subgroups."""
    if 0 not in rank.capacity.values():
        return set()
    room = sum(rank.capacity.get(path, len(stored)) for path in rank.host_slots)
    return set(stored[: max(0, len(stored) - room)])


def _usable_split(rank: Rank, split: Split) -> Split:
    """`split`, or None (speeds decide) when all paths with a weight are retired."""
    named = [path for path, weight in split if weight] if isinstance(split, tuple) else []
    return None if named and all(rank.capacity.get(path) == 0 for path in named) else split


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
        read, write = path_lanes(path)
        speeds[path] = PathSpeeds(
            read_bytes_per_second=known.read_bytes_per_second,
            write_bytes_per_second=known.write_bytes_per_second,
            duplex=rates.keeps.get(read, {}).get(write, 1.0) >= _DUPLEX,
        )
    return speeds


def _placement(rank: Rank, processor: Literal["cpu", "device"], before: Residence, after: Residence) -> Placement:
    """The placement that the engine would give to a subgroup with residence `before` at the start of the step and
    residence `after` at its end.

    If the state passes through a host slot, host memory has no mirror of the weight. If then the CPU updates the
    subgroup, and gradients are kept until the step, the gradient is in the host slot, too.
    """
    placement = Placement(processor, before, after, mirror_valid=processor == "cpu")
    if not placement.uses_host_slot:
        return replace(placement, mirror_valid=processor == "cpu" and (is_path(before) or before == "host"))
    return replace(placement, mirror_valid=False, grad_in_slot=processor == "cpu" and rank.gradients == "keep")


def _pages(nbytes: int) -> int:
    """`nbytes` rounded up to whole pages."""
    return -(-nbytes // _PAGE_BYTES) * _PAGE_BYTES
