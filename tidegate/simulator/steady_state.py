"""What a rank does step after step under some knobs, once they have settled: placements, plans, bytes, memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Literal

from tidegate.errors import ConfigError
from tidegate.plan.effective_knobs import Effective, Split, cached, divide
from tidegate.plan.ops import Norms, Op, Residence, Subgroup, is_path, path_lanes
from tidegate.plan.path_times import PathClock, rounded
from tidegate.plan.placement import place, steady
from tidegate.plan.plan import Placement, Plan
from tidegate.plan.planner import make_plan
from tidegate.plan.tasks import Order, Work, step_work
from tidegate.plan.tier_split import PathSpeeds, assign
from tidegate.speeds.rate_card import RateCard

MAX_SIMULATED_SUBGROUPS: Final = 400
MAX_SIMULATED_TIERED: Final = 96
"""With paths a subgroup has about twice as many ops, and lanes slow each other down: that takes longer to simulate."""
_PAGE_BYTES: Final = 4096
"""State in host memory is whole pages."""
_DUPLEX: Final = 0.9
"""A path whose reads keep this share of their speed while it writes does both at once."""


@dataclass(frozen=True)
class Rank:
    """What knobs do not change: the subgroups of a rank and its staging slots, on the device and for each path.

    capacity: most subgroups of each path, 0 for a retired one; without limit where absent. gradient_order: ids of all
    subgroups as their gradients arrive; None for the last one first. step_at: seconds after which plans count on
    `step()`; None for what follows from the length of the backward. path_speeds: what the engine orders ops by; None
    for the rate card's.
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
            raise ConfigError("There are no subgroups to predict an update for.")

    @property
    def norms(self) -> Norms:
        return "step" if self.gradients == "keep" else "gradient"


@dataclass(frozen=True)
class Settled:
    """One of the steps that take turns: there are two where orders alternate, else one."""

    rank: Rank
    placements: tuple[Placement, ...]
    order: Order

    def plan(self, rates: RateCard, step_at: float = 0.0) -> Plan:
        """The plan that the engine would make where `step()` comes so many seconds after the first gradient."""
        rank = self.rank
        speeds = speeds_of(rates, rank.host_slots) if rank.path_speeds is None else rank.path_speeds
        return make_plan(
            rank.subgroups, self.placements, num_slots=rank.num_slots, norms=rank.norms, host_slots=rank.host_slots,
            grad_on_host_order=rank.gradient_order, order=self.order,
            step_at=rounded(step_at) if rank.step_at is None else rank.step_at,
            rates=PathClock(speeds) if rank.host_slots else None,
        )  # fmt: skip

    def work(self) -> Work:
        """Its ops, not yet in one order: enough to count what they move, and made much faster than a plan."""
        gradients = range(len(self.placements))
        return step_work(
            self.rank.subgroups, self.placements, gradients, self.rank.norms, self.rank.host_slots, self.order
        )

    def lane_bytes(self) -> dict[str, int]:
        """Bytes that cross the link, and that come from and go to each path."""
        found: Counter[str] = Counter()
        for op in ops_of(self.work()):
            found[op.lane] += op.nbytes
        lanes = ["h2d", "d2h", *(lane for path in self.rank.host_slots for lane in path_lanes(path))]
        return {lane: found[lane] for lane in lanes}

    def device_bytes(self) -> int:
        """Residents and staging slots; a slot holds the largest subgroup, and there is none with nothing to stage."""
        both = list(zip(self.rank.subgroups, self.placements, strict=True))
        residents = sum(s.nbytes("state") for s, p in both if p.after == "device")
        if not any(p.is_staged for p in self.placements):
            return residents
        return residents + self.rank.num_slots * max(s.nbytes("state") for s in self.rank.subgroups)

    def host_bytes(self) -> dict[str, int]:
        """Host memory by kind: `state`, `mirror` of weights, `gradient` and, with paths, staging `slot`."""
        found: Counter[str] = Counter()
        for s, p in zip(self.rank.subgroups, self.placements, strict=True):
            if "host" in (p.before, p.after):
                found["state"] += _pages(s.nbytes("state"))
            if p.processor == "cpu" and not p.uses_host_slot:
                found["mirror"] += s.nbytes("weight")
            if p.processor == "cpu" and not p.grad_in_slot:
                found["gradient"] += s.nbytes("gradient")
        kinds = ("state", "mirror", "gradient")
        if any(p.uses_host_slot for p in self.placements):
            contents = ("state", "weight", *(("gradient",) if self.rank.gradients == "keep" else ()))
            slot = sum(_pages(max(s.nbytes(what) for s in self.rank.subgroups)) for what in contents)
            found["slot"] = sum(self.rank.host_slots.values()) * slot
            return {kind: found[kind] for kind in (*kinds, "slot")}
        return {kind: found[kind] for kind in kinds}


def ops_of(work: Work) -> Iterator[Op]:
    yield from work.early
    yield from work.squares
    yield work.norm
    for task in work.tasks:
        yield from task.ops


def sampled(rank: Rank, effective: Effective) -> tuple[Rank, Effective, float]:
    """A rank with fewer subgroups that stands for `rank`, its knobs, and how many parameters each of its stands for.

    Evenly spaced ones stand for the others; the host cache shrinks with them.
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
    # Rounded up, so that what fits still fits.
    capacity = {path: -(-most * count // len(subgroups)) for path, most in rank.capacity.items()}
    number = {subgroups[place].id: i for i, place in enumerate(picked)}
    order = rank.gradient_order and [number[s] for s in rank.gradient_order if s in number]
    step_at = None if rank.step_at is None else rounded(rank.step_at / scale)
    smaller_rank = replace(rank, subgroups=few, capacity=capacity, gradient_order=order, step_at=step_at)
    return smaller_rank, smaller, scale


def settled(rank: Rank, effective: Effective, rates: RateCard) -> list[Settled]:
    """The steps that take turns under these knobs. Without paths, those of storage mean nothing.

    Speeds of paths decide the split where nothing else does. ConfigError when one of them is not known.
    """
    placed = place(len(rank.subgroups), stride=effective.stride, static_ratio=effective.static_ratio)
    if not rank.host_slots:
        return [Settled(rank, steady(placed), "ascending")]
    sizes = [s.nbytes("state") for s in rank.subgroups]
    movable = [i for i, (_, residence) in enumerate(placed) if residence == "host"]
    orders: tuple[Order, ...] = ("ascending", "descending") if effective.alternate else ("ascending",)
    stay = {order: cached(sizes, movable, effective, order) for order in orders}
    # While orders alternate, each subgroup is in storage every other time.
    stored = movable if effective.alternate else [i for i in movable if i not in stay["ascending"]]
    homeless = _homeless(rank, stored)
    stored = stored[len(homeless) :]
    speeds, split = speeds_of(rates, rank.host_slots), _usable(rank, effective.tier_split)
    path_of = assign(stored, divide(len(stored), split, speeds, capacity=rank.capacity, minimum=1))
    after: dict[Order, list[Residence]] = {
        order: [
            residence if residence == "device" else "host" if i in stay[order] | homeless else path_of[i]
            for i, (_, residence) in enumerate(placed)
        ]
        for order in orders
    }
    return [
        Settled(
            rank,
            tuple(
                _placement(rank, processor, before, last)
                for (processor, _), before, last in zip(placed, after[orders[turn - 1]], after[order], strict=True)
            ),
            order,
        )
        for turn, order in enumerate(orders)
    ]


def _homeless(rank: Rank, stored: Sequence[int]) -> set[int]:
    """What stays in host memory, as in the engine, because too little is left of the paths after one was retired."""
    if 0 not in rank.capacity.values():
        return set()
    room = sum(rank.capacity.get(path, len(stored)) for path in rank.host_slots)
    return set(stored[: max(0, len(stored) - room)])


def _usable(rank: Rank, split: Split) -> Split:
    """None, speeds decide, when all that weights name are retired."""
    named = [path for path, weight in split if weight] if isinstance(split, tuple) else []
    return None if named and all(rank.capacity.get(path) == 0 for path in named) else split


def speeds_of(rates: RateCard, paths: Mapping[str, object]) -> dict[str, PathSpeeds]:
    """The speeds of these paths, as a split wants them. ConfigError when one is not known."""
    found: dict[str, PathSpeeds] = {}
    for path in paths:
        known = rates.paths.get(path)
        if known is None or known.read_bytes_per_second is None or known.write_bytes_per_second is None:
            raise ConfigError(f"The rate card lacks the speed of path {path}: it was not measured yet.")
        read, write = path_lanes(path)
        found[path] = PathSpeeds(
            read_bytes_per_second=known.read_bytes_per_second,
            write_bytes_per_second=known.write_bytes_per_second,
            duplex=rates.keeps.get(read, {}).get(write, 1.0) >= _DUPLEX,
        )
    return found


def _placement(rank: Rank, processor: Literal["cpu", "device"], before: Residence, after: Residence) -> Placement:
    """As the engine has it: what passes through a host slot has its gradient there, too, and no mirror of its own."""
    placement = Placement(processor, before, after, mirror_valid=processor == "cpu")
    if not placement.uses_host_slot:
        return replace(placement, mirror_valid=processor == "cpu" and (is_path(before) or before == "host"))
    return replace(placement, mirror_valid=False, grad_in_slot=processor == "cpu" and rank.gradients == "keep")


def _pages(nbytes: int) -> int:
    return -(-nbytes // _PAGE_BYTES) * _PAGE_BYTES
