"""Where state lives after the next step, from the knobs: on the device, in host memory, or on which path."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Final

from tidegate.agent.devices.pinned_memory import host_available_bytes
from tidegate.agent.tiers.tier_store import TierStore
from tidegate.errors import KnobError
from tidegate.knobs.knobs import EQ1
from tidegate.plan.effective_knobs import Effective, Split, cached, divide
from tidegate.plan.ops import OpKind, Residence, Subgroup, is_path
from tidegate.plan.placement import place
from tidegate.plan.tasks import Order as StepOrder
from tidegate.plan.tier_split import Counts, assign
from tidegate.timeline.stall_analysis import both_busy_seconds, busy_seconds
from tidegate.timeline.timeline import Span
from tidegate.tuner.split_decision import PathTraffic, SplitEstimator, WholeStep

EQ1_SLACK: Final = 0.05
"""Share of the subgroups that a path may have more or less than Eq. 1 says now: its speeds are never quite the same."""


class Residences:
    """Divides what is not resident on the device between host memory and paths. One per engine that has paths."""

    def __init__(self, store: TierStore) -> None:
        self._store = store
        self._estimator = SplitEstimator(store.speeds)
        self._assigned: dict[int, str] = {}
        """The path of each subgroup that ever had one; kept while it is in the cache."""
        self._counts: Counts = {}
        self.known_capacity: Counts = {}
        """`capacity`, as it was when the last step was planned."""
        self._split: Split = None
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
        stay = cached([s.nbytes("state") for s in subgroups], movable, effective, order)
        # While orders alternate, each subgroup is in storage every other time: its path stays.
        stored = movable if effective.alternate else [i for i in movable if i not in stay]
        capacity = self.known_capacity = self._store.capacity(self._assigned)
        kept = self._kept(subgroups, stored, capacity)
        self._assign([i for i in stored if i not in kept], effective.tier_split, capacity)
        residences = [residence for _, residence in placed]
        for i in movable:
            residences[i] = "host" if i in stay or i in kept else self._assigned[i]
        return residences, order

    def check(self, subgroups: Sequence[Subgroup], effective: Effective) -> None:
        """MemoryBudgetError, KnobError or CapacityError with figures when these knobs cannot work here."""
        known = list(self._store.paths)
        for name, weight in _named(effective.tier_split):
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
        stay = cached([s.nbytes("state") for s in subgroups], movable, effective, "ascending")
        stored = [i for i in movable if i not in stay]
        capacity = self._store.capacity(self._assigned)
        count = len(stored) - len(self._kept(subgroups, stored, capacity))
        divide(count, self._usable(effective.tier_split), self._estimator.rates, capacity=capacity)

    def _usable(self, split: Split) -> Split:
        """None, speeds decide, when all that weights name are retired."""
        named = [name for name, weight in _named(split) if weight]
        return None if named and all(name in self._store.retired for name in named) else split

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

    def _assign(self, stored: Sequence[int], split: Split, capacity: Mapping[str, int]) -> None:
        counts, usable = self._counts, self._usable(split)
        anew = divide(len(stored), usable, self._estimator.rates, capacity=capacity, minimum=1)
        others = sum(counts.values()) != len(stored) or self._split != split
        if usable is None and not others:
            anew = self._estimator.propose(counts, capacity=capacity) or counts
        elif usable == EQ1 and not others and _near(counts, anew, capacity):
            anew = counts
        self._split = split
        if anew != self._counts or any(i not in self._assigned for i in stored):
            self._assigned = self._assigned | assign(stored, anew, self._assigned)
            self._counts = anew

    @property
    def capacity(self) -> Counts:
        """How many subgroups each path can hold, with those that it holds already; a retired one holds none."""
        return self._store.capacity(self._assigned)

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
    """What the second half of a step's ops moved on each path each way, and how long they were at it; and the whole.

    A path that has rested serves its first bytes at once, as throttled ones and those with a cache do; and what is
    fetched before the step has the path for itself.
    """
    by_lane: defaultdict[tuple[str, OpKind], list[Span]] = defaultdict(list)
    for span in spans:
        if span.kind in (OpKind.FETCH, OpKind.FLUSH) and span.nbytes:
            by_lane[span.lane.rpartition(":")[0], span.kind].append(span)
    moved = [span for lane in by_lane.values() for span in lane]
    step_seconds = max(span.end for span in moved) - min(span.start for span in moved) if moved else 0.0
    found: dict[str, PathTraffic] = {}
    for path in dict.fromkeys(path for path, _ in by_lane):
        reads, writes = by_lane.get((path, OpKind.FETCH), []), by_lane.get((path, OpKind.FLUSH), [])
        late_reads, late_writes = _second_half(reads), _second_half(writes)
        found[path] = PathTraffic(
            read_bytes=sum(span.nbytes for span in late_reads),
            read_seconds=busy_seconds(late_reads),
            shared_read_seconds=both_busy_seconds(late_reads, writes),
            write_bytes=sum(span.nbytes for span in late_writes),
            write_seconds=busy_seconds(late_writes),
            shared_write_seconds=both_busy_seconds(late_writes, reads),
            whole=WholeStep(
                read_bytes=sum(span.nbytes for span in reads),
                write_bytes=sum(span.nbytes for span in writes),
                busy_seconds=busy_seconds([*reads, *writes]),
                step_seconds=step_seconds,
            ),
        )
    return found


def _second_half(spans: Sequence[Span]) -> list[Span]:
    """By their start; the middle one counts."""
    return sorted(spans, key=lambda span: span.start)[len(spans) // 2 :]


def _named(split: Split) -> tuple[tuple[str, float], ...]:
    """Path and weight of each that weights name."""
    return split if isinstance(split, tuple) else ()


def _near(counts: Counts, wanted: Counts, capacity: Mapping[str, int]) -> bool:
    """Whether no path has many more or fewer than is wanted, nor more than it can take."""
    slack = max(1.0, EQ1_SLACK * sum(wanted.values()))
    return all(
        abs(counts[name] - n) <= slack and counts[name] <= capacity.get(name, counts[name])
        for name, n in wanted.items()
    )
