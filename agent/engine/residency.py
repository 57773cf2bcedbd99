"""Decides from the knobs where the state of each subgroup is after the next step: device, host memory or a path."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Final

from tidegate.agent.devices.pinned_memory import host_available_bytes
from tidegate.agent.tiers.tier_store import TierStore
from tidegate.errors import KnobError
from tidegate.knobs.knobs import EQ1
from tidegate.plan.effective_knobs import EffectiveKnobs, Split, divide, host_cached_ids
from tidegate.plan.ops import OpKind, Residence, Subgroup, is_path
from tidegate.plan.placement import place_subgroups
from tidegate.plan.tasks import StepOrder
from tidegate.plan.tier_split import SubgroupCounts, assign_paths
from tidegate.timeline.stall_analysis import both_busy_seconds, busy_seconds
from tidegate.timeline.timeline import Span
from tidegate.tuner.split_decision import PathStepTotals, PathTraffic, SplitEstimator

EQ1_SLACK: Final = 0.05
"""Tolerance for the number of subgroups on a path with the tier split `eq1` (Eq. 1 of MLP-Offload: in proportion to
measured speeds), as a share of all subgroups in storage (but at least one subgroup). Speeds fluctuate: no subgroup is
moved while the number on each path differs from the result of Eq. 1 by no more than this."""


class Residences:
    """Divides the subgroups that are not resident on the device between host memory and storage paths. Each engine with
    paths has one."""

    def __init__(self, store: TierStore) -> None:
        self._store = store
        self._estimator = SplitEstimator(store.speeds)
        self._assigned: dict[int, str] = {}
        """The path of each subgroup that ever had one, also while its state is in host memory."""
        self._counts: SubgroupCounts = {}
        self.known_capacity: SubgroupCounts = {}
        """Number of subgroups that each path could hold when the last step was planned."""
        self._split: Split = None
        self._in_memory: set[int] = set()
        """Subgroups whose state is in host memory between steps."""
        self._steps = 0

    def next_residences(
        self, subgroups: Sequence[Subgroup], placed: Sequence[tuple[str, Residence]], effective: EffectiveKnobs
    ) -> tuple[list[Residence], StepOrder]:
        """The residence of each subgroup at the end of the next step, and the order in which that step updates them.

        `placed`: processor and residence (device or host) of each subgroup, as the knobs place it.
        """
        movable = [i for i, (_, residence) in enumerate(placed) if residence == "host"]
        order: StepOrder = "descending" if effective.alternate and self._steps % 2 else "ascending"
        stay = host_cached_ids([s.nbytes("state") for s in subgroups], movable, effective, order)
        # While orders alternate, each subgroup is in storage after every other step, and keeps its path.
        stored = movable if effective.alternate else [i for i in movable if i not in stay]
        capacity = self.known_capacity = self._store.capacity(self._assigned)
        kept = self._host_overflow(subgroups, stored, capacity)
        self._assign([i for i in stored if i not in kept], effective.tier_split, capacity)
        residences = [residence for _, residence in placed]
        for i in movable:
            residences[i] = "host" if i in stay or i in kept else self._assigned[i]
        return residences, order

    def check(self, subgroups: Sequence[Subgroup], effective: EffectiveKnobs) -> None:
        """Raises MemoryBudgetError, KnobError or CapacityError, with figures, if these knobs cannot be applied in this
        run."""
        known = list(self._store.paths)
        for name, weight in _explicit_weights(effective.tier_split):
            if name not in known:
                raise KnobError(f"tier_split names {name!r}; the run's paths are: {', '.join(known)}.", "tier_split")
            if weight and name in self._store.retired and effective.tier_split != self._split:
                raise KnobError(
                    f"tier_split names {name!r}, which is retired: {self._store.retired[name]} Leave it out, or give "
                    "it weight 0; it can be used again after a restart of the run.",
                    "tier_split",
                )
        placed = place_subgroups(len(subgroups), stride=effective.stride, static_ratio=effective.static_ratio)
        movable = [i for i, (_, residence) in enumerate(placed) if residence == "host"]
        stay = host_cached_ids([s.nbytes("state") for s in subgroups], movable, effective, "ascending")
        stored = [i for i in movable if i not in stay]
        capacity = self._store.capacity(self._assigned)
        count = len(stored) - len(self._host_overflow(subgroups, stored, capacity))
        divide(count, self._usable(effective.tier_split), self._estimator.rates, capacity=capacity)

    def _usable(self, split: Split) -> Split:
        """Replaces a tier split that cannot be used. Returns None (measured speeds decide) if `split` gives weights to
        retired paths only; otherwise returns `split` unchanged."""
        named = [name for name, weight in _explicit_weights(split) if weight]
        return None if named and all(name in self._store.retired for name in named) else split

    def _host_overflow(
        self, subgroups: Sequence[Subgroup], stored: Sequence[int], capacity: SubgroupCounts
    ) -> set[int]:
        """Subgroups in `stored` that must stay in host memory, because a path was retired and the other paths are too
        small.

        Empty if they do not fit in host memory either: `divide` then raises CapacityError.
        """
        if not self._store.retired:
            return set()
        homeless = sorted(stored, key=lambda i: capacity.get(self._assigned.get(i, ""), 0) > 0)
        kept = homeless[: max(0, len(stored) - sum(capacity.values()))]
        fits = sum(subgroups[i].nbytes("state") for i in kept if i not in self._in_memory) <= host_available_bytes()
        return set(kept) if fits else set()

    def _assign(self, stored: Sequence[int], split: Split, capacity: Mapping[str, int]) -> None:
        counts, usable = self._counts, self._usable(split)
        proposed = divide(len(stored), usable, self._estimator.rates, capacity=capacity, minimum=1)
        is_changed = sum(counts.values()) != len(stored) or self._split != split
        if usable is None and not is_changed:
            proposed = self._estimator.propose(counts, capacity=capacity) or counts
        elif usable == EQ1 and not is_changed and _is_close(counts, proposed, capacity):
            proposed = counts
        self._split = split
        if proposed != self._counts or any(i not in self._assigned for i in stored):
            self._assigned = self._assigned | assign_paths(stored, proposed, self._assigned)
            self._counts = proposed

    @property
    def capacity(self) -> SubgroupCounts:
        """Number of subgroups that each path can hold, including those that it holds already; 0 for a retired path."""
        return self._store.capacity(self._assigned)

    @property
    def counts(self) -> SubgroupCounts:
        """Number of subgroups that the tier split assigns to each path, by name of the path."""
        return dict(self._counts)

    def observe(self, spans: Sequence[Span], residences: Sequence[Residence]) -> None:
        """Records a finished step: estimates the speeds of paths from its fetches and flushes, and stores the actual
        residence of each subgroup."""
        self._steps += 1
        self._in_memory = {i for i, lives in enumerate(residences) if lives == "host"}
        # A new dictionary instead of a change of the old one, which `check` may be reading in another thread.
        self._assigned = self._assigned | {i: lives for i, lives in enumerate(residences) if is_path(lives)}
        self._estimator.observe(traffic(spans))
        self._store.speeds.update(self._estimator.rates)


def traffic(spans: Sequence[Span]) -> Mapping[str, PathTraffic]:
    """Bytes and busy seconds of reads and writes on each path: in the second half of a step's fetches and flushes, and
    in the whole step.

    The first half alone would show too high a speed: a throttled path, or a path with a cache, serves the first bytes
    after a pause at once, and fetches before `step()` do not compete with writes.
    """
    by_lane: defaultdict[tuple[str, OpKind], list[Span]] = defaultdict(list)
    for span in spans:
        if span.kind in (OpKind.FETCH, OpKind.FLUSH) and span.nbytes:
            by_lane[span.lane.rpartition(":")[0], span.kind].append(span)
    moved = [span for lane in by_lane.values() for span in lane]
    step_seconds = max(span.end for span in moved) - min(span.start for span in moved) if moved else 0.0
    by_path: dict[str, PathTraffic] = {}
    for path in dict.fromkeys(path for path, _ in by_lane):
        reads, writes = by_lane.get((path, OpKind.FETCH), []), by_lane.get((path, OpKind.FLUSH), [])
        late_reads, late_writes = _second_half(reads), _second_half(writes)
        by_path[path] = PathTraffic(
            read_bytes=sum(span.nbytes for span in late_reads),
            read_seconds=busy_seconds(late_reads),
            shared_read_seconds=both_busy_seconds(late_reads, writes),
            write_bytes=sum(span.nbytes for span in late_writes),
            write_seconds=busy_seconds(late_writes),
            shared_write_seconds=both_busy_seconds(late_writes, reads),
            whole=PathStepTotals(
                read_bytes=sum(span.nbytes for span in reads),
                write_bytes=sum(span.nbytes for span in writes),
                busy_seconds=busy_seconds([*reads, *writes]),
                step_seconds=step_seconds,
            ),
        )
    return by_path


def _second_half(spans: Sequence[Span]) -> list[Span]:
    """The later half of the spans, by start time. If their number is odd, the span in the middle is included."""
    return sorted(spans, key=lambda span: span.start)[len(spans) // 2 :]


def _explicit_weights(split: Split) -> tuple[tuple[str, float], ...]:
    """The paths and their weights if the user has set `tier_split` to weights of paths (as in "nvme:2,pfs:1"); an empty
    tuple if `split` is not given by weights."""
    return split if isinstance(split, tuple) else ()


def _is_close(counts: SubgroupCounts, wanted: SubgroupCounts, capacity: Mapping[str, int]) -> bool:
    """Whether each path has about the number of subgroups that is wanted (see `EQ1_SLACK`), and no more than it can
    hold."""
    slack = max(1.0, EQ1_SLACK * sum(wanted.values()))
    return all(
        abs(counts[name] - n) <= slack and counts[name] <= capacity.get(name, counts[name])
        for name, n in wanted.items()
    )
