"""Keeps what the residency planner needs to know of a run's storage paths: their measured speeds and their contents."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from tidegate.agent.cgroups import host_available_bytes
from tidegate.agent.tiers.tier_store import TierStore
from tidegate.errors import KnobError
from tidegate.plan.effective_knobs import EffectiveKnobs
from tidegate.plan.ops import OpKind, Residence, Subgroup, is_path, path_lanes
from tidegate.plan.residency import NextResidences, TierState, explicit_weights, next_residences, step_order
from tidegate.plan.tasks import StepOrder
from tidegate.plan.tier_split import SubgroupCounts
from tidegate.speeds.path_speed_estimator import PathSpeedEstimator, PathStepTotals, PathTraffic
from tidegate.timeline.stall_analysis import common_seconds, total_seconds, union
from tidegate.timeline.timeline import Span


class Residences:
    """The present state of the storage paths of one engine. Each engine with paths has one."""

    def __init__(self, store: TierStore) -> None:
        self._store = store
        self._estimator = PathSpeedEstimator(store.speeds)
        self._tier = TierState(speeds=self._estimator.rates)
        """State of the paths after the last decision. It is replaced, never changed, because `check` reads it in
        another thread."""
        self._steps = 0

    def next(self, subgroups: Sequence[Subgroup], effective: EffectiveKnobs) -> tuple[NextResidences, StepOrder]:
        """Decides where the next step updates subgroups and where their state is after it. Also returns the order in
        which that step updates them."""
        order = step_order(effective, self._steps)
        decided = next_residences(subgroups, effective, self._now(), order)
        assert decided.tier is not None
        self._tier = decided.tier
        return decided, order

    def check(self, subgroups: Sequence[Subgroup], effective: EffectiveKnobs) -> None:
        """Raises MemoryBudgetError, KnobError or CapacityError, with figures, if these knobs cannot be applied in this
        run."""
        known = list(self._store.paths)
        for name, weight in explicit_weights(effective.tier_split):
            if name not in known:
                raise KnobError(f"tier_split names {name!r}; the run's paths are: {', '.join(known)}.", "tier_split")
            if weight and name in self._store.retired and effective.tier_split != self._tier.split:
                raise KnobError(
                    f"tier_split names {name!r}, which is retired: {self._store.retired[name]} Leave it out, or give "
                    "it weight 0; it can be used again after a restart of the run.",
                    "tier_split",
                )
        next_residences(subgroups, effective, replace(self._now(), counts={}), "ascending")

    def _now(self) -> TierState:
        """The state of the paths, with the capacity that they have now."""
        return replace(
            self._tier,
            speeds=self._estimator.rates,
            capacity=self.capacity,
            retired=frozenset(self._store.retired),
            host_free_bytes=host_available_bytes() if self._store.retired else 0.0,
        )

    @property
    def known_capacity(self) -> Mapping[str, int]:
        """Number of subgroups that each path could hold when the last step was planned."""
        return self._tier.capacity

    @property
    def capacity(self) -> SubgroupCounts:
        """Number of subgroups that each path can hold, including those that it holds already; 0 for a retired path."""
        return self._store.capacity(self._tier.assigned)

    @property
    def counts(self) -> SubgroupCounts:
        """Number of subgroups that the tier split assigns to each path, by name of the path."""
        return dict(self._tier.counts)

    def observe(self, spans: Sequence[Span], residences: Sequence[Residence], deferred: Collection[int] = ()) -> None:
        """Records a finished step: estimates the speeds of paths from its fetches and flushes, and stores the actual
        residence of each subgroup. deferred: ids of the deferred flushes."""
        self._steps += 1
        self._estimator.observe(traffic(spans, deferred))
        self._tier = replace(
            self._tier,
            in_memory=frozenset(i for i, lives in enumerate(residences) if lives == "host"),
            assigned={**self._tier.assigned, **{i: lives for i, lives in enumerate(residences) if is_path(lives)}},
        )
        self._store.speeds.update(self._estimator.rates)


def traffic(spans: Sequence[Span], deferred: Collection[int] = ()) -> Mapping[str, PathTraffic]:
    """Bytes and busy seconds of reads and writes on each path: in the second half of a step's fetches and flushes, and
    in the whole step without its deferred flushes.

    The first half alone would show too high a speed: a throttled path, or a path with a cache, serves the first bytes
    after a pause at once, and fetches before `step()` do not compete with writes. Deferred flushes show how fast a path
    writes alone, but not how fast it is within an update, whose end does not wait for them.
    """
    by_lane: defaultdict[tuple[str, OpKind], list[Span]] = defaultdict(list)
    for span in spans:
        kind = span.kind
        if (kind is OpKind.FETCH or kind is OpKind.FLUSH) and span.nbytes:
            by_lane[span.lane, kind].append(span)
    in_step = {lane: [span for span in moves if span.op not in deferred] for lane, moves in by_lane.items()}
    moved = [span for lane in in_step.values() for span in lane]
    step_seconds = max(span.end for span in moved) - min(span.start for span in moved) if moved else 0.0
    by_path: dict[str, PathTraffic] = {}
    for path in dict.fromkeys(lane.rpartition(":")[0] for lane, _ in by_lane):
        read_lane, write_lane = path_lanes(path)
        reads, writes = by_lane.get((read_lane, OpKind.FETCH), []), by_lane.get((write_lane, OpKind.FLUSH), [])
        late_reads, late_writes = _second_half(reads), _second_half(writes)
        reading, writing, late_reading, late_writing = map(union, (reads, writes, late_reads, late_writes))
        flushed = in_step.get((write_lane, OpKind.FLUSH), [])
        flushing = union(flushed) if deferred else writing
        by_path[path] = PathTraffic(
            read_bytes=sum([span.nbytes for span in late_reads]),
            read_seconds=total_seconds(late_reading),
            shared_read_seconds=common_seconds(late_reading, writing),
            write_bytes=sum([span.nbytes for span in late_writes]),
            write_seconds=total_seconds(late_writing),
            shared_write_seconds=common_seconds(late_writing, reading),
            whole=PathStepTotals(
                read_bytes=sum([span.nbytes for span in reads]),
                write_bytes=sum([span.nbytes for span in flushed]),
                busy_seconds=total_seconds(reading) + total_seconds(flushing) - common_seconds(reading, flushing),
                step_seconds=step_seconds,
            ),
            transfers=len(reads) + len(writes),
        )
    return by_path


def _second_half(spans: Sequence[Span]) -> list[Span]:
    """The later half of the spans, by start time. If their number is odd, the span in the middle is included."""
    return sorted(spans, key=lambda span: span.start)[len(spans) // 2 :]
