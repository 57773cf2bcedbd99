"""Stall analysis of a timeline: idle gaps of an update and their causes, the critical path, busy time of each lane."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Final, Protocol

from tidegate.plan.ops import COMPUTE_LANES, OpKind
from tidegate.timeline.timeline import DISPATCH, Phase, PhaseSpan, Span, Stall, Timeline

_IN_TIME: Final = attrgetter("start", "end", "op")


_Piece = tuple[str, float, float]
"""A piece of a stall: cause, start, end (seconds)."""


class Interval(Protocol):
    """Anything with a start and an end in seconds: a span, a phase, a stall."""

    @property
    def start(self) -> float: ...

    @property
    def end(self) -> float: ...


def union(intervals: Iterable[Interval], window: tuple[float, float] | None = None) -> list[tuple[float, float]]:
    """The union of the intervals, as disjoint intervals in order, limited to `window`."""
    edges = [(one.start, one.end) for one in intervals]
    if window is not None:
        low, high = window
        edges = [(max(start, low), min(end, high)) for start, end in edges]
    stretches: list[tuple[float, float]] = []
    for start, end in sorted(edges):
        if start >= end:
            continue
        if stretches and start <= stretches[-1][1]:
            if end > stretches[-1][1]:
                stretches[-1] = (stretches[-1][0], end)
        else:
            stretches.append((start, end))
    return stretches


def busy_seconds(spans: Iterable[Interval], window: tuple[float, float] | None = None) -> float:
    """Length of the union of the spans in seconds: overlapping spans count once."""
    return total_seconds(union(spans, window))


def total_seconds(stretches: Iterable[tuple[float, float]]) -> float:
    """Sum of the lengths of intervals that do not overlap, such as those of `union`."""
    return sum([end - start for start, end in stretches])


def common_seconds(some: Sequence[tuple[float, float]], others: Sequence[tuple[float, float]]) -> float:
    """Length of the intersection of two sets of intervals, each as `union` returns it."""
    i, j, total = 0, 0, 0.0
    while i < len(some) and j < len(others):
        (start, end), (other_start, other_end) = some[i], others[j]
        total += max(0.0, min(end, other_end) - max(start, other_start))
        i, j = (i + 1, j) if end < other_end else (i, j + 1)
    return total


def stalls(timeline: Timeline) -> tuple[Stall, ...]:
    """The stalls of the update: the time in which no compute op runs, attributed to causes, in order of time.

    The gap before a compute op is attributed by following the chain of waits backwards from that op. Time in which an
    op of the chain was running counts for the lane of that op. Time between two ops of the chain counts for `dispatch`:
    the later op waited for its gradient or for the call of `step()`, or the agent had not started it yet. In the gap at
    the end of the update, the chain begins with the op that ended last.
    """
    return tuple(_merged(Stall("update", *piece) for piece in _pieces(timeline)))


def exposed_waits(timeline: Timeline) -> dict[str, float]:
    """Seconds in which the update could not compute, by cause: the sums of `stalls`."""
    return _seconds_by_cause(_pieces(timeline))


def causes_of_wait(wait: Interval, spans: Sequence[Span], deps: Mapping[int, Sequence[int]]) -> dict[str, float]:
    """Causes of a wait for the end of all these spans: the seconds of the wait, by cause. The chain of waits is
    followed backwards from the span that ended last, as in `stalls`. Unlike there, the wait may include time in which
    an op computes: it counts for the lane of that op. `deps`: ids of the ops that each op depends on."""
    late = [span for span in spans if span.end > wait.start]
    pieces: list[_Piece] = []
    last = max(late, key=attrgetter("end", "op"), default=None)
    _attribute_gap(wait.start, wait.end, last, _Blockers(late, deps), pieces)
    return _seconds_by_cause(pieces)


def _seconds_by_cause(pieces: Iterable[_Piece]) -> dict[str, float]:
    seconds: defaultdict[str, float] = defaultdict(float)
    for cause, start, end in pieces:
        seconds[cause] += end - start
    return dict(seconds)


def critical_path(timeline: Timeline) -> tuple[int, ...]:
    """The critical path: ids of the ops that decided when the step ended, first to last. Each op was the last one that
    the next op waited for. Deferred flushes are not on it."""
    spans = _without_deferred(timeline)
    if not spans:
        return ()
    last = max(spans, key=lambda span: (span.end, span.op))
    return tuple(span.op for span in _Blockers(spans, timeline.deps).chain(last))[::-1]


def _without_deferred(timeline: Timeline) -> Sequence[Span]:
    """The spans for which the step waited: if only flushes ended after the update, they are deferred and left out.
    Where other ops end later, too, the whole update overlaps with the next forward."""
    window = timeline.window("update")
    late = [] if window is None else [span for span in timeline.spans if span.end > window[1]]
    if not late or any(span.kind is not OpKind.FLUSH for span in late):
        return timeline.spans
    return [span for span in timeline.spans if window is not None and span.end <= window[1]]


def split_by_phase(span: Interval, phases: Sequence[PhaseSpan]) -> dict[Phase, float]:
    """The shares of a span's time in each phase; time that no phase covers counts as `other`. The shares add up to 1.

    A span of no length belongs to the phase in which it lies.
    """
    if span.end <= span.start:
        return {next((p.phase for p in phases if p.start <= span.start <= p.end), "other"): 1.0}
    for phase in phases:
        # Fast path: nearly every span lies within one phase.
        if phase.start <= span.start and span.end <= phase.end:
            return {phase.phase: 1.0}
    seconds: defaultdict[Phase, float] = defaultdict(float)
    for phase in phases:
        overlap = min(span.end, phase.end) - max(span.start, phase.start)
        if overlap > 0:
            seconds[phase.phase] += overlap
    total = span.end - span.start
    uncovered = total - busy_seconds(phases, (span.start, span.end))
    # Less than a billionth of the span is a rounding error, not a gap between phases.
    if uncovered > 1e-9 * total:
        seconds["other"] += uncovered
    covered = sum(seconds.values())
    return {phase: part / covered for phase, part in seconds.items()}


def _pieces(timeline: Timeline) -> list[_Piece]:
    """The pieces of all stalls of the update. Gaps are in order of time; the pieces within a gap are in reverse
    order, from its end to its start. This function runs after every training step and must be fast."""
    window = timeline.window("update")
    if window is None:
        return []
    compute = [span for span in timeline.spans if span.lane in COMPUTE_LANES]
    gaps = list(_gaps(union(compute, window), window))
    if not gaps:
        return []
    # Spans that ended before the update began do not explain its stalls.
    blockers = _Blockers([span for span in timeline.spans if span.end > window[0]], timeline.deps)
    by_start = _first_by_start(compute)
    pieces: list[_Piece] = []
    for low, high in gaps:
        # The op after a gap has ended it: the chain that explains the gap begins with the span for which this op
        # waited.
        blocker = _last(timeline, high) if high == window[1] else blockers.of(by_start[high])
        _attribute_gap(low, high, blocker, blockers, pieces)
    return pieces


def _first_by_start(spans: Iterable[Span]) -> dict[float, Span]:
    """For each start time, the span with the lowest op id that starts at that time. Spans of no length are left out."""
    by_start: dict[float, Span] = {}
    for span in spans:
        if span.end > span.start and (span.start not in by_start or span.op <= by_start[span.start].op):
            by_start[span.start] = span
    return by_start


def _last(timeline: Timeline, end: float) -> Span | None:
    """The span with the latest end among the spans that began before `end`."""
    return max((s for s in timeline.spans if s.start < end), key=attrgetter("end", "op"), default=None)


def _gaps(stretches: list[tuple[float, float]], window: tuple[float, float]) -> Iterator[tuple[float, float]]:
    """The idle intervals of `window` (start, end): its parts outside of all `stretches`, which are disjoint intervals
    in order."""
    cursor, high = window
    for start, end in stretches:
        if start > cursor:
            yield cursor, start
        cursor = end
    if cursor < high:
        yield cursor, high


class _Blockers:
    """Finds the span that another span waited for: the one that ended last among its dependencies and the previous span
    of its lane."""

    def __init__(self, spans: Collection[Span], deps: Mapping[int, Sequence[int]]) -> None:
        self.longest_chain = len(spans)
        """Largest number of spans in a blocking chain. If the clocks of lanes disagree, a chain can be circular; it
        is cut at this length."""
        self._deps = deps
        # An op that was repeated has several spans; its dependents waited for the last one.
        self._last_run: dict[int, Span] = {}
        # Keyed by identity, because hashing all fields of a span takes longer than all other work here.
        self._lane_before: dict[int, Span] = {}
        lane_last: dict[str, Span] = {}
        for span in sorted(spans, key=_IN_TIME):
            lane = span.lane
            self._last_run[span.op] = span
            if lane in lane_last:
                self._lane_before[id(span)] = lane_last[lane]
            lane_last[lane] = span

    def of(self, span: Span) -> Span | None:
        """The span that `span` waited for; None if it waited for no span."""
        found = self._lane_before.get(id(span))
        latest = -math.inf if found is None else found.end
        for dep in self._deps.get(span.op, ()):
            blocker = self._last_run.get(dep)
            if blocker is not None and blocker.end >= latest:
                end = blocker.end
                if end > latest or found is None or blocker.op >= found.op:
                    found, latest = blocker, end
        return found

    def chain(self, span: Span | None) -> Iterator[Span]:
        """The blocking chain: `span`, the span that it waited for, and so on; each span once."""
        visited: set[int] = set()
        while span is not None and id(span) not in visited:
            yield span
            visited.add(id(span))
            span = self.of(span)


def _attribute_gap(low: float, high: float, span: Span | None, blockers: _Blockers, pieces: list[_Piece]) -> None:
    """Divides the gap from `low` to `high` (seconds) among the spans of the blocking chain that begins with `span`. If
    `span` is None, the whole gap counts for `dispatch`.

    Appends to `pieces`, from the end of the gap to its start.
    """
    cursor, left = high, blockers.longest_chain
    while span is not None and cursor > low and left:
        start, end = span.start, span.end
        if end < cursor:
            if end < low:
                end = low
            pieces.append((DISPATCH, end, cursor))
            cursor = end
        if low < cursor and start < cursor:
            if start < low:
                start = low
            pieces.append((span.lane, start, cursor))
            cursor = start
        span, left = blockers.of(span), left - 1
    if low < cursor:
        pieces.append((DISPATCH, low, cursor))


def _merged(pieces: Iterable[Stall]) -> Iterator[Stall]:
    """The pieces in order of time; adjacent pieces with the same cause are merged."""
    last: Stall | None = None
    for piece in sorted(pieces, key=lambda piece: piece.start):
        if last is not None and (last.cause, last.end) == (piece.cause, piece.start):
            last = Stall(last.phase, last.cause, last.start, piece.end)
            continue
        if last is not None:
            yield last
        last = piece
    if last is not None:
        yield last
