"""Where state lives after the next step, from the knobs: on the device, in host memory, or on which path."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from tidegate.agent.tiers.store import TierStore
from tidegate.analysis import both_busy_seconds, busy_seconds
from tidegate.errors import KnobError
from tidegate.knobs import Off
from tidegate.model.split import PathTraffic, SplitEstimator
from tidegate.plan.ops import OpKind, Residence, Subgroup, is_path
from tidegate.plan.placement import place
from tidegate.plan.split import Counts, assign, balanced_split, user_split
from tidegate.timeline import Span

StepOrder = Literal["ascending", "descending"]


@dataclass(frozen=True)
class Effective:
    """The knobs as numbers: what the next plan is made from. The last three mean nothing without paths.

    tier_split: weights by path, None for what measured speeds call for. alternate: every other step runs backwards.
    """

    stride: float | Off
    static_ratio: float
    tier_split: tuple[tuple[str, float], ...] | None = None
    host_cache_bytes: int = 0
    alternate: bool = False


class Residences:
    """Divides what is not resident on the device between host memory and paths. One per engine that has paths."""

    def __init__(self, store: TierStore) -> None:
        self._store = store
        self._estimator = SplitEstimator(store.speeds)
        self._assigned: dict[int, str] = {}
        """The path of each subgroup that ever had one; kept while it is in the cache."""
        self._counts: Counts = {}
        self._split: tuple[tuple[str, float], ...] | None = None
        self._steps = 0

    def after(
        self, subgroups: Sequence[Subgroup], placed: Sequence[tuple[str, Residence]], effective: Effective
    ) -> tuple[list[Residence], StepOrder]:
        """The residence of each subgroup at the end of the next step, and the order in which it updates them.

        `placed` says which are residents of the device.
        """
        movable = [i for i, (_, residence) in enumerate(placed) if residence == "host"]
        order: StepOrder = "descending" if effective.alternate and self._steps % 2 else "ascending"
        cached = self._cached(subgroups, movable, effective, order)
        # While orders alternate, each subgroup is in storage every other time: its path stays.
        stored = movable if effective.alternate else [i for i in movable if i not in cached]
        self._assign(stored, effective.tier_split)
        residences = [residence for _, residence in placed]
        for i in movable:
            residences[i] = "host" if i in cached else self._assigned[i]
        return residences, order

    def check(self, subgroups: Sequence[Subgroup], effective: Effective) -> None:
        """MemoryBudgetError, KnobError or CapacityError with figures when these knobs cannot work here."""
        known = list(self._store.paths)
        for name, _ in effective.tier_split or ():
            if name not in known:
                raise KnobError(f"tier_split names {name!r}; the paths here are: {', '.join(known)}.", "tier_split")
        placed = place(len(subgroups), stride=effective.stride, static_ratio=effective.static_ratio)
        movable = [i for i, (_, residence) in enumerate(placed) if residence == "host"]
        cached = self._cached(subgroups, movable, effective, "ascending")
        count = len(movable) - len(cached)
        split = effective.tier_split
        capacity = self._store.capacity(self._assigned)
        if split is not None:
            user_split(count, {name: dict(split).get(name, 0.0) for name in known}, capacity=capacity)
        else:
            balanced_split(count, self._estimator.rates, capacity=capacity)

    def _cached(
        self, subgroups: Sequence[Subgroup], movable: Sequence[int], effective: Effective, order: StepOrder
    ) -> set[int]:
        """The first ones stay, or those that the next step, in the other order, begins with."""
        # Those that come are in memory before those that leave are gone.
        room = effective.host_cache_bytes // (2 if effective.alternate else 1)
        backwards = effective.alternate and order == "ascending"
        cached: set[int] = set()
        for i in reversed(movable) if backwards else movable:
            room -= subgroups[i].nbytes("state")
            if room < 0:
                break
            cached.add(i)
        return cached

    def _assign(self, stored: Sequence[int], split: tuple[tuple[str, float], ...] | None) -> None:
        counts = self._counts
        capacity = self._store.capacity(self._assigned)
        if split is not None:
            weights = {name: dict(split).get(name, 0.0) for name in self._store.paths}
            counts = user_split(len(stored), weights, capacity=capacity)
        elif sum(counts.values()) != len(stored) or self._split is not None:
            counts = balanced_split(len(stored), self._estimator.rates, capacity=capacity, minimum=1)
        else:
            counts = self._estimator.propose(counts, capacity=capacity) or counts
        self._split = split
        if counts != self._counts or any(i not in self._assigned for i in stored):
            self._assigned |= assign(stored, counts, self._assigned)
            self._counts = counts

    @property
    def counts(self) -> Counts:
        """Subgroups in storage by path, as the split has it."""
        return dict(self._counts)

    def observe(self, spans: Sequence[Span]) -> None:
        """A step is done: what its fetches and flushes show of the paths' speeds."""
        self._steps += 1
        self._estimator.observe(traffic(spans))
        self._store.speeds.update(self._estimator.rates)


def traffic(spans: Sequence[Span]) -> Mapping[str, PathTraffic]:
    """What a step moved on each path, and how long it was at it."""
    by_lane: defaultdict[tuple[str, OpKind], list[Span]] = defaultdict(list)
    for span in spans:
        if span.kind in (OpKind.FETCH, OpKind.FLUSH) and span.nbytes:
            by_lane[span.lane.rpartition(":")[0], span.kind].append(span)
    found: dict[str, PathTraffic] = {}
    for path in dict.fromkeys(path for path, _ in by_lane):
        reads, writes = by_lane.get((path, OpKind.FETCH), []), by_lane.get((path, OpKind.FLUSH), [])
        found[path] = PathTraffic(
            read_bytes=sum(span.nbytes for span in reads),
            read_seconds=busy_seconds(reads),
            write_bytes=sum(span.nbytes for span in writes),
            write_seconds=busy_seconds(writes),
            both_seconds=both_busy_seconds(reads, writes),
        )
    return found


def paths_of(residences: Sequence[Residence]) -> Counts:
    """How many of these are on each path."""
    counts: Counts = {}
    for residence in residences:
        if is_path(residence):
            counts[residence] = counts.get(residence, 0) + 1
    return counts
