"""Where state lives after the next step, from the knobs: on the device, in host memory, or on which path."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from tidegate.agent.devices.pinned import host_available_bytes
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
        self._in_memory: set[int] = set()
        """Subgroups whose state is in host memory between steps."""
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
        capacity = self._store.capacity(self._assigned)
        kept = self._kept(subgroups, stored, capacity)
        self._assign([i for i in stored if i not in kept], effective.tier_split, capacity)
        residences = [residence for _, residence in placed]
        for i in movable:
            residences[i] = "host" if i in cached or i in kept else self._assigned[i]
        return residences, order

    def check(self, subgroups: Sequence[Subgroup], effective: Effective) -> None:
        """MemoryBudgetError, KnobError or CapacityError with figures when these knobs cannot work here."""
        known = list(self._store.paths)
        for name, weight in effective.tier_split or ():
            if name not in known:
                raise KnobError(f"tier_split names {name!r}; the paths here are: {', '.join(known)}.", "tier_split")
            if weight and name in self._store.retired and effective.tier_split != self._split:
                raise KnobError(
                    f"tier_split names {name!r}, which is retired: {self._store.retired[name]} Leave it out, or give "
                    "it weight 0; it comes back with a new start of the run.",
                    "tier_split",
                )
        placed = place(len(subgroups), stride=effective.stride, static_ratio=effective.static_ratio)
        movable = [i for i, (_, residence) in enumerate(placed) if residence == "host"]
        cached = self._cached(subgroups, movable, effective, "ascending")
        stored = [i for i in movable if i not in cached]
        capacity = self._store.capacity(self._assigned)
        count = len(stored) - len(self._kept(subgroups, stored, capacity))
        weights = self._weights(effective.tier_split)
        if weights is not None:
            user_split(count, weights, capacity=capacity)
        else:
            balanced_split(count, self._estimator.rates, capacity=capacity)

    def _weights(self, split: tuple[tuple[str, float], ...] | None) -> dict[str, float] | None:
        """The weight of each path; None where speeds decide, as they do when all that were named are retired."""
        if split is None or all(name in self._store.retired for name, weight in split if weight):
            return None
        return {name: dict(split).get(name, 0.0) for name in self._store.paths}

    def _kept(self, subgroups: Sequence[Subgroup], stored: Sequence[int], capacity: Counts) -> set[int]:
        """What stays in host memory because too little is left of the paths, after one of them was retired.

        None when host memory has no room for them, either: then the paths cannot take them, and that is said.
        """
        if not self._store.retired:
            return set()
        homeless = sorted(stored, key=lambda i: capacity.get(self._assigned.get(i, ""), 0) > 0)
        kept = homeless[: max(0, len(stored) - sum(capacity.values()))]
        fits = sum(subgroups[i].nbytes("state") for i in kept if i not in self._in_memory) <= host_available_bytes()
        return set(kept) if fits else set()

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

    def _assign(
        self, stored: Sequence[int], split: tuple[tuple[str, float], ...] | None, capacity: Mapping[str, int]
    ) -> None:
        counts, weights = self._counts, self._weights(split)
        if weights is not None:
            counts = user_split(len(stored), weights, capacity=capacity)
        elif sum(counts.values()) != len(stored) or self._split is not None:
            counts = balanced_split(len(stored), self._estimator.rates, capacity=capacity, minimum=1)
        else:
            counts = self._estimator.propose(counts, capacity=capacity) or counts
        self._split = split
        if counts != self._counts or any(i not in self._assigned for i in stored):
            self._assigned = self._assigned | assign(stored, counts, self._assigned)
            self._counts = counts

    @property
    def counts(self) -> Counts:
        """Subgroups in storage by path, as the split has it."""
        return dict(self._counts)

    def observe(self, spans: Sequence[Span], residences: Sequence[Residence]) -> None:
        """A step is done: what its fetches and flushes show of the paths' speeds, and where state really is now."""
        self._steps += 1
        self._in_memory = {i for i, lives in enumerate(residences) if lives == "host"}
        # Another one, not the same one changed: `check` may be looking at it in another thread.
        self._assigned = self._assigned | {i: lives for i, lives in enumerate(residences) if is_path(lives)}
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
